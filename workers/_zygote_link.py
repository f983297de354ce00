"""The coordinator's end of its zygote: starts it, asks it for workers, hears how they ended, starts it again.

At most one zygote lives at a time. Each start that was asked for ends in exactly one of ``started`` or ``not_started``.
A zygote that ends after it was ready is replaced at once; one that never got ready, at the next request. Everything but
``close`` runs on the I/O thread.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lgroup.transport.io_thread import IOThread
from lgroup.workers import _zygote_wire as wire
from lgroup.workers.environment import zygote_environment
from lgroup.workers.output import OutputPipe, WorkerOutput, forward_line, label
from lgroup.workers.spec import exit_of
from lgroup.workers.start_policy import StartFailure

MAX_UNANSWERED = 8
ENDING_LIMIT_S = 5.0
_ENTRY = str(Path(__file__).parent.parent / "worker.py")  # lgroup/worker.py: this package is lgroup.workers


class Listener(Protocol):
    """Hears what becomes of workers. Called on the I/O thread."""

    def started(self, worker: int, pid: int, pidfd: int) -> None:
        """The process is there; the descriptor is the listener's."""

    def not_started(self, worker: int, failure: StartFailure, why: str) -> None:
        """There will be no process."""

    def exited(self, worker: int, status: int) -> None:
        """The process ended with this status; minus the signal's number if one ended it."""


class LinkState(enum.Enum):
    """What there is of a zygote."""

    IDLE = "idle"  # none; the next request starts one
    IMPORTING = "importing"
    READY = "ready"
    CLOSED = "closed"


@dataclass(frozen=True)
class Start:
    """A request for one worker."""

    worker: int
    payload: wire.Note
    output: OutputPipe


