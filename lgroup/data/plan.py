"""Which rows each rank trains on, in which step, and with which weight. Pure arithmetic.

Invariants of a plan, whatever the number of ranks:

* every row of every module is used exactly once per epoch;
* all ranks have the same number of steps, and in a step the same modules in sorted order;
* step ``s`` of a module holds the same set of rows for any number of ranks, split contiguously and evenly;
* ``ModuleShare.total`` is the sum of ``ModuleShare.weight`` over the ranks.

Plans are shared between callers (the small ones are cached): nobody writes to their dicts and arrays.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, zip_longest
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lgroup.data._plan_wire import ShareRow, pack_shares, unpack_shares

ModuleID: TypeAlias = str
IndexArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
Rows: TypeAlias = "slice | IndexArray"
"""Rows of axis 0: a contiguous slice where possible (taking it copies nothing), else int64 indices."""

_NO_WEIGHTS: Mapping[ModuleID, npt.ArrayLike | None] = MappingProxyType({})

# A plan is cached if it has no more index entries and steps than this: 32 of them then hold 4 MB each at most.
_MAX_CACHED_ROWS = 16_384
_MAX_CACHED_STEPS = 64


@dataclass(frozen=True, slots=True, eq=False)
class ModuleShare:
    """What one rank contributes to one step of one module."""

    rows: Rows
    """Positions in the rank's gathered rows of that module. May be empty."""
    weight: float
    """This rank's weight: its number of rows, or of valid steps under a loss mask."""
    total: float
    """The sum of the weights of all ranks. 0 if every row of the step is masked."""
    lead: int
    """The lowest rank with a weight above 0, -1 if there is none."""


Step: TypeAlias = dict[ModuleID, ModuleShare]
"""One optimizer step. Modules in sorted order; one that has no rows on any rank is not in it."""


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's part of a plan."""

    gather: Mapping[ModuleID, Rows]
    """Rows of the whole batch that this rank needs, by module, in the order in which the steps address them."""
    steps: tuple[Step, ...]

    @property
    def modules(self) -> tuple[ModuleID, ...]:
        """The modules that are trained, sorted."""
        return tuple(self.gather)

    @cached_property
    def _packed(self) -> tuple[bytes, IndexArray | None]:
        index = {module: i for i, module in enumerate(self.gather)}
        return pack_shares(
            ShareRow(number, index[module], share.rows, share.weight, share.total, share.lead)
            for number, step in enumerate(self.steps)
            for module, share in step.items()
        )

    def to_wire(self, *, with_gather: bool = True) -> dict[str, Any]:
        """The plan as a plain tree of strings, ints, bytes and int arrays.

        With ``with_gather=False`` the receiver gets the gathered rows themselves: its plan's ``gather`` takes all of
        what it has, as ``slice(0, n)``.
        """
        table, indices = self._packed
        gather = [_rows_to_wire(rows) if with_gather else [0, num_rows(rows)] for rows in self.gather.values()]
        return {
            "modules": list(self.gather),
            "gather": gather,
            "num_steps": len(self.steps),
            "shares": table,
            "indices": indices,
        }

    @classmethod
    def from_wire(cls, tree: Mapping[str, Any]) -> RankPlan:
        """The plan that ``to_wire`` wrote. Raises ValueError if the tree is not one."""
        modules: list[ModuleID] = tree["modules"]
        steps: tuple[Step, ...] = tuple({} for _ in range(tree["num_steps"]))
        for row in unpack_shares(tree["shares"], tree["indices"], num_steps=len(steps), num_modules=len(modules)):
            steps[row.step][modules[row.module]] = ModuleShare(row.rows, row.weight, row.total, row.lead)
        gather = dict(zip(modules, map(_rows_from_wire, tree["gather"]), strict=True))
        return cls(gather, steps)

    def weight_table(self, row_weights: Mapping[ModuleID, npt.ArrayLike | None] = _NO_WEIGHTS) -> FloatArray:
        """This rank's weights, float64 ``[steps, modules]``; 0 where a module is not in a step.

        ``row_weights`` are those of the rank's *gathered* rows and replace the weights of the plan.
        """
        counts = {module: num_rows(rows) for module, rows in self.gather.items()}
        given = {m: _checked_weights(m, counts[m], w) for m, w in row_weights.items() if w is not None and m in counts}
        table = np.zeros((len(self.steps), len(self.gather)))
        for number, step in enumerate(self.steps):
            for column, module in enumerate(self.gather):
                if module in step:
                    share = step[module]
                    weights = given.get(module)
                    table[number, column] = share.weight if weights is None else weights[share.rows].sum()
        return table

    def with_totals(
        self, totals: npt.ArrayLike, leads: npt.ArrayLike, *, weights: npt.ArrayLike | None = None
    ) -> RankPlan:
        """The same rows with totals (float) and leads (int) of ``[steps, modules]``, as summed over all ranks.

        ``weights`` (same shape, this rank's, as from `weight_table`) replace the weights too.
        """
        shape = (len(self.steps), len(self.gather))
        tables = [np.asarray(table) for table in (totals, leads, *(() if weights is None else (weights,)))]
        for table in tables:
            if table.shape != shape:
                raise ValueError(
                    f"totals, leads and weights have the shape [steps, modules] = {shape}, not {table.shape}"
                )
        column = {module: i for i, module in enumerate(self.gather)}
        steps = tuple(
            {
                module: ModuleShare(
                    share.rows,
                    share.weight if weights is None else float(tables[2][number, column[module]]),
                    float(tables[0][number, column[module]]),
                    int(tables[1][number, column[module]]),
                )
                for module, share in step.items()
            }
            for number, step in enumerate(self.steps)
        )
        return RankPlan(self.gather, steps)


