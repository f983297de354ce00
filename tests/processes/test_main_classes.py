"""What is defined where a program begins trains with two learners, without running the program again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import numpy as np, torch, lgroup

print("begins")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, SIZE)

    def forward(self, batch):
        return self.layer(batch["obs"])

class Mine(lgroup.Learner):
    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        return loss(fwd_out, batch["actions"])

def loss(out, actions):
    return torch.nn.functional.cross_entropy(out, actions)

SIZE = 2
config = (
    lgroup.LearnerGroupConfig()
    .learners(num_learners=2)
    .training(learner_class=Mine)
    .rl_module(rl_module_spec=lgroup.RLModuleSpec(module_class=Net))
)
with lgroup.LearnerGroup(config=config) as group:
    batch = {"obs": np.ones((8, 4), np.float32), "actions": np.zeros(8, np.int64)}
    result = group.update(batch=batch)
    group.check_sync()
    print(result.status, len(result), [r.unwrap() for r in group.foreach_learner(lambda learner: learner.rank)])
"""
PRINTED = "begins\napplied 2 [0, 1]\n"


@pytest.fixture
def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("how", ["python -c", "a script without a main guard"])
def test_learners_of_classes_of_the_main_module_train(how: str, tmp_path: Path, environment: dict[str, str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    arguments = {"python -c": ["-c", PROGRAM], "a script without a main guard": [str(script)]}
    done = subprocess.run(
        [sys.executable, *arguments[how]],
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        timeout=110,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == (PRINTED, "", 0)


NOTEBOOK = """
import json, sys
from pathlib import Path
from jupyter_client.manager import KernelManager

def show(message):
    content = message["content"]
    if message["msg_type"] == "stream":
        print(content["text"], end="")
    elif message["msg_type"] == "error":
        print(*content["traceback"], sep="\\n")

here = Path.cwd()
spec = here / "kernels" / "here"
spec.mkdir(parents=True)
command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
spec.joinpath("kernel.json").write_text(json.dumps({"argv": command, "display_name": "here", "language": "python"}))
manager = KernelManager(kernel_name="here", transport="ipc", ip=str(here / "kernel"))
manager.kernel_spec_manager.kernel_dirs = [str(spec.parent)]
manager.start_kernel()
client = manager.blocking_client()
client.start_channels()
try:
    client.wait_for_ready(timeout=100)
    for cell in json.load(sys.stdin):
        client.execute_interactive(cell, timeout=100, output_hook=show)
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=False)
"""


def test_classes_of_a_jupyter_notebook_train_cell_by_cell(tmp_path: Path, environment: dict[str, str]) -> None:
    definitions, use = PROGRAM.split("SIZE = 2\n")
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        input=json.dumps([definitions, "SIZE = 2\n" + use, use]),
        cwd=tmp_path,
        env=environment | {"JUPYTER_RUNTIME_DIR": str(tmp_path), "IPYTHONDIR": str(tmp_path)},
        text=True,
        capture_output=True,
        timeout=110,
        check=False,
    )
    assert done.stdout == PRINTED + PRINTED.removeprefix("begins\n"), done.stderr
    assert done.returncode == 0