class ZygoteLink:
    """See the module."""

    def __init__(self, io: IOThread, runtime_dir: str, listener: Listener, output: WorkerOutput) -> None:
        self._io = io
        self._runtime_dir = runtime_dir
        self._listener = listener
        self._how = output
        self.state = LinkState.IDLE
        self._waiting: collections.deque[Start] = collections.deque()
        self._unanswered: dict[int, Start] = {}
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None
        self._output: OutputPipe | None = None

    @property
    def pid(self) -> int | None:
        """The zygote's process."""
        return self._process.pid if self._process is not None else None

    def spawn(self) -> None:
        """Start a zygote if there is none."""
        if self.state is not LinkState.IDLE:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = OutputPipe(self._io, lambda line: forward_line(self._how, label("zygote", "local", self.pid), line))
        try:
            self._send_setup(ours)
            self._process = _zygote_process(theirs, output.writer)
        finally:
            theirs.close()
            output.close_writer()
        ours.setblocking(False)
        self._channel, self._output, self.state = ours, output, LinkState.IMPORTING
        self._pidfd = os.pidfd_open(self._process.pid)
        self._io.add_reader(ours.fileno(), self._readable)
        self._io.add_reader(self._pidfd, self._ended)

    def start(self, start: Start) -> None:
        """Ask for a worker."""
        if self.state is LinkState.CLOSED:
            self._refuse(start, StartFailure.STOPPED, "the cluster is closed")
            return
        self._waiting.append(start)
        try:
            self.spawn()
        except OSError as error:
            self._refuse_all(StartFailure.NO_PROCESS, f"no zygote could be started: {error}")
        self._send_waiting()

    def close(self, timeout_s: float) -> None:
        """End the zygote and with it all workers. From any thread; may be called again."""
        self._io.call_soon(self._hang_up)
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._io.call_soon(self._forget)

    def withdraw(self, worker: int, *, stuck: bool) -> None:
        """Nobody wants that start any more. ``stuck``: the zygote had its time, so if it was asked, it is ended."""
        for start in [start for start in self._waiting if start.worker == worker]:
            self._waiting.remove(start)
            self._refuse(start, StartFailure.STOPPED, "its start was withdrawn")
        if stuck and worker in self._unanswered:
            self._process_of_now().kill()

    def _hang_up(self) -> None:
        if self.state is LinkState.IMPORTING and self._process is not None:
            self._process.kill()  # it has no workers yet, and would not look at its channel for seconds
        self.state = LinkState.CLOSED
        if self._channel is not None and self._channel.fileno() >= 0:
            self._io.remove_reader(self._channel.fileno())
            self._channel.close()  # the zygote takes that as its end

    def _forget_pidfd(self) -> None:
        if self._pidfd is not None:
            self._io.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _forget(self) -> None:
        self._forget_pidfd()
        if self._output is not None:
            self._output.close()
        self._refuse_all(StartFailure.STOPPED, "the cluster is closed")

    def _send_setup(self, channel: socket.socket) -> None:
        here = os.getcwd() if _directory_exists() else "/"
        setup = {"sys_path": [entry or here for entry in sys.path], "runtime_dir": self._runtime_dir}
        coordinator = os.pidfd_open(os.getpid())
        try:
            wire.send(channel, setup, [coordinator])
        finally:
            os.close(coordinator)

    def _send_waiting(self) -> None:
        while self.state is LinkState.READY and self._waiting and len(self._unanswered) < MAX_UNANSWERED:
            start = self._waiting.popleft()
            payload = wire.sealed_in_memory(start.payload)
            try:
                assert self._channel is not None
                wire.send(self._channel, {"op": "start", "worker": start.worker}, [start.output.writer, payload])
            except OSError:  # full, or the zygote is ending: its answers or its end come next
                self._waiting.appendleft(start)
                return
            finally:
                os.close(payload)
            start.output.close_writer()
            self._unanswered[start.worker] = start

    def _readable(self) -> None:
        assert self._channel is not None
        with contextlib.suppress(BlockingIOError):
            while self.state is not LinkState.CLOSED:
                received = wire.receive(self._channel)
                if received is None:  # it is ending
                    self._io.remove_reader(self._channel.fileno())
                    self._io.call_later(ENDING_LIMIT_S, self._process_of_now().kill)
                    return
                self._take(*received)
        self._send_waiting()

    def _take(self, note: dict[str, Any], descriptors: list[int]) -> None:
        operation = note["op"]
        if operation == "ready":
            self.state = LinkState.READY
        elif operation == "started":
            self._unanswered.pop(note["worker"], None)
            self._listener.started(note["worker"], note["pid"], descriptors[0])
        elif operation == "fork failed":
            self._refuse(self._unanswered.pop(note["worker"]), StartFailure.NO_PROCESS, f"fork: {note['error']}")
        elif operation == "exited":
            self._listener.exited(note["worker"], note["status"])

    def _process_of_now(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def _ended(self) -> None:
        self._forget_pidfd()
        if self.state is LinkState.CLOSED:
            return
        assert self._channel is not None and self._output is not None
        self._readable()  # the notes it still wrote
        self._io.remove_reader(self._channel.fileno())
        self._channel.close()
        was_ready, self.state = self.state is LinkState.READY, LinkState.IDLE
        status = self._process_of_now().wait()
        self._output.close()
        failure = StartFailure.NO_PROCESS if was_ready or status < 0 else StartFailure.PERMANENT
        ended = exit_of("the zygote", self.pid, status, expected=False, last_lines=self._output.last_lines)
        for start in list(self._unanswered.values()):
            self._refuse(self._unanswered.pop(start.worker), failure, ended.text)
        if was_ready:
            self.spawn()
        else:
            self._refuse_all(failure, ended.text)

    def _refuse_all(self, failure: StartFailure, why: str) -> None:
        starts = [*self._unanswered.values(), *self._waiting]
        self._unanswered.clear()
        self._waiting.clear()
        for start in starts:
            self._refuse(start, failure, why)

    def _refuse(self, start: Start, failure: StartFailure, why: str) -> None:
        self._listener.not_started(start.worker, failure, why)


def _zygote_process(channel: socket.socket, output: int) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise OSError("sys.executable is empty, so there is no Python to start it with")
    # By its path, not with -m: that would import lgroup, and with it torch, before the zygote watches its coordinator.
    return subprocess.Popen(
        [sys.executable, _ENTRY, "--zygote-fd", str(channel.fileno())],
        pass_fds=[channel.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=zygote_environment(os.environ),
        cwd="/",
        start_new_session=True,
    )


def _directory_exists() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True
