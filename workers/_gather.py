"""Waiting for the results of one call to several actors."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lgroup.workers.results import ResultOrError


class Gather:
    """Waits for a number of results, by index."""

    def __init__(self, expected: int) -> None:
        self._missing = expected
        self._answers: dict[int, ResultOrError] = {}
        self._done = threading.Lock()  # held until the last one is in: an Event costs twice as much
        self._done.acquire()
        if not expected:
            self._done.release()

    def taker(self, index: int) -> Callable[[ResultOrError], None]:
        """Takes the result number ``index``, on the I/O thread."""

        def take(result: ResultOrError) -> None:
            self._answers[index] = result
            self._missing -= 1
            if not self._missing:
                self._done.release()

        return take

    def wait(self, timeout_s: float | None) -> dict[int, ResultOrError]:
        """What is there once all are, or the time is over."""
        self._done.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
        return dict(self._answers)