@dataclass(frozen=True, eq=False)
class Plan:
    """All ranks' parts of one update."""

    ranks: tuple[RankPlan, ...]
    modules: tuple[ModuleID, ...]
    """The modules that are trained (those with rows), sorted."""
    rows: dict[ModuleID, int]
    """Rows per module, as planned for."""
    num_steps: int

    @property
    def world_size(self) -> int:
        return len(self.ranks)


def num_rows(rows: Rows) -> int:
    """How many rows ``rows`` names. A slice is taken to be contiguous and within its array, as in every plan."""
    return max(0, rows.stop - rows.start) if isinstance(rows, slice) else len(rows)


def leads_of(weights_by_rank: npt.ArrayLike) -> IndexArray:
    """The lowest rank with a weight above 0 for ``[ranks, steps, modules]``, as int64 ``[steps, modules]``, else -1."""
    positive = np.asarray(weights_by_rank) > 0
    return np.where(positive.any(axis=0), positive.argmax(axis=0), -1).astype(np.int64)


def make_plan(
    rows: Mapping[ModuleID, int],
    *,
    world_size: int,
    row_weights: Mapping[ModuleID, npt.ArrayLike | None] = _NO_WEIGHTS,
    num_epochs: int = 1,
    minibatch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
) -> Plan:
    """The plan of one update over ``world_size`` ranks, for a batch that lies in one place.

    ``rows`` is the number of rows of each module, ``row_weights`` their weights (finite, not negative; one per row)
    where they are not all 1. ``minibatch_size`` counts rows of one module in one optimizer step over the whole group;
    the last minibatch of an epoch is short, and a module that ran out is not in the epoch's later steps. ``shuffle``
    draws one permutation of the whole batch per epoch and module from (seed, epoch, module); it is skipped without a
    minibatch size, where it would change nothing.

    Raises ValueError for an argument out of range.
    """
    shuffle = shuffle and minibatch_size is not None
    if not shuffle and not row_weights and _is_small(rows, minibatch_size):
        return _cached_plan(tuple(rows.items()), world_size, num_epochs, minibatch_size)
    return _new_plan(dict(rows), world_size, row_weights, num_epochs, minibatch_size, shuffle, seed)


