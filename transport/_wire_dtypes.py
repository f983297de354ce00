"""The closed table of element types that may travel, for numpy and torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

# The position in this tuple is the code on the wire: append only. Byte order is part of the type.
_NUMPY_NAMES = (
    "|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16",
    ">i2", ">u2", ">i4", ">u4", ">i8", ">u8", ">f2", ">f4", ">f8", ">c8", ">c16",
)  # fmt: skip
NUMPY_DTYPES: dict[int, np.dtype[np.generic]] = {
    code: np.dtype(name) for code, name in enumerate(_NUMPY_NAMES, start=1)
}
NUMPY_CODES: dict[np.dtype[np.generic], int] = {dtype: code for code, dtype in NUMPY_DTYPES.items()}
_DATETIMES = {60: "<M8", 61: "<m8", 62: ">M8", 63: ">m8"}
_DATETIME_CODES = {name: code for code, name in _DATETIMES.items()}
_UNITS = ("generic", "Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
_MAX_UNIT_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TorchType:
    """A torch dtype on the wire.

    ``carrier`` has the same size and is known to numpy, for types that numpy lacks. ``numpy`` is the numpy type whose
    arrays share memory with such tensors, the carrier's where there is one.
    """

    dtype: torch.dtype
    itemsize: int
    carrier: torch.dtype | None
    numpy: np.dtype[np.generic]


# name in torch, the type that carries its bits into numpy (None: numpy knows it). Append only, as above.
_TORCH_NAMES: tuple[tuple[str, torch.dtype | None], ...] = (
    ("bool", None), ("int8", None), ("uint8", None), ("int16", None), ("uint16", None), ("int32", None),
    ("uint32", None), ("int64", None), ("uint64", None), ("float16", None), ("float32", None), ("float64", None),
    ("complex64", None), ("complex128", None), ("bfloat16", torch.int16), ("float8_e4m3fn", torch.uint8),
    ("float8_e5m2", torch.uint8), ("float8_e4m3fnuz", torch.uint8), ("float8_e5m2fnuz", torch.uint8),
    ("complex32", torch.int32), ("float8_e8m0fnu", torch.uint8),
)  # fmt: skip
TORCH_TYPES: dict[int, TorchType] = {}
for _code, (_name, _carrier) in enumerate(_TORCH_NAMES, start=1):
    _dtype = getattr(torch, _name, None)  # the last ones are not in every supported torch
    if _dtype is not None:
        _shared = torch.empty(0, dtype=_carrier or _dtype).numpy().dtype
        TORCH_TYPES[_code] = TorchType(_dtype, _dtype.itemsize, _carrier, _shared)
TORCH_CODES: dict[torch.dtype, int] = {known.dtype: code for code, known in TORCH_TYPES.items()}


def numpy_code(dtype: np.dtype[np.generic]) -> tuple[int, int, int] | None:
    """``(code, unit, unit count)`` of a dtype, or None if it does not travel."""
    code = NUMPY_CODES.get(dtype)
    if code is not None:
        return code, 0, 0
    if dtype.kind not in "mM":
        return None
    unit, count = np.datetime_data(cast(Any, dtype))
    return _DATETIME_CODES[dtype.str[:3]], _UNITS.index(unit), count


def numpy_dtype(code: int, unit: int, count: int) -> np.dtype[np.generic]:
    """The dtype of a code. Raises ``ValueError`` for what ``numpy_code`` never gives."""
    if not unit and not count and code in NUMPY_DTYPES:
        return NUMPY_DTYPES[code]
    if code not in _DATETIMES or unit >= len(_UNITS) or not 1 <= count <= _MAX_UNIT_COUNT:
        raise ValueError(f"no dtype has code {code}, unit {unit}, count {count}")
    if not unit:
        return np.dtype(_DATETIMES[code])
    return np.dtype(f"{_DATETIMES[code]}[{count}{_UNITS[unit]}]")
