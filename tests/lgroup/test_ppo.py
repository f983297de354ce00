"""PPO's loss against one written from the formulas; its KL coefficient; batches from rollouts and from episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from algorithm_data import built, config_for, gradients_of, loss_of, rollout_columns, train_once

from lgroup.algorithms import IMPALAConfig, PPOConfig, gae, ppo_rows, standardise
from lgroup.algorithms.ppo import CURR_KL_COEFF_KEY, MEAN_KL_LOSS_KEY
from lgroup.columns import DEFAULT_MODULE_ID, Columns
from lgroup.data.episode import SingleAgentEpisode
from lgroup.errors import ConfigError


def rows_of(config: Any, seed: int = 1) -> dict[str, Any]:
    rows = ppo_rows(rollout_columns(config, seed=seed), gamma=config.gamma, lambda_=config.lambda_)
    return {**rows, Columns.ADVANTAGES: standardise(rows[Columns.ADVANTAGES])}


def by_hand(rows: dict[str, Any], logits: torch.Tensor, values: torch.Tensor, config: Any) -> torch.Tensor:
    t = {name: torch.from_numpy(column) for name, column in rows.items()}
    new, old = torch.log_softmax(logits, -1), torch.log_softmax(t[Columns.ACTION_DIST_INPUTS], -1)
    ratio = (new - old).gather(-1, t[Columns.ACTIONS][:, None])[:, 0].exp()
    advantages = t[Columns.ADVANTAGES]
    clipped = ratio.clamp(1 - config.clip_param, 1 + config.clip_param)
    surrogate = torch.min(ratio * advantages, clipped * advantages).mean()
    value = ((values - t[Columns.VALUE_TARGETS]) ** 2).clamp(0, config.vf_clip_param).mean()
    entropy = -(new.exp() * new).sum(-1).mean()
    kl = (old.exp() * (old - new)).sum(-1).mean()
    return -surrogate + config.vf_loss_coeff * value - config.entropy_coeff * entropy + config.kl_coeff * kl


def test_the_loss_is_the_papers() -> None:
    config = config_for("ppo", clip_param=0.05, entropy_coeff=0.1, kl_coeff=0.7, vf_clip_param=4.0, vf_loss_coeff=0.3)
    rows, learner = rows_of(config), built(config, seed=2)
    with torch.no_grad():  # far enough from the policy that sampled for the clip to act
        for parameter in learner.module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    out = learner.module[DEFAULT_MODULE_ID].forward_train({Columns.OBS: torch.from_numpy(rows[Columns.OBS])})
    want = by_hand(rows, out[Columns.ACTION_DIST_INPUTS], out[Columns.VF_PREDS], config)
    got = loss_of(learner, rows)
    torch.testing.assert_close(got, want)
    for name, gradient in gradients_of(learner, want).items():
        torch.testing.assert_close(gradients_of(learner, loss_of(learner, rows))[name], gradient)


def test_rows_are_the_valid_time_steps_with_their_advantages() -> None:
    config = config_for("ppo")
    columns = rollout_columns(config)
    mask = columns[Columns.LOSS_MASK]
    rows = ppo_rows(columns, gamma=0.9, lambda_=0.8)
    assert {len(column) for column in rows.values()} == {mask.sum()}
    np.testing.assert_array_equal(rows[Columns.OBS], columns[Columns.OBS][mask])
    names = (Columns.REWARDS, Columns.VF_PREDS, Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.LOSS_MASK)
    returns = gae(*(columns[name] for name in names), gamma=0.9, lambda_=0.8)
    np.testing.assert_array_equal(rows[Columns.ADVANTAGES], returns.advantages[mask])
    np.testing.assert_array_equal(rows[Columns.VALUE_TARGETS], returns.value_targets[mask])


@pytest.mark.parametrize(("kl", "factor"), [(0.001, 0.5), (0.01, 1.0), (0.03, 1.5)])
def test_the_kl_coefficient_is_adapted_to_the_target(kl: float, factor: float) -> None:
    learner: Any = built(config_for("ppo", kl_coeff=0.4, kl_target=0.01))
    learner._count_kl(DEFAULT_MODULE_ID, torch.tensor(kl), rows=30)
    learner._count_kl(DEFAULT_MODULE_ID, torch.tensor(0.0), rows=0)
    learner.after_gradient_based_update(timesteps={})
    assert learner.curr_kl_coeffs_per_module == {DEFAULT_MODULE_ID: pytest.approx(0.4 * factor)}
    assert learner.metrics.peek((DEFAULT_MODULE_ID, MEAN_KL_LOSS_KEY)) == pytest.approx(kl)
    assert learner.kl_sums == {}


def test_an_update_adapts_the_coefficient_and_reports_it() -> None:
    config = config_for("ppo", lr=1e-2, kl_target=1e-6)
    learner: Any = built(config)
    metrics = train_once(learner, rows_of(config), num_epochs=3, minibatch_size=32, shuffle=True)
    assert metrics[CURR_KL_COEFF_KEY] == learner.curr_kl_coeffs_per_module[DEFAULT_MODULE_ID] == pytest.approx(0.3)
    assert metrics[MEAN_KL_LOSS_KEY] > 0


def test_without_the_kl_term_nothing_is_counted() -> None:
    config = config_for("ppo", use_kl_loss=False)
    learner: Any = built(config)
    metrics = train_once(learner, rows_of(config))
    assert MEAN_KL_LOSS_KEY not in metrics
    assert learner.kl_sums == {}


def episodes_of(columns: dict[str, Any]) -> list[SingleAgentEpisode]:
    """A rollout's episodes, cut where they end and where the rollout does."""
    episodes = []
    for row in range(len(columns[Columns.LOSS_MASK])):
        mask, start = columns[Columns.LOSS_MASK][row], 0
        for end in np.flatnonzero(~mask):
            steps = slice(start, end)
            if start < end:
                episodes.append(
                    SingleAgentEpisode(
                        observations=columns[Columns.OBS][row, start : end + 1],
                        actions=columns[Columns.ACTIONS][row, steps],
                        rewards=columns[Columns.REWARDS][row, steps],
                        terminated=bool(columns[Columns.TERMINATEDS][row, end - 1]),
                        truncated=bool(columns[Columns.TRUNCATEDS][row, end - 1]),
                        extra_model_outputs={
                            name: columns[name][row, steps]
                            for name in (Columns.ACTION_LOGP, Columns.ACTION_DIST_INPUTS)
                        },
                        len_lookback_buffer=0,
                    )
                )
            start = end + 1
    return episodes


