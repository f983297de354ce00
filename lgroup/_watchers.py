"""The user's callbacks about learners that die and come back."""

from __future__ import annotations

from collections.abc import Callable

from lgroup.workers import EventThread, Worker, WorkerEvent, WorkerExit

OnWorker = Callable[[WorkerEvent], object]


class WorkerWatchers:
    """Calls each callback once per event, in order, on a thread that nothing else waits for."""

    def __init__(self, on_worker_died: OnWorker | None, on_worker_restarted: OnWorker | None) -> None:
        self._on_died = on_worker_died
        self._on_restarted = on_worker_restarted
        self._thread = EventThread()

    def died(self, slot: int, worker: Worker, ended: WorkerExit) -> None:
        """A learner's process is gone."""
        if self._on_died is not None:
            self._thread.put(self._on_died, _event(slot, worker, ended.text))

    def restarted(self, slot: int, worker: Worker) -> None:
        """A replacement is up."""
        if self._on_restarted is not None:
            self._thread.put(self._on_restarted, _event(slot, worker, f"{worker.name} (pid {worker.pid}) is up"))

    def close(self) -> None:
        """Call no more callbacks after those that are due."""
        self._thread.close()


def _event(slot: int, worker: Worker, text: str) -> WorkerEvent:
    return WorkerEvent(worker.name, slot, worker.incarnation, "local", worker.pid, text)
