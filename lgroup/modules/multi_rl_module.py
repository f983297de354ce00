"""Several modules under their ids, trained together: `MultiRLModule`, and `MultiRLModuleSpec`, its recipe.

Every learner holds one `MultiRLModule`, with a single module under "default_policy" in the simple case. A parameter may
belong to several modules (a shared encoder), or to the `MultiRLModule` itself; it is still one parameter.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, ItemsView, Iterator, KeysView, Mapping, MutableMapping, ValuesView
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lgroup.columns import ALL_MODULES
from lgroup.errors import ConfigError
from lgroup.modules import _module_state
from lgroup.modules.rl_module import RLModule, RLModuleSpec, copy_of_module, load_state_file, run_forward

SHARED_STATE = "__shared__"
"""The key, beside the module ids, under which states hold what belongs to a `MultiRLModule` and none of its modules."""

_FORBIDDEN = '<>:"/\\|?*'


def validate_module_id(module_id: object) -> str:
    """The id itself, if it can name a module (and a directory, in checkpoints). ConfigError otherwise."""
    if isinstance(module_id, str) and _can_name_a_module(module_id):
        return module_id
    raise ConfigError.refused(
        "module_id",
        module_id,
        f"a non-empty string without any of {_FORBIDDEN}, not ending in a dot or space, not {ALL_MODULES!r} or "
        f"{SHARED_STATE!r}",
    )


def _can_name_a_module(text: str) -> bool:
    if not text or text in (ALL_MODULES, SHARED_STATE) or text[-1] in " .":
        return False
    return not any(c in _FORBIDDEN or not c.isprintable() for c in text)


class _ModuleTable(nn.Module, MutableMapping[str, nn.Module]):
    """Modules by id. Unlike ``nn.ModuleDict`` it takes any id, such as "agent.0" or "items"."""

    def __getitem__(self, module_id: str) -> nn.Module:
        module = self._modules[_attribute_name(module_id)]
        assert module is not None
        return module

    def __setitem__(self, module_id: str, module: nn.Module) -> None:
        self._modules[_attribute_name(module_id)] = module

    def __delitem__(self, module_id: str) -> None:
        del self._modules[_attribute_name(module_id)]

    def __iter__(self) -> Iterator[str]:
        return map(_module_id, self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    # a module is itself and no other, as everywhere in torch; Mapping would compare contents
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def _attribute_name(module_id: str) -> str:
    # torch takes a dot in a module's name for a path
    return module_id.replace("%", "%25").replace(".", "%2E")


def _module_id(attribute_name: str) -> str:
    return attribute_name.replace("%2E", ".").replace("%25", "%")


class MultiRLModule(RLModule):
    """Modules by id, like a dict: ``multi["p0"]``, ``"p0" in multi``, ``len``, ``keys``, ``values``, ``items``.

    Subclasses may build shared parts in ``setup()`` and override ``_forward_train`` and the two methods like it, which
    take ``{module_id: columns}`` and return ``{module_id: fwd_out}``; a batch may lack any of the modules.

    Args:
        observation_space, action_space, inference_only, learner_only, model_config: see `RLModule`.
        rl_module_specs: the recipes by module id; built in this order by ``setup()``. With ``inference_only`` those
            that are learner_only are left out.

    Raises ConfigError for an id that cannot name a module.
    """

    def __init__(
        self,
        *,
        observation_space: Any = None,
        action_space: Any = None,
        inference_only: bool | None = None,
        learner_only: bool = False,
        model_config: Any = None,
        rl_module_specs: Mapping[str, RLModuleSpec] | None = None,
        catalog_class: Any = None,
    ) -> None:
        self.__dict__["rl_module_specs"] = dict(rl_module_specs or {})  # nn.Module's __init__ comes later
        super().__init__(
            observation_space=observation_space,
            action_space=action_space,
            inference_only=inference_only,
            learner_only=learner_only,
            model_config=model_config,
            catalog_class=catalog_class,
        )

    rl_module_specs: dict[str, RLModuleSpec]
    _rl_modules: MutableMapping[str, nn.Module]

    def setup(self) -> None:
        """Builds the modules from their recipes. A subclass calls ``super().setup()`` and may then share parts."""
        self._rl_modules = _ModuleTable()
        for module_id, spec in self.rl_module_specs.items():
            if not (self.inference_only and spec.learner_only):
                self.add_module(module_id, _for_inference(spec, self.inference_only).build())
                self.rl_module_specs[module_id] = dataclasses.replace(spec, instance=None)  # no second set of weights

    def add_module(self, module_id: str, module: nn.Module, *, override: bool = False) -> None:  # type: ignore[override]
        """Puts ``module`` under ``module_id``. ValueError if the id is taken and ``override`` is not set."""
        validate_module_id(module_id)
        if module_id in self._rl_modules and not override:
            raise ValueError(f"there is a module {module_id!r} already; use override=True to replace it")
        self._rl_modules[module_id] = module

    def remove_module(self, module_id: str, *, raise_err_if_not_found: bool = True) -> None:
        """Takes a module out. ValueError if it is not there, unless ``raise_err_if_not_found`` is False."""
        if raise_err_if_not_found and module_id not in self._rl_modules:
            raise ValueError(self._no_such_module(module_id))
        self._rl_modules.pop(module_id, None)
        self.rl_module_specs.pop(module_id, None)

    def reduce_to_inference(self) -> None:
        """Takes out the learner_only modules and, from the others, what choosing actions does not need."""
        for module_id, module in list(self.items()):
            if getattr(module, "learner_only", False):
                del self._rl_modules[module_id]
            else:
                _module_state.drop_non_inference_attributes(module)
        self.inference_only = True

    def foreach_module(self, func: Callable[..., Any], *, return_dict: bool = False, **kwargs: Any) -> Any:
        """``func(module_id, module, **kwargs)`` for each module; their results as a list, or as a dict by id."""
        results = {module_id: func(module_id, module, **kwargs) for module_id, module in self._rl_modules.items()}
        return results if return_dict else list(results.values())

    def _run_forward_pass(self, phase: str, batch: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {
            module_id: run_forward(self[module_id], phase, columns, **kwargs) for module_id, columns in batch.items()
        }

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._run_forward_pass("forward_train", batch, **kwargs)

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._run_forward_pass("forward_train", batch, **kwargs)

    def _forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._run_forward_pass("forward_exploration", batch, **kwargs)

    def _forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._run_forward_pass("forward_inference", batch, **kwargs)

    def get_initial_state(self) -> dict[str, Any]:
        """The recurrent state of each module that has one."""
        states = {k: m.get_initial_state() for k, m in self._rl_modules.items() if isinstance(m, RLModule)}
        return {module_id: state for module_id, state in states.items() if state}

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
    ) -> dict[str, Any]:
        """A copy of the modules' states, ``{module_id: {name: CPU tensor}}``.

        ``components`` and ``not_components`` choose module ids. Modules that are learner_only are left out with
        ``inference_only``. What belongs to no module, if anything, is under ``SHARED_STATE``.
        """
        chosen = [k for k in (*self._rl_modules, SHARED_STATE) if _is_chosen(k, components, not_components)]
        state = {
            k: _state_of(self[k], inference_only)
            for k in chosen
            if k in self and not (inference_only and getattr(self[k], "learner_only", False))
        }
        shared = self._shared_state() if SHARED_STATE in chosen else {}
        return {**state, SHARED_STATE: shared} if shared else state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Copies ``{module_id: state}``, for any subset of the modules, into them.

        Raises ValueError if a state does not fit, and for an id that is not here, unless it is that of a module which
        was left out because it is learner_only.
        """
        left_out = [k for k, spec in self.rl_module_specs.items() if spec.learner_only and k not in self]
        unknown = [k for k in state if k not in self and k not in left_out and k != SHARED_STATE]
        if unknown:
            raise ValueError(self._no_such_module(unknown[0]))
        for module_id, module_state in state.items():
            if module_id == SHARED_STATE:
                self._set_shared_state(module_state)
            elif module_id in self:
                _module_state.set_module_state(self[module_id], module_state)

    def owned_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        """Every parameter once, ``{module_id: {name: parameter}}``: a shared one under the first of its modules, in
        sorted order, and one that belongs to no module under ``SHARED_STATE`` (absent if there is none).
        """
        seen: set[int] = set()
        owned: dict[str, dict[str, nn.Parameter]] = {}
        for owner in (*sorted(self._rl_modules), SHARED_STATE):
            module = self if owner == SHARED_STATE else self[owner]
            mine = {name: p for name, p in module.named_parameters() if id(p) not in seen}
            seen.update(map(id, mine.values()))
            if mine or owner != SHARED_STATE:
                owned[owner] = mine
        return owned

    def as_multi_rl_module(self) -> MultiRLModule:
        """The module itself."""
        return self

    def keys(self) -> KeysView[str]:
        """The module ids, in the order in which they were added."""
        return self._rl_modules.keys()

    def values(self) -> ValuesView[nn.Module]:
        """The modules."""
        return self._rl_modules.values()

    def items(self) -> ItemsView[str, nn.Module]:
        """Pairs of module id and module."""
        return self._rl_modules.items()

    def get(self, module_id: str, default: Any = None) -> Any:
        """The module ``module_id``, or ``default``."""
        return self._rl_modules.get(module_id, default)

    def __getitem__(self, module_id: str) -> Any:
        try:
            return self._rl_modules[module_id]
        except KeyError:
            raise KeyError(self._no_such_module(module_id)) from None

    def __contains__(self, module_id: object) -> bool:
        return isinstance(module_id, str) and module_id in self._rl_modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._rl_modules)

    def __len__(self) -> int:
        return len(self._rl_modules)

    def _no_such_module(self, module_id: object) -> str:
        return f"there is no module {module_id!r}; there are: {', '.join(map(repr, self._rl_modules)) or 'none'}"

    def _shared_state(self) -> dict[str, Any]:
        modules = {id(value) for module in self.values() for value in module.state_dict(keep_vars=True).values()}
        own = self.state_dict(keep_vars=True)
        names = {n for n, v in own.items() if id(v) not in modules and not n.startswith("_rl_modules.")}
        return {n: v for n, v in _module_state.get_module_state(self).items() if n in names} if names else {}

    def _set_shared_state(self, state: Mapping[str, Any]) -> None:
        names = self._shared_state().keys()
        if set(state) != set(names):
            raise ValueError(f"the shared state has the names {sorted(state)}, but {sorted(names)} are needed")
        _module_state.set_module_state(self, {**_module_state.get_module_state(self), **state})


