"""What of a learner is state, and how it is taken out and put back.

The tree that undo and joining use is `lgroup.learner.state_tree`'s; `get_state` gives the same content in the form that
users and checkpoints see: modules by id, optimizers by name, CPU tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lgroup.learner import state_tree
from lgroup.learner.components import select, subcomponents

if TYPE_CHECKING:
    from lgroup.learner.module_slots import ModuleSlots
    from lgroup.modules import MultiRLModule

COMPONENT_RL_MODULE = "rl_module"
COMPONENT_OPTIMIZER = "optimizer"
COMPONENT_ATTRIBUTES = "attributes"
COMPONENT_REGISTERED = "registered"
#: What is in no module and no attribute: free parameters, and buffers that modules keep out of their state_dict.
COMPONENT_TENSORS = "tensors"

_COMPONENTS = (
    COMPONENT_RL_MODULE,
    COMPONENT_OPTIMIZER,
    COMPONENT_ATTRIBUTES,
    COMPONENT_REGISTERED,
    COMPONENT_TENSORS,
)

#: Attributes of a learner that are no state of it.
_NOT_STATE = frozenset({"config", "module_spec", "metrics", "device"})


def _on_cpu(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {key: _on_cpu(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_on_cpu(value) for value in tree]
    return state_tree.copy_tree(tree)


class LearnerState:
    """The part of `lgroup.Learner` that knows what its state is."""

    _lgroup_optimizers: dict[str, torch.optim.Optimizer]
    _lgroup_params: dict[Any, torch.nn.Parameter]
    _lgroup_registered: dict[str, Any]

    @property
    def module(self) -> MultiRLModule:
        """The networks by module id."""
        raise AttributeError("module")

    def slots(self) -> ModuleSlots:
        """Where the module keeps its parameters and buffers."""
        raise AttributeError("slots")

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
    ) -> dict[str, Any]:
        """A copy of the learner's state, on the CPU.

        Args:
            components: Paths to include, such as ``"rl_module"`` or ``"rl_module/policy_a"``; None means all.
            not_components: Paths to leave out.
            inference_only: Leave out what the modules do not need to choose actions.

        Returns:
            ``{"rl_module": {module_id: {name: tensor}}, "optimizer": {name: {"state": ..., "settings": ...}},
            "attributes": ..., "registered": ..., "tensors": ...}``, as far as asked for.
        """
        tree = state_tree.live_tree(self)  # type: ignore[arg-type]
        state: dict[str, Any] = {}
        wanted = subcomponents(COMPONENT_RL_MODULE, components)
        if wanted is not False:
            state[COMPONENT_RL_MODULE] = self.module.get_state(inference_only=inference_only)
        state[COMPONENT_OPTIMIZER] = {
            name: {"state": tree["optimizer_state"][name], "settings": tree["optimizer_settings"][name]}
            for name in tree["optimizer_state"]
        }
        state[COMPONENT_ATTRIBUTES] = tree["attributes"]
        state[COMPONENT_REGISTERED] = tree["registered"]
        kept = set(self.module.state_dict())
        transient = {f"buffer {name}": t for name, t in tree["buffers"].items() if name not in kept}
        state[COMPONENT_TENSORS] = {**transient, **{f"parameter {n}": t for n, t in tree["free_parameters"].items()}}
        return {
            name: value if name == COMPONENT_RL_MODULE else _on_cpu(value)
            for name, value in select(state, components, not_components).items()
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Copy a state, or any of its parts, into the learner in place.

        Raises:
            ValueError: naming the part that does not fit: an unknown component, module, optimizer or tensor, or a
                shape. Learner attributes that the state does not name keep their values.
        """
        unknown = sorted(set(state) - set(_COMPONENTS))
        if unknown:
            raise ValueError(f"a learner's state has no component {unknown[0]!r}; it has {list(_COMPONENTS)}")
        if COMPONENT_RL_MODULE in state:
            self.module.set_state(state[COMPONENT_RL_MODULE])
        optimizers = state.get(COMPONENT_OPTIMIZER, {})
        _check_names("optimizer", optimizers, self._lgroup_optimizers)
        _check_names("registered state", state.get(COMPONENT_REGISTERED, {}), self._lgroup_registered)
        for name, saved in optimizers.items():
            wanted = len(self._lgroup_optimizers[name].param_groups)
            if len(saved["settings"]) != wanted:
                raise ValueError(f"optimizer {name!r} has {wanted} parameter groups, not {len(saved['settings'])}")
        tensors = state.get(COMPONENT_TENSORS, {})
        free = dict(self.free_parameters())
        own = {f"buffer {n}": t for n, t in self.slots().buffers().items()} | {
            f"parameter {n}": t for n, t in free.items()
        }
        _check_names("tensor", tensors, own)
        tree: dict[str, Any] = {
            "optimizer_state": {name: saved["state"] for name, saved in optimizers.items()},
            "optimizer_settings": {name: saved["settings"] for name, saved in optimizers.items()},
            "registered": state.get(COMPONENT_REGISTERED, {}),
            "buffers": _named("buffer ", tensors),
            "free_parameters": _named("parameter ", tensors),
        }
        if COMPONENT_ATTRIBUTES in state:
            tree["attributes"] = state[COMPONENT_ATTRIBUTES]
        state_tree.restore(self, tree, exactly=False)  # type: ignore[arg-type]

    def register_state(self, name: str, obj: Any) -> None:
        """Make `obj` part of the learner's state although it is no attribute of it.

        Args:
            name: A name of your own, the same on every learner.
            obj: A tensor, array, dict or list (restored in place), or an object with ``state_dict`` and
                ``load_state_dict``.

        Raises:
            ValueError: if the name is taken.
            TypeError: if `obj` has no state that could be restored in place.
        """
        if name in self._lgroup_registered:
            raise ValueError(f"state {name!r} is already registered")
        if not state_tree.is_restorable_in_place(obj):
            raise TypeError(f"state {name!r}: a {type(obj).__name__} cannot be restored in place")
        self._lgroup_registered[name] = obj

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """All optimizers by ``"<module id>_<optimizer name>"``."""
        return self._lgroup_optimizers

    def registered_state(self) -> dict[str, Any]:
        """What `register_state` was given."""
        return self._lgroup_registered

    def free_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Optimized parameters that are in no module, with names."""
        in_modules = {id(parameter) for parameter in self.slots().parameters.values()}
        free = (p for p in self._lgroup_params.values() if id(p) not in in_modules)
        return [(f"free_{index}", parameter) for index, parameter in enumerate(free)]

    def state_attributes(self) -> dict[str, Any]:
        """The learner's own attributes that may be state, by name."""
        known = {id(value) for value in self._lgroup_optimizers.values()}
        known |= self.slots().module_ids
        return {
            name: value
            for name, value in vars(self).items()
            if name not in _NOT_STATE and not name.startswith("_lgroup_") and id(value) not in known
        }


def _named(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check_names(what: str, given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    unknown = sorted(set(given) - set(own))
    if unknown:
        raise ValueError(f"this learner has no {what} {unknown[0]!r}; it has {sorted(own)}")
