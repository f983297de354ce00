"""The networks that learners train, their recipes, and the action distributions made from their outputs."""

from __future__ import annotations

from lgroup.modules.default_nets import DefaultActorCritic, DefaultModelConfig
from lgroup.modules.distributions import (
    Categorical,
    Deterministic,
    DiagGaussian,
    Distribution,
    MultiCategorical,
    distribution_class_for,
)
from lgroup.modules.multi_rl_module import SHARED_STATE, MultiRLModule, MultiRLModuleSpec, validate_module_id
from lgroup.modules.rl_module import RLModule, RLModuleSpec, TorchRLModule, ValueFunctionAPI, run_forward

__all__ = [
    "SHARED_STATE",
    "Categorical",
    "DefaultActorCritic",
    "DefaultModelConfig",
    "Deterministic",
    "DiagGaussian",
    "Distribution",
    "MultiCategorical",
    "MultiRLModule",
    "MultiRLModuleSpec",
    "RLModule",
    "RLModuleSpec",
    "TorchRLModule",
    "ValueFunctionAPI",
    "distribution_class_for",
    "run_forward",
    "validate_module_id",
]
