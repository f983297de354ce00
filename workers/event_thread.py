"""Calls users' callbacks about workers that die and come back, one after the other, on a thread that nothing else
waits for: they may call the group, and may take their time.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger("lgroup.workers")


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """Something happened to a worker.

    Attributes:
        name: Such as ``"learner 1"``.
        actor_id: Its place in the group.
        incarnation: 0 for the first process in that place, one more for each restart.
        text: What happened: how it ended, with the last lines it wrote; or that it is up.
    """

    name: str
    actor_id: int
    incarnation: int
    node: str
    pid: int | None
    text: str


OnWorker = Callable[[WorkerEvent], object]


class EventThread:
    """Carries events to callbacks in the order they were put. The thread starts with the first one."""

    def __init__(self, name: str = "lgroup-events") -> None:
        self._name = name
        self._events: queue.SimpleQueue[tuple[OnWorker, WorkerEvent] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, callback: OnWorker, event: WorkerEvent) -> None:
        """Have ``callback(event)`` called. What it raises is logged. After ``close`` nothing happens."""
        with self._lock:
            if self._closed:
                return
            self._events.put((callback, event))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Take no more events; those that were put are carried out. Does not wait. May be called again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._events.put(None)

    def _run(self) -> None:
        while (item := self._events.get()) is not None:
            callback, event = item
            try:
                callback(event)
            except Exception:
                logger.exception("a callback about %s raised", event.name)


class WorkerCallbacks:
    """A user's two callbacks, each called once per event."""

    def __init__(self, on_died: OnWorker | None, on_restarted: OnWorker | None) -> None:
        self._on_died = on_died
        self._on_restarted = on_restarted
        self._thread = EventThread()

    def died(self, event: WorkerEvent) -> None:
        """A process is gone."""
        if self._on_died is not None:
            self._thread.put(self._on_died, event)

    def restarted(self, event: WorkerEvent) -> None:
        """A process took the place of one that died."""
        if self._on_restarted is not None:
            self._thread.put(self._on_restarted, event)

    def close(self) -> None:
        """Call no more callbacks after those that are due."""
        self._thread.close()
