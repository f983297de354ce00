"""The coordinator's end of everything: I/O thread, router, zygote, store table, and the handles of all workers.

A worker stands in the table from the moment it is asked for until it has exited. ``close`` may be interrupted at any
point and called again; only its first complete run does anything.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lgroup.transport.endpoints import Router
from lgroup.transport.errors import ConnectionClosed
from lgroup.transport.io_thread import IOThread
from lgroup.transport.messages import Buffer, Kind, Message
from lgroup.workers._watch import OnBeat, Watch
from lgroup.workers._zygote_link import Start, ZygoteLink
from lgroup.workers.environment import worker_environment
from lgroup.workers.health import AwakeClock
from lgroup.workers.log_files import LogFile, LogFolder
from lgroup.workers.memory import MemoryWatch, find_cgroup
from lgroup.workers.output import OutputPipe, WorkerOutput, forward_line, label
from lgroup.workers.spec import WorkerSpec
from lgroup.workers.start_policy import StartFailure
from lgroup.workers.store_table import Answer, StoreTable
from lgroup.workers.worker import Worker

CLOSE_GRACE_S = 1.0
CLOSE_LIMIT_S = 3.0
_MAX_SOCKET_PATH = 90  # the system allows 107 bytes; the name in the directory needs some

logger = logging.getLogger("lgroup.workers")


class Hub:
    """See the module. Implements what ``Worker`` and ``ZygoteLink`` need of their surroundings."""

    def __init__(self, *, bind: str | None, output: WorkerOutput, log_dir: Path | None) -> None:
        self.owner_pid = os.getpid()
        self._how = output
        self._logs = LogFolder(log_dir)
        self._ids = itertools.count(1)
        self._workers: dict[bytes, Worker] = {}
        self._changed = threading.Condition()
        self._closing = threading.Lock()
        self.closed = False
        self._store = StoreTable()
        self._delayed: dict[int, Callable[[], None]] = {}
        self._runtime_dir = _runtime_directory()
        self.io = IOThread("lgroup-io")
        self.io.start()
        self.memory = MemoryWatch(find_cgroup())
        self._watch = Watch(self.io)
        self._router = Router(
            self.io,
            bind or f"ipc://{self._runtime_dir}/router",
            on_message=self._on_message,
            on_protocol_error=self._on_protocol_error,
            on_unreachable=self._on_unreachable,
            load_pickles=False,  # a reply that cannot be loaded is that call's error, not the end of the worker
        )
        self._link = ZygoteLink(self.io, self._runtime_dir, self, output)
        self._link.spawn()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All that have not exited."""
        return tuple(self._workers.values())

    @property
    def zygote_pid(self) -> int | None:
        """The process that forks the workers."""
        return self._link.pid

    @property
    def clock(self) -> AwakeClock:
        """The coordinator's awake time."""
        return self._watch.clock

    def watch(self, worker: Worker, interval_s: float, on_beat: OnBeat | None) -> None:
        """Keep ``worker.health``; from any thread."""
        self._watch.add(worker, interval_s, on_beat)

    def start_worker(self, spec: WorkerSpec, incarnation: int) -> Worker:
        """Ask for a process; its handle's ``ready`` says what becomes of it."""
        if self.closed or os.getpid() != self.owner_pid:
            raise ConnectionClosed("the cluster is closed, or this is a fork of its process: it starts no workers")
        number = next(self._ids)
        log_file = LogFile(self._logs, f"{spec.name}-{incarnation}")

        def forward(line: str) -> None:
            forward_line(self._how, label(worker.name, worker.node, worker.pid), line)
            log_file.write(line, worker.pid)

        output = OutputPipe(self.io, forward, log_file.close)
        worker = Worker(self, number, spec, incarnation, output)
        payload = self._payload(worker)
        self._workers[worker.identity] = worker
        self.io.call_soon(self._link.start, Start(number, payload, output))
        worker.watch_start()
        return worker

    def _payload(self, worker: Worker) -> dict[str, Any]:
        spec = worker.spec
        return {
            "worker": worker.id,
            "identity": worker.identity.decode(),
            "name": spec.name,
            "incarnation": worker.incarnation,
            "actor_index": spec.actor_index,
            "num_threads": spec.num_threads,
            "seed": spec.seed,
            "env": worker_environment(os.environ, num_threads=spec.num_threads, extra=spec.env),
            "sys_path": list(sys.path),
            "cwd": _working_directory(),
            "address": self._router.address,
            "runtime_dir": self._runtime_dir,
            "coordinator_pid": self.owner_pid,
        }

    # --- for workers ---

    def send(self, identity: bytes, message: Message) -> None:
        """Send to a worker; from any thread."""
        self._router.send(identity, message)

    def send_frames(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        """Send an encoded message to a worker; from any thread."""
        self._router.send_frames(identity, frames)

    def withdraw(self, worker: Worker, *, stuck: bool) -> None:
        """A worker without a process is not wanted any more; from any thread."""
        self.io.call_soon(lambda: self._link.withdraw(worker.id, stuck=stuck))

    def gone(self, worker: Worker) -> None:
        """A worker has exited."""
        self._router.disconnect(worker.identity)
        self._store.forget(worker.identity)
        with self._changed:
            self._workers.pop(worker.identity, None)
            self._changed.notify_all()

    # --- from the zygote ---

    def started(self, worker: int, pid: int, pidfd: int) -> None:
        """A process is there."""
        self._workers[f"w{worker}".encode()].process_started(pid, pidfd)

    def not_started(self, worker: int, failure: StartFailure, why: str) -> None:
        """There will be none."""
        self._workers[f"w{worker}".encode()].process_not_started(failure, why)

    def exited(self, worker: int, status: int) -> None:
        """A process ended."""
        handle = self._workers.get(f"w{worker}".encode())
        if handle is not None:
            handle.status_known(status)

    # --- from the router ---

    def _on_message(self, identity: bytes, message: Message) -> None:
        worker = self._workers.get(identity)
        if worker is None:
            return  # it has exited
        if message.kind is Kind.STORE:
            self._ask_store(identity, message)
            return
        try:
            worker.take(message)
        except (TypeError, ValueError) as error:
            self._on_protocol_error(identity, error)

    def _on_protocol_error(self, identity: bytes, error: Exception) -> None:
        worker = self._workers.get(identity)
        logger.error("%s sent what is no message and loses its connection: %s", worker or identity, error)
        if worker is not None:
            worker.kill()

    def _on_unreachable(self, identity: bytes) -> None:
        worker = self._workers.get(identity)
        if worker is not None:
            worker.unreachable()

    # --- the store ---

    def _ask_store(self, identity: bytes, message: Message) -> None:
        waiting = self._store.num_waiting
        self._answer(self._store.ask(time.monotonic(), identity, message.request_id, message.body))
        if self._store.num_waiting > waiting:
            self.io.call_later(float(message.body[2]) + 0.001, self._expire_store)

    def _expire_store(self) -> None:
        self._answer(self._store.expire(time.monotonic()))

    def _answer(self, answers: list[Answer]) -> None:
        for answer in answers:
            message = Message(Kind.STORE_REPLY, answer.request_id, [answer.status, answer.value])
            with contextlib.suppress(ConnectionClosed):
                self._router.send(answer.asker, message)

    # --- what comes later ---

    def later(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Call ``callback`` on the I/O thread after ``delay_s``, or when the cluster closes if that is sooner."""
        number = next(self._ids)

        def due() -> None:
            if self._delayed.pop(number, None) is not None:
                callback()

        self._delayed[number] = due
        self.io.call_later(0.0 if self.closed else delay_s, due)

    def _hurry(self) -> None:
        for due in list(self._delayed.values()):
            due()

    def store_drop(self, prefix: str) -> None:
        """Forget the keys of ``prefix``."""
        self.io.call_soon(lambda: self._answer(self._store.drop(prefix)))

    # --- the end ---

    def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """End all workers and the zygote, and leave nothing. From any thread; does not wait on the I/O thread."""
        if os.getpid() != self.owner_pid:
            return  # a fork of the coordinator owns nothing of this
        if self.io.in_thread():  # the garbage collector ran there; it cannot wait for itself
            threading.Thread(target=self.close, args=(grace_s,), name="lgroup-close").start()
            return
        with self._closing:
            if self._runtime_dir == "":
                return
            self.closed = True
            self.io.call_soon(self._hurry)
            for worker in self.workers:
                worker.stop(grace_s)
            if not self._wait_for_exits(grace_s + CLOSE_LIMIT_S):
                logger.warning("workers that did not end in time: %s", self.workers)
            self._link.close(CLOSE_LIMIT_S)
            self._wait_for_exits(CLOSE_LIMIT_S)
            self._router.close()
            self.io.close(CLOSE_LIMIT_S)
            shutil.rmtree(self._runtime_dir, ignore_errors=True)
            self._runtime_dir = ""

    def _wait_for_exits(self, limit_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._workers, limit_s)


def _runtime_directory() -> str:
    directory = tempfile.mkdtemp(prefix="lgroup-")  # 0700
    if len(os.fsencode(directory)) <= _MAX_SOCKET_PATH:
        return directory
    os.rmdir(directory)
    return tempfile.mkdtemp(prefix="lgroup-", dir="/tmp")


def _working_directory() -> str | None:
    with contextlib.suppress(OSError):
        return os.getcwd()
    return None
