"""A learner that is hard to recover: dropout, batch norm, a Python attribute that hooks change; and faults on demand.

A fault is a file in a folder, named ``<fault>.<slot>``. Whichever attempt removes the file has the fault, so an update
that is tried again does not meet it twice. A batch with the column ``poison`` ends its first learner each time.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch

import lgroup
from lgroup.workers import current_worker

ROWS, FEATURES, HIDDEN = 24, 6, 16


class Net(torch.nn.Module):
    """Maps ``obs`` [B, 6] to logits [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, HIDDEN),
            torch.nn.BatchNorm1d(HIDDEN),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(HIDDEN, 2),
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.layers(batch["obs"])
        return logits


class ChaosLearner(lgroup.Learner):
    """Cross entropy, whose weight a hook changes from update to update."""

    def build(self) -> None:
        super().build()
        self.temperature = 1.0

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        self.temperature = self.temperature * 0.999 + 0.001

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        if "poison" in batch and self.rank == 0:
            os._exit(3)
        if self._has("exception"):
            raise ValueError("chaos: an exception in the loss")
        if self._has("os_exit"):
            os._exit(4)
        if self._has("gil_held"):
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # locked twice: it never returns, and keeps the interpreter's lock
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        loss = torch.nn.functional.cross_entropy(fwd_out, batch["actions"]) * self.temperature
        return loss * float("nan") if self._has("nonfinite") else loss

    def apply_gradients(self, gradients_dict: Any) -> None:
        if self._has("exit_in_step"):
            os._exit(5)
        super().apply_gradients(gradients_dict)

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        if self._has("exception_after"):
            raise ValueError("chaos: an exception after the last step")

    def _has(self, fault: str) -> bool:
        """Whether this learner is to have the fault now; it has it once."""
        path = Path(self.config.learner_config_dict["faults"]) / f"{fault}.{current_worker().actor_index}"
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True
