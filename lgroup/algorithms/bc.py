"""Behaviour cloning: the policy learns to do what the data's policy did."""

from __future__ import annotations

from typing import Any

import torch

from lgroup.algorithms._losses import distribution_inputs, masked_mean, train_distribution_class
from lgroup.columns import POLICY_LOSS_KEY, Columns
from lgroup.config import LearnerGroupConfig
from lgroup.learner.learner import Learner


class BCConfig(LearnerGroupConfig):
    """Settings of behaviour cloning, with RLlib's names and defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-4
        self.train_batch_size_per_learner = 2000

    def get_default_learner_class(self) -> type[Learner]:
        return BCLearner


class BCLearner(Learner):
    """Minimises the negative log-likelihood of the data's actions.

    A batch has ``obs`` and ``actions``, with or without a time axis and ``loss_mask``. The module may be any
    ``torch.nn.Module`` that returns the action distribution's inputs.
    """

    def compute_loss_for_module(
        self, *, module_id: str, config: LearnerGroupConfig, batch: dict[str, Any], fwd_out: Any
    ) -> torch.Tensor:
        kind = train_distribution_class(self.module[module_id], config)
        logp = kind.from_logits(distribution_inputs(fwd_out)).logp(batch[Columns.ACTIONS])
        loss = -masked_mean(logp, batch.get(Columns.LOSS_MASK))
        self.metrics.log_value((module_id, POLICY_LOSS_KEY), loss)
        return loss
