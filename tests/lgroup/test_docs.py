"""What docs/architecture.md claims about the code is so."""

from __future__ import annotations

import re
from pathlib import Path

from tools.state_diagram import updated

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_state_diagram_is_made_from_the_table_of_transitions() -> None:
    assert updated(ARCHITECTURE) == ARCHITECTURE, "run python -m tools.state_diagram"


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
