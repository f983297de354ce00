"""Learners, networks and batches for the tests of whole groups. Worker processes import this module by its name."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import numpy as np
import torch

import lgroup
from lgroup.workers import current_worker

MODULE = "default_policy"
FULL_SIZE = os.environ.get("LGROUP_FULL_SIZE_TESTS", "") == "1"


class Net(torch.nn.Module):
    """A linear layer: four numbers in, two out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.layer(batch["obs"].reshape(-1, 4))


class Notes:
    """What a learner saw. An object of such a class is no learner state: nothing of it is undone or compared."""

    def __init__(self) -> None:
        self.items: list[Any] = []


class Imitation(lgroup.Learner):
    """Cross entropy. Notes the ``id`` column of what it gets, and the group's gradient at each step."""

    def build(self) -> None:
        super().build()
        self.seen, self.gradients = Notes(), Notes()

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        if "id" in batch:
            self.seen.items += batch["id"].tolist()
        return torch.nn.functional.cross_entropy(fwd_out, batch["actions"].long())

    def postprocess_gradients(self, gradients_dict: Any) -> Any:
        self.gradients.items.append([g.numpy().copy() for g in gradients_dict.values()])
        return super().postprocess_gradients(gradients_dict)


class Slow(lgroup.Learner):
    """Each update takes up to ``learner_config_dict["delay_s"]`` seconds, each learner its own time.

    Notes which updates it got, by the (producer, n) in its keyword `who`, and logs them.
    """

    def build(self) -> None:
        super().build()
        self.seen = Notes()
        self.delays = Notes()
        self.delays.items = [random.Random(f"{os.getpid()}")]

    def before_gradient_based_update(self, *, timesteps: Any, who: Any = None) -> None:
        self.seen.items.append(None if who is None else tuple(who))
        # The load of the case, not a wait: an update that takes this long.
        threading.Event().wait(self.delays.items[0].random() * self.config.learner_config_dict["delay_s"])

    def after_gradient_based_update(self, *, timesteps: Any, who: Any = None) -> None:
        if who is not None:
            self.metrics.log_value((MODULE, "producer"), who[0], weight=1.0)
            self.metrics.log_value((MODULE, "n"), who[1], weight=1.0)

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        return fwd_out.square().mean()


class Failing(Imitation):
    """Raises, or is interrupted, where the keyword `fail` says, on the rank that `rank` says."""

    def build(self) -> None:
        super().build()
        self.coefficient = 1.0

    def before_gradient_based_update(self, *, timesteps: Any, fail: str = "", rank: int = 0) -> None:
        self.coefficient *= 2.0
        self.wanted = fail if rank == self.rank else ""
        self._fail_at("before")

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        self._fail_at("loss")
        return super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)

    def apply_gradients(self, gradients_dict: Any) -> None:
        super().apply_gradients(gradients_dict)
        self._fail_at("apply")

    def after_gradient_based_update(self, *, timesteps: Any, fail: str = "", rank: int = 0) -> None:
        self._fail_at("after")

    def _fail_at(self, place: str) -> None:
        if self.wanted == place:
            raise ValueError(f"no more in {place}")
        if self.wanted == f"interrupt {place}":
            signal.raise_signal(signal.SIGINT)


class BadStart(Imitation):
    """Does not come up, in the way that ``learner_config_dict["start"]`` says."""

    def build(self) -> None:
        worker = current_worker()
        how = self.config.learner_config_dict["start"]
        if how == "raises" or (how == "raises on rank 1" and worker.actor_index == 1):
            raise ValueError("no such table: users")
        if how == "raises twice" and worker.actor_index == 1 and worker.incarnation < 2:
            raise OSError("not yet")
        if how == "hangs" and worker.actor_index == 1:
            threading.Event().wait()
        if how == "aborts" and worker.actor_index == 0:
            os.abort()
        super().build()


def config_of(learner_class: type[lgroup.Learner] = Imitation, num_learners: int = 2, **training: Any) -> Any:
    """A small group's config, seeded."""
    return (
        lgroup.LearnerGroupConfig()
        .learners(num_learners=num_learners)
        .training(learner_class=learner_class, lr=0.05, **training)
        .rl_module(rl_module_spec=lgroup.RLModuleSpec(module_class=Net))
        .debugging(seed=7)
    )


def batch_of(rows: int, seed: int = 0, **columns: Any) -> dict[str, Any]:
    """`rows` rows of noise to imitate."""
    generator = np.random.default_rng(seed)
    obs = generator.normal(size=(rows, 4)).astype(np.float32)
    return {"obs": obs, "actions": (obs.sum(axis=1) > 0).astype(np.int64), **columns}


def episode_of(steps: int, first_id: int = 0) -> lgroup.SingleAgentEpisode:
    """An episode whose steps carry an ``id``, counted from `first_id`."""
    generator = np.random.default_rng(first_id)
    return lgroup.SingleAgentEpisode(
        observations=generator.normal(size=(steps + 1, 4)).astype(np.float32),
        actions=generator.integers(0, 2, size=steps),
        rewards=np.ones(steps, np.float32),
        extra_model_outputs={"id": np.arange(first_id, first_id + steps)},
        terminated=True,
        len_lookback_buffer=0,
    )


def seen_by(group: lgroup.LearnerGroup) -> list[list[Any]]:
    """What each learner noted."""
    return [result.unwrap() for result in group.foreach_learner(lambda learner: list(learner.seen.items))]


def fill_bias(learner: lgroup.Learner, value: float) -> None:
    """For `foreach_learner`: change the one module's bias."""
    torch.nn.init.constant_(learner.module[MODULE].layer.bias, value)


def weights_of(group: lgroup.LearnerGroup) -> dict[str, np.ndarray[Any, Any]]:
    """The one module's weights as arrays of their own."""
    return {name: tensor.numpy().copy() for name, tensor in group.get_weights()[MODULE].items()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two dicts of arrays are the same bit for bit."""
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def adds_up(account: dict[str, Any]) -> bool:
    """Whether the ledger's equation holds for one unit's column of it."""
    settled = account["applied"] + sum(account["dropped"].values()) + sum(account["failed"].values())
    return bool(account["submitted"] == account["in_flight"] + settled)
