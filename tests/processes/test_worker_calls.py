"""Calls to a worker: each gets one reply, whatever happens to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lgroup.workers import Cluster, Worker, WorkerSpec, WorkerState, current_worker, in_worker, prepare_call


class Actor:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return [list(args), kwargs] if kwargs else args[0]

    def see(self, item: Any) -> list[Any]:
        self.seen.append(item)
        return self.seen

    def flags(self, array: np.ndarray[Any, Any]) -> bool:
        return array.flags.writeable

    def boom(self) -> None:
        raise ZeroDivisionError("as planned")

    def quit(self, code: int) -> None:
        sys.exit(code)

    def unsendable(self) -> Any:
        return threading.Lock()

    def unloadable(self) -> Any:
        return Unloadable()

    def talk(self) -> None:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        os.write(1, b"no end")

    def block(self, descriptor_path: str) -> int:
        with open(descriptor_path) as pipe:
            return len(pipe.read())

    def group_sum(self, prefix: str, rank: int, world_size: int) -> float:
        from datetime import timedelta

        import torch.distributed as dist

        store = current_worker().store(prefix)
        group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=20))
        tensor = torch.full((3,), float(rank))
        group.allreduce([tensor]).wait()
        del group
        current_worker().forget_store(prefix)
        return float(tensor[0])

    def get_key(self, prefix: str, key: str, timeout_s: float) -> bytes:
        from datetime import timedelta

        store = current_worker().store(prefix)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store.get(key)

    def start_child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid


class Unloadable:
    def __reduce__(self) -> Any:
        return (_only_in_workers, ())


def _only_in_workers() -> Unloadable:
    from lgroup.workers import in_worker

    if not in_worker():
        raise RuntimeError("not for this process")
    return Unloadable()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(pickle_by_value=[__name__], worker_output="log") as cluster:
        yield cluster


@pytest.fixture
def worker(cluster: Cluster) -> Iterator[Worker]:
    (worker,) = start(cluster, 1)
    yield worker
    worker.kill()


def start(cluster: Cluster, count: int) -> list[Worker]:
    futures = [cluster.launch(WorkerSpec(f"actor {number}", Actor)) for number in range(count)]
    return [future.result(60) for future in futures]


@pytest.fixture
def ask(worker: Worker, inbox: Any) -> Callable[..., Any]:
    def ask(target: Any, *args: Any, data_only: bool = False, **kwargs: Any) -> Any:
        before = len(inbox.items)
        worker.call(target, args, kwargs, on_reply=inbox.put, data_only=data_only)
        return inbox.wait(before + 1)[-1]

    return ask


@pytest.mark.parametrize("data_only", [False, True])
def test_values_arrays_and_tensors_go_and_come_back(ask: Callable[..., Any], data_only: bool) -> None:
    body = {"a": [1, "x", None, (2.5, b"y")], "n": np.arange(6).reshape(2, 3), "t": torch.ones(2, dtype=torch.bfloat16)}
    value = ask("echo", body, data_only=data_only).unwrap()
    assert value["a"] == body["a"]
    np.testing.assert_array_equal(value["n"], body["n"])
    assert torch.equal(value["t"], body["t"]) and value["t"].dtype is torch.bfloat16


def test_keyword_arguments_functions_and_closures_are_carried_out(ask: Callable[..., Any]) -> None:
    offset = 5
    assert ask("echo", 1, b=2).unwrap() == [[1], {"b": 2}]
    assert ask(lambda actor, number: actor.echo(number + offset), 1).unwrap() == 6


def test_arrays_of_a_call_are_read_only_and_those_of_data_are_the_workers_own(ask: Callable[..., Any]) -> None:
    array = np.zeros(10_000)
    assert ask("flags", array).unwrap() is False
    assert ask("flags", array, data_only=True).unwrap() is True


def test_calls_are_carried_out_in_order(worker: Worker, inbox: Any) -> None:
    for number in range(200):
        worker.call("see", (number,), on_reply=inbox.put, data_only=number % 2 == 0)
    assert inbox.wait(200)[-1].value == list(range(200))


@pytest.mark.parametrize("data_only", [False, True])
def test_an_exception_is_the_reply_and_leaves_the_actor_alive(ask: Callable[..., Any], data_only: bool) -> None:
    reply = ask("boom", data_only=data_only)
    assert (reply.ok, reply.error.type_name, reply.error.message) == (False, "ZeroDivisionError", "as planned")
    assert not reply.error.died and "in boom" in reply.error.traceback
    assert ask("echo", 1).unwrap() == 1


def test_a_result_that_cannot_travel_is_that_calls_error(ask: Callable[..., Any]) -> None:
    assert ask("unsendable").error.type_name == "TypeError"
    assert ask(lambda actor: (number for number in [1])).error.type_name == "TypeError"
    assert "cannot be loaded here: not for this process" in ask("unloadable").error.message
    assert ask("echo", 1).unwrap() == 1


def test_arguments_that_cannot_travel_raise_and_leave_nothing_pending(worker: Worker, inbox: Any) -> None:
    with pytest.raises(TypeError):
        worker.call("echo", (threading.Lock(),), on_reply=inbox.put)
    with pytest.raises(TypeError, match="body"):
        worker.call("echo", (Actor(),), on_reply=inbox.put, data_only=True)
    assert worker.num_pending == 0


def test_a_method_that_does_not_exist_is_an_error(ask: Callable[..., Any]) -> None:
    assert ask("no_such_method").error.type_name == "AttributeError"


def test_a_prepared_call_goes_to_many(cluster: Cluster, inbox: Any) -> None:
    workers = start(cluster, 3)
    prepared = prepare_call("echo", (np.arange(10),))
    for worker in workers:
        worker.send(prepared, inbox.put)
    assert [int(reply.value.sum()) for reply in inbox.wait(3)] == [45, 45, 45]
    for worker in workers:
        worker.kill()


def test_a_busy_worker_answers_a_ping(worker: Worker, inbox: Any, tmp_path: Any) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    request_id = worker.call("block", (str(pipe),), on_reply=inbox.put)
    while True:
        before = len(inbox.items)
        worker.ping(inbox.put)
        pong = inbox.wait(before + 1)[-1].value
        if pong != ["idle", None]:
            break
    assert pong == ["calling", request_id]
    pipe.write_text("abc")
    assert inbox.wait_for(lambda items: items[-1].request_id == request_id)[-1].value == 3


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda worker: worker.call("quit", (3,), on_reply=lambda reply: None), "exited with status 3"),
        (lambda worker: os.kill(worker.pid, signal.SIGKILL), "killed by SIGKILL; if nobody killed it"),
        (lambda worker: os.kill(worker.pid, signal.SIGTERM), "killed by SIGTERM"),
    ],
)
def test_a_death_answers_every_pending_call_and_is_told_once(
    worker: Worker, inbox: Any, tmp_path: Any, end: Callable[[Worker], Any], how: str
) -> None:
    worker.call("talk", on_reply=inbox.put)
    inbox.wait()
    if "status" not in how:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        worker.call("block", (str(pipe),), on_reply=inbox.put)
    worker.on_exit(lambda ended: inbox.put(("exit", ended)))
    end(worker)
    for _ in range(20):
        worker.call("echo", (1,), on_reply=inbox.put)
    expected = 1 + ("status" not in how) + 20 + 1
    items = inbox.wait(expected)
    (ended,) = [item[1] for item in items if isinstance(item, tuple)]
    assert how in ended.text and not ended.expected
    assert ended.last_lines[-3:] == ("to stdout", "to stderr", "no end")
    failed = [item for item in items if not isinstance(item, tuple)][1:]
    assert all(not reply.ok and reply.error.died for reply in failed)
    assert worker.state is WorkerState.EXITED and worker.num_pending == 0
    late = len(inbox.items)
    worker.call("echo", (1,), on_reply=inbox.put)
    worker.on_exit(inbox.put)
    assert how in inbox.wait(late + 2)[late].error.message
    assert len(inbox.items) == expected + 2


def test_replies_sent_before_a_death_arrive(cluster: Cluster, inbox: Any) -> None:
    for round_number in range(5):
        (worker,) = start(cluster, 1)
        before = len(inbox.items)
        for number in range(50):
            worker.call("echo", (number,), on_reply=inbox.put)
        worker.call("quit", (0,), on_reply=inbox.put)
        replies = inbox.wait(before + 51)[before:]
        assert [reply.value for reply in replies[:50]] == list(range(50)), round_number
        assert replies[50].error.died


def test_stop_lets_calls_finish_and_kill_does_not(cluster: Cluster, inbox: Any) -> None:
    gentle, hard = start(cluster, 2)
    gentle.on_exit(inbox.put)
    replies: list[Any] = []
    for number in range(100):
        gentle.call("echo", (number,), on_reply=replies.append)
    gentle.stop(20.0)
    (ended,) = inbox.wait()
    assert (ended.exit_code, ended.expected) == (0, True)
    assert [reply.value for reply in replies] == list(range(100))
    hard.on_exit(inbox.put)
    hard.kill()
    assert inbox.wait(2)[1].signal_name == "SIGKILL"


def test_a_worker_that_does_not_stop_is_killed_after_its_grace(worker: Worker, inbox: Any, tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    worker.call("block", (str(tmp_path / "pipe"),), on_reply=inbox.put)
    worker.on_exit(inbox.put)
    worker.stop(0.1)
    reply, ended = inbox.wait(2)
    assert reply.error.died and ended.signal_name == "SIGKILL"


def test_children_of_a_worker_go_with_it(
    worker: Worker, ask: Callable[..., Any], wait_gone: Callable[..., None]
) -> None:
    child = ask("start_child").unwrap()
    worker.kill()
    wait_gone([worker.pid, child])


def test_output_is_forwarded_with_the_name_of_its_worker(
    ask: Callable[..., Any], worker: Worker, caplog: pytest.LogCaptureFixture, inbox: Any
) -> None:
    with caplog.at_level("INFO", logger="lgroup.worker_output"):
        ask("talk").unwrap()
        worker.on_exit(inbox.put)
        worker.kill()
        inbox.wait(2)
    who = f"(actor 0@local pid={worker.pid})"
    assert [f"{who} to stdout", f"{who} to stderr", f"{who} no end"] == caplog.messages


def test_ranks_find_each_other_through_the_store(cluster: Cluster, inbox: Any) -> None:
    workers = start(cluster, 3)
    for generation in range(3):
        for rank, worker in enumerate(workers):
            worker.call("group_sum", (f"g{generation}", rank, 3), on_reply=inbox.put, data_only=True)
        replies = inbox.wait(3 * (generation + 1))
        assert [reply.unwrap() for reply in replies[-3:]] == [3.0, 3.0, 3.0]
        cluster.store_drop(f"g{generation}")
    for worker in workers:
        worker.kill()


def test_a_key_that_nobody_sets_ends_in_an_error_that_names_it(ask: Callable[..., Any]) -> None:
    began = time.monotonic()
    reply = ask("get_key", "p", "missing", 0.2)
    assert reply.error.type_name == "DistStoreError" and "'missing'" in reply.error.message
    assert time.monotonic() - began < 5


def test_a_dropped_prefix_ends_the_wait_for_its_keys(worker: Worker, cluster: Cluster, inbox: Any) -> None:
    worker.call("get_key", ("q", "missing", 60.0), on_reply=inbox.put)
    while not cluster._hub._store.num_waiting:
        worker.ping(inbox.put)
        inbox.wait(len(inbox.items) + 1)
    cluster.store_drop("q")
    (reply,) = [item for item in inbox.wait_for(lambda items: any(not item.ok for item in items)) if not item.ok]
    assert "dropped by the coordinator" in reply.error.message


def test_this_process_is_no_worker() -> None:
    assert not in_worker()
    with pytest.raises(RuntimeError, match="this process is none"):
        current_worker()
