"""What a run was asked to do, and the configs that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lgroup.algorithms import BCConfig, IMPALAConfig, PPOConfig
from lgroup.config import LearnerGroupConfig
from lgroup.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The command line's options; None stands for the algorithm's `Recipe`."""

    env: str
    algo: str
    out: Path
    env_config: Mapping[str, Any] = field(default_factory=dict)
    num_learners: int = 2
    num_env_runners: int = 2
    num_envs_per_env_runner: int | None = None
    train_batch_size: int | None = None
    rollout_fragment_length: int | None = None
    minibatch_size: int | None = None
    num_epochs: int | None = None
    lr: float | None = None
    gamma: float | None = None
    reward_scale: float | None = None
    hidden: tuple[int, ...] | None = None
    stop_return: float | None = None
    stop_env_steps: int | None = None
    stop_seconds: float | None = None
    seed: int | None = None
    data: Path | None = None
    save_data: int = 0
    plain: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Settings that make an algorithm learn CartPole-v1 quickly and reliably on two cores; see docs/learning.md."""

    config_class: type[LearnerGroupConfig]
    num_envs_per_env_runner: int
    train_batch_size: int
    rollout_fragment_length: int | str
    stop_env_steps: int
    settings: Mapping[str, Any]
    hidden: tuple[int, ...] = (64, 64)
    max_requests_in_flight_per_learner: int = 3


RECIPES: Mapping[str, Recipe] = {
    "ppo": Recipe(
        config_class=PPOConfig,
        num_envs_per_env_runner=16,
        train_batch_size=4096,
        rollout_fragment_length="auto",
        stop_env_steps=500_000,
        settings={
            "lr": 1e-3,
            "lambda_": 0.95,
            "clip_param": 0.2,
            "vf_clip_param": 1e6,
            "vf_loss_coeff": 0.5,
            "grad_clip": 0.5,
            "num_epochs": 8,
            "minibatch_size": 512,
        },
    ),
    "impala": Recipe(
        config_class=IMPALAConfig,
        num_envs_per_env_runner=16,
        train_batch_size=320,
        rollout_fragment_length=20,
        stop_env_steps=1_000_000,
        max_requests_in_flight_per_learner=2,
        settings={
            "lr": 1e-3,
            "vtrace_lambda": 0.95,
            "vf_loss_coeff": 0.5,
            "entropy_coeff": 0.005,
            "grad_clip": 1.0,
            "reward_scale": 0.1,
        },
    ),
    "bc": Recipe(
        config_class=BCConfig,
        num_envs_per_env_runner=16,
        train_batch_size=512,
        rollout_fragment_length=64,
        stop_env_steps=1_000_000,
        settings={"lr": 1e-3},
    ),
}


_ONLY_FOR = {"minibatch_size": "ppo", "num_epochs": "ppo", "reward_scale": "impala"}


def config_for(options: RunOptions, spaces: tuple[Any, Any], num_cores: int = 1) -> LearnerGroupConfig:
    """The config of the learners and env runners of a run, which share the `num_cores` of this machine.

    Raises:
        ConfigError: an option's value is not allowed, or does not go with the algorithm.
    """
    recipe = RECIPES[options.algo]
    config = recipe.config_class()
    config.environment(
        env=options.env,
        env_config=dict(options.env_config),
        observation_space=spaces[0],
        action_space=spaces[1],
    )
    config.learners(
        num_learners=options.num_learners,
        # torch's idle threads spin: with more of them than cores, small updates took eight times as long
        num_cpus_per_learner=cores_per_learner(options, num_cores),
        max_requests_in_flight_per_learner=recipe.max_requests_in_flight_per_learner,
    )
    config.env_runners(
        num_env_runners=options.num_env_runners,
        num_envs_per_env_runner=options.num_envs_per_env_runner or recipe.num_envs_per_env_runner,
        rollout_fragment_length=options.rollout_fragment_length or recipe.rollout_fragment_length,
    )
    batch_size = options.train_batch_size or recipe.train_batch_size
    config.training(
        train_batch_size_per_learner=-(-batch_size // max(1, options.num_learners)),
        **_training_settings(options, recipe),
    )
    hidden = options.hidden or recipe.hidden
    config.rl_module(model_config={"fcnet_hiddens": list(hidden), "vf_share_layers": options.algo == "bc"})
    config.debugging(seed=options.seed)
    config.validate()
    return config


def cores_per_learner(options: RunOptions, num_cores: int) -> int:
    """An even share of what one core for each env runner leaves, and at least one."""
    return max(1, (num_cores - options.num_env_runners) // max(1, options.num_learners))


def _training_settings(options: RunOptions, recipe: Recipe) -> dict[str, Any]:
    names = ("lr", "gamma", *_ONLY_FOR)
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    for name, algo in _ONLY_FOR.items():
        if options.algo != algo and name in given:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} goes with --algo {algo} only, not with --algo {options.algo}")
    return {**recipe.settings, **given}