def _state_of(module: nn.Module, inference_only: bool) -> dict[str, Any]:
    if isinstance(module, RLModule):
        return module.get_state(inference_only=inference_only)
    return _module_state.get_module_state(module, inference_only=inference_only)


def _is_chosen(key: str, wanted: str | Collection[str] | None, unwanted: str | Collection[str] | None) -> bool:
    return (wanted is None or key in _ids(wanted)) and (unwanted is None or key not in _ids(unwanted))


def _ids(ids: str | Collection[str]) -> Collection[str]:
    return (ids,) if isinstance(ids, str) else ids


def _for_inference(spec: RLModuleSpec, inference_only: bool) -> RLModuleSpec:
    return dataclasses.replace(spec, inference_only=True) if inference_only and not spec.inference_only else spec


@dataclass
class MultiRLModuleSpec:
    """The recipe for a `MultiRLModule`. A plain value, as `RLModuleSpec` is.

    Args:
        multi_rl_module_class: the class, `MultiRLModule` or a subclass.
        observation_space, action_space, inference_only, model_config: handed to it; see `RLModule`.
        rl_module_specs: the recipes by module id.
        load_state_path: a file that ``torch.save`` wrote, with ``{module_id: state}``, to start from.
        modules_to_load: the module ids to take from that file; None: all that are in it.
        instance: a finished module to copy instead of building one; see `from_module`.
    """

    multi_rl_module_class: type[MultiRLModule] = MultiRLModule
    observation_space: Any = None
    action_space: Any = None
    inference_only: bool | None = None
    model_config: Any = None
    rl_module_specs: dict[str, RLModuleSpec] = field(default_factory=dict)
    load_state_path: str | os.PathLike[str] | None = None
    modules_to_load: Collection[str] | None = None
    instance: MultiRLModule | None = field(default=None, kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.rl_module_specs, Mapping):
            raise ConfigError.refused("rl_module_specs", self.rl_module_specs, "a dict of module id to RLModuleSpec")
        if self.load_state_path is None and self.modules_to_load is not None:
            raise ConfigError.refused("modules_to_load", self.modules_to_load, "None unless load_state_path is given")

    @classmethod
    def from_module(cls, module: MultiRLModule) -> MultiRLModuleSpec:
        """The recipe that copies ``module`` with the weights it has now (on the CPU)."""
        instance = copy_of_module(module).cpu()
        assert isinstance(instance, MultiRLModule)
        specs = {k: module.rl_module_specs.get(k) or RLModuleSpec.describing(m) for k, m in module.items()}
        return cls(
            multi_rl_module_class=type(module),
            observation_space=module.observation_space,
            action_space=module.action_space,
            inference_only=module.inference_only,
            model_config=module.model_config,
            rl_module_specs=specs,
            instance=instance,
        )

    def build(self, module_id: str | None = None) -> Any:
        """A new `MultiRLModule`, or with ``module_id`` only that one of its modules. ConfigError if incomplete."""
        if module_id is not None and self.instance is None:
            return _for_inference(self[module_id], bool(self.inference_only)).build()
        module = self._construct() if self.instance is None else self._copy_instance(self.instance)
        if module_id is not None:
            return module[module_id]
        if self.load_state_path is not None:
            state = load_state_file(self.load_state_path)
            module.set_state({k: v for k, v in state.items() if self._is_to_load(k)})
        return module

    def _construct(self) -> MultiRLModule:
        if not self.rl_module_specs:
            raise ConfigError("MultiRLModuleSpec.rl_module_specs is empty; give at least one RLModuleSpec")
        return self.multi_rl_module_class(
            observation_space=self.observation_space,
            action_space=self.action_space,
            inference_only=self.inference_only,
            model_config=self.model_config,
            rl_module_specs=self.rl_module_specs,
        )

    def _copy_instance(self, instance: MultiRLModule) -> MultiRLModule:
        module = copy_of_module(instance)
        assert isinstance(module, MultiRLModule)
        for module_id in [k for k in module if k not in self]:
            module.remove_module(module_id)
        if self.inference_only:
            module.reduce_to_inference()
        return module

    def _is_to_load(self, module_id: str) -> bool:
        return self.modules_to_load is None or module_id in self.modules_to_load

    def add_modules(self, module_specs: Mapping[str, RLModuleSpec], override: bool = True) -> None:
        """Adds recipes; with ``override=False`` only under ids that are not taken, else they replace what is there."""
        kept = {k: v for k, v in self.rl_module_specs.items() if not override or k not in module_specs}
        self.rl_module_specs = {**self.rl_module_specs, **module_specs, **kept}

    def remove_modules(self, module_ids: str | Collection[str]) -> None:
        """Removes recipes by id; ids that are not there change nothing."""
        self.rl_module_specs = {k: v for k, v in self.rl_module_specs.items() if k not in _ids(module_ids)}

    def update(self, other: MultiRLModuleSpec | RLModuleSpec, override: bool = False) -> None:
        """Adds the recipes of ``other``; a single one updates each of ours (see `RLModuleSpec.update`)."""
        if isinstance(other, RLModuleSpec):
            for spec in self.rl_module_specs.values():
                spec.update(other, override=override)
        else:
            self.add_modules(other.rl_module_specs, override=override)

    def copy(self) -> MultiRLModuleSpec:
        """Another spec with copies of the recipes in it."""
        return dataclasses.replace(self, rl_module_specs={k: spec.copy() for k, spec in self.rl_module_specs.items()})

    def as_multi_rl_module_spec(self) -> MultiRLModuleSpec:
        """The spec itself."""
        return self

    def __contains__(self, module_id: object) -> bool:
        return module_id in self.rl_module_specs

    def __getitem__(self, module_id: str) -> RLModuleSpec:
        try:
            return self.rl_module_specs[module_id]
        except KeyError:
            raise KeyError(
                f"there is no module {module_id!r}; there are: {', '.join(self.rl_module_specs) or 'none'}"
            ) from None
