"""Which values each setting may have: predicates with the phrase that describes them in error messages."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lgroup.errors import ConfigError


@dataclass(frozen=True)
class Check:
    """What a setting may be: ``accepts`` decides, ``allowed`` is the phrase for it."""

    allowed: str
    accepts: Callable[[Any], bool]

    def __or__(self, other: Check) -> Check:
        return Check(f"{self.allowed} or {other.allowed}", lambda value: self.accepts(value) or other.accepts(value))

    def require(self, name: str, value: Any) -> None:
        """Raises ConfigError naming the setting, its value and what is allowed, unless the value is accepted."""
        if not self.accepts(value):
            raise ConfigError.refused(name, value, self.allowed)


def integer(at_least: int) -> Check:
    """An int of at least this."""
    return Check(f"an integer >= {at_least}", lambda value: _is_integer(value) and value >= at_least)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not _is_bool(value) and math.isfinite(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not _is_bool(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def number(*, at_least: float | None = None, above: float | None = None, at_most: float | None = None) -> Check:
    """A finite int or float within bounds."""
    bounds = [
        f"{sign} {bound:g}" for sign, bound in ((">=", at_least), (">", above), ("<=", at_most)) if bound is not None
    ]

    def accepts(value: Any) -> bool:
        in_upper = _is_number(value) and (at_most is None or value <= at_most)
        return in_upper and (at_least is None or value >= at_least) and (above is None or value > above)

    return Check(" ".join(["a number", " and ".join(bounds)]).strip(), accepts)


def one_of(*values: str) -> Check:
    """One of these strings."""
    return Check(" or ".join(map(repr, values)), lambda value: isinstance(value, str) and value in values)


def instance_of(phrase: str, *types: type) -> Check:
    """An instance of one of these types."""
    return Check(phrase, lambda value: isinstance(value, types))


NONE = Check("None", lambda value: value is None)
BOOLEAN = instance_of("True or False", bool)
MAPPING = instance_of("a dict", Mapping)
CALLABLE = Check("a callable", callable)
STRINGS = Check(
    "a collection of strings",
    lambda value: (
        isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(v, str) for v in value)
    ),
)
LEARNER_CLASS = Check(
    "a subclass of lgroup.Learner", lambda value: isinstance(value, type) and hasattr(value, "compute_loss_for_module")
)
SPACE = Check("a Gymnasium space", lambda value: hasattr(value, "contains") and hasattr(value, "sample"))
MODEL_CONFIG = Check(
    "a dict or a dataclass instance",
    lambda value: (
        not isinstance(value, type) and (isinstance(value, Mapping) or hasattr(value, "__dataclass_fields__"))
    ),
)
SPEC = Check("an RLModuleSpec or a MultiRLModuleSpec", lambda value: hasattr(value, "as_multi_rl_module_spec"))


CHECKS: Mapping[str, Check] = {
    # environment()
    "env": NONE | instance_of("an environment's name", str) | CALLABLE,
    "env_config": MAPPING,
    "observation_space": NONE | SPACE,
    "action_space": NONE | SPACE,
    # learners()
    "num_learners": integer(0),
    "num_cpus_per_learner": one_of("auto") | number(above=0),
    "num_gpus_per_learner": number(at_least=0),
    "max_requests_in_flight_per_learner": integer(1),
    "learner_class": NONE | LEARNER_CLASS,
    "learner_config_dict": MAPPING,
    # env_runners()
    "num_env_runners": integer(0),
    "num_envs_per_env_runner": integer(1),
    "max_requests_in_flight_per_env_runner": integer(1),
    "rollout_fragment_length": one_of("auto") | integer(1),
    # training()
    "gamma": number(at_least=0, at_most=1),
    "lr": number(at_least=0),
    "grad_clip": NONE | number(above=0),
    "grad_clip_by": one_of("global_norm", "norm", "value"),
    "train_batch_size_per_learner": integer(1),
    "num_epochs": integer(1),
    "minibatch_size": NONE | integer(1),
    "minibatch_size_per_learner": NONE | integer(1),
    "shuffle_batch_per_epoch": BOOLEAN,
    "loss_reduction": one_of("mean", "sum"),
    # reporting()
    "log_gradients": BOOLEAN,
    # rl_module()
    "model_config": MODEL_CONFIG,
    "rl_module_spec": NONE | SPEC,
    "algorithm_config_overrides_per_module": MAPPING,
    # multi_agent()
    "policies": MAPPING | STRINGS,
    "policy_mapping_fn": NONE | CALLABLE,
    "policies_to_train": NONE | STRINGS | CALLABLE,
    # fault_tolerance()
    "restart_failed_learners": BOOLEAN,
    "min_learners": integer(1),
    "max_restarts": integer(0),
    "restart_window_s": number(above=0),
    "update_retries": integer(0),
    "update_timeout_s": number(above=0),
    "heartbeat_timeout_s": number(above=0),
    "snapshot_every": NONE | integer(1),
    "max_staleness": NONE | integer(0),
    "on_nonfinite": one_of("skip", "raise"),
    # callbacks()
    "on_worker_died": NONE | CALLABLE,
    "on_worker_restarted": NONE | CALLABLE,
    # debugging()
    "seed": NONE | integer(0),
    "log_dir": NONE | instance_of("a path", str, os.PathLike),
    # transport()
    "max_bytes_in_flight": integer(1),
}
