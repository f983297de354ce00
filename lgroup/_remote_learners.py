"""Learners in worker processes of a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import psutil

from lgroup._group_events import Event, Join, Joined, JoinFailed, Replied, Send, Tick, WorkerLost
from lgroup._replies import read_answer, read_error
from lgroup.errors import LGroupError
from lgroup.learner.collective import CollectiveLost, GlooGroup
from lgroup.workers import Cluster, Reply, Worker, WorkerExit, WorkerSpec, current_worker
from lgroup.workers.errors import ActorError

#: Seconds between two looks at the clock while something is awaited.
TICK_S = 1.0


class OpenGlooGroup:
    """Opens a generation's process group, inside a worker; rendezvous goes through the coordinator's own channel."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __call__(self, generation: int, rank: int, world_size: int, timeout_s: float) -> GlooGroup:
        """Rank `rank`'s end of the group."""
        worker = current_worker()
        worker.forget_store(f"{self._prefix}/{generation - 1}")
        return GlooGroup(worker.store(f"{self._prefix}/{generation}"), rank, world_size, timeout_s)


class RemoteLearners:
    """`num_learners` worker processes, each with a `LearnerHost`; rank is the place in the list.

    Raises:
        WorkerStartError: if one of them does not come up; the others are ended first.
    """

    def __init__(self, cluster: Cluster, spec_of: Callable[[int], WorkerSpec], num_learners: int, prefix: str) -> None:
        self._cluster = cluster
        self._prefix = prefix
        self._post: Callable[[Event], None] = lambda event: None
        self._timeout_s = spec_of(0).start_timeout_s
        self._workers = _started([cluster.launch(spec_of(rank)) for rank in range(num_learners)])

    def attach(self, post: Callable[[Event], None]) -> None:
        """Report answers, exits and the passing of time to `post`."""
        self._post = post
        for rank, worker in enumerate(self._workers):
            worker.on_exit(partial(self._ended, rank))
        self._cluster.io.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        if not self._cluster.closed and any(worker.exit is None for worker in self._workers):
            self._cluster.io.call_later(TICK_S, self._tick)
            self._post(Tick())

    def _ended(self, rank: int, ended: WorkerExit) -> None:
        self._post(WorkerLost(rank, ActorError(f"rank {rank}: {ended.text}", actor_died=True)))

    def join(self, join: Join) -> None:
        """Have one rank enter the generation's process group."""
        self._cluster.store_drop(f"{self._prefix}/{join.generation - 1}")
        args = (join.generation, join.rank, len(self._workers), join.lead, join.behind, self._timeout_s)

        def answered(reply: Reply) -> None:
            if reply.ok:
                self._post(Joined(join.rank, join.generation))
            elif reply.error is not None and not reply.error.died:
                error = reply.error
                lost = error.type_name == CollectiveLost.__name__
                self._post(JoinFailed(join.rank, join.generation, f"{error.type_name}: {error.message}", lost))

        self._workers[join.rank].call("join", args, on_reply=answered, data_only=True)

    def send(self, send: Send) -> None:
        """Send the entry to its ranks."""
        entry, generation = send.entry, send.generation
        asks = entry.payload.asks(entry, len(self._workers))
        for rank in send.ranks:

            def answered(reply: Reply, rank: int = rank) -> None:
                if reply.ok:
                    self._post(Replied(rank, generation, entry.number, read_answer(reply.value)))
                elif reply.error is not None and not reply.error.died:
                    self._post(Replied(rank, generation, entry.number, read_error(reply.error, entry.kind)))

            ask = asks[rank]
            try:
                worker = self._workers[rank]
                worker.call(ask.method, (generation, *ask.args), on_reply=answered, data_only=ask.data_only)
            except BaseException as error:  # other ranks may have it already, and would wait for this one
                self._post(
                    WorkerLost(rank, LGroupError(f"rank {rank}: an {entry.kind.value} could not be sent: {error}"))
                )
                raise

    def stop(self) -> None:
        """Kill every process."""
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        """Kill every process and wait until each is accounted for."""
        gone = [_exit_of(worker) for worker in self._workers]
        self.stop()
        if not self._cluster.closed and not self._cluster.io.in_thread():
            for future in gone:
                with contextlib.suppress(TimeoutError):
                    future.result(timeout=5.0)

    def names(self) -> list[str]:
        """Who each rank is."""
        return [f"rank {rank} ({worker.name}, pid {worker.pid})" for rank, worker in enumerate(self._workers)]

    def rows(self) -> list[dict[str, Any]]:
        """One row per rank for `get_stats`."""
        return [
            {
                "rank": rank,
                "pid": worker.pid,
                "node": "local",
                "phase": worker.state.value,
                "rss_bytes": _rss(worker.pid),
            }
            for rank, worker in enumerate(self._workers)
        ]


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


def _exit_of(worker: Worker) -> Future[None]:
    future: Future[None] = Future()
    worker.on_exit(lambda ended: future.set_result(None))
    return future


def _rss(pid: int | None) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss) if pid is not None else 0
    except psutil.Error:
        return 0
