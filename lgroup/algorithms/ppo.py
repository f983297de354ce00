"""PPO: several epochs of minibatch steps on one batch, kept near the policy that sampled it.

Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347 (equation 7's clipped
objective and section 4's adaptive KL penalty); advantages are those of arXiv:1506.02438.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgroup._config_checks import BOOLEAN, number
from lgroup.algorithms._losses import distribution_inputs, masked_mean, state_values, train_distribution_class
from lgroup.algorithms.returns import gae, standardise
from lgroup.columns import DEFAULT_MODULE_ID, ENTROPY_KEY, POLICY_LOSS_KEY, VF_LOSS_KEY, Columns
from lgroup.config import LearnerGroupConfig
from lgroup.learner.learner import Learner

Array = NDArray[Any]

MEAN_KL_LOSS_KEY = "mean_kl_loss"
CURR_KL_COEFF_KEY = "curr_kl_coeff"
VF_EXPLAINED_VAR_KEY = "vf_explained_var"


class PPOConfig(LearnerGroupConfig):
    """Settings of PPO, with RLlib's names and defaults."""

    checks = {
        "use_kl_loss": BOOLEAN,
        "kl_coeff": number(at_least=0),
        "kl_target": number(above=0),
        "clip_param": number(above=0),
        "vf_clip_param": number(above=0),
        "vf_loss_coeff": number(at_least=0),
        "entropy_coeff": number(at_least=0),
        "lambda_": number(at_least=0, at_most=1),
    }

    def __init__(self) -> None:
        super().__init__()
        self.use_kl_loss = True
        self.kl_coeff: float = 0.2
        self.kl_target: float = 0.01
        self.clip_param: float = 0.3
        self.vf_clip_param: float = 10.0
        self.vf_loss_coeff: float = 1.0
        self.entropy_coeff: float = 0.0
        self.lambda_: float = 1.0
        self.lr = 5e-5
        self.num_epochs = 30
        self.minibatch_size = 128
        self.shuffle_batch_per_epoch = True
        self.train_batch_size_per_learner = 4000

    def get_default_learner_class(self) -> type[Learner]:
        return PPOLearner


