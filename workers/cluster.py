"""The processes a coordinator can use. In this version: on its own node."""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Literal

import cloudpickle

from lgroup.transport.io_thread import IOThread
from lgroup.workers._hub import CLOSE_GRACE_S, Hub
from lgroup.workers._launch import Launch
from lgroup.workers._watch import OnBeat
from lgroup.workers.health import AwakeClock
from lgroup.workers.output import WorkerOutput
from lgroup.workers.spec import WorkerSpec
from lgroup.workers.start_policy import StartPolicy
from lgroup.workers.worker import Worker

LOOPBACK = "tcp://127.0.0.1:"


class Cluster:
    """Starts worker processes and supervises them. Groups may share one; whoever made it closes it.

    All methods are thread-safe. It closes itself when it is garbage or the program ends; if the program is killed, its
    processes end by themselves within a second.

    Args:
        bind: where workers connect: by default a socket in a directory that only this user can enter, or
            ``"tcp://127.0.0.1:PORT"`` (0 for any port).
        advertise, key_file: for workers on other nodes, which this version does not have.
        local_slots: how many cores workers may use together; ``"auto"``: those this process may use.
        pickle_by_value: modules (or their names) whose classes and functions travel whole, not by their names.
        start_timeout_s: for workers that name no limit of their own.
        worker_output: what becomes of the lines workers write: ``"print"`` to this process's stderr, or ``"log"`` to
            the logger ``lgroup.worker_output``; each as ``(learner 1@local pid=123) line``.
        log_dir: a folder where each worker's lines are appended to a file of its own besides, such as
            ``learner-1-0-123.log`` (name, incarnation, pid); it is made if need be. One that writes nothing has none. A
            folder that cannot be written costs a warning, once.

    Attributes:
        log_dir: that folder as a ``Path``, or ``None``.

    Raises ``ValueError`` for a setting that is not possible.
    """

    def __init__(
        self,
        *,
        bind: str | None = None,
        advertise: str | None = None,
        key_file: str | None = None,
        local_slots: int | Literal["auto"] = "auto",
        pickle_by_value: Iterable[str | ModuleType] = (),
        start_timeout_s: float = 60.0,
        worker_output: WorkerOutput = "print",
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        _refuse_remote(bind, advertise, key_file)
        if worker_output not in ("print", "log"):
            raise ValueError(f"worker_output={worker_output!r}: allowed are 'print' and 'log'")
        if local_slots != "auto" and (not isinstance(local_slots, int) or local_slots < 1):
            raise ValueError(f"local_slots={local_slots!r}: allowed are 'auto' and numbers from 1")
        for module in pickle_by_value:
            cloudpickle.register_pickle_by_value(importlib.import_module(module) if isinstance(module, str) else module)
        self.start_timeout_s = start_timeout_s
        self.local_slots = usable_cores() if local_slots == "auto" else local_slots
        self.log_dir = None if log_dir is None else Path(log_dir).absolute()
        self._hub = Hub(bind=bind, output=worker_output, log_dir=self.log_dir)
        self._finaliser = weakref.finalize(self, Hub.close, self._hub)

    def __repr__(self) -> str:
        if self._hub.closed:
            return "<Cluster closed>"
        counts = f"nodes={len(self.nodes)} slots={self.local_slots} workers={len(self.workers)}"
        return f"<Cluster {counts} zygote={self.zygote_pid}>"

    @property
    def io(self) -> IOThread:
        """The thread that replies and exits are reported on."""
        return self._hub.io

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers that have not exited."""
        return self._hub.workers

    @property
    def nodes(self) -> tuple[str, ...]:
        """The machines it has: in this version its own."""
        return ("local",)

    @property
    def zygote_pid(self) -> int | None:
        """The process that forks the workers."""
        return self._hub.zygote_pid

    @property
    def closed(self) -> bool:
        """Whether it starts no more workers."""
        return self._hub.closed

    def threads_per_worker(self, num_workers: int) -> int:
        """Threads for each of ``num_workers`` that share this node's slots."""
        return max(1, self.local_slots // max(1, num_workers))

    def start_worker(self, spec: WorkerSpec, *, incarnation: int = 0) -> Worker:
        """Start one worker; returns at once, its ``ready`` says what becomes of it.

        Raises ``ConnectionClosed`` if the cluster is closed.
        """
        return self._hub.start_worker(spec, incarnation)

    def launch(self, spec: WorkerSpec, *, policy: StartPolicy | None = None, incarnation: int = 0) -> Future[Worker]:
        """Start a worker, again as ``policy`` says if it fails; each attempt is the next incarnation.

        The future ends with the ready worker or raises the last attempt's ``WorkerStartError``, when no process of it
        is left. All attempts together have ``spec.start_timeout_s``. Its callbacks run on the I/O thread.
        Cancelling it kills what is starting.
        """
        launch = Launch(self._hub, spec, policy or StartPolicy(), incarnation)
        launch.begin()
        return launch.future

    def later(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Call ``callback`` on the I/O thread after ``delay_s`` seconds, or sooner, when the cluster closes."""
        self._hub.later(delay_s, callback)

    @property
    def clock(self) -> AwakeClock:
        """Seconds without the coordinator's own pauses, which it notices while workers are watched: ``clock.now()``."""
        return self._hub.clock

    def watch(self, worker: Worker, interval_s: float = 1.0, on_beat: OnBeat | None = None) -> None:
        """Keep ``worker.health`` from now on, until the worker is told to end: ask it every ``interval_s`` seconds.

        Its process is looked at only if an answer is late by more than an interval. ``on_beat(worker, health)`` is
        called on the I/O thread once an interval while the worker is ready, and must be quick. Raises ``ValueError``
        for an interval that is not above 0.
        """
        self._hub.watch(worker, interval_s, on_beat)

    def store_drop(self, prefix: str) -> None:
        """Forget the keys that workers' ``store(prefix)`` hold; whoever waits for one of them gets an error."""
        self._hub.store_drop(prefix)

    def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """End all workers, killing those that are not done after ``grace_s`` seconds, and leave nothing behind.

        Calls without a reply get an error. May be called again, by several threads, after an interrupted call. Not from
        the I/O thread.
        """
        self._hub.close(grace_s)
        self._finaliser.detach()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def _refuse_remote(bind: str | None, advertise: str | None, key_file: str | None) -> None:
    for name, value in (("advertise", advertise), ("key_file", key_file)):
        if value is not None:
            raise ValueError(
                f"{name}={value!r} is for workers on other nodes, which this version does not have; leave it out"
            )
    if bind is not None and not bind.startswith(LOOPBACK):
        raise ValueError(
            f"bind={bind!r} is not possible in this version, which has workers on this node only; "
            f"allowed: None, or '{LOOPBACK}PORT' (0 for any port)"
        )