def local_plan(
    rows_by_rank: Sequence[Mapping[ModuleID, int]],
    rank: int,
    *,
    num_epochs: int = 1,
    minibatch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
) -> RankPlan:
    """The plan of ``rank`` for data that already lie on the ranks: it trains on its own rows only.

    A module has as many steps per epoch as its rows on all ranks make minibatches, and each rank spreads its own
    rows evenly over them (so a step can hold up to one row per rank more than ``minibatch_size``, and steps that no
    rank has rows for are left out). Weights and totals count rows; under a loss mask, sum `RankPlan.weight_table`
    over the ranks and use `RankPlan.with_totals`.

    Raises ValueError for an argument out of range.
    """
    if not 0 <= rank < len(rows_by_rank):
        raise ValueError(f"rank is {rank}; with {len(rows_by_rank)} ranks it is from 0 to {len(rows_by_rank) - 1}")
    _check_sizes(len(rows_by_rank), num_epochs, minibatch_size)
    shuffle = shuffle and minibatch_size is not None
    gather: dict[ModuleID, Rows] = {}
    parts: dict[ModuleID, list[list[ModuleShare | None]]] = {}
    for module in sorted({module for rows in rows_by_rank for module in rows}):
        counts = [_checked_count(module, rows.get(module, 0)) for rows in rows_by_rank]
        if not any(counts):
            continue
        orders: Sequence[IndexArray | None] = [None]
        if shuffle:
            orders = [_permutation(seed, epoch, module, counts[rank]) for epoch in range(num_epochs)]
        gather[module] = slice(0, counts[rank])
        parts[module] = _local_shares(_local_cuts(counts, minibatch_size), orders, rank)
    return RankPlan(gather, _zip_steps(parts, num_epochs))


