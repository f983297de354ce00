"""A learner's whole state as one tree of plain containers and tensors.

The same tree serves undo, joining and checkpoints. `live_tree` makes it without copying: its leaves are the learner's
own tensors. `copy_tree` takes the copy, and `restore` writes a tree back **in place**, so that whatever else refers to
a tensor or a container goes on referring to the right one. Nothing is cast: a leaf comes back with the dtype it had.

Two halves, because they are copied at different moments of an update::

    early  buffers, optimizer settings, learner attributes, registered objects    (before the first hook)
    late   parameters and optimizer state                                         (while the first sum runs)
"""

from __future__ import annotations

import collections
import copy
import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from lgroup.learner.learner import Learner

Tree = dict[str, Any]

_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)


class EnumMember(NamedTuple):
    """A member of an enum, by value: its class is that of what it is restored into."""

    value: Any


class _Unknown:
    """Stands for a value that is no state: it is neither copied nor restored."""


UNKNOWN = _Unknown()


def has_state_dict(value: Any) -> bool:
    """Whether `value` keeps its state behind ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_restorable_in_place(value: Any) -> bool:
    """Whether `restore` can put a state back into the very object `value`."""
    return isinstance(value, (torch.Tensor, np.ndarray, dict, list, set, collections.deque)) or has_state_dict(value)


def _live(value: Any) -> Any:
    """`value` as a tree over its own tensors; `UNKNOWN` if it is no state."""
    if isinstance(value, enum.Enum):  # first: members of IntEnum and the like are numbers, too
        return EnumMember(value.value)
    if isinstance(value, (*_SCALARS, torch.Tensor, np.ndarray)):
        return value
    if isinstance(value, torch.nn.Module):
        return dict(value.state_dict())
    if has_state_dict(value):
        return value.state_dict()
    if isinstance(value, Mapping):
        items = ((key, _live(item)) for key, item in value.items())
        return {key: item for key, item in items if item is not UNKNOWN}
    if isinstance(value, (list, tuple, collections.deque)):
        parts = [_live(item) for item in value]
        if any(part is UNKNOWN for part in parts):
            return UNKNOWN
        return (
            type(value)(*parts) if hasattr(value, "_fields") else (tuple if isinstance(value, tuple) else list)(parts)
        )
    if isinstance(value, (set, frozenset)):
        return set(value) if all(isinstance(item, _SCALARS) for item in value) else UNKNOWN
    return UNKNOWN


def _optimizer_settings(optimizer: torch.optim.Optimizer) -> list[Tree]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """State by the parameter's position in the optimizer; parameters without state are left out."""
    state = optimizer.state
    return {i: dict(state[p]) for i, p in enumerate(_optimizer_parameters(optimizer)) if state.get(p)}


def early_tree(learner: Learner) -> Tree:
    """Buffers, optimizer settings, attributes and registered objects, over live tensors."""
    attributes = {name: _live(value) for name, value in learner.state_attributes().items()}
    return {
        "buffers": learner.slots().buffers(),
        "optimizer_settings": {name: _optimizer_settings(opt) for name, opt in learner.optimizers().items()},
        "attributes": {name: value for name, value in attributes.items() if value is not UNKNOWN},
        "registered": {name: _live(value) for name, value in learner.registered_state().items()},
    }


def late_tree(learner: Learner) -> Tree:
    """Parameters and optimizer state, over live tensors."""
    return {
        "parameters": learner.slots().parameters,
        "free_parameters": dict(learner.free_parameters()),
        "optimizer_state": {name: _optimizer_state(opt) for name, opt in learner.optimizers().items()},
    }


def live_tree(learner: Learner) -> Tree:
    """The whole state, over live tensors."""
    return {**early_tree(learner), **late_tree(learner)}


