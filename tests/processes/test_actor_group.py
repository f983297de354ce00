from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lgroup.workers import ActorError, ActorGroup, Cluster, WorkerStartError, current_worker


class Counter:
    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.value = start
        self.step = step

    def count(self, times: int = 1) -> int:
        self.value += times * self.step
        return self.value

    def boom(self) -> None:
        raise KeyError("as planned")

    def quit(self) -> None:
        os._exit(9)

    def wait_for(self, pipe: str) -> str:
        with open(pipe) as file:
            return file.read()

    def incarnation(self) -> int:
        return current_worker().incarnation


class Picky:
    def __init__(self, good: bool) -> None:
        if not good:
            raise ValueError("not good")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(pickle_by_value=[__name__], worker_output="log") as cluster:
        yield cluster


@pytest.fixture
def make(cluster: Cluster) -> Iterator[Callable[..., ActorGroup]]:
    groups = []

    def make(actor_class: Any = Counter, **settings: Any) -> ActorGroup:
        groups.append(ActorGroup(actor_class, cluster=cluster, **({"num_actors": 2} | settings)))
        return groups[-1]

    yield make
    for group in groups:
        group.close()
    drain(cluster)


def drain(cluster: Cluster) -> None:
    """Wait for the exits of all workers, so that nothing of a test outlives it."""
    gone = threading.Semaphore(0)
    workers = cluster.workers
    for worker in workers:
        worker.on_exit(lambda _: gone.release())
    for _ in workers:
        assert gone.acquire(timeout=20)


def values(results: Any) -> list[Any]:
    return [result.get() for result in results]


def kill(group: ActorGroup, actor_id: int) -> None:
    os.kill(group.actor_pids()[actor_id], signal.SIGKILL)


def test_each_actor_answers_in_its_place(make: Callable[..., ActorGroup]) -> None:
    group = make(num_actors=3, kwargs=[{"start": 10}, {"start": 20}, {"start": 30}])
    results = group.foreach_actor("count")
    assert [(result.actor_id, result.get()) for result in results] == [(0, 11), (1, 21), (2, 31)]
    assert values(group.foreach_actor("count", kwargs={"times": 2})) == [13, 23, 33]
    assert values(group.foreach_actor("count", kwargs=[{"times": 0}, {"times": 1}, {"times": 2}])) == [13, 24, 35]
    assert values(group.foreach_actor(["count", lambda actor: actor.step], remote_actor_ids=[2, 0])) == [36, 1]
    assert values(group.foreach_actor("count", remote_actor_ids=[0, 0])) == [14, 15]
    assert len(group) == group.num_actors() == 3 and group.actor_ids() == [0, 1, 2] and bool(group)


def test_arguments_of_the_constructor_reach_every_actor(make: Callable[..., ActorGroup]) -> None:
    assert values(make(args=(5,), kwargs={"step": 3}).foreach_actor("count")) == [8, 8]


def test_large_arrays_come_and_go(make: Callable[..., ActorGroup]) -> None:
    group = make()
    array = np.arange(16_000, dtype=np.float32)
    for result in values(group.foreach_actor(lambda actor, data: data * 2, kwargs={"data": array})):
        np.testing.assert_array_equal(result, array * 2)


def test_a_user_exception_is_one_result_and_leaves_the_actor_healthy(make: Callable[..., ActorGroup]) -> None:
    group = make()
    results = group.foreach_actor(["boom", "count"], remote_actor_ids=[0, 1])
    assert [result.ok for result in results] == [False, True]
    error = values(results)[0]
    assert isinstance(error, ActorError) and error.cause_type == "KeyError" and "in boom" in str(error)
    assert len(list(results.ignore_actor_errors())) == 2 and len(list(results.ignore_errors())) == 1
    with pytest.raises(ActorError, match="KeyError"):
        next(iter(results)).unwrap()
    assert group.healthy_actor_ids() == [0, 1] and values(group.foreach_actor("count")) == [1, 2]


def test_a_dead_actor_is_an_error_then_unhealthy_then_back(make: Callable[..., ActorGroup]) -> None:
    group = make()
    results = group.foreach_actor(["quit", "count"], remote_actor_ids=[0, 1])
    assert [result.ok for result in results] == [False, True] and len(list(results.ignore_ray_errors())) == 1
    assert "actor 0" in str(values(results)[0]) and "exited with status 9" in str(values(results)[0])
    assert not group.is_actor_healthy(0) and group.healthy_actor_ids() == [1]
    assert [result.actor_id for result in group.foreach_actor("count")] == [1]
    assert group.probe_unhealthy_actors() == [0] and group.num_healthy_actors() == 1
    assert group.probe_unhealthy_actors(mark_healthy=True) == [0] and group.num_healthy_actors() == 2
    assert group.total_num_restarts() == 1
    assert values(group.foreach_actor("incarnation")) == [1, 0]


