"""Learners for the tests of "n learners equal one" and of failed updates. Worker processes import this module."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lgroup.columns import DEFAULT_MODULE_ID
from lgroup.config import LearnerGroupConfig
from lgroup.data.episode import SingleAgentEpisode, episodes_to_batch
from lgroup.learner.learner import Learner
from lgroup.modules import MultiRLModule, MultiRLModuleSpec, RLModuleSpec

OBS, HIDDEN, OUT = 4, 8, 2


def squared_error(fwd_out: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """Mean over the rows; over the valid ones under a loss mask."""
    error = (fwd_out - batch["y"]).square().mean(dim=-1)
    if "loss_mask" not in batch:
        return error.mean()
    mask = batch["loss_mask"].to(error.dtype)
    return (error * mask).sum() / mask.sum()


class Regression(Learner):
    """Squared error, with the optimizer that ``learner_config_dict["optimizer"]`` names."""

    def configure_optimizers_for_module(self, module_id: str, config: LearnerGroupConfig | None = None) -> None:
        super().configure_optimizers_for_module(module_id=module_id, config=config)
        if self.config.learner_config_dict.get("optimizer") == "sgd":
            for name, adam in self.get_optimizers_for_module(module_id):
                sgd = torch.optim.SGD(adam.param_groups[0]["params"], lr=self.config.lr)
                self._lgroup_optimizers[f"{module_id}_{name}"] = sgd

    def compute_loss_for_module(
        self, *, module_id: str, config: LearnerGroupConfig, batch: dict[str, Any], fwd_out: Any
    ) -> torch.Tensor:
        return squared_error(fwd_out, batch)


class OwnWeights(Regression):
    """Each row's loss counts as its column ``importance`` says."""

    def loss_weight(self, module_id: str, batch: Mapping[str, Any]) -> float:
        return float(batch["importance"].sum())

    def compute_loss_for_module(
        self, *, module_id: str, config: LearnerGroupConfig, batch: dict[str, Any], fwd_out: Any
    ) -> torch.Tensor:
        error = (fwd_out - batch["y"]).square().mean(dim=-1)
        return (error * batch["importance"]).sum() / batch["importance"].sum()


