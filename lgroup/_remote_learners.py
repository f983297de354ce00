"""Learners in worker processes of a cluster: carries out what the state machine says, reports what happens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from lgroup._group_events import (
    Event,
    Interrupt,
    Join,
    Joined,
    JoinFailed,
    Kill,
    Replied,
    Send,
    Start,
    StartFailed,
    Tick,
    Unsendable,
    WorkerLost,
    WorkerReady,
)
from lgroup._liveness import Limits
from lgroup._replies import read_answer, read_error
from lgroup.learner.collective import CollectiveLost
from lgroup.learner.host import describe
from lgroup.workers import (
    Cluster,
    Reply,
    Worker,
    WorkerCallbacks,
    WorkerEvent,
    WorkerExit,
    WorkerSpec,
    prepare_call,
)
from lgroup.workers.errors import ActorError
from lgroup.workers.start_policy import StartFailure


@dataclass(slots=True)
class _Place:
    """What fills a slot: its last process, its rank in the last generation, stacks that were dumped before its end."""

    worker: Worker
    rank: int
    stacks: dict[str, tuple[str, ...]]


class RemoteLearners:
    """`num_learners` worker processes, each with a `LearnerHost`; a slot is a place in the list.

    Raises:
        WorkerStartError: if one of them does not come up; the others are ended first.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec_of: Callable[[int], WorkerSpec],
        num_learners: int,
        prefix: str,
        limits: Limits,
        callbacks: WorkerCallbacks,
    ) -> None:
        self._cluster = cluster
        self._spec_of = spec_of
        self._prefix = prefix
        self._limits = limits
        self._callbacks = callbacks
        self._post: Callable[[Event], None] = lambda event: None
        self._stopped = False
        workers = _started([cluster.launch(spec_of(slot)) for slot in range(num_learners)])
        self._places = [_Place(worker, slot, {}) for slot, worker in enumerate(workers)]
        self._starting: dict[int, Worker] = {}

    def attach(self, post: Callable[[Event], None]) -> None:
        """Report answers, exits and the passing of time to `post`."""
        self._post = post
        for slot, place in enumerate(self._places):
            self._listen(slot, place.worker)
        self._cluster.io.call_later(self._limits.beat_s, self._tick)

    def now(self) -> float:
        """Seconds that the coordinator was awake."""
        return self._cluster.clock.now()

    def _listen(self, slot: int, worker: Worker) -> None:
        self._cluster.watch(worker, self._limits.beat_s)
        worker.on_exit(partial(self._ended, slot, worker))

    def _tick(self) -> None:
        if self._stopped or self._cluster.closed:
            return
        self._cluster.io.call_later(self._limits.beat_s, self._tick)
        workers = {slot: place.worker for slot, place in enumerate(self._places)}
        self._post(
            Tick(
                {
                    slot: worker.health
                    for slot, worker in workers.items()
                    if worker.exit is None and worker.health is not None
                }
            )
        )

    # Coming and going

    def _ended(self, slot: int, worker: Worker, ended: WorkerExit) -> None:
        place = self._places[slot]
        if place.worker is not worker or self._stopped:
            return
        record = {**ended.as_dict(), "stacks": place.stacks}
        cause = ActorError(f"rank {place.rank}: {ended.text}", actor_died=True)
        self._callbacks.died(_event(slot, worker, ended.text))
        self._post(WorkerLost(slot, cause, ended.own, record))

    def start(self, start: Start) -> None:
        """Fill a slot with a new process, after a pause."""
        incarnation = self._places[start.slot].worker.incarnation + 1
        self._cluster.later(start.delay_s, partial(self._start, start.slot, incarnation))

    def _start(self, slot: int, incarnation: int) -> None:
        if self._stopped:
            return
        try:
            worker = self._cluster.start_worker(self._spec_of(slot), incarnation=incarnation)
        except Exception as error:  # the cluster is closed
            self._post(StartFailed(slot, error, permanent=True))
            return
        self._starting[slot] = worker
        worker.ready.add_done_callback(lambda ready: self._came_up(slot, worker, ready))

    def _came_up(self, slot: int, worker: Worker, ready: Future[Worker]) -> None:
        error = ready.exception()
        if error is not None:
            worker.on_exit(lambda ended: self._did_not_start(slot, worker, error))
            return
        self._starting.pop(slot, None)
        self._places[slot] = _Place(worker, slot, {})
        if self._stopped:
            worker.kill()
            return
        self._post(WorkerReady(slot))
        self._callbacks.restarted(_event(slot, worker, f"{worker.name} (pid {worker.pid}) is up"))
        self._listen(slot, worker)

    def _did_not_start(self, slot: int, worker: Worker, error: BaseException) -> None:
        self._starting.pop(slot, None)
        self._places[slot].worker = worker  # for its incarnation
        if not self._stopped:
            cause = error if isinstance(error, Exception) else RuntimeError(str(error))
            self._post(StartFailed(slot, cause, permanent=worker.failure is StartFailure.PERMANENT))

    def kill(self, kill: Kill) -> None:
        """Write down the stacks of all, then end one."""
        victim = self._places[kill.slot]
        waiting = set(kill.dump)
        if not waiting:
            victim.worker.kill(kill.reason)

        def dumped(name: str, slot: int, lines: tuple[str, ...]) -> None:
            victim.stacks[name] = lines
            waiting.discard(slot)
            if not waiting:
                victim.worker.kill(kill.reason)

        for slot in kill.dump:
            place = self._places[slot]
            place.worker.dump_stacks(partial(dumped, place.worker.name, slot))

    # The generation

    def join(self, join: Join) -> None:
        """Have one learner enter the generation's process group."""
        place, slot, generation = self._places[join.slot], join.slot, join.generation
        place.rank = join.rank
        self._cluster.store_drop(f"{self._prefix}/{generation - 1}")
        ranks = {slot: rank for rank, slot in enumerate(join.members)}
        behind = [ranks[slot] for slot in join.behind]
        args = (generation, join.rank, len(join.members), ranks[join.lead], behind, join.snapshot)

        def answered(reply: Reply) -> None:
            if reply.ok:
                self._post(Joined(slot, generation))
            elif reply.error is not None and not reply.error.died:
                error = reply.error
                lost = error.type_name == CollectiveLost.__name__
                self._post(JoinFailed(slot, generation, f"{error.type_name}: {error.message}", lost))

        place.worker.call("join", args, on_reply=answered, data_only=True)

    def interrupt(self, interrupt: Interrupt) -> None:
        """Have learners leave the generation's process group, and who waits for its rendezvous stop waiting."""
        for slot in interrupt.slots:
            self._places[slot].worker.interrupt(interrupt.generation)
        self._cluster.store_drop(f"{self._prefix}/{interrupt.generation}")

    def send(self, send: Send) -> None:
        """Send the entry to its learners; if that is impossible, to none."""
        entry, generation = send.entry, send.generation
        try:
            asks = entry.payload.asks(entry, len(send.members))
            ranks = {slot: rank for rank, slot in enumerate(send.members)}
            calls = {
                slot: prepare_call((ask := asks[ranks[slot]]).method, (generation, *ask.args), data_only=ask.data_only)
                for slot in send.slots
            }
        except Exception as error:
            self._post(Unsendable(entry.number, generation, describe(error)))
            return
        for slot, call in calls.items():

            def answered(reply: Reply, slot: int = slot) -> None:
                if reply.ok:
                    self._post(Replied(slot, generation, entry.number, read_answer(reply.value)))
                elif reply.error is not None and not reply.error.died:
                    self._post(Replied(slot, generation, entry.number, read_error(reply.error, entry.kind)))

            worker = self._places[slot].worker
            try:
                worker.send(call, answered)
            except BaseException as error:  # others may have it already, and would wait for this one
                worker.kill(f"an {entry.kind.value} could not be sent: {error}")
                raise

    # The end

    def stop(self) -> None:
        """Kill every process, and start no more."""
        self._stopped = True
        for worker in self._all():
            worker.kill()

    def _all(self) -> list[Worker]:
        return [*(place.worker for place in self._places), *self._starting.values()]

    def close(self) -> None:
        """Kill every process and wait until each is accounted for."""
        gone = [_exit_of(worker) for worker in self._all()]
        self.stop()
        if not self._cluster.closed and not self._cluster.io.in_thread():
            for future in gone:
                with contextlib.suppress(TimeoutError):
                    future.result(timeout=5.0)
        self._callbacks.close()

    def name(self, slot: int) -> str:
        """Who the learner in a slot is."""
        place = self._places[slot]
        return f"rank {place.rank} ({place.worker.name}, pid {place.worker.pid})"

    def rows(self) -> list[dict[str, Any]]:
        """One row per slot for `get_stats`."""
        return [self._row(slot, place) for slot, place in enumerate(self._places)]

    def _row(self, slot: int, place: _Place) -> dict[str, Any]:
        worker, health = place.worker, place.worker.health
        phase = worker.state.value if health is None or worker.exit is not None else health.phase
        silent_s = 0.0 if health is None else health.silent_s
        return {
            "learner": slot,
            "rank": place.rank,
            "pid": worker.pid,
            "node": "local",
            "incarnation": worker.incarnation,
            "state": worker.state.value,
            "phase": phase,
            "silent_s": silent_s,
            "busy": silent_s > 2 * self._limits.beat_s and health is not None and health.cpu_advancing,
            "rss_bytes": _rss(worker.pid),
        }


def _started(futures: list[Future[Worker]]) -> list[Worker]:
    """The workers when all are up. If one fails, the others are killed and its error is raised."""
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.add_done_callback(_kill_if_started)
        raise


def _kill_if_started(future: Future[Worker]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().kill()


def _event(slot: int, worker: Worker, text: str) -> WorkerEvent:
    return WorkerEvent(worker.name, slot, worker.incarnation, worker.node, worker.pid, text)


def _exit_of(worker: Worker) -> Future[None]:
    future: Future[None] = Future()
    worker.on_exit(lambda ended: future.set_result(None))
    return future


def _rss(pid: int | None) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss) if pid is not None else 0
    except psutil.Error:
        return 0
