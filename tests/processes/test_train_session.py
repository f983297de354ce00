"""A run's processes: env runners that die are replaced, and everything is gone at the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from lgroup.algorithms import IMPALAConfig, spaces_of
from lgroup.errors import WorkerStartError
from lgroup.train.progress import Progress
from lgroup.train.rounds import IMPALARounds
from lgroup.train.session import Session


def config() -> IMPALAConfig:
    observation_space, action_space = spaces_of("CartPole-v1")
    return (
        IMPALAConfig()
        .environment("CartPole-v1", observation_space=observation_space, action_space=action_space)
        .learners(num_learners=1, num_cpus_per_learner=1)
        .env_runners(num_env_runners=2, num_envs_per_env_runner=4, rollout_fragment_length=10)
        .training(train_batch_size_per_learner=40)
        .rl_module(model_config={"fcnet_hiddens": [16]})
    )


def test_a_killed_env_runner_is_replaced_and_gets_the_newest_weights(wait_gone: Callable[[list[int]], Any]) -> None:
    progress = Progress()
    with Session(config(), progress, with_values=False) as session:
        rounds = IMPALARounds(session)
        while progress.snapshot(0.0, session.group.get_stats()).updates < 5:
            rounds.round()
        victim = session.runners.actor_pids()[1]
        os.kill(victim, signal.SIGKILL)
        wait_gone([victim])
        while session.runners.total_num_restarts() < 1 or session.runners.num_healthy_actors() < 2:
            rounds.round()
        rounds.round()
        rounds.finish()
        session.send_weights()
        current = session.group.get_weights().version
        versions = [result.get() for result in session.runners.foreach_actor(lambda runner: runner.weights_version)]
        assert versions == [current, current]
        pids = [*session.runners.actor_pids().values(), *(row["pid"] for row in session.group.get_stats()["learners"])]
    wait_gone(pids)


def test_an_env_runner_that_does_not_come_up_leaves_no_process() -> None:
    broken = config().environment("CartPole-v9")
    with pytest.raises(WorkerStartError, match="there is no environment 'CartPole-v9'"):
        Session(broken, Progress(), with_values=False)