def test_a_call_with_mark_healthy_brings_an_actor_back(make: Callable[..., ActorGroup]) -> None:
    group = make()
    group.foreach_actor("quit", remote_actor_ids=[1])
    results = group.foreach_actor("count", healthy_only=False, mark_healthy=True)
    assert values(results) == [1, 1] and group.healthy_actor_ids() == [0, 1]


def test_without_restarts_a_dead_actor_stays_dead_and_says_so(make: Callable[..., ActorGroup]) -> None:
    group = make(restart_failed_actors=False)
    group.foreach_actor("quit", remote_actor_ids=[0])
    (error,) = values(group.foreach_actor("count", healthy_only=False, remote_actor_ids=[0]))
    assert isinstance(error, ActorError) and error.actor_died and "exited with status 9" in str(error)
    assert group.probe_unhealthy_actors(mark_healthy=True) == [] and group.total_num_restarts() == 0


def test_a_timeout_gives_up_results_and_leaves_actors_as_they_are(
    make: Callable[..., ActorGroup], tmp_path: Path
) -> None:
    group = make()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    slow = group.foreach_actor(
        ["wait_for", "count"], kwargs=[{"pipe": str(pipe)}, {}], remote_actor_ids=[0, 1], timeout_seconds=0.3
    )
    assert [result.actor_id for result in slow] == [1]
    assert group.num_healthy_actors() == 2
    pipe.write_text("x")
    assert values(group.foreach_actor("count")) == [1, 2]


def test_asynchronous_calls_are_limited_per_actor_and_tag(make: Callable[..., ActorGroup], tmp_path: Path) -> None:
    group = make(max_requests_in_flight_per_actor=2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert group.foreach_actor_async("wait_for", "w", kwargs={"pipe": str(pipe)}, remote_actor_ids=[0]) == 1
    assert group.foreach_actor_async("count", "w") == 2
    assert group.foreach_actor_async("count", "w") == 1  # actor 0 has two already
    assert group.foreach_actor_async("count", "w") == 0
    assert group.foreach_actor_async("count", "v", remote_actor_ids=[1]) == 1
    assert (group.num_outstanding_async_reqs(), group.num_outstanding_async_reqs("v")) == (5, 1)
    first = group.fetch_ready_async_reqs(tags="w", timeout_seconds=20, min_results=2)
    assert [(result.actor_id, result.get(), result.tag) for result in first] == [(1, 1, "w"), (1, 2, "w")]
    assert len(group.fetch_ready_async_reqs(tags="w")) == 0
    assert values(group.fetch_ready_async_reqs(tags=["v", "u"], timeout_seconds=20)) == [3]
    pipe.write_text("x")
    assert values(group.fetch_ready_async_reqs(timeout_seconds=None)) == ["x", 1]
    assert group.num_outstanding_async_reqs() == 0


def test_min_results_returns_at_the_first(make: Callable[..., ActorGroup], tmp_path: Path) -> None:
    group = make()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    sent = group.foreach_actor_async(["wait_for", "count"], kwargs=[{"pipe": str(pipe)}, {}], remote_actor_ids=[0, 1])
    assert sent == 2
    assert values(group.fetch_ready_async_reqs(timeout_seconds=None, min_results=1)) == [1]
    pipe.write_text("y")
    assert values(group.fetch_ready_async_reqs(timeout_seconds=None, min_results=5)) == ["y"]


def test_fetching_and_sending_at_once_pipelines_calls(make: Callable[..., ActorGroup]) -> None:
    group = make(num_actors=1)
    assert group.foreach_actor_async_fetch_ready("count", "t") == []
    assert group.foreach_actor_async_fetch_ready("count", "t", timeout_seconds=None, return_actor_ids=True) == [(0, 1)]
    assert group.foreach_actor_async_fetch_ready("boom", "t", timeout_seconds=None) == [2]
    assert group.foreach_actor_async_fetch_ready("count", "t", timeout_seconds=None) == []


def test_results_of_an_actor_that_dies_are_errors_never_missing(
    make: Callable[..., ActorGroup], tmp_path: Path
) -> None:
    group = make(max_requests_in_flight_per_actor=5)
    os.mkfifo(tmp_path / "pipe")
    group.foreach_actor_async("wait_for", kwargs={"pipe": str(tmp_path / "pipe")}, remote_actor_ids=[0])
    for _ in range(4):
        group.foreach_actor_async("count", remote_actor_ids=[0])
    kill(group, 0)
    results = group.fetch_ready_async_reqs(timeout_seconds=None)
    assert len(results) == 5 and len(list(results.ignore_actor_errors())) == 0
    assert not group.is_actor_healthy(0) and group.foreach_actor_async("count") == 1
    results = group.fetch_ready_async_reqs(timeout_seconds=None, mark_healthy=True)
    assert group.foreach_actor_async("count", healthy_only=False) == 2
    group.fetch_ready_async_reqs(timeout_seconds=None, mark_healthy=True)
    assert group.num_healthy_actors() == 2


def test_a_state_set_by_hand_counts(make: Callable[..., ActorGroup]) -> None:
    group = make()
    group.set_actor_state(0, healthy=False)
    assert [result.actor_id for result in group.foreach_actor("count")] == [1]
    group.set_actor_state(0, healthy=True)
    assert values(group.foreach_actor("count")) == [1, 2]
    for call in (
        lambda: group.is_actor_healthy(9),
        lambda: group.set_actor_state(9, True),
        lambda: group.remove_actor(9),
    ):
        with pytest.raises(ValueError, match=r"unknown actor id 9; there are \[0, 1\]"):
            call()


def test_actors_are_added_and_removed_and_ids_never_come_back(make: Callable[..., ActorGroup]) -> None:
    group = make()
    assert group.add_actors(2, kwargs=[{"start": 5}, {"start": 6}]) == [2, 3]
    group.remove_actor(1)
    assert group.actor_ids() == [0, 2, 3] and values(group.foreach_actor("count")) == [1, 6, 7]
    assert group.add_actors() == [4]
    group.clear()
    assert group.num_actors() == 0 and len(group.foreach_actor("count")) == 0 and bool(group)
    assert group.add_actors() == [5]


def test_an_actor_that_does_not_come_up_ends_the_group_and_names_itself(
    cluster: Cluster, make: Callable[..., ActorGroup]
) -> None:
    with pytest.raises(WorkerStartError, match=r"picky 1 .* raised ValueError: not good"):
        make(Picky, kwargs=[{"good": True}, {"good": False}], name="picky")
    drain(cluster)
    group = make(Picky, kwargs={"good": True})
    with pytest.raises(WorkerStartError, match="not good"):
        group.add_actors(kwargs={"good": False})
    assert group.actor_ids() == [0, 1]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"num_actors": -1}, "num_actors=-1: allowed"),
        ({"max_requests_in_flight_per_actor": 0}, "max_requests_in_flight_per_actor=0: allowed"),
        ({"num_threads": 0}, "num_threads=0: allowed"),
        ({"kwargs": [{}]}, "kwargs is a list of 1 for 2 actors"),
    ],
)
def test_an_impossible_group_is_refused(make: Callable[..., ActorGroup], setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**setting)