def _local_cuts(counts: Sequence[int], minibatch_size: int | None) -> list[list[int]]:
    """``[ranks][steps + 1]``: rank ``r`` takes places ``cuts[r][s]`` to ``cuts[r][s + 1]`` of its own order.

    The offset staggers the ranks: without it, ranks with one row each would all take it in the last step.
    """
    num_steps = 1 if minibatch_size is None else -(-sum(counts) // minibatch_size)
    offsets = [before % num_steps for before in accumulate(counts, initial=0)]
    return [
        [(own * step + offset) // num_steps for step in range(num_steps + 1)]
        for own, offset in zip(counts, offsets, strict=False)
    ]


def _local_shares(
    cuts: list[list[int]], orders: Sequence[IndexArray | None], rank: int
) -> list[list[ModuleShare | None]]:
    spans = [slice(lo, hi) for lo, hi in pairwise(cuts[rank])]
    table = [[float(own[step + 1] - own[step]) for own in cuts] for step in range(len(spans))]
    return [
        [
            ModuleShare(span if order is None else order[span], weights[rank], sum(weights), _lead(weights))
            if any(weights)
            else None
            for span, weights in zip(spans, table, strict=True)
        ]
        for order in orders
    ]


@lru_cache(maxsize=32)
def _cached_plan(
    items: tuple[tuple[ModuleID, int], ...], world_size: int, num_epochs: int, minibatch_size: int | None
) -> Plan:
    return _new_plan(dict(items), world_size, _NO_WEIGHTS, num_epochs, minibatch_size, False, 0)


def _is_small(rows: Mapping[ModuleID, int], minibatch_size: int | None) -> bool:
    if minibatch_size is None:
        return True
    most = max(rows.values(), default=0)
    return most <= _MAX_CACHED_ROWS and most <= _MAX_CACHED_STEPS * minibatch_size


def _new_plan(
    rows: dict[ModuleID, int],
    world_size: int,
    row_weights: Mapping[ModuleID, npt.ArrayLike | None],
    num_epochs: int,
    minibatch_size: int | None,
    shuffle: bool,
    seed: int,
) -> Plan:
    _check_sizes(world_size, num_epochs, minibatch_size)
    rows = {module: _checked_count(module, count) for module, count in rows.items()}
    for module in row_weights:
        if module not in rows:
            raise ValueError(f"row_weights names module {module!r}; rows has {sorted(rows)}")
    modules = tuple(sorted(module for module, count in rows.items() if count))
    splits: dict[ModuleID, _Split] = {}
    for module in modules:
        given = row_weights.get(module)
        weights = None if given is None else _checked_weights(module, rows[module], given)
        orders = [_permutation(seed, e, module, rows[module]) for e in range(num_epochs)] if shuffle else [None]
        splits[module] = _split(rows[module], world_size, minibatch_size, weights, orders)
    ranks = tuple(_rank_plan(splits, rank, num_epochs) for rank in range(world_size))
    return Plan(ranks, modules, rows, len(ranks[0].steps))


@dataclass(frozen=True, slots=True)
class _Split:
    """The rows of one module, cut into steps and ranks."""

    num_rows: int
    cuts: list[list[int]]
    """``[steps][ranks + 1]``: rank ``r`` takes places ``cuts[s][r]`` to ``cuts[s][r + 1]`` of an epoch's order."""
    orders: Sequence[IndexArray | None]
    """The order of the rows in each epoch. A single None stands for all epochs: the order of the batch."""
    weights: list[list[list[float]]]
    """``[epochs][steps][ranks]``, as many epochs as orders."""


def _split(
    count: int,
    world_size: int,
    minibatch_size: int | None,
    weights: FloatArray | None,
    orders: Sequence[IndexArray | None],
) -> _Split:
    size = minibatch_size or count
    cuts = []
    for start in range(0, count, size):
        own = min(size, count - start)
        cuts.append([start + own * rank // world_size for rank in range(world_size + 1)])
    if weights is None:
        table = [[float(hi - lo) for lo, hi in pairwise(cut)] for cut in cuts]
        return _Split(count, cuts, orders, [table] * len(orders))
    return _Split(count, cuts, orders, [_weights_of_cuts(cuts, weights, order) for order in orders])


def _weights_of_cuts(cuts: list[list[int]], weights: FloatArray, order: IndexArray | None) -> list[list[float]]:
    """Sums between the cuts, ``[steps][ranks]``.

    Each is summed by itself: differences of a running sum would leave a rounding error where all weights are 0.
    """
    starts = np.array([cut[:-1] for cut in cuts])
    empty = starts == np.array([cut[1:] for cut in cuts])
    # reduceat gives the element itself for an empty span, and refuses a start at the end: hence the 0 appended.
    ordered = np.append(weights if order is None else weights[order], 0.0)
    sums = np.add.reduceat(ordered, starts.ravel()).reshape(starts.shape)
    table: list[list[float]] = np.where(empty, 0.0, sums).tolist()
    return table


def _rank_plan(splits: Mapping[ModuleID, _Split], rank: int, num_epochs: int) -> RankPlan:
    gather: dict[ModuleID, Rows] = {}
    parts: dict[ModuleID, list[list[ModuleShare | None]]] = {}
    for module, split in splits.items():
        gather[module], rows_by_epoch = _rank_rows(split, rank)
        parts[module] = [
            [
                ModuleShare(rows, weights[rank], sum(weights), _lead(weights))
                for rows, weights in zip(by_step, table, strict=True)
            ]
            for by_step, table in zip(rows_by_epoch, split.weights, strict=True)
        ]
    return RankPlan(gather, _zip_steps(parts, num_epochs))


def _rank_rows(split: _Split, rank: int) -> tuple[Rows, list[list[Rows]]]:
    """What ``rank`` gathers, and the rows of its steps within that, by epoch and step."""
    spans = [slice(cut[rank], cut[rank + 1]) for cut in split.cuts]
    if len(split.orders) > 1:
        return _rows_of_epochs(split, spans)
    ends = list(accumulate((num_rows(span) for span in spans), initial=0))
    order = split.orders[0]
    steps: list[Rows] = [slice(lo, hi) for lo, hi in pairwise(ends)]
    if order is not None:
        return _frozen(np.concatenate([order[span] for span in spans])), [steps]
    filled = [span for span in spans if span.start < span.stop]
    if all(left.stop == right.start for left, right in pairwise(filled)):
        return (slice(filled[0].start, filled[-1].stop) if filled else slice(0, 0)), [steps]
    return _frozen(np.concatenate([np.arange(span.start, span.stop) for span in filled])), [steps]


def _rows_of_epochs(split: _Split, spans: list[slice]) -> tuple[Rows, list[list[Rows]]]:
    """The union of the rows that several shuffled epochs need, gathered once."""
    needed = np.zeros(split.num_rows, dtype=bool)
    by_epoch = [[order[span] for span in spans] for order in split.orders if order is not None]
    for by_step in by_epoch:
        for rows in by_step:
            needed[rows] = True
    if needed.all():
        return slice(0, split.num_rows), [[_frozen(rows) for rows in by_step] for by_step in by_epoch]
    place = np.cumsum(needed) - 1
    return _frozen(np.flatnonzero(needed)), [[_frozen(place[rows]) for rows in by_step] for by_step in by_epoch]


def _zip_steps(parts: Mapping[ModuleID, Sequence[Sequence[ModuleShare | None]]], num_epochs: int) -> tuple[Step, ...]:
    """The steps of all epochs from ``parts[module][epoch][step]``; a single epoch given stands for all."""
    steps: list[Step] = []
    num_given = 0
    for num_given, by_module in enumerate(zip(*parts.values(), strict=True), start=1):  # noqa: B007 (used below)
        for shares in zip_longest(*by_module):
            step = {module: share for module, share in zip(parts, shares, strict=True) if share is not None}
            if step:
                steps.append(step)
    return tuple(steps) if num_given == num_epochs else tuple(steps) * num_epochs


def _permutation(seed: int, epoch: int, module: ModuleID, count: int) -> IndexArray:
    entropy = [seed & 0xFFFF_FFFF_FFFF_FFFF, epoch, zlib.crc32(module.encode())]
    return _frozen(np.random.default_rng(entropy).permutation(count).astype(np.int64, copy=False))


def _lead(weights: Sequence[float]) -> int:
    return next((rank for rank, weight in enumerate(weights) if weight > 0), -1)


def _frozen(rows: IndexArray) -> IndexArray:
    rows.flags.writeable = False
    return rows


def _rows_to_wire(rows: Rows) -> Any:
    if isinstance(rows, slice):
        return [rows.start, rows.stop]
    return rows.astype(np.int32) if len(rows) == 0 or int(rows.max()) < 2**31 else rows


def _rows_from_wire(tree: Any) -> Rows:
    return tree.astype(np.int64) if isinstance(tree, np.ndarray) else slice(tree[0], tree[1])


def _check_sizes(world_size: int, num_epochs: int, minibatch_size: int | None) -> None:
    for name, value in (("world_size", world_size), ("num_epochs", num_epochs), ("minibatch_size", minibatch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 or more" + (" or None" if name[0] == "m" else ""))


def _checked_count(module: ModuleID, count: int) -> int:
    if operator.index(count) < 0:
        raise ValueError(f"module {module!r} has {count} rows; the number of rows is 0 or more")
    return operator.index(count)


def _checked_weights(module: ModuleID, count: int, weights: npt.ArrayLike) -> FloatArray:
    array = np.asarray(weights, dtype=np.float64)
    if array.shape != (count,):
        raise ValueError(f"row_weights of module {module!r} has shape {array.shape}; it needs ({count},), one per row")
    if not (np.isfinite(array).all() and (array >= 0).all()):
        row = int(np.flatnonzero(~(np.isfinite(array) & (array >= 0)))[0])
        raise ValueError(f"row_weights of module {module!r} is {array[row]} at row {row}; it must be finite, 0 or more")
    return array
