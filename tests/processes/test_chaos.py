"""A short run of tools/chaos: faults of every quick kind, and nothing wrong afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = "sigkill,exception,exception_after,nonfinite,os_exit,exit_in_step,two_at_once,all_at_once,during_reforming"


def test_a_training_survives_random_faults_without_a_mistake(tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "tools.chaos", "--faults", "25", "--seed", "7", "--kinds", KINDS]
    done = subprocess.run(
        [*command, "--json", str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    record = json.loads(out.read_text())
    assert sum(record["faults"].values()) == 25
    assert record["updates"]["applied"] >= 25
    assert not any(record["errors"].values())
