"""Actors that die, are stopped or cannot come back, and what their group makes of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lgroup.workers import ActorError, ActorGroup, Cluster, WorkerEvent, current_worker


class Actor:
    """Its constructor does what the first line of the file ``orders`` says, and takes that line away."""

    def __init__(self, orders: str | None = None) -> None:
        if orders is not None:
            path = Path(orders)
            first, *rest = [*path.read_text().splitlines(), ""] if path.exists() else [""]
            path.write_text("\n".join(rest))
            if first == "raise":
                raise OSError("as ordered")
            if first == "import":
                import a_module_that_is_not_there  # type: ignore[import-not-found]  # noqa: F401

    def incarnation(self) -> int:
        return current_worker().incarnation

    def wait(self, pipe: str) -> str:
        with open(pipe) as file:
            return file.read()

    def compute(self, rounds: int) -> int:
        return sum(range(rounds))  # in C, and never lets go of the GIL


class Group:
    """A group whose events come into an inbox."""

    def __init__(self, cluster: Cluster, inbox: Any, **settings: Any) -> None:
        self.inbox = inbox
        self.actors = ActorGroup(
            Actor,
            cluster=cluster,
            **({"num_actors": 2} | settings),
            on_worker_died=lambda event: inbox.put("died", event),
            on_worker_restarted=lambda event: inbox.put("restarted", event),
        )

    def kill(self, actor_id: int, number: int = signal.SIGKILL) -> int:
        pid = self.actors.actor_pids()[actor_id]
        os.kill(pid, number)
        return pid

    def events(self, kind: str, count: int) -> list[WorkerEvent]:
        def of_kind(items: list[Any]) -> list[WorkerEvent]:
            return [event for what, event in items if what == kind]

        return of_kind(self.inbox.wait_for(lambda items: len(of_kind(items)) >= count))

    def call(self, target: str, **settings: Any) -> list[Any]:
        return [result.get() for result in self.actors.foreach_actor(target, healthy_only=False, **settings)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(pickle_by_value=[__name__], worker_output="log") as cluster:
        yield cluster


@pytest.fixture
def make(cluster: Cluster, inbox: Any, wait_gone: Callable[..., None]) -> Iterator[Callable[..., Group]]:
    groups = []

    def make(**settings: Any) -> Group:
        groups.append(Group(cluster, inbox, **settings))
        return groups[-1]

    yield make
    for group in groups:
        group.actors.close()
    wait_gone([worker.pid for worker in cluster.workers if worker.pid is not None])


def test_a_killed_actor_is_an_error_then_restarted_probed_and_marked_healthy(
    make: Callable[..., Group], tmp_path: Path
) -> None:
    group = make()
    os.mkfifo(tmp_path / "pipe")
    group.actors.foreach_actor_async("wait", kwargs={"pipe": str(tmp_path / "pipe")}, remote_actor_ids=[0])
    group.actors.foreach_actor_async("incarnation", remote_actor_ids=[0])
    pid = group.kill(0)
    errors = [result.get() for result in group.actors.fetch_ready_async_reqs(timeout_seconds=None)]
    assert len(errors) == 2 and all(isinstance(error, ActorError) and error.actor_died for error in errors)
    assert f"actor 0 (pid {pid}) on node local killed by SIGKILL" in str(errors[0])
    (back,) = group.events("restarted", 1)
    assert (back.actor_id, back.incarnation, back.pid) == (0, 1, group.actors.actor_pids()[0])
    assert group.actors.actor_states() == {0: "up", 1: "up"} and group.actors.healthy_actor_ids() == [1]
    assert group.actors.probe_unhealthy_actors(mark_healthy=True) == [0]
    assert group.call("incarnation") == [1, 0] and group.actors.num_healthy_actors() == 2


def test_callbacks_are_called_once_for_each_death_and_each_return(make: Callable[..., Group]) -> None:
    group = make()
    pids = []
    for count in (1, 2, 3):
        assert group.call("incarnation", remote_actor_ids=[1]) == [count - 1]  # so that it comes back at once
        pids.append(group.kill(1))
        died, back = group.events("died", count), group.events("restarted", count)
    assert [(event.actor_id, event.incarnation, event.pid) for event in died] == [(1, i, pids[i]) for i in range(3)]
    assert [(event.actor_id, event.incarnation) for event in back] == [(1, 1), (1, 2), (1, 3)]
    assert [kind for kind, _ in group.inbox.items] == ["died", "restarted"] * 3
    assert all("killed by SIGKILL" in event.text for event in died) and "is up again" in back[0].text


def test_actors_that_are_removed_or_closed_did_not_die(
    make: Callable[..., Group], wait_gone: Callable[..., None]
) -> None:
    group = make()
    pids = list(group.actors.actor_pids().values())
    group.actors.remove_actor(0)
    group.actors.close()
    wait_gone(pids)
    assert group.inbox.items == []


def test_a_callback_that_raises_or_calls_the_group_harms_nobody(cluster: Cluster, inbox: Any) -> None:
    def on_restarted(event: WorkerEvent) -> None:
        inbox.put(group.probe_unhealthy_actors(mark_healthy=True))

    def on_died(event: WorkerEvent) -> None:
        raise RuntimeError("as planned")

    with ActorGroup(
        Actor, num_actors=1, cluster=cluster, on_worker_died=on_died, on_worker_restarted=on_restarted
    ) as group:
        os.kill(group.actor_pids()[0], signal.SIGKILL)
        assert inbox.wait() == [[0]] and group.healthy_actor_ids() == [0]


def test_a_stopped_actor_is_killed_and_replaced(make: Callable[..., Group]) -> None:
    group = make(heartbeat_timeout_s=0.5)
    group.kill(0, signal.SIGSTOP)
    (error,) = group.call("incarnation", remote_actor_ids=[0])
    assert isinstance(error, ActorError) and error.actor_died
    assert "killed by lgroup: silent for" in str(error) and "its process is stopped (heartbeat_timeout_s=0.5)" in str(
        error
    )
    group.events("restarted", 1)
    assert group.actors.probe_unhealthy_actors(mark_healthy=True) == [0]
    assert [event.actor_id for event in group.events("died", 1)] == [0]


def test_an_actor_that_computes_past_the_heartbeat_is_left_alone(make: Callable[..., Group]) -> None:
    group = make(num_actors=1, heartbeat_timeout_s=0.3)
    assert group.call("compute", kwargs={"rounds": 60_000_000}) == [sum(range(60_000_000))]
    assert group.actors.total_num_restarts() == 0 and group.inbox.items == []


def test_a_group_whose_budget_is_used_up_leaves_its_actors_down_and_says_so(make: Callable[..., Group]) -> None:
    group = make(max_restarts=1, restart_window_s=600.0)
    group.kill(0)
    group.events("restarted", 1)
    group.kill(1)
    last = group.events("died", 2)[1]
    words = "all 1 restarts within 600 s (max_restarts) are used up, so it stays down"
    assert last.actor_id == 1 and words in last.text and "killed by SIGKILL" in last.text
    assert group.actors.actor_states() == {0: "up", 1: "down"}
    alive, error = group.call("incarnation")
    assert alive == 1 and isinstance(error, ActorError) and error.actor_died and words in str(error)


def test_a_restart_that_would_fail_again_the_same_way_leaves_the_actor_down_at_once(
    make: Callable[..., Group], tmp_path: Path
) -> None:
    orders = tmp_path / "orders"
    group = make(num_actors=1, kwargs={"orders": str(orders)})
    orders.write_text("import\nraise")
    group.kill(0)
    first, second = group.events("died", 2)
    assert (first.incarnation, second.incarnation) == (0, 1) and "a_module_that_is_not_there" in second.text
    assert group.actors.actor_states() == {0: "down"} and orders.read_text() == "raise\n"
    (error,) = group.call("incarnation")
    assert isinstance(error, ActorError) and "a_module_that_is_not_there" in str(error)


def test_restarts_that_fail_are_tried_again_with_pauses_and_count_in_the_budget(
    make: Callable[..., Group], cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = tmp_path / "orders"
    group = make(num_actors=1, kwargs={"orders": str(orders)}, max_restarts=5)
    pauses: list[float] = []
    later = cluster.later

    def noted(delay_s: float, callback: Callable[[], object]) -> None:
        pauses.append(delay_s)
        later(delay_s, callback)

    monkeypatch.setattr(cluster, "later", noted)
    orders.write_text("raise\nraise\nraise")
    group.kill(0)
    group.events("died", 1)
    assert group.call("incarnation") == [4]  # a call waits until it is up
    assert [event.incarnation for event in group.events("died", 4)] == [0, 1, 2, 3]
    assert pauses[0] == 0.0 and 0.0 < pauses[1] < pauses[2] < pauses[3]
    group.kill(0)  # it has answered, so the next pause is none
    group.events("restarted", 2)
    assert pauses[4] == 0.0
    group.kill(0)
    assert "all 5 restarts" in group.events("died", 6)[5].text and group.actors.actor_states() == {0: "down"}


def test_restarts_go_on_after_the_zygote_was_killed(inbox: Any, wait_gone: Callable[..., None]) -> None:
    with Cluster(pickle_by_value=[__name__], worker_output="log") as cluster:
        group = Group(cluster, inbox)
        zygote = cluster.zygote_pid
        assert zygote is not None
        os.kill(zygote, signal.SIGKILL)
        wait_gone([zygote])
        group.kill(0)
        (back,) = group.events("restarted", 1)
        assert back.actor_id == 0 and cluster.zygote_pid not in (zygote, None)
        assert group.call("incarnation")[1] == 0
        group.actors.close()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"max_restarts": -1}, "max_restarts=-1: at least 0"),
        ({"restart_window_s": 0.0}, r"restart_window_s=0\.0: it must be above 0"),
        ({"heartbeat_timeout_s": 0.0}, r"heartbeat_timeout_s=0\.0: it must be above 0"),
    ],
)
def test_impossible_supervision_is_refused_before_any_process_starts(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ActorGroup(Actor, num_actors=1, **setting)
