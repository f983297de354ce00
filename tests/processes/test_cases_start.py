"""Cases about starting: many groups at once, learners that do not come up, and what a learner finds around it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from group_learners import FULL_SIZE, BadStart, Imitation, batch_of, config_of

import lgroup
from lgroup.workers import Cluster, current_worker


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(local_slots=2, worker_output="log") as cluster:
        yield cluster


def bad_start(how: str) -> Any:
    return config_of(BadStart, learner_config_dict={"start": how})


def start_and_train(cluster: Cluster | None) -> str:
    with lgroup.LearnerGroup(config=config_of(), cluster=cluster) as group:
        group.check_sync()
        return str(group.update(batch=batch_of(8)).status)


def test_many_groups_start_at_once(cluster: Cluster) -> None:
    """Case C14 (vllm#40443): 16 groups in 5 rounds, each in a cluster of its own, in full size."""
    groups, rounds = (16, 5) if FULL_SIZE else (4, 2)
    with ThreadPoolExecutor(groups) as pool:
        for number in range(rounds):
            # Most share a cluster in the small size: its one zygote forks for several groups at once.
            shared = [None if FULL_SIZE or n == number == 0 else cluster for n in range(groups)]
            assert list(pool.map(start_and_train, shared)) == ["applied"] * groups
    assert cluster.workers == ()


FAILED_STARTS = {
    "raises": (r"learner [01] .*did not start", "ValueError: no such table: users"),
    "raises on rank 1": (r"learner 1 .*did not start", "ValueError: no such table: users"),
    "aborts": (r"learner 0 .*did not start", "SIGABRT"),
    "hangs": (r"learner 1 .*did not start", "did not return within"),
}


@pytest.mark.parametrize("how", FAILED_STARTS)
def test_a_learner_that_does_not_come_up_is_named_with_its_reason_and_none_is_left(
    cluster: Cluster, how: str, monkeypatch: pytest.MonkeyPatch, wait_gone: Callable[..., None]
) -> None:
    """Case C11 (ray#13334)."""
    who, why = FAILED_STARTS[how]
    monkeypatch.setattr(cluster, "start_timeout_s", 1.5 if how == "hangs" else 20.0)
    with pytest.raises(lgroup.WorkerStartError, match=who) as caught:
        lgroup.LearnerGroup(config=bad_start(how), cluster=cluster)
    assert why in f"{caught.value}\n{caught.value.remote_traceback}"
    if "raises" in how:
        assert caught.value.cause_type == "ValueError"
        assert "in build" in caught.value.remote_traceback
    wait_gone([worker.pid for worker in cluster.workers if worker.pid], 5.0)


def test_a_learner_that_comes_up_at_the_third_try_is_no_failure(cluster: Cluster) -> None:
    """Case C11 (ray#13334)."""
    with lgroup.LearnerGroup(config=bad_start("raises twice"), cluster=cluster) as group:
        incarnations = group.foreach_learner(lambda learner: current_worker().incarnation)
        assert [result.unwrap() for result in incarnations] == [0, 2]
        assert group.update(batch=batch_of(8)).status == "applied"


def test_a_learner_class_that_workers_cannot_import_fails_at_once_with_the_name(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C11 (ray#13334)."""
    source = tmp_path / "only_here.py"
    source.write_text("from group_learners import Imitation\nclass Mine(Imitation): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    source.unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for compiled in tmp_path.rglob("*.pyc"):
        compiled.unlink()
    with pytest.raises(lgroup.WorkerStartError, match="only_here") as caught:
        lgroup.LearnerGroup(config=config_of(only_here.Mine), cluster=cluster)
    assert caught.value.cause_type == "ModuleNotFoundError"
    assert "attempt" not in str(caught.value)


class Untransferable(Imitation):
    def build(self) -> None:
        super().build()
        self.friends = np.array([object()], dtype=object)


def test_state_that_cannot_reach_the_other_learners_ends_the_start_at_once(cluster: Cluster) -> None:
    """The others wait for it in a collective, and are not left there until their deadline."""
    with pytest.raises(lgroup.LGroupError, match="friends"):
        lgroup.LearnerGroup(config=config_of(Untransferable), cluster=cluster)


@pytest.mark.parametrize(("num_learners", "threads"), [(4, 1), (1, 2)])
def test_learners_share_the_cores_and_omp_agrees_with_torch(cluster: Cluster, num_learners: int, threads: int) -> None:
    """Case C20 (torchtitan#4038): four learners on two cores."""
    with lgroup.LearnerGroup(config=config_of(num_learners=num_learners), cluster=cluster) as group:
        group.update(batch=batch_of(64))
        for result in group.foreach_learner(threads_around):
            assert result.unwrap() == {"torch": threads, "OMP_NUM_THREADS": str(threads), "worker": threads}


def threads_around(learner: lgroup.Learner) -> dict[str, Any]:
    import torch

    return {
        "torch": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
        "worker": current_worker().num_threads,
    }


def test_the_cores_of_a_learner_can_be_said(cluster: Cluster) -> None:
    with lgroup.LearnerGroup(config=config_of().learners(num_cpus_per_learner=3), cluster=cluster) as group:
        assert {result.unwrap()["torch"] for result in group.foreach_learner(threads_around)} == {3}


class WatchesNames(Imitation):
    """Notes every question for a host's name or address that its process asks."""

    def build(self) -> None:
        super().build()
        asked = self.seen.items
        sys.addaudithook(lambda event, args: asked.append((event, str(args))) if event in NAME_QUESTIONS else None)


NAME_QUESTIONS = {"socket.gethostname", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}


def test_learners_of_one_node_never_ask_for_the_hosts_own_name(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C15 (aws-do-eks#69), first half: whatever the name resolves to, learners meet on the loopback interface.

    gloo itself would look at these variables, or else at what the host's name resolves to.
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonexistent0")
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    with lgroup.LearnerGroup(config=config_of(WatchesNames, num_learners=3), cluster=cluster) as group:
        group.update(batch=batch_of(9))
        assert [r.unwrap() for r in group.foreach_learner(lambda learner: learner.seen.items)] == [[], [], []]
        for row in group.get_stats()["learners"]:
            connections = psutil.Process(row["pid"]).net_connections("inet")
            assert connections
            assert {connection.laddr.ip for connection in connections} == {"127.0.0.1"}
