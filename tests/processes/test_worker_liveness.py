"""What the coordinator sees of a worker that is stopped, stuck or busy, and how it reaches one that is."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lgroup.workers import Cluster, Health, Worker, WorkerSpec, current_worker

INTERVAL_S = 0.1
SILENT_S = 0.6  # six intervals: late answers are looked at from the second on


class Actor:
    def __init__(self) -> None:
        self.interrupts: queue.SimpleQueue[int] = queue.SimpleQueue()

    def compute(self) -> int:
        return sum(range(10**12))  # in C, and never lets go of the GIL

    def sleep_with_the_gil(self) -> None:
        ctypes.PyDLL(None).usleep(60_000_000)

    def wait_for_interrupts(self, count: int) -> list[int]:
        current_worker().on_interrupt(self.interrupts.put)
        return [self.interrupts.get(timeout=60) for _ in range(count)]

    def talk(self, text: str) -> None:
        print(text)
        print("to stderr", file=sys.stderr)
        os.write(1, b"no end")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(pickle_by_value=[__name__], worker_output="log") as cluster:
        yield cluster


@pytest.fixture
def worker(cluster: Cluster, inbox: Any) -> Iterator[Worker]:
    """One whose health comes into the inbox at each beat."""
    worker = cluster.launch(WorkerSpec("actor 0", Actor)).result(60)
    cluster.watch(worker, INTERVAL_S, lambda _, health: inbox.put(health))
    yield worker
    worker.kill()


def silent(inbox: Any) -> Health:
    """Its health once it has been silent for a while."""
    found: Health = inbox.wait_for(lambda items: items and items[-1].silent_s >= SILENT_S)[-1]
    return found


def ignore(*_: Any) -> None:
    pass


def test_a_worker_that_answers_is_not_silent_and_says_what_it_does(worker: Worker, inbox: Any) -> None:
    health = inbox.wait_for(lambda items: items and items[-1].phase == "idle")[-1]
    assert health.silent_s < SILENT_S and not health.stopped and health.request_id is None
    request_id = worker.call("wait_for_interrupts", (1,), on_reply=ignore)
    inbox.wait_for(lambda items: (items[-1].phase, items[-1].request_id) == ("calling", request_id))


def test_a_stopped_worker_is_seen_as_stopped_until_it_goes_on(worker: Worker, inbox: Any) -> None:
    os.kill(worker.pid or 0, signal.SIGSTOP)
    health = silent(inbox)
    assert health.stopped and health.stuck(SILENT_S) and "its process is stopped" in health.text
    os.kill(worker.pid or 0, signal.SIGCONT)
    health = inbox.wait_for(lambda items: items[-1].silent_s < SILENT_S)[-1]
    assert not health.stopped and not health.stuck(SILENT_S)


def test_a_worker_that_computes_with_the_interpreter_locked_is_silent_but_busy(worker: Worker, inbox: Any) -> None:
    worker.call("compute", on_reply=ignore)
    health = silent(inbox)
    assert health.cpu_advancing and not health.stopped and not health.stuck(SILENT_S)
    assert health.cpu_s is not None and health.cpu_s > 0


def test_a_worker_that_sleeps_with_the_interpreter_locked_is_stuck(worker: Worker, inbox: Any) -> None:
    worker.call("sleep_with_the_gil", on_reply=ignore)
    inbox.wait_for(lambda items: items and items[-1].stuck(SILENT_S))
    assert "using no CPU" in inbox.items[-1].text and not inbox.items[-1].stopped


def test_stacks_show_where_a_worker_holds_the_interpreter(worker: Worker, inbox: Any) -> None:
    worker.call("sleep_with_the_gil", on_reply=ignore)
    inbox.wait_for(lambda items: items and items[-1].stuck(SILENT_S))
    worker.dump_stacks(lambda lines: inbox.put(("stacks", lines)))
    items = inbox.wait_for(lambda items: any(isinstance(item, tuple) for item in items))
    (lines,) = [item[1] for item in items if isinstance(item, tuple)]
    assert any("in sleep_with_the_gil" in line for line in lines)


def test_a_worker_that_is_stopped_or_gone_has_no_stacks_and_nobody_waits(worker: Worker, inbox: Any) -> None:
    os.kill(worker.pid or 0, signal.SIGSTOP)
    silent(inbox)
    worker.dump_stacks(lambda lines: inbox.put(("stacks", lines)))
    inbox.wait_for(lambda items: ("stacks", ()) in items)
    worker.on_exit(lambda ended: inbox.put(("ended", ended)))
    worker.kill("it was in the way")
    items = inbox.wait_for(lambda items: any(isinstance(item, tuple) and item[0] == "ended" for item in items))
    (ended,) = [item[1] for item in items if isinstance(item, tuple) and item[0] == "ended"]
    assert ended.how == "killed by lgroup: it was in the way" and not ended.own
    worker.dump_stacks(lambda lines: inbox.put(("again", lines)))
    inbox.wait_for(lambda items: ("again", ()) in items)


def test_interrupts_reach_a_worker_while_user_code_blocks(cluster: Cluster, inbox: Any) -> None:
    worker = cluster.launch(WorkerSpec("actor 0", Actor)).result(60)
    worker.call("wait_for_interrupts", (1,), on_reply=inbox.put)
    while True:  # until it is known to be in the call
        before = len(inbox.items)
        worker.ping(inbox.put)
        if inbox.wait(before + 1)[-1].value[0] == "calling":
            break
    before = len(inbox.items)
    worker.interrupt(7)
    assert inbox.wait(before + 1)[-1].value == [7]
    worker.kill()


def test_each_worker_has_a_file_for_its_lines(inbox: Any, tmp_path: Path) -> None:
    with Cluster(pickle_by_value=[__name__], worker_output="log", log_dir=tmp_path / "a" / "logs") as cluster:
        assert cluster.log_dir == tmp_path / "a" / "logs"
        workers = [
            cluster.start_worker(WorkerSpec(f"env runner {number}", Actor), incarnation=number) for number in range(2)
        ]
        for worker in workers:
            worker.ready.result(60).call("talk", (worker.name,), on_reply=inbox.put)
        inbox.wait(2)
    for number, worker in enumerate(workers):
        file = tmp_path / "a" / "logs" / f"env-runner-{number}-{number}-{worker.pid}.log"
        assert file.read_text() == f"env runner {number}\nto stderr\nno end\n"
    assert len(list((tmp_path / "a" / "logs").iterdir())) == 2


def test_a_log_folder_that_cannot_be_written_costs_one_warning(
    inbox: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with Cluster(pickle_by_value=[__name__], worker_output="log", log_dir=tmp_path / "file") as cluster:
        workers = [cluster.launch(WorkerSpec(f"actor {number}", Actor)) for number in range(2)]
        for worker in workers:
            worker.result(60).call("talk", ("hello",), on_reply=inbox.put)
        assert all(reply.ok for reply in inbox.wait(2))
    warnings = [record.getMessage() for record in caplog.records if "log_dir" in record.getMessage()]
    assert len(warnings) == 1 and str(tmp_path / "file") in warnings[0]
