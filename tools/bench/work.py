"""What both contenders compute: an MLP 4-256-256-2 with tanh, cross-entropy, Adam, one thread per learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

LEARNERS = 2
LR = 1e-3
WIDTH = 256


class Net(torch.nn.Module):
    """Maps observations [B, 4] to logits [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, WIDTH),
            torch.nn.Tanh(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Tanh(),
            torch.nn.Linear(WIDTH, 2),
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.layers(batch["obs"])
        return logits


def loss_of(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over the rows at hand."""
    return torch.nn.functional.cross_entropy(logits, batch["actions"])


def make_batch(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """`obs` float32 [rows, 4], `actions` int64 [rows]."""
    generator = np.random.default_rng(0)
    obs = generator.standard_normal((rows, 4), dtype=np.float32)
    return {"obs": obs, "actions": generator.integers(0, 2, rows)}