def _clone(tree: Any, copy_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The tree with its containers and arrays copied, and its tensors replaced by what `copy_of` gives."""
    if isinstance(tree, torch.Tensor):
        return copy_of(tree)
    if isinstance(tree, dict):
        return {key: _clone(value, copy_of) for key, value in tree.items()}
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, tuple):
        parts = [_clone(value, copy_of) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [_clone(value, copy_of) for value in tree]
    if isinstance(tree, set):
        return set(tree)
    # What else there is comes out of someone's state_dict().
    return tree if isinstance(tree, _SCALARS) else copy.deepcopy(tree)


def _fits(memory: torch.Tensor, live: torch.Tensor) -> bool:
    return memory.shape == live.shape and memory.dtype is live.dtype and memory.device == live.device


class TreeCopy:
    """Repeated copies of a tree into the same memory: fresh memory costs more than the copy.

    Measured at 67 k parameters with Adam: 24 clones 95 us, one `_foreach_copy_` into warm memory 30 us.
    """

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, tree: Any) -> Any:
        """A copy of `tree`; it is overwritten by the next `take`."""
        memory, live = self._memory, list[torch.Tensor]()
        seen: dict[int, torch.Tensor] = {}

        def copy_of(tensor: torch.Tensor) -> torch.Tensor:
            copy = seen.get(id(tensor))
            if copy is not None:
                return copy
            place = len(live)
            live.append(tensor)
            if place == len(memory):
                memory.append(torch.empty_like(tensor).detach())
            elif not _fits(memory[place], tensor):
                memory[place] = torch.empty_like(tensor).detach()
            copy = seen[id(tensor)] = memory[place]
            return copy

        result = _clone(tree, copy_of)
        del memory[len(live) :]
        if live:
            torch._foreach_copy_(memory, live)
        return result


@torch.no_grad()
def copy_tree(tree: Any) -> Any:
    """An independent copy of a tree: tensors and arrays cloned on their device, containers rebuilt."""
    seen: dict[int, torch.Tensor] = {}

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        copy = seen.get(id(tensor))
        if copy is None:
            copy = seen[id(tensor)] = tensor.detach().clone()
        return copy

    return _clone(tree, copy_of)


def _restored(live: Any, saved: Any) -> Any:
    """Write `saved` into `live` where it can be written into; return what should stand in `live`'s place."""
    if isinstance(saved, torch.Tensor):
        if isinstance(live, torch.Tensor) and live.shape == saved.shape and live.dtype == saved.dtype:
            live.detach().copy_(saved)
            return live
        return saved.clone()
    if isinstance(saved, np.ndarray):
        if (
            isinstance(live, np.ndarray)
            and live.shape == saved.shape
            and live.dtype == saved.dtype
            and live.flags.writeable
        ):
            live[...] = saved
            return live
        return saved.copy()
    if saved is None:
        return None
    if has_state_dict(live):
        live.load_state_dict(copy_tree(saved))
        return live
    if isinstance(saved, dict):
        return _restored_mapping(live, saved)
    if isinstance(saved, EnumMember):
        return type(live)(saved.value) if isinstance(live, enum.Enum) else saved.value
    if isinstance(saved, (list, tuple)):
        return _restored_sequence(live, saved)
    if isinstance(saved, set):
        return _restored_set(live, saved)
    return saved


def _restored_mapping(live: Any, saved: dict[Any, Any]) -> Any:
    target = live if isinstance(live, dict) else {}
    no_state = {key: value for key, value in target.items() if key not in saved and _live(value) is UNKNOWN}
    items = {key: _restored(target.get(key), value) for key, value in saved.items()}
    target.clear()
    target.update({**items, **no_state})
    return target


def _restored_sequence(live: Any, saved: list[Any] | tuple[Any, ...]) -> Any:
    old = list(live) if isinstance(live, (list, tuple, collections.deque)) else []
    old += [None] * (len(saved) - len(old))
    parts = [_restored(o, s) for o, s in zip(old, saved, strict=False)]
    if isinstance(saved, list) and isinstance(live, (list, collections.deque)):
        live.clear()
        live.extend(parts)
        return live
    if isinstance(saved, tuple):
        fields = getattr(saved, "_fields", None)
        # The wire may have had to make up a class of the same fields.
        kind = type(live) if fields and getattr(live, "_fields", None) == fields else type(saved)
        return kind(*parts) if fields else tuple(parts)
    return parts


def _restored_set(live: Any, saved: set[Any]) -> Any:
    if isinstance(live, set):
        live.clear()
        live.update(saved)
        return live
    return frozenset(saved) if isinstance(live, frozenset) else set(saved)


def _restore_optimizer_state(optimizer: torch.optim.Optimizer, saved: Mapping[int, Any]) -> None:
    for index, parameter in enumerate(_optimizer_parameters(optimizer)):
        if index in saved:
            optimizer.state[parameter] = _restored(optimizer.state.get(parameter), saved[index])
        else:
            optimizer.state.pop(parameter, None)


def _restore_optimizer_settings(optimizer: torch.optim.Optimizer, saved: list[Tree]) -> None:
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        parameters = group["params"]
        items = {key: _restored(group.get(key), value) for key, value in settings.items()}
        group.clear()
        group.update({"params": parameters, **items})


@torch.no_grad()
def restore(learner: Learner, tree: Tree, *, exactly: bool = True) -> None:
    """Write a tree, or any of its top-level parts, back into the learner in place.

    What the tree does not name keeps its state, except that, with `exactly`, learner attributes which came after the
    tree was taken are deleted again.
    """
    slots, free = learner.slots(), dict(learner.free_parameters())
    for name, tensor in tree.get("parameters", {}).items():
        slots.parameters[name].detach().copy_(tensor)
    for name, tensor in tree.get("free_parameters", {}).items():
        free[name].detach().copy_(tensor)
    for name, tensor in tree.get("buffers", {}).items():
        slots.set_buffer(name, tensor)
    optimizers = learner.optimizers()
    for name, state in tree.get("optimizer_state", {}).items():
        _restore_optimizer_state(optimizers[name], state)
    for name, settings in tree.get("optimizer_settings", {}).items():
        _restore_optimizer_settings(optimizers[name], settings)
    if "attributes" in tree:
        _restore_attributes(learner, tree["attributes"], exactly=exactly)
    registered = learner.registered_state()
    for name, value in tree.get("registered", {}).items():
        _restored(registered[name], value)


def _restore_attributes(learner: Learner, saved: Tree, *, exactly: bool) -> None:
    now = learner.state_attributes()
    for name, value in now.items():
        if exactly and name not in saved and _live(value) is not UNKNOWN:
            delattr(learner, name)
    for name, value in saved.items():
        setattr(learner, name, _restored(now.get(name), value))
