"""Weights as users and env runners get them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch


class Weights(dict[str, dict[str, Any]]):
    """``{module_id: {name: CPU tensor}}``; each module's part fits ``load_state_dict``.

    Attributes:
        version: Number of updates that these weights hold.
    """

    def __init__(self, modules: Mapping[str, dict[str, Any]], version: int) -> None:
        super().__init__(modules)
        self.version = version

    def copied(self, module_ids: Collection[str] | None = None) -> Weights:
        """A private copy, of these modules (None means all)."""
        chosen = self if module_ids is None else module_ids
        return Weights({m: {n: _copy(value) for n, value in self[m].items()} for m in chosen}, self.version)

    def __repr__(self) -> str:
        return f"<Weights version={self.version} modules={sorted(self)}>"


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
