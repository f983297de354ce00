"""Deaths in the middle of calls that change all learners, and what waits or goes on meanwhile.

The cases about recovery are spread: C4 (its kill), C6 (second half), C7, C8, C10 and C12 in test_learner_deaths.py, C11
in test_cases_start.py and test_worker_start.py, C13 in tests/lgroup/test_liveness.py, C22 in test_learner_stuck.py and
test_cluster_ends.py. Here are the kills inside a call that those leave out.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Deadline
from dying_learners import arm, batch_of, config_of, pid_of, same_state, train_until
from failing_learners import Failing, count_and_die
from group_learners import adds_up

import lgroup


@pytest.fixture(scope="module")
def cluster() -> Iterator[lgroup.Cluster]:
    with lgroup.Cluster() as cluster:
        yield cluster


@pytest.fixture
def group_of(cluster: lgroup.Cluster, tmp_path: Path) -> Callable[..., lgroup.LearnerGroup]:
    """Groups in the shared cluster, whose faults are in the test's folder."""

    def group_of(num_learners: int, **fault_tolerance: Any) -> lgroup.LearnerGroup:
        config = config_of(num_learners, tmp_path, **fault_tolerance).training(learner_class=Failing)
        return lgroup.LearnerGroup(config=config, cluster=cluster)

    return group_of


def whole(group: lgroup.LearnerGroup) -> None:
    """Train until everybody takes part; then all are the same and everything is accounted for."""
    train_until(group, lambda result: len(result) == len(group), Deadline())
    group.check_sync()
    stats = group.get_stats()
    assert adds_up(stats["updates"]) and adds_up(stats["env_steps"])


@pytest.mark.parametrize("slots", [[1], [0, 2], [0, 1, 2]], ids=["one", "two", "all"])
@pytest.mark.parametrize("min_learners", [1, 3])
def test_a_call_in_which_learners_are_killed_changes_all_of_them_once(
    group_of: Any, tmp_path: Path, slots: list[int], min_learners: int
) -> None:
    """Case C4 (ray#63819), the kill inside of a change."""
    with group_of(3, min_learners=min_learners, update_retries=3) as group:
        group.update(batch=batch_of())
        for slot in slots:
            (tmp_path / f"token.{slot}").touch()
        results = group.foreach_learner(count_and_die, tokens=str(tmp_path), slots=slots)
        assert {result.get() for result in results if result.ok} == {1}
        whole(group)
        assert [r.unwrap() for r in group.foreach_learner(lambda learner: learner.calls)] == [1, 1, 1]
        # Who had not begun when another one died may adopt that the others did it, and so never meet its own death.
        assert len(list(tmp_path.glob("token.*"))) < len(slots), "one was killed at least"


def test_a_learner_killed_inside_of_set_state_costs_nobody_the_new_state(group_of: Any, tmp_path: Path) -> None:
    with group_of(3) as group:
        group.update(batch=batch_of())
        state = group.get_state()
        group.update(batch=batch_of(1))
        arm(tmp_path, "set_state", 1, "SIGKILL")
        group.set_state(state)
        assert same_state(group.get_state(), state)
        assert group.update(batch=batch_of(1)).weights_version == 3
        whole(group)
        assert group.get_stats()["num_restarts"] == 1


def test_with_too_few_learners_an_update_waits_for_the_replacement(group_of: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with group_of(2, min_learners=2) as group:
        group.update(batch=batch_of())
        survivor = pid_of(group, 0)
        arm(tmp_path, "door", 1, str(tmp_path / "pipe"))
        os.kill(pid_of(group, 1), signal.SIGKILL)
        with open(tmp_path / "pipe", "w"):  # once the replacement is at the door
            future = group.submit(batch=batch_of(1))
            with pytest.raises(TimeoutError):
                future.result(0.3)
            assert group.get_stats()["phase"] == "waiting"
        assert len(future.result(20)) == 2
        assert pid_of(group, 0) == survivor
        whole(group)


def test_a_learner_that_computes_with_the_interpreter_locked_is_called_busy_and_left_alone(
    group_of: Any, tmp_path: Path
) -> None:
    with group_of(2, heartbeat_timeout_s=0.6) as group:
        group.update(batch=batch_of())
        arm(tmp_path, "compute", 1, "yes")
        future = group.submit(batch=batch_of(1))
        busy = []
        while not future.done():
            busy.append([row["busy"] for row in group.get_stats()["learners"]])
            with contextlib.suppress(TimeoutError):
                future.result(0.05)
        assert len(future.result()) == 2
        assert [False, True] in busy
        assert group.get_stats()["num_restarts"] == 0
