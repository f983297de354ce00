"""More learners with faults, on top of `dying_learners`. Worker processes import this module by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from dying_learners import Dying, die

import lgroup
from lgroup.workers import current_worker

LONG_SUM = 200_000_000  # numbers to add in one C call that computes and never lets go of the GIL: seconds


class Failing(Dying):
    """Faults in more places: ``door`` (a pipe to read before it is built), ``set_state`` and ``compute``."""

    def build(self) -> None:
        pipe = self._wanted("door")
        if pipe:
            Path(pipe).read_text()
        super().build()

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        if self._wanted("compute"):
            sum(range(LONG_SUM))
        return super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self._have("set_state")


def count_and_die(learner: lgroup.Learner, tokens: str, slots: Sequence[int]) -> int:
    """For `foreach_learner`: count the calls; in `slots`, die the first time in the middle of it."""
    learner.calls = getattr(learner, "calls", 0) + 1  # type: ignore[attr-defined]
    slot = current_worker().actor_index
    token = Path(tokens) / f"token.{slot}"
    if slot in slots and token.exists():
        token.unlink()
        die("SIGKILL")
    return int(learner.calls)  # type: ignore[attr-defined]
