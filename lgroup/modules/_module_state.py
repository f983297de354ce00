"""The state of any torch module as a plain dict of CPU tensors, and back.

Names are those of ``state_dict``. *Non-inference attributes* are the submodules or parameters that a module lists as
not needed to choose actions (a value head, a target network): an inference-only module lacks them, and states of both
kinds fit both kinds of module.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn


def get_module_state(module: nn.Module, *, inference_only: bool = False) -> dict[str, Any]:
    """A copy of the module's parameters and persistent buffers, ``{name: CPU tensor}``, which fits ``load_state_dict``.

    With ``inference_only``, without the module's non-inference attributes.
    """
    left_out = non_inference_attributes(module) if inference_only else ()
    return {name: _cpu_copy(value) for name, value in module.state_dict().items() if not belongs_to_any(name, left_out)}


def set_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Copies ``state``, ``{name: tensor or numpy array}``, into the module, in place.

    Names must match, apart from non-inference attributes. Raises ValueError naming what is missing, unexpected or of
    another shape; parts that fit may have been copied by then.
    """
    optional = non_inference_attributes(module)
    own = module.state_dict()
    wanted = {n: _as_tensor(v) for n, v in state.items() if n in own or not belongs_to_any(n, optional)}
    missing = [n for n in own if n not in wanted and not belongs_to_any(n, optional)]
    unexpected = [n for n in wanted if n not in own]
    if missing or unexpected:
        raise ValueError(f"the state does not fit {type(module).__name__}: missing {missing}, unexpected {unexpected}")
    try:
        module.load_state_dict(wanted, strict=False)
    except RuntimeError as error:
        raise ValueError(f"the state does not fit {type(module).__name__}: {error}") from error


def non_inference_attributes(module: nn.Module) -> tuple[str, ...]:
    """What the module says (by ``get_non_inference_attributes``) it does not need to choose actions."""
    names = getattr(module, "get_non_inference_attributes", None)
    return tuple(names()) if callable(names) else ()


def drop_non_inference_attributes(module: nn.Module) -> None:
    """Deletes what the module does not need to choose actions, as far as it is there."""
    for path in non_inference_attributes(module):
        parent_path, _, name = path.rpartition(".")
        parent = module.get_submodule(parent_path)
        if hasattr(parent, name):
            delattr(parent, name)


def belongs_to_any(name: str, attributes: Collection[str]) -> bool:
    """Whether the state name is one of the ``attributes`` or lies below one."""
    return any(name == attribute or name.startswith(f"{attribute}.") for attribute in attributes)


def _cpu_copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value.clone() if value.device.type == "cpu" else value.cpu()


def _as_tensor(value: Any) -> Any:
    # a copy, because torch warns about sharing memory with a read-only array
    return torch.from_numpy(np.array(value)) if isinstance(value, (np.ndarray, np.generic)) else value
