"""The same work as a learner group."""

from __future__ import annotations

from typing import Any

import torch

import lgroup
from tools.bench.work import LEARNERS, LR, Net, loss_of


class BenchLearner(lgroup.Learner):
    """The smallest learner that does the work."""

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        return loss_of(fwd_out, batch)


def group_config(num_learners: int = LEARNERS, in_flight: int = 3) -> lgroup.LearnerGroupConfig:
    """A group of `num_learners`, one thread each, that takes `in_flight` updates at a time."""
    return (
        lgroup.LearnerGroupConfig()
        .learners(
            num_learners=num_learners,
            num_cpus_per_learner=1,
            num_gpus_per_learner=0,
            max_requests_in_flight_per_learner=in_flight,
        )
        .training(learner_class=BenchLearner, lr=LR)
        .rl_module(rl_module_spec=lgroup.RLModuleSpec(module_class=Net))
    )
