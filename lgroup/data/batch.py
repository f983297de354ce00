"""Batches: columns by name, per module, with their rows on axis 0.

Invariant of a `SampleBatch` that came through `normalise`: every column is a numpy array or torch tensor of a numeric
dtype, or a nested dict of them, and all have the same number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lgroup.columns import DEFAULT_MODULE_ID, Columns

ModuleID: TypeAlias = str
ColumnTree: TypeAlias = dict[str, Any]
"""Columns by name: numpy arrays, torch tensors, or nested dicts of them."""
Indices: TypeAlias = "slice | npt.NDArray[np.integer[Any]] | npt.NDArray[np.bool_]"

_NUMERIC_KINDS = frozenset("biufcmM")
_ALLOWED = "numpy arrays and torch tensors with a row axis, and nested dicts of them"

# Columns with one scalar per step: where one has two axes, the batch is [B, T].
_STEP_COLUMNS = (
    Columns.REWARDS,
    Columns.TERMINATEDS,
    Columns.TRUNCATEDS,
    Columns.ACTION_LOGP,
    Columns.ADVANTAGES,
    Columns.VALUE_TARGETS,
    Columns.VF_PREDS,
)
_KNOWN_COLUMNS = frozenset(value for name, value in vars(Columns).items() if name.isupper())


class SampleBatch(dict[str, Any]):
    """The columns of one module. ``len()`` is the number of rows, as in RLlib, not of columns.

    ``batch["obs"]`` is a column; ``batch[10:20]`` and ``batch[np.array([3, 1])]`` are batches of these rows (a slice
    gives views). Values other than arrays and tensors (lists of numbers) are made numpy arrays.

    Raises ValueError if the columns have different numbers of rows, TypeError for a column that holds no numbers.
    """

    __slots__ = ()

    def __init__(self, columns: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        super().__init__()
        given = {} if columns is None else columns
        _fill(self, {**given, **more} if more else given, None)

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self)

    def __len__(self) -> int:
        return _num_rows(self)

    def __bool__(self) -> bool:
        return len(self) > 0

    def __getitem__(self, key: str | Indices) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        return _trusted(take(self, _plain_rows(key, len(self))))

    def __setitem__(self, name: str, value: Any) -> None:
        value, count = _column(name, value, None)
        for other, present in self.items():
            if other != name and _num_rows(present) != count:
                raise _rows_differ(name, count, other, _num_rows(present), None)
        super().__setitem__(name, value)

    def update(self, *args: Any, **more: Any) -> None:
        for name, value in dict(*args, **more).items():
            self[name] = value

    def __ior__(self, other: Any) -> SampleBatch:  # type: ignore[override, misc]
        self.update(other)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def copy(self, shallow: bool = False) -> SampleBatch:
        """A batch of copied arrays, or with ``shallow=True`` of the same ones."""
        return _trusted(dict(self) if shallow else map_columns(_copied, self))

    def concat(self, other: Mapping[str, Any]) -> SampleBatch:
        """The rows of this batch followed by those of ``other``, which must have the same columns."""
        return concat_samples([self, other])

    def env_steps(self) -> int:
        """Valid steps under a ``loss_mask``; else rows times the length of the time axis, where there is one."""
        return _env_steps(self)

    def agent_steps(self) -> int:
        """The same as `env_steps`: a batch of one module has one agent per step."""
        return _env_steps(self)

    def size_bytes(self) -> int:
        """Bytes of all columns."""
        return nbytes(self)

    def as_multi_agent(self, module_id: ModuleID = DEFAULT_MODULE_ID) -> MultiAgentBatch:
        """This batch as the only module of a `MultiAgentBatch`."""
        return MultiAgentBatch({module_id: self}, self.env_steps())

    def __reduce__(self) -> tuple[Any, ...]:
        return _trusted, (dict(self),)

    def __repr__(self) -> str:
        return f"SampleBatch({len(self)}: {sorted(self)})"


class MultiAgentBatch:
    """Batches by module id, and the number of env steps they were collected in. ``len()`` is the env steps."""

    __slots__ = ("_env_steps", "policy_batches")

    def __init__(self, policy_batches: Mapping[ModuleID, Mapping[str, Any]], env_steps: int) -> None:
        if env_steps < 0:
            raise ValueError(f"env_steps is {env_steps}; it must be 0 or more")
        self.policy_batches: dict[ModuleID, SampleBatch] = {
            _checked_module_id(module): columns if type(columns) is SampleBatch else _sample_batch(columns, module)
            for module, columns in policy_batches.items()
        }
        self._env_steps = int(env_steps)

    @property
    def count(self) -> int:
        """Env steps."""
        return self._env_steps

    @property
    def rows(self) -> dict[ModuleID, int]:
        """Number of rows by module."""
        return {module: len(batch) for module, batch in self.policy_batches.items()}

    def env_steps(self) -> int:
        return self._env_steps

    def agent_steps(self) -> int:
        """Sum of the modules' steps."""
        return sum(_env_steps(batch) for batch in self.policy_batches.values())

    def row_weights(self) -> dict[ModuleID, npt.NDArray[np.float64]]:
        """Valid steps of each row, float64 ``[rows]``, for the modules that have a ``loss_mask``."""
        return {
            module: _mask_weights(batch[Columns.LOSS_MASK])
            for module, batch in self.policy_batches.items()
            if Columns.LOSS_MASK in batch
        }

    def as_multi_agent(self) -> MultiAgentBatch:
        return self

    def copy(self) -> MultiAgentBatch:
        """A batch of copied arrays."""
        return MultiAgentBatch({m: batch.copy() for m, batch in self.policy_batches.items()}, self._env_steps)

    def size_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(map(nbytes, self.policy_batches.values()))

    def __getitem__(self, module_id: ModuleID) -> SampleBatch:
        return self.policy_batches[module_id]

    def __iter__(self) -> Iterator[ModuleID]:
        return iter(self.policy_batches)

    def __contains__(self, module_id: object) -> bool:
        return module_id in self.policy_batches

    def __len__(self) -> int:
        return self._env_steps

    def __repr__(self) -> str:
        return f"MultiAgentBatch({self.policy_batches}, env_steps={self._env_steps})"


