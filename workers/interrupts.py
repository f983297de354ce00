"""Inside a worker: what the coordinator's interrupts lead to. Nothing is lost: a value that comes too early waits."""

from __future__ import annotations

import traceback
from collections.abc import Callable

OnInterrupt = Callable[[int], object]


class Interrupts:
    """Hands interrupts to the one callback that is registered, on the I/O thread.

    ``arrived`` runs on that thread, and so does everything that touches what waits; hence no lock.
    """

    def __init__(self, call_soon: Callable[[Callable[[], object]], object]) -> None:
        """``call_soon`` runs a function on the I/O thread, after what that does now."""
        self._call_soon = call_soon
        self._callback: OnInterrupt | None = None
        self._waiting: int | None = None

    def register(self, callback: OnInterrupt) -> None:
        """Have ``callback`` called from now on; from any thread."""
        self._callback = callback
        self._call_soon(self._hand_over)

    def arrived(self, value: int) -> None:
        """The coordinator interrupts."""
        if self._callback is None:
            self._waiting = value if self._waiting is None else max(self._waiting, value)
            return
        self._hand_over()  # registered a moment ago: what waited comes first
        self._call(value)

    def _hand_over(self) -> None:
        value, self._waiting = self._waiting, None
        if value is not None:
            self._call(value)

    def _call(self, value: int) -> None:
        try:
            assert self._callback is not None
            self._callback(value)
        except Exception:
            traceback.print_exc()