class PPOLearner(Learner):
    """PPO's clipped objective with an adaptive KL penalty.

    A row of the batch is one env step. Columns: obs, actions, action_logp and action_dist_inputs of the policy that
    acted, advantages, value_targets. `ppo_rows` makes them from rollouts, `build_batch` from episodes.

    Attributes:
        curr_kl_coeffs_per_module: the KL penalty's coefficient of each module, adapted after each update.
    """

    curr_kl_coeffs_per_module: dict[str, float]

    def build(self) -> None:
        super().build()
        self.curr_kl_coeffs_per_module = {
            module_id: float(getattr(self.config.get_config_for_module(module_id), "kl_coeff", 0.0))
            for module_id in sorted(self.module.keys())
        }
        # by module: sum of KL times rows, and rows, of this update so far. Empty between updates: it differs by rank.
        self.kl_sums: dict[str, Tensor] = {}

    def build_batch(self, episodes: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """One row per env step, with advantages and value targets from this module's values.

        Episodes need the extra model outputs ``action_logp`` and ``action_dist_inputs``. Advantages are standardised
        over the episodes of all learners.

        Raises:
            KeyError: an episode lacks one of these outputs.
        """
        batch: dict[str, dict[str, Any]] = {}
        for module_id in sorted(self.module.keys()):
            own = [episode for episode in episodes if len(episode) and _module_of(episode) == module_id]
            advantages = np.empty(0, np.float32)
            if own:
                batch[module_id] = self._rows_of_episodes(module_id, own)
                advantages = batch[module_id][Columns.ADVANTAGES]
            standardised = self._standardised_over_group(advantages)  # a reduction: every learner takes part
            if own:
                batch[module_id][Columns.ADVANTAGES] = standardised
        return batch

    def compute_loss_for_module(
        self, *, module_id: str, config: LearnerGroupConfig, batch: dict[str, Any], fwd_out: Any
    ) -> Tensor:
        module, settings, mask = self.module[module_id], _settings(config), batch.get(Columns.LOSS_MASK)
        kind = train_distribution_class(module, config)
        policy = kind.from_logits(distribution_inputs(fwd_out))
        values = state_values(module, batch, fwd_out)

        policy_loss = -masked_mean(_surrogate(policy.logp(batch[Columns.ACTIONS]), batch, settings.clip_param), mask)
        squared_error = (values - batch[Columns.VALUE_TARGETS]) ** 2
        vf_loss = masked_mean(squared_error.clamp(max=settings.vf_clip_param), mask)
        entropy = masked_mean(policy.entropy(), mask)
        loss = policy_loss + settings.vf_loss_coeff * vf_loss - settings.entropy_coeff * entropy
        if settings.use_kl_loss:
            kl = masked_mean(kind.from_logits(batch[Columns.ACTION_DIST_INPUTS]).kl(policy), mask)
            loss = loss + self.curr_kl_coeffs_per_module[module_id] * kl
            self._count_kl(module_id, kl.detach(), len(values) if mask is None else int(mask.sum()))

        logged = {
            POLICY_LOSS_KEY: policy_loss,
            VF_LOSS_KEY: vf_loss,
            ENTROPY_KEY: entropy,
            VF_EXPLAINED_VAR_KEY: _explained_variance(batch[Columns.VALUE_TARGETS], values.detach()),
        }
        self.metrics.log_dict(logged, key=(module_id,))
        return loss

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Adapts the KL coefficients: half as much below half of the target, 1.5 times as much above twice of it.

        The KL is the mean over the rows of all minibatches of the update, and of all learners.
        """
        super().after_gradient_based_update(timesteps=timesteps)
        if not getattr(self.config, "use_kl_loss", True):
            return
        names = sorted(self.module.keys())
        zero = torch.zeros(2, dtype=torch.float64)
        sums = self.group_mean(torch.stack([self.kl_sums.get(name, zero) for name in names])).tolist()
        self.kl_sums.clear()
        for module_id, (weighted, rows) in zip(names, sums, strict=True):
            if rows:
                self._adapt_kl_coeff(module_id, weighted / rows)

    def _adapt_kl_coeff(self, module_id: str, kl: float) -> None:
        target = _settings(self.config.get_config_for_module(module_id)).kl_target
        self.metrics.log_value((module_id, MEAN_KL_LOSS_KEY), kl)
        if kl > 2.0 * target:
            self.curr_kl_coeffs_per_module[module_id] *= 1.5
        elif kl < 0.5 * target:
            self.curr_kl_coeffs_per_module[module_id] *= 0.5
        self.metrics.log_value((module_id, CURR_KL_COEFF_KEY), self.curr_kl_coeffs_per_module[module_id])

    def _count_kl(self, module_id: str, kl: Tensor, rows: int) -> None:
        added = torch.tensor([float(kl) * rows, rows], dtype=torch.float64)
        self.kl_sums[module_id] = self.kl_sums.get(module_id, torch.zeros_like(added)) + added

    def _rows_of_episodes(self, module_id: str, episodes: Sequence[Any]) -> dict[str, Array]:
        columns = columns_of_episodes(episodes)
        module, settings = self.module[module_id], _settings(self.config.get_config_for_module(module_id))
        obs = torch.as_tensor(columns[Columns.OBS], device=self.device)
        with torch.no_grad():
            values: Tensor = module.compute_values({Columns.OBS: obs})
        columns[Columns.VF_PREDS] = values.cpu().numpy()
        return ppo_rows(columns, gamma=settings.gamma, lambda_=settings.lambda_)

    def _standardised_over_group(self, advantages: Array) -> Array:
        own = advantages.astype(np.float64)
        count, total, squares = self.group_mean(torch.tensor([float(len(own)), own.sum(), (own**2).sum()])).tolist()
        if not count:
            return advantages
        mean = total / count
        return standardise(advantages, mean=mean, deviation=math.sqrt(max(0.0, squares / count - mean**2)))


def ppo_rows(columns: Mapping[str, Array], *, gamma: float, lambda_: float) -> dict[str, Array]:
    """A rollout (``[B, T, ...]`` with vf_preds, see `EnvRunner.sample`) as one row per valid time step, plus GAE.

    Advantages are as GAE gives them: standardise those of the whole batch before it is split.
    """
    mask = columns[Columns.LOSS_MASK]
    returns = gae(
        columns[Columns.REWARDS],
        columns[Columns.VF_PREDS],
        columns[Columns.TERMINATEDS],
        columns[Columns.TRUNCATEDS],
        mask,
        gamma=gamma,
        lambda_=lambda_,
    )
    kept = (Columns.OBS, Columns.ACTIONS, Columns.ACTION_LOGP, Columns.ACTION_DIST_INPUTS)
    rows = {name: columns[name][mask] for name in kept}
    return {**rows, Columns.ADVANTAGES: returns.advantages[mask], Columns.VALUE_TARGETS: returns.value_targets[mask]}


def columns_of_episodes(episodes: Sequence[Any]) -> dict[str, Array]:
    """Episodes in the layout of a rollout: one row each, ``T`` being the longest one's steps and one more.

    Raises:
        KeyError: an episode lacks the extra model outputs ``action_logp`` and ``action_dist_inputs``.
    """
    shape = (len(episodes), max(map(len, episodes)) + 1)
    columns: dict[str, Array] = {}
    for row, episode in enumerate(episodes):
        steps = len(episode)
        parts = {
            Columns.OBS: episode.get_observations(),
            Columns.ACTIONS: episode.get_actions(),
            Columns.REWARDS: np.asarray(episode.get_rewards(), np.float32),
            Columns.ACTION_LOGP: episode.get_extra_model_outputs(Columns.ACTION_LOGP),
            Columns.ACTION_DIST_INPUTS: episode.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS),
            Columns.TERMINATEDS: np.arange(steps) == (steps - 1 if episode.is_terminated else -1),
            Columns.TRUNCATEDS: np.arange(steps) == (steps - 1 if episode.is_truncated else -1),
            Columns.LOSS_MASK: np.ones(steps, np.bool_),
        }
        for name, part in parts.items():
            values = np.asarray(part)
            if name not in columns:
                columns[name] = np.zeros((*shape, *values.shape[1:]), values.dtype)
            columns[name][row, : len(values)] = values
    return columns


def _surrogate(logp: Tensor, batch: Mapping[str, Tensor], clip_param: float) -> Tensor:
    """Equation 7's objective of each row."""
    ratio = torch.exp(logp - batch[Columns.ACTION_LOGP])
    advantages = batch[Columns.ADVANTAGES]
    return torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_param, 1.0 + clip_param) * advantages)


def _explained_variance(targets: Tensor, values: Tensor) -> Tensor:
    """1 where the values explain the targets wholly, 0 where a constant would do as well; at least -1."""
    if targets.numel() < 2:
        return torch.zeros(())
    return (1.0 - (targets - values).var() / targets.var().clamp(min=1e-8)).clamp(min=-1.0)


def _settings(config: LearnerGroupConfig) -> PPOConfig:
    if not isinstance(config, PPOConfig):
        raise TypeError(f"PPOLearner needs a PPOConfig, not a {type(config).__name__}")
    return config


def _module_of(episode: Any) -> str:
    return DEFAULT_MODULE_ID if episode.module_id is None else str(episode.module_id)