def normalise(batch: Any) -> MultiAgentBatch:
    """Any accepted training batch as a checked `MultiAgentBatch`; its arrays are the caller's own, not copies.

    Accepted: `SampleBatch`, `MultiAgentBatch`, a mapping of columns (a TensorDict is one), or a mapping of module id to
    one of these. A mapping whose values are all mappings is one of modules, unless a key is the name of a known column:
    wrap the columns in `SampleBatch` to say so explicitly.

    Env steps are those of a `MultiAgentBatch`; else the sum over modules of the valid steps under ``loss_mask``, or of
    B times T, where T is axis 1 of a column with one scalar per step (rewards, action_logp, ...), or 1.

    Raises TypeError for what is no batch or a column that holds no numbers, ValueError if rows differ.
    """
    if isinstance(batch, MultiAgentBatch):
        return MultiAgentBatch(
            {module: _sample_batch(columns, module) for module, columns in batch.policy_batches.items()},
            batch.env_steps(),
        )
    if not isinstance(batch, SampleBatch):
        if not _is_mapping(batch):
            raise TypeError(
                f"batch is a {type(batch).__name__}; allowed are SampleBatch, MultiAgentBatch, a dict of columns "
                "or a dict of module id to one"
            )
        if _maps_modules(batch):
            batches = {module: _sample_batch(columns, module) for module, columns in batch.items()}
            return MultiAgentBatch(batches, sum(map(_env_steps, batches.values())))
    columns = _sample_batch(batch, None)
    return MultiAgentBatch({DEFAULT_MODULE_ID: columns}, _env_steps(columns))


def take(columns: Mapping[str, Any], rows: Indices) -> ColumnTree:
    """The columns with axis 0 indexed: views for a slice, gathered copies for int64 indices from 0.

    Nested dicts stay. A slice of all rows gives the arrays themselves: that is a small update's usual step, and slicing
    a tensor takes 3 us where a numpy array takes 0.2.
    """
    if isinstance(rows, slice):
        if (
            rows.step is None
            and not rows.start
            and (rows.stop is None or rows.stop >= _num_rows(next(iter(columns.values()), None)))
        ):
            return {name: take(value, rows) if isinstance(value, dict) else value for name, value in columns.items()}
        return {name: take(value, rows) if isinstance(value, dict) else value[rows] for name, value in columns.items()}
    if rows.dtype == np.bool_:
        rows = np.flatnonzero(rows)
    taken: ColumnTree = {}
    indices: torch.Tensor | None = None
    for name, value in columns.items():
        if isinstance(value, np.ndarray):
            taken[name] = value.take(rows, axis=0)
        elif isinstance(value, dict):
            taken[name] = take(value, rows)
        else:
            if indices is None:
                # from_numpy warns about read-only arrays, and those of a plan are.
                indices = torch.from_numpy(np.array(rows, dtype=np.int64)).to(value.device)
            taken[name] = value.index_select(0, indices)
    return taken


def concat_columns(parts: Sequence[Mapping[str, Any]]) -> ColumnTree:
    """The columns of ``parts`` joined along axis 0. Raises ValueError if their columns or inner shapes differ."""
    if not parts:
        return {}
    return _concat(parts, "")