def test_calls_that_make_no_sense_are_refused(make: Callable[..., ActorGroup]) -> None:
    group = make()
    with pytest.raises(ValueError, match="func is a list of 1 for 2 actors"):
        group.foreach_actor(["count"])
    with pytest.raises(ValueError, match="return_obj_refs=True needs"):
        group.foreach_actor("count", return_obj_refs=True)
    with pytest.raises(TypeError):
        group.foreach_actor_async("count", kwargs={"times": threading.Lock()})
    assert group.num_outstanding_async_reqs() == 0 and values(group.foreach_actor("count")) == [1, 1]


def test_threads_of_four_actors_are_capped_on_two_cores(make: Callable[..., ActorGroup], cluster: Cluster) -> None:
    """C20: torch and OMP agree, and together they are not more than there are cores (but one each)."""

    def threads(actor: Any) -> tuple[int, str]:
        import torch

        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    allowed = max(1, cluster.local_slots // 4)
    assert values(make(num_actors=4).foreach_actor(threads)) == [(allowed, str(allowed))] * 4


def test_sixteen_groups_start_at_once(cluster: Cluster, make: Callable[..., ActorGroup]) -> None:
    """C14: all start, several times over, on one cluster."""
    for _ in range(2):
        with ThreadPoolExecutor(16) as pool:
            found = [future.result() for future in [pool.submit(make) for _ in range(16)]]
        assert [values(group.foreach_actor("count")) for group in found] == [[1, 1]] * 16
        for group in found:
            group.close()


def test_a_group_has_a_cluster_of_its_own_by_default(wait_gone: Callable[..., None]) -> None:
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ActorGroup(Counter, num_actors=1) as group:
        pids = [*group.actor_pids().values(), group.cluster.zygote_pid]
        assert values(group.foreach_actor("count")) == [1]
    wait_gone(pids, 0.1)
    group.shutdown()
    assert group.cluster.closed and "actors=0" in repr(group)
