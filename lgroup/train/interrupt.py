"""Ending a run from outside: while there is something to save the first signal asks, the second insists."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, SIGINT and SIGTERM raise KeyboardInterrupt; the first after `be_patient` only sets `requested`.

    Outside of the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._is_patient = False
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

    def be_patient(self) -> None:
        """From now on somebody looks at `requested`."""
        self._is_patient = True

    @property
    def requested(self) -> bool:
        """Whether there was a signal."""
        return self._number is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it; 0 if there was no signal."""
        return 0 if self._number is None else 128 + self._number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        insists = self.requested or not self._is_patient
        self._number = number
        if insists:
            raise KeyboardInterrupt
