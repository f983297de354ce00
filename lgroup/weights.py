"""Weights as users and env runners get them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Weights(dict[str, dict[str, Any]]):
    """``{module_id: {name: CPU tensor}}``; each module's part fits ``load_state_dict``.

    Attributes:
        version: Number of updates that these weights hold.
    """

    def __init__(self, modules: Mapping[str, dict[str, Any]], version: int) -> None:
        super().__init__(modules)
        self.version = version

    def __repr__(self) -> str:
        return f"<Weights version={self.version} modules={sorted(self)}>"
