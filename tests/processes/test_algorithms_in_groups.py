"""PPO, IMPALA and behaviour cloning in a group of learners take the step that one learner would take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lgroup import Cluster, LearnerGroup, SingleAgentEpisode
from lgroup.algorithms import EnvRunner, IMPALAConfig, PPOConfig, ppo_rows, standardise
from lgroup.columns import DEFAULT_MODULE_ID, Columns

MODEL = {"fcnet_hiddens": [16], "vf_share_layers": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as shared:
        yield shared


def config_for(config: Any, **training: Any) -> Any:
    return (
        config.environment("CartPole-v1")
        .env_runners(num_envs_per_env_runner=5, rollout_fragment_length=30)
        .rl_module(model_config=MODEL)
        .training(**training)
        .debugging(seed=3)
    )


def rollout(config: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    return EnvRunner(config, with_values=True, seed=1).sample()["batch"]


def trained(cluster: Cluster, config: Any, num_learners: int, updates: int = 2, **data: Any) -> dict[str, torch.Tensor]:
    """The weights after some updates on the same data; learners must be identical to each other."""
    cpus = 1 if num_learners else "auto"
    chosen = config.copy().learners(num_learners=num_learners, num_cpus_per_learner=cpus)
    with LearnerGroup(config=chosen, cluster=cluster if num_learners else None) as group:
        for _ in range(updates):
            group.update(**data)
        group.check_sync()
        return dict(group.get_weights()[DEFAULT_MODULE_ID])


def assert_same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-5, atol=1e-5, msg=name)


def test_impala_on_uneven_shards_equals_one_learner(cluster: Cluster) -> None:
    config = config_for(IMPALAConfig(), lr=1e-3)
    batch = rollout(config)
    alone = trained(cluster, config, 0, batch=batch)
    assert_same(trained(cluster, config, 2, batch=batch), alone)


def test_ppo_with_minibatches_equals_one_learner(cluster: Cluster) -> None:
    config = config_for(PPOConfig(), lr=1e-3, num_epochs=2, minibatch_size=33, lambda_=0.95)
    rows = ppo_rows(rollout(config), gamma=config.gamma, lambda_=config.lambda_)
    rows[Columns.ADVANTAGES] = standardise(rows[Columns.ADVANTAGES])
    alone = trained(cluster, config, 0, batch=rows)
    assert_same(trained(cluster, config, 2, batch=rows), alone)


def test_ppo_on_episodes_standardises_over_all_learners(cluster: Cluster) -> None:
    config = config_for(PPOConfig(), lr=1e-3, num_epochs=1, minibatch_size=None, shuffle_batch_per_epoch=False)
    random = np.random.default_rng(0)
    episodes = [episode(random, length) for length in (17, 4, 9)]
    alone = trained(cluster, config, 0, episodes=episodes)
    assert_same(trained(cluster, config, 2, episodes=episodes), alone)
    # one episode for two learners: one of them has none
    alone = trained(cluster, config, 0, episodes=episodes[:1])
    assert_same(trained(cluster, config, 2, episodes=episodes[:1]), alone)


def episode(random: np.random.Generator, length: int) -> SingleAgentEpisode:
    inputs = random.normal(size=(length, 2)).astype(np.float32)
    actions = random.integers(0, 2, length)
    logp = torch.log_softmax(torch.from_numpy(inputs), -1).numpy()[np.arange(length), actions]
    return SingleAgentEpisode(
        observations=random.normal(size=(length + 1, 4)).astype(np.float32),
        actions=actions,
        rewards=random.normal(size=length).astype(np.float32),
        terminated=length == 4,
        extra_model_outputs={Columns.ACTION_LOGP: logp, Columns.ACTION_DIST_INPUTS: inputs},
        len_lookback_buffer=0,
    )
