"""The networks that learners train, their recipes, and the action distributions made from their outputs."""

from __future__ import annotations

from lgroup.modules.default_nets import DefaultActorCritic, DefaultModelConfig
from lgroup.modules.distributions import Categorical, Deterministic, DiagGaussian, Distribution, MultiCategorical
from lgroup.modules.multi_rl_module import SHARED_STATE, MultiRLModule, MultiRLModuleSpec, validate_module_id
from lgroup.modules.rl_module import RLModule, RLModuleSpec, TorchRLModule, ValueFunctionAPI

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
    "validate_module_id",
]
