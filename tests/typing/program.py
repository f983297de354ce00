"""A program as a user would write it. mypy checks it in `make check`; nobody runs it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

import lgroup
from lgroup.algorithms import IMPALAConfig, PPOConfig


class Net(torch.nn.Module):
    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, hidden)

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.layer(batch[lgroup.Columns.OBS])


class Imitation(lgroup.Learner):
    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(fwd_out, batch[lgroup.Columns.ACTIONS])
        self.metrics.log_value((module_id, "loss"), loss)
        return loss


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count


def configure() -> lgroup.LearnerGroupConfig:
    return (
        lgroup.LearnerGroupConfig()
        .learners(num_learners=2, num_gpus_per_learner=0, max_requests_in_flight_per_learner=3)
        .training(learner_class=Imitation, lr=1e-3, num_epochs=1, minibatch_size=None, grad_clip=None)
        .rl_module(rl_module_spec=lgroup.RLModuleSpec(module_class=Net, model_config={"hidden": 256}))
        .debugging(seed=0)
    )


def configs_of_algorithms_keep_their_class() -> tuple[PPOConfig, IMPALAConfig]:
    return PPOConfig().environment("CartPole-v1").learners(num_learners=2), IMPALAConfig().training(lr=5e-4)


def train(batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    with lgroup.LearnerGroup(config=configure()) as group:
        results: Any = group.update(batch=batch)
        future: Future[lgroup.UpdateResult] = group.submit(batch=batch)
        result = future.result()
        if result.status == "applied":
            print(result.seq, result.rows, result.env_steps, result.weights_version, result.generation)
        finished: list[lgroup.UpdateResult] = group.poll()
        print(results, len(finished), len(group), bool(group), group.get_stats()["updates"])
        return dict(group.get_weights())


async def train_in_an_event_loop(batch: lgroup.SampleBatch) -> lgroup.UpdateResult:
    async with lgroup.LearnerGroup(config=configure()) as group:
        future = await group.submit_async(batch=batch)
        return await future


def failing(group: lgroup.LearnerGroup, batch: lgroup.MultiAgentBatch) -> str:
    try:
        group.update(batch=batch)
    except lgroup.UpdateFailed as failure:
        return f"{failure.cause_type}: {failure.remote_traceback}"
    except lgroup.LGroupError as error:
        return str(error)
    return ""


def call_actors() -> list[Any]:
    with lgroup.ActorGroup(Counter, num_actors=2, args=(1,), max_requests_in_flight_per_actor=2) as actors:
        sent: int = actors.foreach_actor_async("add", tag="adding", kwargs={"amount": 2})
        finished = actors.fetch_ready_async_reqs(tags=("adding",), timeout_seconds=1.0)
        everyone: lgroup.RemoteCallResults = actors.foreach_actor(lambda counter: counter.count)
        print(sent, len(finished))
        return [result.get() for result in everyone.ignore_errors()]
