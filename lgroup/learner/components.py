"""Paths into a state: ``"learner/rl_module/policy_a"`` names a component of a component. Pure functions on dicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

Components = str | Collection[str] | None


def _paths(components: str | Collection[str]) -> list[list[str]]:
    paths = [components] if isinstance(components, str) else list(components)
    return [path.strip("/").split("/") for path in paths]


def subcomponents(name: str, components: Components) -> list[str] | Literal[False] | None:
    """What of `components` lies below `name`.

    Returns:
        None if all of it is wanted, a list of paths if only these are, False if nothing is.
    """
    if components is None:
        return None
    paths = [path for path in _paths(components) if path[0] == name]
    if not paths:
        return False
    if any(len(path) == 1 for path in paths):
        return None
    return ["/".join(path[1:]) for path in paths]


def select(state: Mapping[str, Any], components: Components, not_components: Components = None) -> dict[str, Any]:
    """The part of a nested state that `components` name, without what `not_components` name."""
    result: dict[str, Any] = {}
    for name, value in state.items():
        wanted = subcomponents(name, components)
        unwanted = subcomponents(name, not_components) if not_components is not None else False
        if wanted is False or unwanted is None:
            continue
        if isinstance(value, Mapping) and (wanted is not None or unwanted is not False):
            value = select(value, wanted, unwanted or None)
        result[name] = value
    return result
