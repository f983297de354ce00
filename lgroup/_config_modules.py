"""From a config's settings to the complete recipe of the network: which modules there are, and their spaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lgroup.columns import DEFAULT_MODULE_ID
from lgroup.errors import ConfigError
from lgroup.modules.multi_rl_module import MultiRLModuleSpec, validate_module_id
from lgroup.modules.rl_module import RLModule, RLModuleSpec, model_config_dict

Spaces = tuple[Any, Any]
"""(observation space, action space), each a Gymnasium space or None."""


@dataclass(frozen=True)
class PolicySpec:
    """What is special about one module: its spaces, and settings that override the config's for it."""

    observation_space: Any = None
    action_space: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)


Policies = Mapping[str, PolicySpec | None] | Collection[str]


def policy_of(policies: Policies, module_id: str) -> PolicySpec:
    """The `PolicySpec` of a module, an empty one if it has none."""
    return (policies.get(module_id) if isinstance(policies, Mapping) else None) or PolicySpec()


def module_ids_of(policies: Policies, spec: RLModuleSpec | MultiRLModuleSpec) -> list[str]:
    """The ids of all modules: the policies', and those which only the spec has.

    Policies of nothing but "default_policy" are the default and add nothing to a spec with ids of its own.
    """
    if not isinstance(spec, MultiRLModuleSpec):
        ids = list(policies)
    elif set(policies) == {DEFAULT_MODULE_ID}:
        ids = list(spec.rl_module_specs)
    else:
        ids = [*spec.rl_module_specs, *(k for k in policies if k not in spec)]
    return [validate_module_id(module_id) for module_id in ids]


@dataclass(frozen=True)
class ModuleSources:
    """Where what a module spec leaves open comes from.

    Spaces come from ``spaces`` by module id, then from the policy, then from ``common_spaces``, and if an `RLModule`
    still has none, from ``make_spaces``, at a price.
    """

    spec: RLModuleSpec | MultiRLModuleSpec
    default_spec: RLModuleSpec | MultiRLModuleSpec
    policies: Policies
    model_config: Any
    spaces: Mapping[str, Spaces]
    common_spaces: Spaces
    make_spaces: Callable[[], Spaces]


def complete_spec(sources: ModuleSources, *, inference_only: bool) -> MultiRLModuleSpec:
    """The recipe with a complete `RLModuleSpec` for each module, in copies. ConfigError if something is missing."""
    ids = module_ids_of(sources.policies, sources.spec)
    completed = {module_id: _completed(sources, module_id, inference_only) for module_id in ids}
    specs = {k: spec for k, spec in completed.items() if not (inference_only and spec.learner_only)}
    outer = sources.spec if isinstance(sources.spec, MultiRLModuleSpec) else MultiRLModuleSpec()
    return dataclasses.replace(outer, rl_module_specs=specs, inference_only=inference_only or outer.inference_only)


def _completed(sources: ModuleSources, module_id: str, inference_only: bool) -> RLModuleSpec:
    default = _spec_for(sources.default_spec, module_id)
    spec = (_spec_for(sources.spec, module_id) or default or RLModuleSpec()).copy()
    if spec.module_class is None:
        spec.module_class = default.module_class if default is not None else None
    if spec.module_class is None:
        raise ConfigError(f"the module {module_id!r} has no module_class; give one in its RLModuleSpec")
    if spec.instance is None:
        spec.model_config = {**model_config_dict(sources.model_config), **model_config_dict(spec.model_config)}
        _fill_in_spaces(spec, sources, module_id)
    spec.inference_only = (inference_only and not spec.learner_only) or spec.inference_only
    return spec


def _spec_for(spec: RLModuleSpec | MultiRLModuleSpec, module_id: str) -> RLModuleSpec | None:
    return spec if isinstance(spec, RLModuleSpec) else spec.rl_module_specs.get(module_id)


def _fill_in_spaces(spec: RLModuleSpec, sources: ModuleSources, module_id: str) -> None:
    policy = policy_of(sources.policies, module_id)
    own = sources.spaces.get(module_id, (None, None))
    for spaces in (own, (policy.observation_space, policy.action_space), sources.common_spaces):
        _take_spaces(spec, spaces)
    is_rl_module = isinstance(spec.module_class, type) and issubclass(spec.module_class, RLModule)
    if is_rl_module and (spec.observation_space is None or spec.action_space is None):
        _take_spaces(spec, sources.make_spaces())


def _take_spaces(spec: RLModuleSpec, spaces: Spaces) -> None:
    if spec.observation_space is None:
        spec.observation_space = spaces[0]
    if spec.action_space is None:
        spec.action_space = spaces[1]


def spaces_of(env: Any) -> Spaces:
    """The spaces of one environment; of one of its copies, if it is a vector of environments."""
    single = getattr(env, "single_observation_space", None)
    if single is not None:
        return single, getattr(env, "single_action_space", None)
    return getattr(env, "observation_space", None), getattr(env, "action_space", None)
