"""The env runner samples what the algorithms' layout says, whatever the environment's spaces are."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lgroup.algorithms import BCConfig, EnvRunner, concatenated, make_vector_env, reward_threshold_of, spaces_of
from lgroup.columns import DEFAULT_MODULE_ID, Columns
from lgroup.config import LearnerGroupConfig
from lgroup.errors import ConfigError


class Countdown(gym.Env[Any, Any]):
    """Ends after ``length`` steps; the observation is the number of the step, the reward the number of the last one."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.observation_space = spaces.Box(0.0, np.inf, (1,), np.float64)
        self.action_space = settings.get("action_space", spaces.Discrete(2))
        self._length, self._truncates = settings["length"], settings.get("truncates", False)
        self.actions: list[Any] = []
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self._t += 1
        is_over = self._t == self._length
        over = (is_over and not self._truncates, is_over and self._truncates)
        return np.full(1, float(self._t)), float(self._t), *over, {}


def config_of(env: Any, num_envs: int = 2, fragment: int | str = 8, **env_config: Any) -> LearnerGroupConfig:
    return (
        BCConfig()
        .environment(env, env_config=env_config)
        .env_runners(num_envs_per_env_runner=num_envs, rollout_fragment_length=fragment)
        .rl_module(model_config={"fcnet_hiddens": [8]})
    )


def test_a_rollout_masks_the_step_after_each_end_and_the_one_after_the_fragment() -> None:
    rollout = EnvRunner(config_of(Countdown, length=3), seed=0).sample()
    batch = rollout["batch"]
    assert batch[Columns.OBS][0, :, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert batch[Columns.REWARDS][0].tolist() == [1, 2, 3, 0, 1, 2, 3, 0, 0]
    assert batch[Columns.TERMINATEDS][0].tolist() == [0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert batch[Columns.LOSS_MASK][0].tolist() == [1, 1, 1, 0, 1, 1, 1, 0, 0]
    assert not batch[Columns.TRUNCATEDS].any()
    assert rollout["env_steps"] == 2 * 6
    assert rollout["episode_returns"].tolist() == [6.0] * 4
    assert rollout["episode_lengths"].tolist() == [3] * 4


def test_episodes_go_on_from_rollout_to_rollout() -> None:
    runner = EnvRunner(config_of(Countdown, num_envs=1, fragment=4, length=6, truncates=True), seed=0)
    first, second = runner.sample(), runner.sample()
    assert first["batch"][Columns.OBS][0, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert second["batch"][Columns.OBS][0, :, 0].tolist() == [4, 5, 6, 0, 1]
    assert second["batch"][Columns.TRUNCATEDS][0].tolist() == [0, 1, 0, 0, 0]
    assert first["episode_returns"].tolist() == [] and second["episode_returns"].tolist() == [21.0]


def test_logp_and_values_are_those_of_the_module_that_acted() -> None:
    runner = EnvRunner(config_of("CartPole-v1", num_envs=3, fragment=5), with_values=True, seed=1)
    batch = runner.sample()["batch"]
    obs = torch.from_numpy(batch[Columns.OBS])
    with torch.no_grad():
        out = runner.module.forward_train({Columns.OBS: obs})
    mask = batch[Columns.LOSS_MASK]
    np.testing.assert_allclose(out[Columns.VF_PREDS].numpy(), batch[Columns.VF_PREDS], rtol=1e-4, atol=1e-5)
    inputs = out[Columns.ACTION_DIST_INPUTS]
    np.testing.assert_allclose(inputs.numpy()[mask], batch[Columns.ACTION_DIST_INPUTS][mask], rtol=1e-4, atol=1e-5)
    logp = torch.log_softmax(inputs, -1).gather(-1, torch.from_numpy(batch[Columns.ACTIONS])[..., None])[..., 0]
    np.testing.assert_allclose(logp.numpy()[mask], batch[Columns.ACTION_LOGP][mask], rtol=1e-4, atol=1e-5)


def test_without_exploring_the_likeliest_action_is_taken() -> None:
    batch = EnvRunner(config_of("CartPole-v1"), seed=1).sample(20, explore=False)["batch"]
    mask = batch[Columns.LOSS_MASK]
    likeliest = batch[Columns.ACTION_DIST_INPUTS].argmax(-1)
    assert (batch[Columns.ACTIONS] == likeliest)[mask].all()
    assert batch[Columns.OBS].shape == (2, 21, 4)


def test_weights_are_loaded_and_their_version_stamped_on_rollouts() -> None:
    config = config_of("CartPole-v1")
    runner, other = EnvRunner(config, seed=0), EnvRunner(config, seed=0)
    assert runner.sample()["weights_version"] == 0
    weights = {name: value.numpy() for name, value in other.module.state_dict().items()}
    runner.set_weights({DEFAULT_MODULE_ID: weights}, version=7)
    assert runner.sample()["weights_version"] == 7
    for name, value in other.module.state_dict().items():
        torch.testing.assert_close(runner.module.state_dict()[name], value, rtol=0, atol=0)


def test_a_rollout_is_not_touched_by_the_next_one() -> None:
    runner = EnvRunner(config_of("CartPole-v1"), seed=0)
    first = runner.sample()["batch"]
    copies = {name: column.copy() for name, column in first.items()}
    runner.sample()
    for name, column in first.items():
        np.testing.assert_array_equal(column, copies[name])


def test_the_same_seed_gives_the_same_rollout() -> None:
    rollouts = []
    for _ in range(2):
        torch.manual_seed(3)
        rollouts.append(EnvRunner(config_of("CartPole-v1"), seed=5).sample()["batch"])
    for name, column in rollouts[0].items():
        np.testing.assert_array_equal(column, rollouts[1][name])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([2, 4]),
        spaces.Box(np.array([-2, 0], np.float32), np.array([2, 0.1], np.float32)),
        spaces.Box(-np.inf, np.inf, (2,), np.float64),
    ],
    ids=["discrete from -1", "multi-discrete", "bounded box", "unbounded box"],
)
def test_the_environment_gets_actions_of_its_own_space(space: spaces.Space[Any]) -> None:
    batch = EnvRunner(config_of(Countdown, length=50, action_space=space), seed=0).sample()["batch"]
    assert np.isfinite(batch[Columns.ACTION_LOGP]).all()


def test_a_bounded_box_is_scaled_from_minus_one_to_one() -> None:
    space = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32))
    runner = EnvRunner(config_of(Countdown, length=50, action_space=space), seed=0)
    scaled = runner._for_env(np.array([[-1.0, -1.0], [0.0, 0.5], [5.0, 1.0]], np.float32))
    np.testing.assert_allclose(scaled, [[-2.0, 0.0], [0.0, 0.75], [2.0, 1.0]])