def test_a_batch_built_from_episodes_equals_the_rollouts() -> None:
    config = config_for("ppo", lambda_=0.9)
    columns = rollout_columns(config, num_steps=60)
    learner = built(config)
    with torch.no_grad():
        obs = torch.from_numpy(columns[Columns.OBS])
        columns[Columns.VF_PREDS] = learner.module[DEFAULT_MODULE_ID].compute_values({Columns.OBS: obs}).numpy()
    want = ppo_rows(columns, gamma=config.gamma, lambda_=0.9)
    want[Columns.ADVANTAGES] = standardise(want[Columns.ADVANTAGES])
    got = learner.build_batch(episodes_of(columns))[DEFAULT_MODULE_ID]
    assert set(got) == set(want)
    for name, column in want.items():
        np.testing.assert_allclose(got[name], column, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_learner_without_episodes_takes_part_and_has_no_rows() -> None:
    assert built(config_for("ppo")).build_batch([]) == {}


def test_an_episode_without_what_its_policy_put_out_is_refused() -> None:
    episode = SingleAgentEpisode(
        observations=np.zeros((2, 4), np.float32), actions=[0], rewards=[1.0], len_lookback_buffer=0
    )
    with pytest.raises(KeyError, match="action_logp"):
        built(config_for("ppo")).build_batch([episode])


def test_settings_are_checked_and_another_algorithms_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="clip_param"):
        PPOConfig().training(clip_param=-0.1)
    with pytest.raises(ConfigError, match="vf_share_coeff"):
        PPOConfig().training(vf_share_coeff=0.1)
    config = config_for("ppo")
    with pytest.raises(TypeError, match="PPOLearner needs a PPOConfig, not a IMPALAConfig"):
        loss_of(built(config), rows_of(config), IMPALAConfig())


def test_continuous_actions_are_trained() -> None:
    config = config_for("ppo", env="Pendulum-v1")
    loss = loss_of(built(config), rows_of(config))
    assert torch.isfinite(loss) and loss.requires_grad
