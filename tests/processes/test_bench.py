"""tools/bench does what its table claims. What it measures is no matter here: other work runs beside the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.bare import BareLoop
from tools.bench.figures import Figure, ratio_figure, table

ROOT = Path(__file__).parents[2]


def test_the_bare_loop_times_every_update() -> None:
    with BareLoop() as bare:
        for rows, updates in ((64, 3), (65, 2), (64, 1)):
            seconds = bare.run(rows, updates)
            assert len(seconds) == updates
            assert min(seconds) > 0


def test_one_run_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    record = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tools.bench", "--only", "start", "--repeat", "1", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "warm start of 2 learners" in done.stdout
    figures = json.loads(record.read_text())["figures"]
    assert [figure["goal"] for figure in figures] == [0.2, 2.5]
    assert all(figure["value"] > 0 for figure in figures)


def test_a_ratio_is_that_of_the_medians_with_the_spread_of_its_rounds() -> None:
    figure = ratio_figure("sync", ours=[[2.0, 2.0], [3.0, 3.0]], bare=[[1.0, 1.0], [2.0, 2.0]], goal=1.5)
    assert figure.value == pytest.approx(2.5 / 1.5)
    assert figure.detail["round_ratio_quartiles"] == pytest.approx([1.375, 2.125])
    assert figure.met is False


def test_the_table_is_markdown_and_says_what_missed_its_goal() -> None:
    lines = table([Figure("a", 1.0, "s", 2.0), Figure("b", 3.0, "s", 2.0), Figure("c", 1234.5, "MB")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[3] for row in cells[2:]] == ["ok", "MISSED", ""]
    assert cells[4][1] == "1234 MB"
