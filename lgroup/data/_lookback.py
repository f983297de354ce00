"""What one kind of an episode's data is kept in: items in time order, the first of which may be history.

Invariant: ``0 <= lookback <= total``. Index 0 is the first item that is no history. The items are a list (while the
episode grows) or one tree of arrays stacked along axis 0; what was never filled is a list, as its shape is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Index: TypeAlias = "int | slice | Sequence[int] | None"


class LookbackBuffer:
    """Items with ``lookback`` items of history in front. ``len()`` does not count the history."""

    __slots__ = ("data", "lookback")

    def __init__(self, data: Any = (), lookback: int = 0) -> None:
        self.data: Any = list(data) if isinstance(data, (list, tuple)) else tree_map(np.asarray, data)
        """A list of items, or a tree of arrays."""
        self.lookback = lookback
        if not 0 <= lookback <= self.total:
            raise ValueError(f"lookback is {lookback}; with {self.total} items it is from 0 to {self.total}")

    @property
    def is_numpy(self) -> bool:
        return not isinstance(self.data, list)

    @property
    def total(self) -> int:
        """Number of items with the history."""
        return tree_len(self.data)

    def __len__(self) -> int:
        return self.total - self.lookback

    def append(self, item: Any) -> None:
        if isinstance(self.data, list):
            self.data.append(item)
        else:
            self.data = tree_map(lambda old, new: np.concatenate([old, new]), self.data, stack([item]))

    def extend(self, other: LookbackBuffer) -> None:
        """Append the items of ``other`` that are no history there."""
        if isinstance(self.data, list) and not other.is_numpy:
            self.data.extend(other.data[other.lookback :])
        elif len(other):
            new = stack_or_same(other.get())
            self.data = tree_map(lambda a, b: np.concatenate([a, b]), stack(self.data), new) if self.total else new

    def drop_last(self) -> None:
        self.data = self.part(slice(0, self.total - 1))

    def part(self, places: slice) -> Any:
        """Items by their place, the history counted too: a new list, or views of the arrays."""
        return self.data[places] if isinstance(self.data, list) else tree_map(lambda array: array[places], self.data)

    def to_numpy(self) -> None:
        """Stack the items; no change if there are none or it is done."""
        self.data = stack_or_same(self.data)

    def unstack(self) -> None:
        """Make a list of the items again, for a buffer that is to grow. They are copies, and keep no array alive."""
        if not isinstance(self.data, list):
            count = self.total
            self.data = [tree_map(lambda array, place=i: array[place].copy(), self.data) for i in range(count)]

    def get(self, index: Index = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """Items by index: all that are no history for None, one for an int, several for a slice or a list of ints.

        A negative index counts from the end, or with ``neg_index_as_lookback`` from the start into the history.
        Indices out of range raise IndexError (a slice is cut to what is there), or give ``fill`` if it is not None.
        """
        if index is None:
            return self.part(slice(self.lookback, None))
        if isinstance(index, slice):
            places = self._places(index, neg_index_as_lookback, clip=fill is None)
            if fill is None and isinstance(places, slice):
                return self.part(places)
            return self._pick_each(places, fill)
        if isinstance(index, (int, np.integer)):
            return self._item(self._place(int(index), neg_index_as_lookback), fill)
        return self._pick_each([self._place(int(i), neg_index_as_lookback) for i in index], fill)

    def _place(self, index: int, neg_index_as_lookback: bool) -> int:
        """Where logical ``index`` lies in ``data``; may be out of range."""
        return index + (self.total if index < 0 and not neg_index_as_lookback else self.lookback)

    def _places(self, index: slice, neg_index_as_lookback: bool, *, clip: bool) -> slice | range:
        step = 1 if index.step is None else index.step
        lowest, highest = (self.lookback, self.total) if step > 0 else (self.lookback - 1, self.total - 1)
        ends = (lowest, highest) if step > 0 else (highest, lowest)
        start, stop = (
            default if end is None else self._place(end, neg_index_as_lookback)
            for end, default in zip((index.start, index.stop), ends, strict=True)
        )
        if not clip:
            return range(start, stop, step)
        if step > 0:
            return slice(max(start, 0), max(min(stop, self.total), 0), step)
        return range(min(start, self.total - 1), max(stop, -1), step)

    def _pick_each(self, places: Iterable[int] | slice, fill: Any) -> Any:
        if isinstance(places, slice):
            places = range(*places.indices(self.total))
        wanted = np.array(list(places), dtype=np.int64)
        inside = (wanted >= 0) & (wanted < self.total)
        if fill is None and not inside.all():
            raise self._out_of_range(int(wanted[~inside][0]))
        if isinstance(self.data, list):
            return [self._item(place, fill) for place in wanted.tolist()]
        return tree_map(lambda array: _picked(array, wanted, inside, fill), self.data)

    def _item(self, place: int, fill: Any) -> Any:
        if not 0 <= place < self.total:
            if fill is None:
                raise self._out_of_range(place)
            return tree_map(lambda like: _filled(like, fill), self._item(0, None)) if self.total else fill
        return self.data[place] if isinstance(self.data, list) else tree_map(lambda array: array[place], self.data)

    def _out_of_range(self, place: int) -> IndexError:
        first = -self.lookback
        return IndexError(f"there is no item {place - self.lookback}: they go from {first} to {len(self) - 1}")


def _picked(array: npt.NDArray[Any], places: npt.NDArray[np.int64], inside: npt.NDArray[np.bool_], fill: Any) -> Any:
    picked = np.full((len(places), *array.shape[1:]), 0 if fill is None else fill, dtype=array.dtype)
    picked[inside] = array[places[inside]]
    return picked


def _filled(like: Any, fill: Any) -> Any:
    return np.full_like(like, fill) if isinstance(like, np.ndarray) else fill


def stack(items: Any) -> Any:
    """Items stacked along a new axis 0, dicts key by key; a tree of arrays as it is.

    Numbers that are no arrays become float32 where numpy would make them float64: rewards and log-probabilities come
    as Python floats, and one float64 column would make a whole loss float64.
    """
    if not isinstance(items, list):
        return items
    first = items[0]
    if isinstance(first, dict):
        return {key: stack([item[key] for item in items]) for key in first}
    array = np.stack(items) if isinstance(first, np.ndarray) else np.asarray(items)
    return array.astype(np.float32) if array.dtype == np.float64 and not isinstance(first, np.ndarray) else array


def stack_or_same(items: Any) -> Any:
    """`stack`, or the list itself if it is empty."""
    return stack(items) if isinstance(items, list) and items else items


def tree_len(tree: Any) -> int:
    while isinstance(tree, dict):
        tree = next(iter(tree.values()))
    return len(tree)


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply ``function`` to the leaves of nested dicts of the same structure."""
    if isinstance(tree, dict):
        return {key: tree_map(function, tree[key], *(other[key] for other in others)) for key in tree}
    return function(tree, *others)
