"""The coordinator's handle of a worker, where its news come in an unusual order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lgroup.transport.messages import Kind, Message
from lgroup.workers.memory import MemoryWatch
from lgroup.workers.spec import WorkerSpec, WorkerState
from lgroup.workers.worker import Worker


class Io:
    """An I/O thread that carries out nothing."""

    def add_reader(self, descriptor: int, callback: Any) -> None: ...

    def call_later(self, delay_s: float, *callback: Any) -> Any:
        return SimpleNamespace(cancel=lambda: None)

    def call_soon(self, *callback: Any) -> bool:
        return True


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until its input ends."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with child:
        yield child
        child.kill()


def handle() -> Worker:
    nothing = lambda *_, **__: None  # noqa: E731
    surroundings: Any = SimpleNamespace(io=Io(), memory=MemoryWatch(None), send=nothing, withdraw=nothing)
    worker = Worker(surroundings, 1, WorkerSpec("learner 1", object), 0, SimpleNamespace())  # type: ignore[arg-type]
    worker.watch_start()
    return worker


def test_a_worker_that_says_it_is_ready_before_the_zygote_says_it_was_forked_is_not_killed(
    process: subprocess.Popen[bytes],
) -> None:
    worker = handle()
    worker.take(Message(Kind.HELLO, 0, [1, process.pid]))
    worker.take(Message(Kind.READY, 0, None))
    assert worker.state is WorkerState.READY
    worker.process_started(process.pid, os.pidfd_open(process.pid))
    process.communicate(b"\n")
    assert process.returncode == 0, "it ended by itself"
    assert worker.pid == process.pid


def test_a_worker_that_nobody_wants_any_more_when_it_is_forked_is_killed(process: subprocess.Popen[bytes]) -> None:
    worker = handle()
    worker.kill()
    worker.process_started(process.pid, os.pidfd_open(process.pid))
    assert process.wait(20) == -signal.SIGKILL