def regression_columns(episodes: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Observations and, as targets, the actions of episodes."""
    if not episodes:
        return {}
    columns = episodes_to_batch(episodes)[DEFAULT_MODULE_ID]
    return {DEFAULT_MODULE_ID: {"obs": columns["obs"], "y": columns["actions"]}}


class ActionsAsTargets(Regression):
    """Takes the actions of episodes as targets; the batch is built as ever."""

    def compute_loss_for_module(
        self, *, module_id: str, config: LearnerGroupConfig, batch: dict[str, Any], fwd_out: Any
    ) -> torch.Tensor:
        return squared_error(fwd_out, {"y": batch["actions"]})


class OwnBatch(Regression):
    """Turns episodes into batches itself."""

    def build_batch(self, episodes: Sequence[Any]) -> dict[str, dict[str, Any]]:
        return regression_columns(episodes)


class TwoLayers(nn.Module):
    """Smooth, so that float32 sums in another order change little."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(OBS, HIDDEN), nn.Tanh())
        self.head = nn.Linear(HIDDEN, OUT)

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        return self.head(self.encoder(batch["obs"]))  # type: ignore[no-any-return]


class SharedEncoder(MultiRLModule):
    """All modules use the first one's encoder."""

    def setup(self) -> None:
        super().setup()
        first, *others = self.values()
        for module in others:
            module.encoder = first.encoder


class Fault:
    """Raises in `hook` on `ranks`, at the `step`-th call of it. A plain object is no state of a learner."""

    def __init__(self, hook: str, ranks: Collection[int], step: int = 0) -> None:
        self.hook, self.ranks, self.step = hook, frozenset(ranks), step
        self.calls = 0

    def meet(self, hook: str, rank: int) -> None:
        if hook == self.hook and rank in self.ranks:
            self.calls += 1
            if self.calls - 1 == self.step:
                raise ValueError(f"no luck in {hook}")


def arm(learner: Any, fault: Fault) -> None:
    """For `foreach_learner`."""
    learner.fault = fault


class Normed(nn.Module):
    """A BatchNorm, a running mean that is replaced, and a counter that is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(OBS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, OUT)
        self.register_buffer("running", torch.zeros(OBS))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.on_forward: Any = None

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        hidden = self.first(batch["obs"])
        if len(hidden) > 1:
            hidden = self.norm(hidden)
        self.running = 0.9 * self.running + 0.1 * batch["obs"].mean(dim=0)
        self.rows += len(batch["obs"])
        if self.on_forward is not None:
            self.on_forward()
        return self.last(torch.tanh(hidden))  # type: ignore[no-any-return]


class Mood(enum.IntEnum):
    """What a learner keeps beside numbers."""

    CALM = 0
    UPSET = 1


class Faulty(Regression):
    """Changes its state in hooks around the step, then raises there as its fault says."""

    def build(self) -> None:
        super().build()
        self.kl_coeff = 0.2
        self.mood = Mood.CALM
        self.window: deque[float] = deque([0.0, 0.0, 0.0], maxlen=3)
        self.trace = {"met": 0, "last": torch.zeros(2)}
        self.fault = Fault("", ())
        self.module[DEFAULT_MODULE_ID].on_forward = lambda: self.meet("forward")

    def meet(self, hook: str) -> None:
        if hook not in ("forward", "compute_losses", "compute_loss_for_module", "compute_gradients"):
            # A learner without rows in a step does not come to those four, so they must leave no trace.
            self.kl_coeff = (self.kl_coeff * 1.5) % 10.0
            self.window.append(self.kl_coeff)
            self.mood = Mood(self.trace["met"] % 2)
            self.trace["met"] += 1
            self.trace["last"] += 1.0
        elif hook == self.fault.hook:
            self.kl_coeff, self.trace["met"], self.extra = 99.0, 99, 99  # only undoing makes up for that
            self.window.clear()
        self.fault.meet(hook, self.rank)

    def compute_losses(self, *, fwd_out: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        losses = super().compute_losses(fwd_out=fwd_out, batch=batch)
        self.meet("compute_losses")
        return losses

    def compute_loss_for_module(
        self, *, module_id: str, config: LearnerGroupConfig, batch: dict[str, Any], fwd_out: Any
    ) -> torch.Tensor:
        self.meet("compute_loss_for_module")
        return squared_error(fwd_out, batch)

    def compute_gradients(self, loss_per_module: Mapping[str, torch.Tensor], **kwargs: Any) -> dict[Any, Any]:
        gradients = super().compute_gradients(loss_per_module, **kwargs)
        self.meet("compute_gradients")
        return gradients

    def postprocess_gradients(self, gradients_dict: dict[Any, Any]) -> dict[Any, Any]:
        self.meet("postprocess_gradients")
        return super().postprocess_gradients(gradients_dict)

    def apply_gradients(self, gradients_dict: dict[Any, Any]) -> None:
        super().apply_gradients(gradients_dict)
        self.meet("apply_gradients")

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        self.meet("after_gradient_based_update")


class FaultyFromTheStart(Faulty):
    """The same with the hooks that come before the first forward pass, which write to parameters here."""

    def build_batch(self, episodes: Sequence[Any]) -> dict[str, dict[str, Any]]:
        self.meet("build_batch")
        return regression_columns(episodes)

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(0.99)
        self.meet("before_gradient_based_update")


def config_of(
    learner_class: type[Learner], num_learners: int, spec: RLModuleSpec | MultiRLModuleSpec, **training: Any
) -> LearnerGroupConfig:
    """A config with a fixed seed."""
    return (
        LearnerGroupConfig()
        .learners(num_learners=num_learners)
        .training(learner_class=learner_class, **{"lr": 0.01, **training})
        .rl_module(rl_module_spec=spec)
        .debugging(seed=7)
    )


def rows(count: int, seed: int, mean: float = 0.0) -> dict[str, Any]:
    """`count` rows of float32."""
    obs = np.random.default_rng(seed).normal(mean, 1.0, size=(count, OBS)).astype(np.float32)
    return {"obs": obs, "y": np.tanh(obs[:, :OUT]) + np.float32(0.1)}


def episode(length: int, seed: int) -> SingleAgentEpisode:
    """`length` steps; the actions are the targets."""
    data = rows(length + 1, seed)
    return SingleAgentEpisode(
        observations=list(data["obs"]),
        actions=list(data["y"][:length]),
        rewards=[0.0] * length,
        terminated=True,
        len_lookback_buffer=0,
    )
