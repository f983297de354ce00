"""C11: an actor's constructor that raises, hangs, crashes or cannot be imported."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lgroup.workers import Cluster, StartPolicy, WorkerSpec, WorkerStartError, WorkerState, current_worker
from lgroup.workers.start_policy import StartFailure

QUICK = StartPolicy(max_attempts=3, backoff_s=0.01)


class Fails:
    """Fails until its `marker` file has as many lines as `times`."""

    def __init__(self, how: str, marker: Path, times: int) -> None:
        with open(marker, "a") as file:
            file.write(f"{os.getpid()} {current_worker().incarnation}\n")
        if len(marker.read_text().splitlines()) <= times:
            getattr(self, how)()

    def raises(self) -> None:
        raise OSError("the disk is on fire")

    def imports(self) -> None:
        import a_module_that_is_not_there  # type: ignore[import-not-found]  # noqa: F401

    def aborts(self) -> None:
        print("about to abort", flush=True)
        os.abort()

    def segfaults(self) -> None:
        ctypes.string_at(0)

    def exits(self) -> None:
        os._exit(7)

    def leaves(self) -> None:
        raise SystemExit("I would rather not")

    def hangs(self) -> None:
        time.sleep(600)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(pickle_by_value=[__name__], worker_output="log") as cluster:
        yield cluster


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "attempts"


def attempts(marker: Path) -> list[tuple[int, int]]:
    return [(int(pid), int(incarnation)) for pid, incarnation in map(str.split, marker.read_text().splitlines())]


def spec(how: str, marker: Path, times: int = 100, start_timeout_s: float = 30.0) -> WorkerSpec:
    return WorkerSpec("learner 1", Fails, (how, marker, times), start_timeout_s=start_timeout_s)


@pytest.mark.parametrize(
    ("how", "num_attempts", "words"),
    [
        ("raises", 3, "constructor raised OSError: the disk is on fire"),
        ("imports", 1, "constructor raised ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("aborts", 3, "killed by SIGABRT"),
        ("segfaults", 3, "killed by SIGSEGV"),
        ("exits", 3, "exited with status 7"),
        ("leaves", 3, "exited with status 1"),
    ],
)
def test_a_constructor_that_fails_is_tried_as_often_as_makes_sense_and_then_named(
    cluster: Cluster, marker: Path, how: str, num_attempts: int, words: str
) -> None:
    with pytest.raises(WorkerStartError, match=words) as caught:
        cluster.launch(spec(how, marker), policy=QUICK).result(60)
    tried = attempts(marker)
    assert [incarnation for _, incarnation in tried] == list(range(num_attempts))
    text = str(caught.value)
    assert f"learner 1 (pid {tried[-1][0]})" in text
    assert not any(psutil.pid_exists(pid) for pid, _ in tried)
    assert cluster.workers == ()
    if how in ("raises", "imports"):
        assert f"in {how}" in text and caught.value.remote_traceback.strip() in text  # the child's own traceback
        assert "lgroup" not in caught.value.remote_traceback  # without our frames
    else:
        assert {"aborts": "about to abort", "segfaults": "Fatal Python error", "leaves": "rather not"}.get(
            how, ""
        ) in text


def test_a_constructor_that_fails_twice_succeeds_the_third_time(cluster: Cluster, marker: Path) -> None:
    worker = cluster.launch(spec("raises", marker, times=2), policy=QUICK).result(60)
    assert (worker.incarnation, worker.state) == (2, WorkerState.READY)
    assert [incarnation for _, incarnation in attempts(marker)] == [0, 1, 2]
    worker.kill()


def test_a_constructor_that_hangs_is_ended_at_the_deadline_and_its_stacks_shown(
    cluster: Cluster, marker: Path, wait_gone: Callable[..., None]
) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerStartError, match=r"did not return within 0\.5") as caught:
        cluster.launch(spec("hangs", marker, start_timeout_s=0.5), policy=QUICK).result(60)
    assert time.monotonic() - began < 5
    assert "in hangs" in str(caught.value)  # from faulthandler
    wait_gone([pid for pid, _ in attempts(marker)], 0.1)


def test_arguments_the_class_does_not_take_fail_at_once(cluster: Cluster) -> None:
    with pytest.raises(WorkerStartError, match=r"Fails\(how: .* missing a required argument: 'marker'"):
        cluster.launch(WorkerSpec("actor", Fails, ("raises",))).result(60)


def test_a_class_that_cannot_be_sent_fails_at_once_and_leaves_no_process(cluster: Cluster) -> None:
    worker = cluster.start_worker(WorkerSpec("actor", Fails, (threading.Lock(),)))
    error = worker.ready.exception(60)
    assert isinstance(error, WorkerStartError) and "cannot be sent" in str(error)
    assert worker.failure is StartFailure.PERMANENT


def test_a_class_that_cannot_be_found_there_fails_at_once(cluster: Cluster, tmp_path: Path, inbox: Any) -> None:
    (tmp_path / "only_here.py").write_text("class Actor:\n    pass\n")
    namespace: dict[str, Any] = {"__name__": "only_here"}
    exec((tmp_path / "only_here.py").read_text(), namespace)
    module = types.ModuleType("only_here")
    module.__dict__.update(namespace)
    sys.modules["only_here"] = module
    try:
        with pytest.raises(WorkerStartError, match="No module named 'only_here'"):
            cluster.launch(WorkerSpec("actor", module.Actor)).result(60)
    finally:
        del sys.modules["only_here"]


def test_a_worker_killed_while_it_starts_says_so(cluster: Cluster, marker: Path, inbox: Any) -> None:
    worker = cluster.start_worker(spec("hangs", marker))
    worker.on_exit(inbox.put)
    worker.kill()
    (ended,) = inbox.wait()
    assert ended.expected and worker.state is WorkerState.EXITED
    assert isinstance(worker.ready.exception(), WorkerStartError) and worker.failure is StartFailure.STOPPED


class Plain:
    """Says where it lives."""

    def __init__(self) -> None:
        import random

        import numpy as np
        import torch

        self.numbers = (random.random(), float(np.random.rand()), float(torch.rand(1)))

    def where(self) -> dict[str, Any]:
        import torch

        worker = current_worker()
        return {
            "name": worker.name,
            "seed": worker.seed,
            "threads": (worker.num_threads, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]),
            "numbers": self.numbers,
            "cwd": os.getcwd(),
            "path": sys.path,
            "extra": os.environ.get("EXTRA"),
            "rank": os.environ.get("RANK"),
            "sid": os.getsid(0),
            "sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            "stdin": os.readlink("/proc/self/fd/0"),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }


def where(cluster: Cluster, inbox: Any, **settings: Any) -> dict[str, Any]:
    worker = cluster.launch(WorkerSpec("actor 3", Plain, **settings)).result(60)
    before = len(inbox.items)
    worker.call("where", on_reply=inbox.put)
    found: dict[str, Any] = inbox.wait(before + 1)[-1].unwrap()
    worker.kill()
    return found | {"pid": worker.pid}


def test_a_worker_has_its_coordinators_surroundings_and_its_own_session(
    cluster: Cluster, inbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RANK", "5")
    found = where(cluster, inbox, num_threads=2, env={"EXTRA": "yes"})
    assert found["name"] == "actor 3"
    assert (found["cwd"], found["path"][0]) == (str(tmp_path), str(tmp_path))
    assert (found["extra"], found["rank"]) == ("yes", None)
    assert found["threads"] == (2, 2, "2")
    assert found["sid"] == found["pid"] and found["sigint"] and found["stdin"] == os.devnull


def test_a_working_directory_that_is_gone_is_no_reason_to_fail(
    cluster: Cluster, inbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert where(cluster, inbox)["cwd"] == "/"


def test_seeds_make_every_generator_repeat_and_differ_between_actors(cluster: Cluster, inbox: Any) -> None:
    first = where(cluster, inbox, seed=1, actor_index=0)["numbers"]
    assert where(cluster, inbox, seed=1, actor_index=0)["numbers"] == first
    assert where(cluster, inbox, seed=1, actor_index=1)["numbers"] != first
    assert where(cluster, inbox)["numbers"] != where(cluster, inbox)["numbers"]


def test_start_attempts_share_one_deadline(cluster: Cluster, marker: Path) -> None:
    slow = StartPolicy(max_attempts=3, backoff_s=5.0, jitter=0)
    began = time.monotonic()
    with pytest.raises(WorkerStartError, match="the disk is on fire"):
        cluster.launch(spec("raises", marker, start_timeout_s=4.0), policy=slow).result(60)
    assert len(attempts(marker)) == 1 and time.monotonic() - began < 4


def test_a_start_that_is_cancelled_leaves_no_process(cluster: Cluster, marker: Path, inbox: Any) -> None:
    launch = cluster.launch(spec("hangs", marker))
    (worker,) = cluster.workers
    worker.on_exit(inbox.put)
    assert launch.cancel()
    inbox.wait()
    assert cluster.workers == ()


def wait_for_pause(cluster: Cluster) -> None:
    """Returns when a start was put off: asked again and again on the I/O thread, where that happens."""
    put_off = threading.Event()

    def look() -> None:
        if cluster._hub._delayed:
            put_off.set()
        else:
            cluster.io.call_later(0.01, look)

    cluster.io.call_soon(look)
    assert put_off.wait(60)


def test_closing_the_cluster_ends_a_start_that_waits_for_its_next_attempt(marker: Path) -> None:
    waiting = StartPolicy(max_attempts=3, backoff_s=20.0, max_backoff_s=20.0, jitter=0)
    with Cluster(pickle_by_value=[__name__], worker_output="log") as cluster:
        launch = cluster.launch(spec("raises", marker, start_timeout_s=60.0), policy=waiting)
        wait_for_pause(cluster)
    assert "closed" in str(launch.exception(1))
