"""Ending a run from outside: the first signal asks, the second insists."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, SIGINT and SIGTERM set `signal_number` the first time, and raise KeyboardInterrupt the second.

    Outside of the main thread, where Python delivers no signals, it does nothing.

    Args:
        on_request: called by the first signal's handler; it must be quick.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        self.signal_number: int | None = None
        self._on_request = on_request
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int | None:
        """128 + the signal's number, as shells have it; None if there was no signal."""
        return None if self.signal_number is None else 128 + self.signal_number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number
        self._on_request()
