"""cloudpickle, and what it lacks: tensors of the types that torch 2.13 pickles but cannot unpickle."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import torch

_NAMES = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
          "float8_e8m0fnu", "complex32")  # fmt: skip
_DTYPES = {getattr(torch, name): name for name in _NAMES if hasattr(torch, name)}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.dtype in _DTYPES and obj.is_cpu and obj.layout is torch.strided:
            raw = obj.detach().resolve_conj().contiguous().reshape(-1)
            data = raw.view(torch.uint8).numpy() if raw.numel() else np.zeros(0, np.uint8)
            return _tensor, (data, _DTYPES[obj.dtype], tuple(obj.shape))
        return super().reducer_override(obj)


def _tensor(data: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not data.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(data if data.flags.writeable else data.copy()).view(getattr(torch, dtype)).reshape(shape)


def dumps(value: object, buffer_callback: Callable[[pickle.PickleBuffer], Any]) -> bytes:
    """A protocol 5 pickle of ``value``; large buffers go to ``buffer_callback``."""
    with io.BytesIO() as file:
        _Pickler(file, protocol=5, buffer_callback=buffer_callback).dump(value)
        return file.getvalue()