def test_a_registered_continuous_environment_is_sampled() -> None:
    batch = EnvRunner(config_of("Pendulum-v1", num_envs=3), with_values=True, seed=0).sample(10)["batch"]
    assert batch[Columns.ACTIONS].shape == (3, 11, 1)
    assert batch[Columns.ACTION_DIST_INPUTS].shape == (3, 11, 2)
    assert batch[Columns.OBS].dtype == np.float32


def test_dict_observations_arrive_as_one_vector() -> None:
    class Room(Countdown):
        def __init__(self, settings: dict[str, Any]) -> None:
            super().__init__(settings)
            self.observation_space = spaces.Dict({"at": spaces.Discrete(3), "speed": spaces.Box(-1, 1, (2,))})

        def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            super().reset(**kwargs)
            return {"at": 1, "speed": np.zeros(2, np.float32)}, {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            _, *rest = super().step(action)
            return {"at": 2, "speed": np.ones(2, np.float32)}, *rest

    batch = EnvRunner(config_of(Room, length=50), seed=0).sample(2)["batch"]
    assert batch[Columns.OBS][0].tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]


def test_rollouts_are_joined_row_after_row() -> None:
    runner = EnvRunner(config_of("CartPole-v1"), seed=0)
    rollouts = [runner.sample(), runner.sample()]
    joined = concatenated(rollouts)
    assert joined[Columns.OBS].shape == (4, 9, 4)
    np.testing.assert_array_equal(joined[Columns.OBS][2:], rollouts[1]["batch"][Columns.OBS])
    assert concatenated(rollouts[:1]) is rollouts[0]["batch"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartPole-v99", "there is no environment 'CartPole-v99'"),
        ("CartPool-v1", "there is no environment 'CartPool-v1'"),
        ("ALE/Pong-v5", "there is no environment 'ALE/Pong-v5'"),
        ("no_such_package:Env-v0", "needs something that is not installed"),
    ],
)
def test_a_wrong_environment_name_is_one_clear_sentence(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_vector_env(name, {}, 1)
    assert "\n" not in str(caught.value)


def test_wrong_environment_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"does not take env_config=\{'gravity': 3\}"):
        make_vector_env("CartPole-v1", {"gravity": 3}, 1)


def test_spaces_and_goal_come_from_the_environment() -> None:
    obs, action = spaces_of("CartPole-v1")
    assert obs.shape == (4,) and action.n == 2
    assert reward_threshold_of("CartPole-v1") == 475.0
    assert reward_threshold_of("Pendulum-v1") is None
    assert reward_threshold_of(Countdown) is None
