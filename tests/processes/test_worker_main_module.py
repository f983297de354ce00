"""What a program's ``__main__`` defines travels by value, both ways, and the program is never run again.

Learners of such classes, from ``python -c`` and notebooks too, are tested with groups of learners.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
from dataclasses import dataclass
from lgroup.workers import ActorGroup
import helper

print("the program runs")

@dataclass
class Point:
    x: int

class Actor:
    def __init__(self, start):
        self.point = Point(start)
    def move(self, by):
        self.point = Point(self.point.x + helper.twice(by))
        return self.point

with ActorGroup(Actor, num_actors=2, args=(1,)) as group:
    results = group.foreach_actor("move", kwargs={"by": 3})
    print(sorted(result.unwrap().x for result in results), all(type(r.get()) is Point for r in results))
"""


def test_a_scripts_own_classes_are_actors_and_come_back_as_themselves(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def twice(number):\n    return 2 * number\n")
    (tmp_path / "workers").mkdir()  # a user's own folders of these names are no trap
    (tmp_path / "transport").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["the program runs", "[7, 7] True"]
