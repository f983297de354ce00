"""IMPALA's loss against one written from the formulas, and its independence of how rows are split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from algorithm_data import built, config_for, gradients_of, loss_of, rollout_columns, train_once

from lgroup.algorithms import PPOConfig, vtrace
from lgroup.columns import DEFAULT_MODULE_ID, ENTROPY_KEY, POLICY_LOSS_KEY, VF_LOSS_KEY, Columns


def by_hand(columns: dict[str, Any], logits: torch.Tensor, values: torch.Tensor, config: Any) -> torch.Tensor:
    """Section 4.2's three gradients as one loss, a sum over valid steps divided by their number."""
    mask = torch.from_numpy(columns[Columns.LOSS_MASK])
    log_probs = torch.log_softmax(logits, -1)
    logp = log_probs.gather(-1, torch.from_numpy(columns[Columns.ACTIONS])[..., None])[..., 0]
    returns = vtrace(
        columns[Columns.ACTION_LOGP],
        logp.detach().numpy(),
        columns[Columns.REWARDS],
        values.detach().numpy(),
        columns[Columns.TERMINATEDS],
        columns[Columns.TRUNCATEDS],
        columns[Columns.LOSS_MASK],
        gamma=config.gamma,
    )
    policy = -(logp * torch.from_numpy(returns.advantages))[mask].mean()
    value = 0.5 * ((values - torch.from_numpy(returns.value_targets.copy())) ** 2)[mask].mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1)[mask].mean()
    return policy + config.vf_loss_coeff * value - config.entropy_coeff * entropy


def test_the_loss_is_the_papers() -> None:
    config = config_for("impala", entropy_coeff=0.03, vf_loss_coeff=0.25)
    columns = rollout_columns(config, seed=1)
    learner = built(config, seed=2)  # another policy than the one that sampled
    out = learner.module[DEFAULT_MODULE_ID].forward_train({Columns.OBS: torch.from_numpy(columns[Columns.OBS])})
    want = by_hand(columns, out[Columns.ACTION_DIST_INPUTS], out[Columns.VF_PREDS], config)
    torch.testing.assert_close(loss_of(learner, columns), want)


def test_shares_of_any_split_of_the_rows_add_up_to_the_whole_gradient() -> None:
    config = config_for("impala")
    learner, columns = built(config, seed=2), rollout_columns(config, seed=1)
    whole = gradients_of(learner, loss_of(learner, columns))
    total = columns[Columns.LOSS_MASK].sum()
    summed: dict[str, torch.Tensor] = {}
    for rows in (slice(0, 1), slice(1, 4)):
        part = {name: column[rows] for name, column in columns.items()}
        share = float(part[Columns.LOSS_MASK].sum() / total)
        for name, gradient in gradients_of(learner, loss_of(learner, part) * share).items():
            summed[name] = summed.get(name, torch.zeros_like(gradient)) + gradient
    for name, gradient in whole.items():
        torch.testing.assert_close(summed[name], gradient, rtol=1e-5, atol=1e-5)


def test_a_reward_scale_is_the_same_as_scaled_rewards() -> None:
    config = config_for("impala", reward_scale=0.1)
    learner, columns = built(config), rollout_columns(config)
    scaled = {**columns, Columns.REWARDS: columns[Columns.REWARDS] * np.float32(0.1)}
    torch.testing.assert_close(loss_of(learner, columns), loss_of(learner, scaled, config_for("impala")))


def test_masked_steps_give_no_gradient() -> None:
    config = config_for("impala")
    learner, columns = built(config), rollout_columns(config)
    dirty = {name: column.copy() for name, column in columns.items()}
    masked = ~columns[Columns.LOSS_MASK]
    dirty[Columns.ACTIONS][masked] = 1
    dirty[Columns.REWARDS][masked] = 1e5
    dirty[Columns.ACTION_LOGP][masked] = -50.0
    torch.testing.assert_close(loss_of(learner, dirty), loss_of(learner, columns))
    nothing = {**columns, Columns.LOSS_MASK: np.zeros_like(columns[Columns.LOSS_MASK])}
    assert loss_of(learner, nothing).item() == 0.0


def test_an_update_reports_its_losses_and_changes_the_weights() -> None:
    config = config_for("impala")
    learner, columns = built(config), rollout_columns(config)
    before = {name: value.clone() for name, value in learner.module.state_dict().items()}
    metrics = train_once(learner, columns)
    assert {POLICY_LOSS_KEY, VF_LOSS_KEY, ENTROPY_KEY, "total_loss"} <= set(metrics)
    assert 0.6 < metrics[ENTROPY_KEY] < 0.7
    assert any((before[name] != value).any() for name, value in learner.module.state_dict().items())


def test_continuous_actions_are_trained() -> None:
    config = config_for("impala", env="Pendulum-v1")
    loss = loss_of(built(config), rollout_columns(config))
    assert torch.isfinite(loss) and loss.requires_grad


def test_another_algorithms_config_is_refused() -> None:
    config = config_for("impala")
    learner, columns = built(config), rollout_columns(config)
    with pytest.raises(TypeError, match="IMPALALearner needs an IMPALAConfig, not a PPOConfig"):
        loss_of(learner, columns, PPOConfig())


def test_repeated_updates_on_one_rollout_raise_its_rewarded_actions() -> None:
    config = config_for("impala", lr=1e-2, entropy_coeff=0.0, gamma=0.0)
    learner, columns = built(config), rollout_columns(config)
    columns[Columns.REWARDS] = (columns[Columns.ACTIONS] == 1).astype(np.float32)
    for _ in range(25):
        train_once(learner, columns)
    out = learner.module[DEFAULT_MODULE_ID].forward_train({Columns.OBS: torch.from_numpy(columns[Columns.OBS])})
    assert torch.softmax(out[Columns.ACTION_DIST_INPUTS], -1)[..., 1].mean() > 0.7
