"""What an actor group does about actors that die or fall silent: the settings of its slots, shared by all of them.

The budget counts each start that follows a death or a failed restart, whichever actor it was.
"""

from __future__ import annotations

import threading
import time

from lgroup.workers.event_thread import OnWorker, WorkerCallbacks
from lgroup.workers.health import Health
from lgroup.workers.start_policy import RestartBudget
from lgroup.workers.worker import Worker

# A silent worker's CPU time is compared over five intervals, so these are the timeout.
BEATS_PER_TIMEOUT = 5


class Supervision:
    """Thread-safe. Raises ``ValueError`` for settings that are not possible."""

    def __init__(
        self,
        *,
        restart: bool,
        max_restarts: int,
        restart_window_s: float,
        heartbeat_timeout_s: float,
        on_died: OnWorker | None,
        on_restarted: OnWorker | None,
    ) -> None:
        if not heartbeat_timeout_s > 0:
            raise ValueError(f"heartbeat_timeout_s={heartbeat_timeout_s}: it must be above 0")
        self.restart = restart
        self._budget = RestartBudget(max_restarts, restart_window_s)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._lock = threading.Lock()
        self._condemned: set[int] = set()  # workers whose stacks are being dumped
        self.callbacks = WorkerCallbacks(on_died, on_restarted)

    def take_restart(self) -> str | None:
        """Take one restart from the budget; if none is left, a text that says so."""
        with self._lock:
            return None if self._budget.take(time.monotonic()) else self._budget.text

    @property
    def interval_s(self) -> float:
        """How often a worker is to be watched."""
        return self._heartbeat_timeout_s / BEATS_PER_TIMEOUT

    def beat(self, worker: Worker, health: Health) -> None:
        """Kill ``worker`` if it was stopped, or silent without using CPU time, for the heartbeat timeout."""
        if worker.id in self._condemned or not health.stuck(self._heartbeat_timeout_s):
            return
        self._condemned.add(worker.id)
        reason = f"{health.text} (heartbeat_timeout_s={self._heartbeat_timeout_s:g})"
        worker.dump_stacks(lambda _: self._dumped(worker, reason))

    def _dumped(self, worker: Worker, reason: str) -> None:
        self._condemned.discard(worker.id)
        if worker.health is not None and worker.health.silent_s >= self._heartbeat_timeout_s:
            worker.kill(reason)  # else it has answered meanwhile
