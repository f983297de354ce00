"""What is defined in a program's ``__main__`` travels by value, and the program is never run again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CODE = """
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
HELPER = "def twice(number):\n    return 2 * number\n"
PRINTED = ["the program runs", "[7, 7] True"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "workers").mkdir()  # a user's own folders of these names are no trap
    (tmp_path / "transport").mkdir()
    (tmp_path / "program.py").write_text(CODE)
    return tmp_path


@pytest.mark.parametrize("how", [["-c", CODE], ["program.py"]], ids=["python -c", "a script without a main guard"])
def test_a_programs_own_classes_are_actors(how: list[str], directory: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *how], cwd=directory, env=environment, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, PRINTED, "")


NOTEBOOK = """
import sys
from jupyter_client.manager import start_new_kernel

def keep(message):
    content = message["content"]
    if message["msg_type"] == "stream":
        print(content["text"], end="")
    elif message["msg_type"] == "error":
        print(*content["traceback"], sep="\\n")

manager, client = start_new_kernel(startup_timeout=60)
client.execute_interactive(sys.stdin.read(), timeout=100, output_hook=keep)
client.stop_channels()
manager.shutdown_kernel(now=False)
"""


def test_a_notebooks_own_classes_are_actors(directory: Path) -> None:
    pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    done = subprocess.run(  # a process of its own: the client keeps an event loop open
        [sys.executable, "-c", NOTEBOOK],
        input=CODE,
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, PRINTED), done.stderr
