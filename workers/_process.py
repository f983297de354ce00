"""A worker's process as its coordinator holds it: a pid, a pidfd, and what the system says of it.

Signals go through the pidfd, so they never reach another process that got the number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

from lgroup.workers.health import Look, parse_stat

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class WorkerProcess:
    """Thread-safe. Has no pid before ``started``, and no pidfd before that and after ``ended``."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self._pidfd: int | None = None
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        """It was started and is not known to have ended."""
        return self._pidfd is not None

    def started(self, pid: int, pidfd: int) -> None:
        """It is there; the descriptor is this object's from now on."""
        with self._lock:
            self.pid, self._pidfd = pid, pidfd

    def ended(self) -> None:
        """It is gone."""
        with self._lock:
            pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)

    def signal(self, number: int) -> None:
        """Send it a signal; does nothing if it is gone."""
        with self._lock:
            if self._pidfd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)

    def look(self) -> Look | None:
        """Its state and the CPU time it has used; ``None`` if it is gone or cannot be looked at."""
        if not self.running:
            return None
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return parse_stat(file.read(), _TICKS_PER_S)
        except (OSError, ValueError, IndexError):
            return None

    @property
    def stopped(self) -> bool:
        """Whether it is stopped, by SIGSTOP say."""
        look = self.look()
        return look is not None and look.state == "T"
