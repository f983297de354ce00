"""Metrics of one update on one learner.

Invariant: nothing outlives an update. What is logged between `begin` and `take` is this update's delta; the coordinator
adds deltas to lifetime sums only when the group has applied the update, so that a failed update leaves no trace.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch

Reduction = Literal["mean", "sum", "min", "max", "lifetime"]
Key = str | tuple[str, ...]
Number = float | int
#: One metric on its way to the coordinator: path, reduction, value, weight (of a mean).
Delta = tuple[tuple[str, ...], str, Number, float]

_PLAIN = frozenset({int, float, bool})
_REDUCTIONS: frozenset[str] = frozenset(get_args(Reduction))


@dataclass(slots=True)
class _Series:
    reduce: Reduction
    values: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


def _reduced(reduce: str, values: list[Number], weights: list[float]) -> tuple[Number, float]:
    """The value and the weight that a series of numbers stands for."""
    if reduce == "mean":
        total = sum(weights)
        if total == 0.0:
            return float("nan"), 0.0
        if len(values) == 1:
            return values[0], total
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total, total
    if reduce == "min":
        return min(values), 1.0
    if reduce == "max":
        return max(values), 1.0
    return sum(values), 1.0


def _plain(values: list[Any]) -> list[Number]:
    """Turn scalar tensors into Python numbers, all with one device synchronisation."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        return values
    if len(tensors) == 1:
        numbers = iter([tensors[0].item()])
    else:
        numbers = iter(torch.stack([tensor.reshape(()).to(torch.float64) for tensor in tensors]).tolist())
    return [next(numbers) if isinstance(value, torch.Tensor) else value for value in values]


def _number(path: tuple[str, ...], value: Any) -> Number:
    """A number of another kind, such as numpy's, as a plain one."""
    if isinstance(value, np.ndarray) and value.size != 1:
        raise ValueError(f"metric {path}: an array of shape {value.shape} is not one number")
    number = value.item() if isinstance(value, (np.generic, np.ndarray)) else value
    if not isinstance(number, (int, float)):
        raise TypeError(f"metric {path}: a {type(value).__name__} is not a number")
    return number


class Metrics:
    """What a learner's hooks log. ``learner.metrics`` is one; the names follow RLlib's `MetricsLogger`."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, ...], _Series] = {}
        self._weights: Mapping[str, float] = {}

    def begin_step(self, weights: Mapping[str, float]) -> None:
        """Set the default weight of means logged under each module: its rows (or valid steps) of this minibatch."""
        self._weights = weights

    def log_value(self, key: Key, value: Any, *, reduce: Reduction = "mean", weight: float | None = None) -> None:
        """Log one number.

        Args:
            key: A name, or a path such as ``(module_id, "policy_loss")``.
            value: A Python number or a tensor of one element (kept on its device until the update ends).
            reduce: How values of one update, and then of several learners, become one: ``mean`` (weighted), ``sum``,
                ``min``, ``max``, or ``lifetime`` (a sum that the coordinator carries on from update to update).
            weight: The weight in a mean. By default the module's rows (valid steps) in the current minibatch when the
                path starts with a module's id, else 1.

        Raises:
            ValueError: for an unknown reduction, or a tensor or array with more than one element.
            TypeError: for what is no number.
        """
        path = (key,) if isinstance(key, str) else tuple(key)
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"metric {path}: a tensor of shape {tuple(value.shape)} is not one number")
            value = value.detach()
        elif type(value) not in _PLAIN:
            value = _number(path, value)
        series = self._series.get(path)
        if series is None:
            if reduce not in _REDUCTIONS:
                raise ValueError(f"metric {path}: reduce={reduce!r} is none of {sorted(_REDUCTIONS)}")
            series = self._series[path] = _Series(reduce)
        series.values.append(value)
        series.weights.append(self._weights.get(path[0], 1.0) if weight is None else float(weight))

    def log_dict(self, values: Mapping[str, Any], *, key: Key = (), reduce: Reduction = "mean") -> None:
        """Log every number of a (nested) mapping under the path `key`."""
        prefix = (key,) if isinstance(key, str) else tuple(key)
        for name, value in values.items():
            if isinstance(value, Mapping):
                self.log_dict(value, key=(*prefix, name), reduce=reduce)
            else:
                self.log_value((*prefix, name), value, reduce=reduce)

    @contextmanager
    def log_time(self, key: Key) -> Iterator[None]:
        """Log how many seconds the block took, as a mean."""
        start = time.perf_counter()
        yield
        self.log_value(key, time.perf_counter() - start)

    def peek(self, key: Key, default: Any = None) -> Any:
        """This update's value so far, on this learner, as a Python number.

        Raises:
            KeyError: if nothing was logged under `key` and no `default` is given.
        """
        path = (key,) if isinstance(key, str) else tuple(key)
        series = self._series.get(path)
        if series is None:
            if default is None:
                raise KeyError(f"no metric {path} in this update; there are {sorted(self._series)}")
            return default
        series.values = _plain(series.values)
        return _reduced(series.reduce, series.values, series.weights)[0]

    def begin(self) -> None:
        """Forget everything: an update begins."""
        self._series = {}
        self._weights = {}

    def take(self) -> list[Delta]:
        """Everything logged since `begin`, reduced to one number a path."""
        values = [value for series in self._series.values() for value in series.values]
        numbers = iter(_plain(values))
        deltas: list[Delta] = []
        for path, series in self._series.items():
            own = [next(numbers) for _ in series.values]
            value, weight = _reduced(series.reduce, own, series.weights)
            deltas.append((path, series.reduce, value, weight))
        self.begin()
        return deltas


def merge(deltas: list[list[Delta]]) -> dict[tuple[str, ...], tuple[str, Number]]:
    """Several learners' deltas as the one that a single learner would have reported: path to (reduction, value)."""
    together: dict[tuple[str, ...], _Series] = {}
    for learner in deltas:
        for path, reduce, value, weight in learner:
            if reduce == "mean" and weight == 0.0:
                continue
            series = together.setdefault(tuple(path), _Series(reduce))  # type: ignore[arg-type]
            series.values.append(value)
            series.weights.append(weight)
    return {path: (s.reduce, _reduced(s.reduce, s.values, s.weights)[0]) for path, s in together.items()}
