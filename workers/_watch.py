"""Watching workers: one timer for all of a cluster's, on the I/O thread, that runs only while somebody is watched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lgroup.transport.io_thread import IOThread, Timer
from lgroup.workers.health import AwakeClock, Health, Pulse
from lgroup.workers.spec import WorkerState
from lgroup.workers.worker import Worker

OnBeat = Callable[[Worker, Health], object]

logger = logging.getLogger("lgroup.workers")


@dataclass
class _Watched:
    worker: Worker
    pulse: Pulse
    interval_s: float
    on_beat: OnBeat | None


class Watch:
    """Keeps ``worker.health`` of all watched workers, and the clock that tells the coordinator's pauses apart."""

    def __init__(self, io: IOThread, clock: AwakeClock | None = None) -> None:
        self.clock = clock or AwakeClock()
        self._io = io
        self._watched: dict[int, _Watched] = {}
        self._timer: Timer | None = None

    def add(self, worker: Worker, interval_s: float, on_beat: OnBeat | None) -> None:
        """Watch ``worker`` until it is told to end or has ended; from any thread. Again: with the new interval."""
        if not interval_s > 0:
            raise ValueError(f"interval_s={interval_s}: it must be above 0")
        self._io.call_soon(self._add, worker, interval_s, on_beat)

    def _add(self, worker: Worker, interval_s: float, on_beat: OnBeat | None) -> None:
        if worker.exit is not None:
            return
        pulse = Pulse(self.clock.now(), interval_s)
        worker.health = worker.health or pulse.health
        self._watched[worker.id] = _Watched(worker, pulse, interval_s, on_beat)
        worker.on_pong(lambda body: self._heard(worker, pulse, body))
        if self._timer is not None:
            self._timer.cancel()
        self._beat_later()

    def _beat_later(self) -> None:
        if not self._watched:
            self.clock.rest()
            self._timer = None
            return
        interval_s = min(watched.interval_s for watched in self._watched.values())
        self.clock.expect(interval_s)
        self._timer = self._io.call_later(interval_s, self._beat)

    def _beat(self) -> None:
        paused = self.clock.beat() > 0.0
        now = self.clock.now()
        for watched in list(self._watched.values()):
            self._see(watched, now, paused)
        self._beat_later()

    def _see(self, watched: _Watched, now: float, paused: bool) -> None:
        worker, pulse = watched.worker, watched.pulse
        if worker.state in (WorkerState.STOPPING, WorkerState.EXITED):
            del self._watched[worker.id]
            worker.on_pong(None)
            return
        if worker.state is WorkerState.STARTING:
            pulse.not_ready(now)
            return
        pulse.beat(now, paused=paused)
        worker.health = pulse.health
        if not pulse.turn(now):
            return
        if pulse.overdue(now) and (look := worker.look()) is not None:
            pulse.looked(now, look)
        if pulse.due(now):
            pulse.asked(now)
            worker.beat()
        worker.health = pulse.health
        if watched.on_beat is not None:
            try:
                watched.on_beat(worker, pulse.health)
            except Exception:
                logger.exception("a callback for the health of %s raised", worker.name)

    def _heard(self, worker: Worker, pulse: Pulse, body: Any) -> None:
        phase, request_id = body
        pulse.heard(self.clock.now(), str(phase), request_id)
        worker.health = pulse.health
