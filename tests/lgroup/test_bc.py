"""Behaviour cloning minimises the negative log-likelihood of the actions, and imitates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithm_data import built, config_for, gradients_of, loss_of, rollout_columns, train_once
from gymnasium import spaces

from lgroup.columns import DEFAULT_MODULE_ID, POLICY_LOSS_KEY, Columns
from lgroup.errors import ConfigError
from lgroup.modules import RLModuleSpec


def test_the_loss_is_the_mean_negative_log_likelihood() -> None:
    learner = built(config_for("bc"))
    obs, actions = torch.randn(7, 4), torch.tensor([0, 1, 1, 0, 1, 0, 0])
    loss = loss_of(learner, {Columns.OBS: obs, Columns.ACTIONS: actions})
    logits = learner.module[DEFAULT_MODULE_ID].forward_train({Columns.OBS: obs})[Columns.ACTION_DIST_INPUTS]
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, actions))
    assert learner.metrics.peek((DEFAULT_MODULE_ID, POLICY_LOSS_KEY)) == pytest.approx(loss.item())


def test_masked_time_steps_do_not_count() -> None:
    config = config_for("bc")
    learner, columns = built(config), rollout_columns(config)
    mask = columns[Columns.LOSS_MASK]
    kept = {name: columns[name] for name in (Columns.OBS, Columns.ACTIONS, Columns.LOSS_MASK)}
    flat = {name: columns[name][mask] for name in (Columns.OBS, Columns.ACTIONS)}
    torch.testing.assert_close(loss_of(learner, kept), loss_of(learner, flat))


def test_continuous_actions_are_imitated() -> None:
    config = config_for("bc", env="Pendulum-v1")
    learner = built(config)
    loss = loss_of(learner, {Columns.OBS: torch.randn(5, 3), Columns.ACTIONS: torch.randn(5, 1)})
    assert gradients_of(learner, loss)


def test_any_torch_module_will_do_if_the_config_has_the_action_space() -> None:
    spec = RLModuleSpec(module_class=_ObsNet, model_config={"size": 8})
    config = config_for("bc").rl_module(rl_module_spec=spec, model_config={})
    data = {Columns.OBS: torch.randn(3, 4), Columns.ACTIONS: torch.tensor([0, 1, 0])}
    config.environment(observation_space=spaces.Box(-1, 1, (4,)), action_space=spaces.Discrete(2))
    assert loss_of(built(config), data).requires_grad
    without = config.copy().environment(action_space=None)
    with pytest.raises(ConfigError, match="action_space is not set, and _ObsNet does not say"):
        loss_of(built(config), data, without)


def test_training_on_a_rule_makes_the_policy_follow_it() -> None:
    learner = built(config_for("bc", lr=3e-3))
    obs = np.random.default_rng(0).normal(size=(512, 4)).astype(np.float32)
    data = {Columns.OBS: obs, Columns.ACTIONS: (obs[:, 0] > 0).astype(np.int64)}
    for epoch in range(15):
        train_once(learner, data, minibatch_size=64, shuffle=True, seed=epoch)
    logits = learner.module[DEFAULT_MODULE_ID].forward_train({Columns.OBS: torch.from_numpy(obs)})
    right = logits[Columns.ACTION_DIST_INPUTS].argmax(-1).numpy() == data[Columns.ACTIONS]
    assert right.mean() > 0.95


class _ObsNet(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, size), torch.nn.Tanh(), torch.nn.Linear(size, 2))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.layers(batch[Columns.OBS])
        return out
