"""Writes the picture and the table of the group's phases into docs/architecture.md, from the code.

python -m tools.state_diagram          # write
python -m tools.state_diagram --check  # exit with 1 if the document is not what the code says
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lgroup._group_phases import as_markdown, as_mermaid

DOCUMENT = Path(__file__).parents[1] / "docs" / "architecture.md"
BEGIN, END = "<!-- made by tools/state_diagram.py -->\n", "<!-- end -->\n"


def updated(text: str) -> str:
    """The document with the picture and the table that the code has now."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}```mermaid\n{as_mermaid()}\n```\n\n{as_markdown()}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Write the document, or compare."""
    parser = argparse.ArgumentParser(prog="python -m tools.state_diagram", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare; exit with 1 if something differs")
    options = parser.parse_args(arguments)
    text = DOCUMENT.read_text()
    wanted = updated(text)
    if options.check:
        return int(text != wanted)
    DOCUMENT.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
