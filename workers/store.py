"""A ``torch.distributed.Store`` over a worker's own channel to its coordinator.

It lets ranks find each other without a listening TCPStore, which takes anyone's writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed has it, but hides it from type checkers

from lgroup.workers.store_table import DROPPED, OK, TIMED_OUT

DEFAULT_TIMEOUT_S = 60.0
# The coordinator answers a timeout itself; this long after it, the coordinator must be stopped or gone.
GRACE_S = 30.0


class Ask(Protocol):
    """Puts a question to the coordinator's store table and waits for ``[status, value]``."""

    def __call__(self, question: list[Any], timeout_s: float) -> Sequence[Any]: ...


class ChannelStore(Store):
    """The keys under ``prefix`` of the coordinator's table. May be used from any thread of the worker.

    Raises ``torch.distributed.DistStoreError`` where a key does not appear in time, or its prefix was dropped.
    """

    def __init__(self, ask: Ask, prefix: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__()
        self._ask = ask
        self._prefix = prefix
        self._timeout_s = timeout_s

    def _question(self, operation: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        status, value = self._ask([operation, self._prefix, timeout_s, *arguments], timeout_s + GRACE_S)
        if status == OK:
            return value
        if status == TIMED_OUT:
            raise dist.DistStoreError(f"store {self._prefix!r}: {value} not set within {timeout_s} s")
        if status == DROPPED:
            raise dist.DistStoreError(f"store {self._prefix!r}: dropped by the coordinator while waiting for {value}")
        raise dist.DistStoreError(f"store {self._prefix!r}: {operation} refused: {value}")

    def set(self, key: str, value: str | bytes) -> None:
        self._question("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        value: bytes = self._question("get", [key])[0]
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._question("get", list(keys)))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._question("set", list(keys), [_bytes(value) for value in values])

    def add(self, key: str, amount: Any) -> int:
        total: int = self._question("add", key, int(amount))
        return total

    def append(self, key: str, value: str | bytes) -> None:
        self._question("append", key, _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        value: bytes = self._question("compare_set", key, _bytes(expected), _bytes(desired))
        return value

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._question("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._question("wait", list(keys), timeout_s=None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return bool(self._question("delete", key))

    def num_keys(self) -> int:
        return int(self._question("num_keys"))

    def list_keys(self) -> list[str]:
        return list(self._question("list_keys"))

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)


def _bytes(value: Any) -> bytes:
    # C++ hands over vectors of integers, str or bytes
    return value.encode() if isinstance(value, str) else bytes(value)
