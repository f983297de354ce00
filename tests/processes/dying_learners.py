"""Learners that die, hang or raise where a batch or a file says so. Worker processes import this module by its name."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lgroup
from lgroup.workers import current_worker

FEATURES = 4


class Net(torch.nn.Module):
    """Four numbers in, two out; with dropout and batch norm, whose states a retry must find as they were."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        hard = [] if plain else [torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3)]
        self.layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), *hard, torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        logits: torch.Tensor = self.layers(batch["obs"])
        return logits


def die(how: str) -> None:
    """End this process, or stop it, or hold the interpreter's lock."""
    if how == "segv":
        ctypes.string_at(0)
    elif how.startswith("exit"):
        os._exit(int(how[4:]))
    elif how == "deadlock":  # with the interpreter's lock held; no signal handler ends it
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    elif how.startswith("gil"):
        ctypes.PyDLL(None).usleep(int(float(how[3:]) * 1e6))
    elif how == "sleep":
        threading.Event().wait()
    elif how == "raise":
        raise ValueError("no more")
    else:
        os.kill(os.getpid(), signal.Signals[how])


class Dying(lgroup.Learner):
    """Has the fault that a file ``<folder>/<place>.<slot>`` describes, once; the file is gone then.

    Places: constructor, before, loss, sum, step, after. A batch with a column ``segv`` kills rank 0 each time.
    """

    def build(self) -> None:
        self._have("constructor")
        super().build()
        self.coefficient = 1.0

    def before_gradient_based_update(self, *, timesteps: Any) -> None:
        self.coefficient *= 1.001
        self._have("before")

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        if "segv" in batch and self.rank == 0:
            die("segv")
        self._have("loss")
        return torch.nn.functional.cross_entropy(fwd_out, batch["actions"].long()) * self.coefficient

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        gradients = super().compute_gradients(*args, **kwargs)
        how = self._wanted("sum")
        if how:  # so that it happens while this learner waits for the others' gradients
            threading.Timer(0.05, die, (how,)).start()
        return gradients

    def apply_gradients(self, gradients_dict: Any) -> None:
        self._have("step")
        super().apply_gradients(gradients_dict)

    def after_gradient_based_update(self, *, timesteps: Any) -> None:
        self._have("after")

    def _have(self, place: str) -> None:
        how = self._wanted(place)
        if how:
            die(how)

    def _wanted(self, place: str) -> str:
        folder = self.config.learner_config_dict.get("faults", "")
        path = Path(folder) / f"{place}.{current_worker().actor_index}"
        if not folder or not path.exists():
            return ""
        how = path.read_text()
        if not how.startswith("always "):
            path.unlink()
        return how.removeprefix("always ")


def config_of(num_learners: int, faults: Path | None = None, *, plain: bool = False, **fault_tolerance: Any) -> Any:
    """A small seeded group, epochs and minibatches, quick to notice."""
    settings = {"max_restarts": 10**6, "heartbeat_timeout_s": 1.0, "update_timeout_s": 20.0, **fault_tolerance}
    spec = lgroup.RLModuleSpec(module_class=Net, model_config={"plain": plain})
    return (
        lgroup.LearnerGroupConfig()
        .learners(num_learners=num_learners, num_cpus_per_learner=1)
        .training(
            learner_class=Dying,
            lr=0.01,
            num_epochs=2,
            minibatch_size=12,
            shuffle_batch_per_epoch=True,
            learner_config_dict={"faults": str(faults or "")},
        )
        .rl_module(rl_module_spec=spec)
        .fault_tolerance(**settings)
        .debugging(seed=11)
    )


def batch_of(seed: int = 0, rows: int = 24, **columns: Any) -> dict[str, Any]:
    """Rows of noise."""
    generator = np.random.default_rng(seed)
    obs = generator.normal(size=(rows, FEATURES)).astype(np.float32)
    return {"obs": obs, "actions": generator.integers(0, 2, rows), **columns}


def arm(folder: Path, place: str, slot: int, how: str) -> None:
    """Have a learner meet a fault at a place. Complete at once: learners may look at any moment."""
    temporary = folder / f"new.{place}.{slot}"
    temporary.write_text(how)
    temporary.rename(folder / f"{place}.{slot}")


def pid_of(group: lgroup.LearnerGroup, slot: int) -> int:
    """The process of the learner in a slot."""
    pid: int = group.get_stats()["learners"][slot]["pid"]
    return pid


def train_until(group: lgroup.LearnerGroup, condition: Callable[[lgroup.UpdateResult], bool], deadline: Any) -> int:
    """Train until a result is as wanted; says how many updates it took."""
    for number in range(1, 1_000_000):
        if condition(group.update(batch=batch_of(number))):
            return number
        deadline.check("the result that the test waits for")
    raise AssertionError


def same_state(left: Any, right: Any) -> bool:
    """Whether two states are the same bit for bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_state(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_state, left, right))
    if isinstance(left, torch.Tensor):
        return bool(torch.equal(left, right))
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right))
    return bool(left == right)
