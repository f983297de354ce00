"""The steps of a rank's plan as one table of bytes, so that a plan costs the transport a handful of values.

A record per module share: step, module number, start, stop, weight, total, lead, indexed. Where ``indexed`` is set,
start and stop are places in the array of all indices, which goes beside the table; else they are the slice itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_RECORD = struct.Struct("<iiqqddiI")
RECORD_NBYTES = _RECORD.size
_NO_PLACES = np.zeros(0, np.int64)


class ShareRow(NamedTuple):
    """One record: a module's share of a step."""

    step: int
    module: int
    rows: slice | npt.NDArray[np.int64]
    weight: float
    total: float
    lead: int


def pack_shares(shares: Iterable[ShareRow]) -> tuple[bytes, npt.NDArray[np.int64] | None]:
    """The table, and the indices of those shares that are no slices (None if there are none)."""
    records: list[bytes] = []
    arrays: list[npt.NDArray[np.int64]] = []
    place = 0
    for step, module, rows, weight, total, lead in shares:
        if isinstance(rows, slice):
            records.append(_RECORD.pack(step, module, rows.start, rows.stop, weight, total, lead, 0))
            continue
        arrays.append(rows)
        records.append(_RECORD.pack(step, module, place, place + len(rows), weight, total, lead, 1))
        place += len(rows)
    return b"".join(records), np.concatenate(arrays) if arrays else None


def unpack_shares(
    table: bytes, indices: npt.NDArray[np.integer] | None, *, num_steps: int, num_modules: int
) -> Iterator[ShareRow]:
    """The records of ``table``. Raises ValueError if it does not fit the numbers of steps, modules or indices."""
    if len(table) % RECORD_NBYTES:
        raise ValueError(f"a plan's table has {len(table)} bytes; it must be a multiple of {RECORD_NBYTES}")
    places = _NO_PLACES if indices is None else np.asarray(indices).astype(np.int64)
    for step, module, start, stop, weight, total, lead, indexed in _RECORD.iter_unpack(table):
        if not (0 <= step < num_steps and 0 <= module < num_modules and 0 <= start <= stop):
            raise ValueError(
                f"a plan's table names step {step}, module {module}, rows {start} to {stop}; "
                f"there are {num_steps} steps and {num_modules} modules"
            )
        if indexed and stop > len(places):
            raise ValueError(f"a plan's table names index {stop}; there are {len(places)}")
        rows = places[start:stop] if indexed else slice(start, stop)
        yield ShareRow(step, module, rows, weight, total, lead)
