"""However a coordinator ends, its processes and its directory are gone soon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from lgroup.workers import Cluster, WorkerSpec, WorkerState

ROOT = Path(__file__).parents[2]
GONE_S = 3.0  # the goal is one second on an idle machine; tests share theirs

COORDINATOR = """
import os, subprocess, sys, time
from lgroup.workers import Cluster, WorkerSpec

class Actor:
    def __init__(self, seconds=0.0):
        if seconds:
            print("constructing", flush=True)
            time.sleep(seconds)
    def wait(self):
        print("in a call", flush=True)
        time.sleep(600)
    def hold_the_interpreter(self):
        print("in a call", flush=True)
        import ctypes
        ctypes.PyDLL(None).sleep(600)
    def start_child(self):
        return subprocess.Popen(["sleep", "600"]).pid

def say(*words):
    print(*words, flush=True)

def worker(*args):
    return cluster.start_worker(WorkerSpec("actor", Actor, args))

cluster = Cluster()
say(cluster.zygote_pid)
"""
UNTIL_KILLED = "\nsys.stdin.read()\n"


@contextmanager
def coordinator(code: str, directory: Path, *, wait: bool = True) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(directory)}
    with subprocess.Popen(
        [sys.executable, "-c", COORDINATOR + code + (UNTIL_KILLED if wait else "")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def wait_for_stderr(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    for text in process.stderr:
        if words in text:
            return
    pytest.fail(f"the coordinator ended without writing {words!r}")


STAGES = {
    "while its zygote imports": ("", ""),
    "while an actor is built": ("worker(600.0)", "constructing"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_left_of_a_coordinator_that_is_killed(
    stage: str, tmp_path: Path, wait_gone: Callable[..., None]
) -> None:
    code, words = STAGES[stage]
    with coordinator(code, tmp_path) as process:
        pids = line(process)
        if words:
            wait_for_stderr(process, words)
        assert list(tmp_path.glob("lgroup-*"))  # the directory with the socket
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_gone(pids, GONE_S)
        assert list(tmp_path.glob("lgroup-*")) == []


AT_WORK = """
workers = [worker() for _ in range(4)]
say(*[w.ready.result().pid for w in workers])
idle, waiting, holding, parent = workers
waiting.call("wait", on_reply=say)
holding.call("hold_the_interpreter", on_reply=say)
parent.call("start_child", on_reply=lambda reply: say(reply.value))
"""


def test_workers_at_work_and_their_children_go_with_a_coordinator_that_is_killed(
    tmp_path: Path, wait_gone: Callable[..., None]
) -> None:
    with coordinator(AT_WORK, tmp_path) as process:
        pids = line(process) + line(process) + line(process)
        assert len(pids) == 6  # the zygote, the workers and a worker's child
        wait_for_stderr(process, "in a call")
        wait_for_stderr(process, "in a call")
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_gone(pids, GONE_S)
        assert list(tmp_path.glob("lgroup-*")) == []


def test_workers_end_with_their_coordinator_when_the_zygote_was_killed_first(
    tmp_path: Path, wait_gone: Callable[..., None]
) -> None:
    with coordinator("w = worker(); w.ready.result(); say(w.pid)", tmp_path) as process:
        zygote, worker = line(process) + line(process)
        os.kill(process.pid, signal.SIGSTOP)  # so that it starts no new one
        os.kill(zygote, signal.SIGKILL)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_gone([zygote, worker], GONE_S)
        assert list(tmp_path.glob("lgroup-*")) == []


def test_a_program_that_ends_by_an_exception_and_never_closes_its_cluster_leaves_nothing(
    tmp_path: Path, wait_gone: Callable[..., None]
) -> None:
    code = "w = worker(); w.ready.result(); say(w.pid); raise RuntimeError('as planned')"
    with coordinator(code, tmp_path, wait=False) as process:
        pids = line(process) + line(process)
        _, errors = process.communicate(timeout=20)
        wait_gone(pids, GONE_S)
        assert list(tmp_path.glob("lgroup-*")) == []
        assert errors.count("Traceback") == 1 and errors.endswith("RuntimeError: as planned\n")


def test_ctrl_c_reaches_only_the_coordinator_which_closes_in_its_finally(
    tmp_path: Path, wait_gone: Callable[..., None]
) -> None:
    code = """
w = worker()
w.ready.result()
w.call("wait", on_reply=lambda reply: say(int(reply.error.died)))
say(w.pid)
try:
    sys.stdin.read()
finally:
    cluster.close(0.1)
"""
    with coordinator(code, tmp_path, wait=False) as process:
        pids = line(process) + line(process)
        wait_for_stderr(process, "in a call")
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=20)
        wait_gone(pids, GONE_S)
        assert printed == "1\n" and process.returncode == -signal.SIGINT
        assert errors.count("Traceback") == 1 and errors.endswith("KeyboardInterrupt\n")
        assert list(tmp_path.glob("lgroup-*")) == []


def test_a_stopped_coordinator_loses_nothing(tmp_path: Path) -> None:
    code = "w = worker(); w.ready.result(); say(w.pid); sys.stdin.readline()"
    code += "; w.call('start_child', on_reply=lambda r: say(r.value))"
    with coordinator(code, tmp_path) as process:
        pids = line(process) + line(process)
        os.kill(process.pid, signal.SIGSTOP)
        for pid in pids:
            with pytest.raises(psutil.TimeoutExpired):
                psutil.Process(pid).wait(1.0)
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert line(process)


class Actor:
    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls


def test_a_cluster_closes_once_however_often_and_whoever_closes_it(inbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(pickle_by_value=[__name__])
    worker = cluster.start_worker(WorkerSpec("actor", Actor))
    worker.ready.result(60)
    # a fork of the coordinator closes nothing
    child = os.fork()
    if child == 0:
        cluster.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    worker.call("count", on_reply=inbox.put)
    assert inbox.wait()[0].value == 1
    # a close that is interrupted can be done again
    with monkeypatch.context() as patch:
        patch.setattr(cluster._hub, "_wait_for_exits", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cluster.close()
    # several at once are one
    worker.on_exit(inbox.put)
    threads = [threading.Thread(target=cluster.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    cluster.close()
    for thread in threads:
        thread.join()
    ended = inbox.wait(2)[1]
    assert (ended.exit_code, ended.expected) == (0, True)
    assert cluster.closed and cluster.workers == () and "closed" in repr(cluster)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_closing_while_workers_start_ends_them_and_their_futures(wait_gone: Callable[..., None]) -> None:
    cluster = Cluster(pickle_by_value=[__name__])
    workers = [cluster.start_worker(WorkerSpec(f"actor {number}", Actor)) for number in range(3)]
    zygote = cluster.zygote_pid
    cluster.close()
    wait_gone([zygote], 0.1)
    for worker in workers:
        assert worker.ready.exception(1) is not None and worker.state is WorkerState.EXITED


def test_a_forgotten_cluster_closes_itself(wait_gone: Callable[..., None]) -> None:
    cluster = Cluster()
    zygote = cluster.zygote_pid
    del cluster
    wait_gone([zygote])


def test_many_cycles_leave_no_descriptor_and_no_memory(wait_gone: Callable[..., None]) -> None:
    zygotes = []
    for _ in range(10):
        cluster = Cluster()
        zygotes.append(cluster.zygote_pid)
        cluster.close()
    wait_gone(zygotes, 0.1)