def concat_samples(batches: Sequence[Mapping[str, Any]]) -> SampleBatch:
    """One `SampleBatch` of the rows of all; those without columns are left out."""
    return _trusted(concat_columns([batch for batch in batches if batch.keys()]))


def concat_multi_agent(batches: Iterable[MultiAgentBatch]) -> MultiAgentBatch:
    """One `MultiAgentBatch` of the rows and env steps of all, module by module."""
    parts: dict[ModuleID, list[SampleBatch]] = {}
    env_steps = 0
    for batch in batches:
        env_steps += batch.env_steps()
        for module, columns in batch.policy_batches.items():
            parts.setdefault(module, []).append(columns)
    joined = {m: found[0] if len(found) == 1 else concat_samples(found) for m, found in parts.items()}
    return MultiAgentBatch(joined, env_steps)


def map_columns(function: Callable[[Any], Any], columns: Mapping[str, Any]) -> ColumnTree:
    """The columns with ``function`` applied to each array."""
    return {
        name: map_columns(function, value) if isinstance(value, dict) else function(value)
        for name, value in columns.items()
    }


def row_weights(columns: Mapping[str, Any]) -> npt.NDArray[np.float64] | None:
    """Valid steps of each row, float64 ``[rows]``; None without a ``loss_mask`` column."""
    mask = columns.get(Columns.LOSS_MASK)
    return None if mask is None else _mask_weights(mask)


def nbytes(columns: Mapping[str, Any]) -> int:
    """Bytes of all columns."""
    return sum(nbytes(value) if isinstance(value, dict) else value.nbytes for value in columns.values())


def _trusted(columns: ColumnTree) -> SampleBatch:
    """A batch of columns that are known to be checked."""
    batch = SampleBatch.__new__(SampleBatch)
    dict.update(batch, columns)
    return batch


def _sample_batch(columns: Any, module: ModuleID | None) -> SampleBatch:
    if not _is_mapping(columns):
        found = type(columns).__name__
        raise TypeError(f"batch of module {_checked_module_id(module)!r} is a {found}; a dict of columns is allowed")
    batch = SampleBatch.__new__(SampleBatch)
    _fill(batch, columns, module)
    return batch


def _fill(batch: SampleBatch, columns: Mapping[str, Any], module: ModuleID | None) -> None:
    """Put ``columns`` into the empty ``batch``, checked."""
    put = dict.__setitem__
    first, rows = "", -1
    for name, value in columns.items():
        if type(value) is np.ndarray and value.ndim and value.dtype.kind in _NUMERIC_KINDS and type(name) is str:
            count = value.shape[0]
        else:
            value, count = _column(name, value, module)
        if count != rows:
            if rows >= 0:
                raise _rows_differ(name, count, first, rows, module)
            first, rows = name, count
        put(batch, name, value)


def _column(name: Any, value: Any, module: ModuleID | None) -> tuple[Any, int]:
    """The column as it is kept, and its number of rows."""
    if not isinstance(name, str):
        raise TypeError(f"batch column {name!r}{_of(module)} is named by a {type(name).__name__}; names are strings")
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            raise _not_a_column(name, "a tensor without axes", module)
        return value, value.shape[0]
    if _is_mapping(value):
        if name == Columns.LOSS_MASK:
            raise _not_a_column(name, "a dict", module)
        return _nested_column(name, value, module)
    if not isinstance(value, np.ndarray):
        value = _as_array(name, value, module)
    if value.dtype.hasobject or value.dtype.names is not None or value.dtype.kind in "SU":
        raise _not_a_column(name, f"an array of dtype {value.dtype}", module)
    if value.ndim == 0:
        raise _not_a_column(name, "an array without axes", module)
    return np.asarray(value), value.shape[0]


def _as_array(name: str, value: Any, module: ModuleID | None) -> npt.NDArray[Any]:
    """A list of numbers, or whatever else numpy makes an array of."""
    try:
        return np.asarray(value)
    except ValueError as error:  # ragged
        raise _not_a_column(name, f"a {type(value).__name__} that is no array ({error})", module) from None


def _nested_column(name: str, value: Mapping[str, Any], module: ModuleID | None) -> tuple[ColumnTree, int]:
    nested: ColumnTree = {}
    first, rows = "", -1
    for key, inner in value.items():
        path = f"{name}.{key}"
        if not isinstance(key, str):
            raise TypeError(f"batch column {path!r}{_of(module)} is named by a {type(key).__name__}; names are strings")
        nested[key], count = _column(path, inner, module)
        if rows >= 0 and count != rows:
            raise _rows_differ(path, count, first, rows, module)
        first, rows = path, count
    if rows < 0:
        raise _not_a_column(name, "an empty dict", module)
    return nested, rows


