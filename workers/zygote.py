"""The zygote: a process that has everything imported and forks workers on request.

It has one thread, runs no tensor operation and never touches a GPU, so that its forks are whole. It knows every worker
it forked and has not reaped. When its coordinator's process is gone, or has closed the channel, it kills them with all
their children, removes the runtime directory and ends.
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from lgroup.workers import _zygote_wire as wire
from lgroup.workers.worker_main import worker_process


class Zygote:
    """Serves one coordinator until that ends."""

    def __init__(self, channel: socket.socket, coordinator: int, runtime_dir: str) -> None:
        """``coordinator`` is a pidfd of the coordinator's process."""
        self._channel = channel
        self._coordinator = coordinator
        self._runtime_dir = runtime_dir
        self._workers: dict[int, int] = {}  # pid -> worker id
        self._wake, self._wake_writer = socket.socketpair()

    def serve(self) -> None:
        """Fork workers and report their ends until the coordinator is gone or hangs up."""
        self._catch_child_signals()
        wire.send(self._channel, {"op": "ready", "pid": os.getpid()})
        poller = select.poll()
        for descriptor in (self._channel.fileno(), self._coordinator, self._wake.fileno()):
            poller.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if self._wake.fileno() in ready:
                self._reap()
            if self._coordinator in ready or (self._channel.fileno() in ready and not self._serve_note()):
                break
        self._end()

    def _catch_child_signals(self) -> None:
        self._wake.setblocking(False)
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _serve_note(self) -> bool:
        received = wire.receive(self._channel)
        if received is None:
            return False
        note, descriptors = received
        if note["op"] == "start":
            self._fork(note["worker"], output=descriptors[0], payload=descriptors[1])
        return True

    def _fork(self, worker: int, output: int, payload: int) -> None:
        settings = wire.read_in_memory(payload)
        try:
            pid = os.fork()
        except OSError as error:
            os.close(output)
            self._tell({"op": "fork failed", "worker": worker, "error": str(error)})
            return
        if pid == 0:
            self._become_worker(settings, output)
        os.close(output)
        self._workers[pid] = worker
        pidfd = os.pidfd_open(pid)  # the child cannot be reaped before this process does it
        self._tell({"op": "started", "worker": worker, "pid": pid}, [pidfd])
        os.close(pidfd)

    def _become_worker(self, settings: dict[str, Any], output: int) -> None:
        try:
            signal.set_wakeup_fd(-1)
            for end in (self._channel, self._wake, self._wake_writer):
                end.close()
            worker_process(settings, output=output, coordinator=self._coordinator)
        except BaseException:
            traceback.print_exc()
        finally:  # never back into the zygote's loop
            os._exit(70)

    def _reap(self) -> None:
        while True:
            try:
                if not self._wake.recv(4096):
                    break
            except BlockingIOError:
                break
        while self._workers:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # Its process group is its own children; the number cannot be another's before the wait below.
            _kill_group(ended.si_pid)
            pid, status = os.waitpid(ended.si_pid, 0)
            worker = self._workers.pop(pid, None)
            if worker is not None:
                self._tell({"op": "exited", "worker": worker, "status": os.waitstatus_to_exitcode(status)})

    def _tell(self, note: wire.Note, descriptors: Sequence[int] = ()) -> None:
        try:
            wire.send(self._channel, note, descriptors)
        except OSError:
            return  # nobody listens any more; the poll loop sees that next

    def _end(self) -> None:
        for pid in self._workers:
            _kill_group(pid)
        for pid in self._workers:
            os.waitpid(pid, 0)
        shutil.rmtree(self._runtime_dir, ignore_errors=True)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # by its number too: it may not have reached setsid yet
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def prepare_to_fork() -> None:
    """Put what is imported beyond the garbage collector, whose marks would otherwise copy its pages in every worker."""
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # not collected before: that takes a tenth of the start and finds 8,500 objects
