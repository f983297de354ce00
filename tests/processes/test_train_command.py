"""The training command as a user runs it: processes, signals, files, exit codes."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from lgroup.algorithms import spaces_of
from lgroup.columns import DEFAULT_MODULE_ID
from lgroup.modules import DefaultActorCritic

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(300)  # several whole runs in one test

BROKEN_ENV = """
import gymnasium as gym
import numpy as np

class Broken(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    steps = 0

    def reset(self, **kwargs):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps > 50:
            raise RuntimeError("the simulator fell over")
        return np.zeros(2, np.float32), 1.0, self.steps % 5 == 0, False, {}

gym.register("Broken-v0", Broken)
"""


@contextmanager
def train(*argv: str, path: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """The command, started; killed if it is still there at the end, and its workers with it."""
    python_path = os.pathsep.join(map(str, filter(None, (ROOT, path))))
    process = subprocess.Popen(
        [sys.executable, "-m", "lgroup.train", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a run that ends by itself."""
    out, err = process.communicate(timeout=140)
    return process.returncode, out, err


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def read_until(process: subprocess.Popen[str], pattern: str) -> None:
    """Consumes stdout up to a line that matches."""
    assert process.stdout is not None
    for line in process.stdout:
        if re.search(pattern, line):
            return
    raise AssertionError(f"the command ended without a line like {pattern!r}")


def ledger_of(summary: str) -> dict[str, list[int]]:
    """submitted, in flight, applied, dropped, failed of updates and of env steps; reasons left out."""
    table = summary[summary.index("  ledger") :].splitlines()[1:3]
    rows = [re.sub(r"\(.*?\)", "", line) for line in table]
    return {
        match["name"].strip(): [int(n.replace(",", "")) for n in match["counts"].split()]
        for row in rows
        if (match := re.match(r"  (?P<name>updates|env steps) +(?P<counts>[\d, ]+)$", row))
    }


def test_impala_trains_asynchronously_and_leaves_its_results(tmp_path: Path) -> None:
    out = tmp_path / "run"
    argv = ("--env", "CartPole-v1", "--algo", "impala", "--seed", "0", "--out", str(out), "--stop-env-steps", "6000")
    with train(*argv) as process:
        code, printed, err = finished(process)
    assert (code, err) == (0, "")
    assert "6,0" in printed and "env steps reached the limit of 6,000" in printed
    names = {"weights.pt", "curve.png", "progress.csv", "tensorboard", "summary.txt"}
    assert {path.name for path in out.iterdir()} == names
    assert printed.endswith((out / "summary.txt").read_text())

    for submitted, in_flight, *rest in ledger_of(printed).values():
        assert submitted > 0 and in_flight == 0 and submitted == sum(rest)
    with (out / "progress.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert int(last["env_steps"]) >= 6000 and last["dropped"] == last["failed"] == "0"
    assert int(last["updates"]) == int(last["weights_version"])

    weights = torch.load(out / "weights.pt", weights_only=True)
    observation_space, action_space = spaces_of("CartPole-v1")
    module = DefaultActorCritic(
        observation_space=observation_space,
        action_space=action_space,
        model_config={"fcnet_hiddens": [64, 64], "vf_share_layers": False},
    )
    module.load_state_dict(weights[DEFAULT_MODULE_ID])


def test_ctrl_c_ends_a_run_cleanly_and_saves_what_was_learned(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with train("--env", "CartPole-v1", "--out", str(out), "--stop-return", "1e9") as process:
        read_until(process, r"env steps \(")
        workers = descendants(process)
        process.send_signal(signal.SIGINT)
        code, printed, err = finished(process)
        assert (code, err) == (130, "")
        assert "interrupted." in printed
        assert torch.load(out / "weights.pt", weights_only=True)
        assert (out / "curve.png").exists()
        gone, alive = psutil.wait_procs(workers, timeout=10)
        assert len(gone) >= 5 and not alive  # a zygote, two learners, two env runners


def test_ctrl_c_before_training_begins_ends_it_at_once(tmp_path: Path) -> None:
    with train("--env", "CartPole-v1", "--out", str(tmp_path / "run")) as process:
        read_until(process, "impala on CartPole-v1")
        process.send_signal(signal.SIGINT)
        code, printed, err = finished(process)
    assert (code, printed) == (130, "")
    assert err == "interrupted before everything was saved\n"


def test_ppo_leaves_data_that_bc_imitates(tmp_path: Path) -> None:
    teacher, pupil = tmp_path / "ppo", tmp_path / "bc"
    base = ("--env", "CartPole-v1", "--seed", "1", "--num-env-runners", "1")
    argv = ("--algo", "ppo", "--num-learners", "0", "--train-batch-size", "1024", "--minibatch-size", "256")
    with train(*base, *argv, "--stop-return", "60", "--save-data", "2000", "--out", str(teacher)) as process:
        code, printed, err = finished(process)
    assert (code, err) == (0, "") and "reached the goal of 60" in printed
    with np.load(teacher / "data.npz") as data:
        assert data["obs"].shape == (2000, 4) and data["actions"].shape == (2000,)

    argv = ("--algo", "bc", "--data", str(teacher / "data.npz"), "--out", str(pupil), "--stop-return", "45")
    with train(*base, *argv, "--num-learners", "1") as process:
        code, printed, err = finished(process)
    assert (code, err) == (0, "")
    assert "reached the goal of 45" in printed


def test_an_environment_that_raises_ends_the_run_with_its_traceback_and_the_weights(tmp_path: Path) -> None:
    (tmp_path / "broken_env.py").write_text(BROKEN_ENV)
    out = tmp_path / "run"
    argv = ("--env", "broken_env:Broken-v0", "--num-learners", "1", "--num-env-runners", "1", "--out", str(out))
    with train(*argv, path=tmp_path) as process:
        code, printed, err = finished(process)
    assert code == 1
    assert "the simulator fell over" in err and "in step" in err
    assert "failed: " in printed
    assert (out / "weights.pt").exists()


def test_the_example_of_a_loop_of_ones_own_runs() -> None:
    source = ROOT / "examples" / "embed.py"
    assert len(source.read_text().splitlines()) < 40
    done = subprocess.run(
        [sys.executable, str(source)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    sine = re.search(r"sin\(1\) = ([\d.]+) after 400 updates", done.stdout)
    assert sine is not None and abs(float(sine[1]) - np.sin(1.0)) < 0.1
