"""What docs/architecture.md claims about the code is so."""

from __future__ import annotations

import re
from pathlib import Path

from lgroup._group_state import TRANSITIONS, Phase

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_state_diagram_is_the_table_of_transitions() -> None:
    drawn = re.findall(r"^    (\w+) --> (\w+):", ARCHITECTURE, re.MULTILINE)
    assert len(drawn) == len(set(drawn))
    assert {(Phase(start), Phase(end)) for start, end in drawn} == {
        (start, end) for start, ends in TRANSITIONS.items() for end in ends
    }


def test_every_module_that_the_map_names_is_there() -> None:
    table = ARCHITECTURE.split("One module, one subject")[1].split("## ")[0]
    missing = []
    for row in table.splitlines():
        for cell in row.split("|"):
            folder = Path()
            for name in re.findall(r"`([\w/]+(?:\.py|/))`", cell):
                path = ROOT / name if "/" in name else ROOT / folder / name
                folder = path.relative_to(ROOT).parent
                missing += [] if path.exists() else [str(path.relative_to(ROOT))]
    assert not missing
