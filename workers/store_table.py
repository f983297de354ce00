"""The coordinator's side of the rendezvous store: keys by prefix, and who waits for which. Pure: time is an argument.

Every question gets exactly one answer: at once, or when its last key is set, or when its deadline passes, or when its
prefix is dropped. A question of an asker who was forgotten gets none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

OK, TIMED_OUT, DROPPED, REFUSED = "ok", "timed out", "dropped", "refused"


@dataclass(frozen=True, slots=True)
class Answer:
    """What to tell ``asker`` about its question ``request_id``."""

    asker: bytes
    request_id: int
    status: str
    value: Any


@dataclass(frozen=True, slots=True)
class Waiter:
    """A question that cannot be answered before ``keys`` are all set. ``deadline`` is in the caller's seconds."""

    asker: bytes
    request_id: int
    prefix: str
    keys: tuple[str, ...]
    operation: str
    deadline: float


@dataclass
class StoreTable:
    """All prefixes of one cluster."""

    _values: dict[str, dict[str, bytes]] = field(default_factory=dict)
    _waiters: list[Waiter] = field(default_factory=list)

    def ask(self, now: float, asker: bytes, request_id: int, question: Sequence[Any]) -> list[Answer]:
        """The answers that ``question`` = ``[operation, prefix, timeout_s, *arguments]`` gives rise to."""
        try:
            operation, prefix, timeout_s, *arguments = question
            if operation in _WAITING:
                keys = tuple(arguments[0])
                self._waiters.append(Waiter(asker, request_id, prefix, keys, operation, now + float(timeout_s)))
                return self._settled()
            values = self._values.setdefault(prefix, {})
            value = _IMMEDIATE[operation](values, *arguments)
        except (KeyError, TypeError, ValueError) as error:
            return [Answer(asker, request_id, REFUSED, f"{type(error).__name__}: {error}")]
        return [Answer(asker, request_id, OK, value), *self._settled()]

    def expire(self, now: float) -> list[Answer]:
        """The answers to those whose deadline has passed."""
        return self._take(lambda waiter: waiter.deadline <= now, TIMED_OUT)

    def drop(self, prefix: str) -> list[Answer]:
        """Forget the keys of ``prefix``; whoever waits for one learns that."""
        self._values.pop(prefix, None)
        return self._take(lambda waiter: waiter.prefix == prefix, DROPPED)

    def forget(self, asker: bytes) -> None:
        """``asker`` is gone: its questions need no answer."""
        self._waiters = [waiter for waiter in self._waiters if waiter.asker != asker]

    @property
    def num_waiting(self) -> int:
        """Questions that have no answer yet."""
        return len(self._waiters)

    def num_keys(self, prefix: str) -> int:
        """Keys set under ``prefix``."""
        return len(self._values.get(prefix, ()))

    def _settled(self) -> list[Answer]:
        answers, waiting = [], []
        for waiter in self._waiters:
            values = self._values.get(waiter.prefix, {})
            if all(key in values for key in waiter.keys):
                value = [values[key] for key in waiter.keys] if waiter.operation == "get" else None
                answers.append(Answer(waiter.asker, waiter.request_id, OK, value))
            else:
                waiting.append(waiter)
        self._waiters = waiting
        return answers

    def _take(self, due: Callable[[Waiter], bool], status: str) -> list[Answer]:
        taken = [waiter for waiter in self._waiters if due(waiter)]
        self._waiters = [waiter for waiter in self._waiters if not due(waiter)]
        return [Answer(waiter.asker, waiter.request_id, status, self._missing(waiter)) for waiter in taken]

    def _missing(self, waiter: Waiter) -> list[str]:
        values = self._values.get(waiter.prefix, {})
        return [key for key in waiter.keys if key not in values]


def _set(values: dict[str, bytes], keys: Sequence[str], new: Sequence[bytes]) -> None:
    if len(keys) != len(new):
        raise ValueError(f"{len(keys)} keys, {len(new)} values")
    values.update(zip(keys, new, strict=True))


def _add(values: dict[str, bytes], key: str, amount: int) -> int:
    # torch keeps counters as decimal text, so that get() after add() reads the same everywhere
    total = int(values.get(key, b"0")) + int(amount)
    values[key] = str(total).encode()
    return total


def _append(values: dict[str, bytes], key: str, more: bytes) -> None:
    values[key] = values.get(key, b"") + more


def _compare_set(values: dict[str, bytes], key: str, expected: bytes, desired: bytes) -> bytes:
    present = values.get(key)
    if present is None:
        if expected:
            return expected
        values[key] = desired
    elif present == expected:
        values[key] = desired
    return values[key]


def _delete(values: dict[str, bytes], key: str) -> bool:
    return values.pop(key, None) is not None


_WAITING = frozenset({"get", "wait"})
_IMMEDIATE: dict[str, Callable[..., Any]] = {
    "set": _set,
    "add": _add,
    "append": _append,
    "compare_set": _compare_set,
    "delete": _delete,
    "check": lambda values, keys: all(key in values for key in keys),
    "num_keys": len,
    "list_keys": list,
}
