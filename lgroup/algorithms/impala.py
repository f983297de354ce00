"""IMPALA: actor-critic learning from rollouts that older policies sampled, corrected by V-trace.

Source: Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures", arXiv:1802.01561.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lgroup._config_checks import integer, number
from lgroup.algorithms._losses import distribution_inputs, masked_mean, state_values, train_distribution_class
from lgroup.algorithms.returns import Returns, vtrace
from lgroup.columns import ENTROPY_KEY, POLICY_LOSS_KEY, VF_LOSS_KEY, Columns
from lgroup.config import LearnerGroupConfig
from lgroup.learner.learner import Learner


class IMPALAConfig(LearnerGroupConfig):
    """Settings of IMPALA, with RLlib's names and defaults.

    Two are not RLlib's. ``vtrace_lambda`` is the lambda of the paper's remark 2: below 1 the value targets have less
    variance, and more bias. ``reward_scale`` multiplies the rewards in the losses, so that discounted returns come to
    about 10 or less: where values are in the hundreds, their loss drowns the policy's.
    """

    checks = {
        "vtrace_clip_rho_threshold": number(above=0),
        "vtrace_clip_pg_rho_threshold": number(above=0),
        "vtrace_lambda": number(at_least=0, at_most=1),
        "reward_scale": number(above=0),
        "vf_loss_coeff": number(at_least=0),
        "entropy_coeff": number(at_least=0),
        "broadcast_interval": integer(1),
    }

    def __init__(self) -> None:
        super().__init__()
        self.vtrace_clip_rho_threshold: float = 1.0
        self.vtrace_clip_pg_rho_threshold: float = 1.0
        self.vtrace_lambda: float = 1.0
        self.reward_scale: float = 1.0
        self.vf_loss_coeff: float = 0.5
        self.entropy_coeff: float = 0.01
        self.broadcast_interval: int = 1
        self.lr = 0.0005
        self.grad_clip = 40.0
        self.grad_clip_by = "global_norm"
        self.train_batch_size_per_learner = 500
        self.rollout_fragment_length = 50
        self.num_env_runners = 2

    def get_default_learner_class(self) -> type[Learner]:
        return IMPALALearner


class IMPALALearner(Learner):
    """V-trace actor-critic. A row of the batch is one sequence, so that shards never cut one.

    Columns, ``[rows, T, ...]`` in the layout of `lgroup.algorithms.returns`: obs, actions, rewards, terminateds,
    truncateds, action_logp (of the policy that acted), loss_mask. The losses are means over the valid time steps.
    """

    def compute_loss_for_module(
        self, *, module_id: str, config: LearnerGroupConfig, batch: dict[str, Any], fwd_out: Any
    ) -> Tensor:
        module, settings = self.module[module_id], _settings(config)
        mask = batch[Columns.LOSS_MASK]
        policy = train_distribution_class(module, config).from_logits(distribution_inputs(fwd_out))
        logp = policy.logp(batch[Columns.ACTIONS])
        values = state_values(module, batch, fwd_out)
        returns = vtrace_of(batch, logp, values, settings)

        advantages, targets = (_like(array, values) for array in (returns.advantages, returns.value_targets))
        policy_loss = -masked_mean(logp * advantages, mask)
        vf_loss = 0.5 * masked_mean((values - targets) ** 2, mask)
        entropy = masked_mean(policy.entropy(), mask)
        logged = {POLICY_LOSS_KEY: policy_loss, VF_LOSS_KEY: vf_loss, ENTROPY_KEY: entropy}
        self.metrics.log_dict(logged, key=(module_id,))
        return policy_loss + settings.vf_loss_coeff * vf_loss - settings.entropy_coeff * entropy


def vtrace_of(batch: dict[str, Any], logp: Tensor, values: Tensor, config: IMPALAConfig) -> Returns:
    """V-trace of a batch of torch columns, on the CPU: a loop over time of small arrays is no work for a GPU."""
    names = (
        Columns.ACTION_LOGP,
        Columns.REWARDS,
        Columns.TERMINATEDS,
        Columns.TRUNCATEDS,
        Columns.LOSS_MASK,
    )
    behaviour_logp, rewards, terminateds, truncateds, mask = (batch[name].cpu().numpy() for name in names)
    return vtrace(
        behaviour_logp,
        logp.detach().cpu().numpy(),
        rewards * np.float32(config.reward_scale),
        values.detach().cpu().numpy(),
        terminateds,
        truncateds,
        mask,
        gamma=config.gamma,
        clip_rho_threshold=config.vtrace_clip_rho_threshold,
        clip_pg_rho_threshold=config.vtrace_clip_pg_rho_threshold,
        lambda_=config.vtrace_lambda,
    )


def _settings(config: LearnerGroupConfig) -> IMPALAConfig:
    if not isinstance(config, IMPALAConfig):
        raise TypeError(f"IMPALALearner needs an IMPALAConfig, not a {type(config).__name__}")
    return config


def _like(array: Any, values: Tensor) -> Tensor:
    return torch.as_tensor(array, dtype=values.dtype, device=values.device)