def _num_rows(value: Any) -> int:
    """Rows of a column, by the first array in it; 0 for None and for a dict without columns."""
    while isinstance(value, dict):
        value = next(iter(value.values()), None)
    return 0 if value is None else int(value.shape[0])


def _env_steps(batch: SampleBatch) -> int:
    mask = batch.get(Columns.LOSS_MASK)
    if mask is not None:
        return int(np.count_nonzero(mask) if isinstance(mask, np.ndarray) else torch.count_nonzero(mask))
    for name in _STEP_COLUMNS:
        value = batch.get(name)
        if value is not None and not isinstance(value, dict):
            shape = value.shape
            return int(shape[0] * shape[1]) if len(shape) > 1 else int(shape[0])
    return _num_rows(batch)


def _mask_weights(mask: Any) -> npt.NDArray[np.float64]:
    if isinstance(mask, torch.Tensor):
        # Summed by torch: numpy has no bfloat16.
        mask = mask.detach().double().reshape(mask.shape[0], math.prod(mask.shape[1:])).sum(1).cpu().numpy()
    weights: npt.NDArray[np.float64] = mask.sum(axis=tuple(range(1, mask.ndim)), dtype=np.float64)
    return weights


def _plain_rows(rows: Indices, count: int) -> Indices:
    """Rows as `take` wants them: no mask, no negative step (tensors have none)."""
    if isinstance(rows, slice):
        return rows if rows.step is None or rows.step > 0 else np.arange(count)[rows]
    array: npt.NDArray[Any] = np.asarray(rows)
    if array.dtype == np.bool_:
        if array.shape != (count,):
            raise IndexError(f"a mask of shape {array.shape} cannot select rows; it needs ({count},)")
        return np.flatnonzero(array)
    if array.size == 0:
        return array.reshape(-1).astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise IndexError(f"rows are selected by a slice, a mask or an int array with one axis, not by {rows!r}")
    if int(array.min()) < -count or int(array.max()) >= count:
        raise IndexError(f"rows {int(array.min())} to {int(array.max())} are out of range; the batch has {count}")
    return np.where(array < 0, array + count, array)


def _concat(parts: Sequence[Mapping[str, Any]], path: str) -> ColumnTree:
    first = parts[0]
    for part in parts[1:]:
        if part.keys() != first.keys():
            differing = ", ".join(repr(path + str(name)) for name in sorted(part.keys() ^ first.keys()))
            raise ValueError(f"cannot join batches with different columns: only some have {differing}")
    joined: ColumnTree = {}
    for name in first:
        values = [part[name] for part in parts]
        kinds = {
            dict if isinstance(v, dict) else torch.Tensor if isinstance(v, torch.Tensor) else np.ndarray for v in values
        }
        if len(kinds) > 1:
            raise ValueError(
                f"cannot join column {path + name!r}: some are {' and some '.join(sorted(k.__name__ for k in kinds))}"
            )
        joined[name] = _concat(values, f"{path}{name}.") if kinds == {dict} else _concat_arrays(values, path + name)
    return joined


def _concat_arrays(values: Sequence[Any], name: str) -> Any:
    inner = {tuple(value.shape[1:]) for value in values}
    if len(inner) > 1:
        raise ValueError(f"cannot join column {name!r}: the shapes of a row differ: {sorted(inner)}")
    return torch.cat(list(values)) if isinstance(values[0], torch.Tensor) else np.concatenate(values)


def _copied(array: Any) -> Any:
    return array.clone() if isinstance(array, torch.Tensor) else array.copy()


def _is_mapping(value: Any) -> bool:
    # A TensorDict is a mapping in all but name.
    return isinstance(value, (dict, Mapping)) or (hasattr(value, "keys") and hasattr(value, "items"))


def _maps_modules(batch: Mapping[str, Any]) -> bool:
    """Whether this maps module ids to batches, rather than names to columns."""
    for name, value in batch.items():
        if type(value) is np.ndarray or name in _KNOWN_COLUMNS:
            return isinstance(value, SampleBatch)
        if isinstance(value, SampleBatch):
            return True
        if not _is_mapping(value):
            return False
    return True


def _checked_module_id(module: Any) -> ModuleID:
    if not isinstance(module, str):
        raise TypeError(f"module id {module!r} is a {type(module).__name__}; ids are strings")
    return module


def _of(module: ModuleID | None) -> str:
    return "" if module is None else f" of module {module!r}"


def _rows_differ(name: str, count: int, other: str, expected: int, module: ModuleID | None) -> ValueError:
    return ValueError(
        f"batch column {name!r}{_of(module)} has {count} rows, {other!r} has {expected}; all must have the same number"
    )


def _not_a_column(name: str, found: str, module: ModuleID | None) -> TypeError:
    return TypeError(f"batch column {name!r}{_of(module)} is {found}; allowed are {_ALLOWED}")
