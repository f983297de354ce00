"""Rollouts, learners and steps for the tests of the algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lgroup.algorithms import BCConfig, EnvRunner, IMPALAConfig, PPOConfig
from lgroup.columns import DEFAULT_MODULE_ID, Columns
from lgroup.config import LearnerGroupConfig
from lgroup.data.plan import make_plan
from lgroup.learner.learner import Learner
from lgroup.learner.undo import Undo
from lgroup.learner.update import Update

torch.set_num_threads(1)  # on these small tensors two threads mostly wait for each other

CONFIGS: dict[str, type[LearnerGroupConfig]] = {"bc": BCConfig, "ppo": PPOConfig, "impala": IMPALAConfig}


def config_for(algo: str, env: str = "CartPole-v1", **training: Any) -> Any:
    """A small network on `env`."""
    return (
        CONFIGS[algo]()
        .environment(env)
        .env_runners(num_envs_per_env_runner=4, rollout_fragment_length=16)
        .rl_module(model_config={"fcnet_hiddens": [16], "vf_share_layers": False})
        .training(**training)
    )


def built(config: Any, seed: int = 0) -> Learner:
    """A learner with weights from `seed`."""
    torch.manual_seed(seed)
    return config.build_learner()  # type: ignore[no-any-return]


def rollout_columns(config: Any, num_steps: int = 40, seed: int = 0) -> dict[str, Any]:
    """Columns ``[4, num_steps + 1, ...]`` of a random policy, with values."""
    torch.manual_seed(seed)
    return EnvRunner(config, with_values=True, seed=seed).sample(num_steps)["batch"]


def loss_of(learner: Learner, columns: dict[str, Any], config: Any = None) -> torch.Tensor:
    """The learner's loss on `columns`, with gradients."""
    batch = {name: torch.as_tensor(column) for name, column in columns.items()}
    fwd_out = learner.module.forward_train({DEFAULT_MODULE_ID: batch})[DEFAULT_MODULE_ID]
    return learner.compute_loss_for_module(
        module_id=DEFAULT_MODULE_ID, config=config or learner.config, batch=batch, fwd_out=fwd_out
    )


def gradients_of(learner: Learner, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss's gradients by parameter name."""
    named = dict(learner.module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def train_once(learner: Learner, columns: dict[str, Any], **plan_options: Any) -> dict[str, Any]:
    """One update of a learner that is alone; returns its metrics."""
    rows = {DEFAULT_MODULE_ID: len(columns[Columns.OBS])}
    plan = make_plan(rows, world_size=1, **plan_options).ranks[0]
    update = Update(learner, Undo(learner), {}, {})
    update.begin()
    update.run(plan, {DEFAULT_MODULE_ID: {name: np.array(column) for name, column in columns.items()}})
    return {path[-1]: value for path, _, value, _ in learner.metrics.take()}
