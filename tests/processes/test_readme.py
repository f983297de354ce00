"""What the README shows is run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_code_of_the_readme_runs_as_one_script(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    script = tmp_path / "readme.py"
    script.write_text("\n\n".join(blocks))
    command = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    status, version, *_ = done.stdout.split()
    assert (status, version) == ("applied", "10")
    assert done.stderr == ""


def test_embedding_takes_ten_lines() -> None:
    block = README.split("Training two copies of it")[1].split("```python\n")[1].split("```")[0]
    assert len(block.splitlines()) <= 12
    assert sum(1 for line in block.splitlines() if not line.endswith("(") and line != ")") <= 10


def test_every_file_the_readme_links_to_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing
