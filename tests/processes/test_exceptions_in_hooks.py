"""An exception in a hook: what callers are told, and that no learner keeps anything of a failed update."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import regression_learners as rl
import torch

import lgroup
from lgroup import ActorError, LearnerGroup, RLModuleSpec, UpdateFailed

torch.set_num_threads(1)  # on these small tensors two threads mostly wait for each other

ROWS, MINIBATCH, NUM_STEPS = 12, 4, 3
SPEC = RLModuleSpec(module_class=rl.Normed)

ONCE = ("before_gradient_based_update", "after_gradient_based_update")
EACH_STEP = (
    "forward",
    "compute_losses",
    "compute_loss_for_module",
    "compute_gradients",
    "postprocess_gradients",
    "apply_gradients",
)
AFTER_THE_REDUCE = ("postprocess_gradients", "apply_gradients")


@pytest.fixture(scope="module")
def cluster() -> Iterator[lgroup.Cluster]:
    with lgroup.Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def group_of(cluster: lgroup.Cluster) -> Iterator[Callable[..., LearnerGroup]]:
    """Groups by class and size, each started once and used by all tests."""
    groups: dict[Any, LearnerGroup] = {}

    def group_of(learner_class: type[rl.Faulty], num_learners: int) -> LearnerGroup:
        return groups[learner_class, num_learners]

    for learner_class, num_learners in (
        (rl.FaultyFromTheStart, 0),
        (rl.FaultyFromTheStart, 2),
        (rl.FaultyFromTheStart, 3),
        (rl.Faulty, 2),
    ):
        config = rl.config_of(learner_class, num_learners, SPEC, minibatch_size=MINIBATCH)
        groups[learner_class, num_learners] = LearnerGroup(config=config, cluster=cluster if num_learners else None)
    yield group_of
    for group in groups.values():
        group.shutdown()


@pytest.fixture
def started(group_of: Callable[..., LearnerGroup], request: pytest.FixtureRequest) -> LearnerGroup:
    """One of the groups, after a clean update: so there is Adam state."""
    learner_class, num_learners = request.param
    group = group_of(learner_class, num_learners)
    group.foreach_learner(rl.arm, fault=rl.Fault("", ()))
    assert group.update(batch=rl.rows(ROWS, 0)).status == "applied"
    return group


def on(*cases: tuple[type[rl.Faulty], int]) -> pytest.MarkDecorator:
    ids = [f"{learner_class.__name__}-{num_learners}" for learner_class, num_learners in cases]
    return pytest.mark.parametrize("started", cases, ids=ids, indirect=True)


ALL_GROUPS = on((rl.FaultyFromTheStart, 0), (rl.FaultyFromTheStart, 2), (rl.FaultyFromTheStart, 3), (rl.Faulty, 2))


def pids(group: LearnerGroup) -> list[int]:
    return [row["pid"] for row in group.get_stats()["learners"]]


def updates(group: LearnerGroup) -> dict[str, Any]:
    stats = group.get_stats()["updates"]
    assert stats["submitted"] == (
        stats["in_flight"] + stats["applied"] + sum(stats["dropped"].values()) + sum(stats["failed"].values())
    )
    return stats  # type: ignore[no-any-return]


def rank_sets(group: LearnerGroup) -> list[tuple[int, ...]]:
    size = max(1, len(group))
    return [(0,)] if size == 1 else [(size - 1,), tuple(range(size))]


def expect_failure(group: LearnerGroup, hook: str, ranks: tuple[int, ...], before: dict[str, str]) -> UpdateFailed:
    """Train into the armed fault: failed, with the raising rank named, and everything as it was."""
    account, who = updates(group), pids(group)
    with pytest.raises(UpdateFailed, match=f"raised ValueError: no luck in {hook}") as caught:
        group.update(batch=rl.rows(ROWS, 1))
    error = caught.value
    assert (error.reason, error.cause_type, error.result.status) == ("user_error", "ValueError", "failed")
    assert f"in {hook}" in error.remote_traceback or hook == "forward"
    assert "self.fault.meet(hook, self.rank)" in error.remote_traceback
    if len(group):
        assert all(f"rank {rank} (learner {rank}, pid {who[rank]})" in str(error) for rank in ranks)
    assert group.check_sync() == before
    assert pids(group) == who
    now = updates(group)
    assert now["failed"]["user_error"] == account["failed"].get("user_error", 0) + 1
    assert now["applied"] == account["applied"]
    return error


@ALL_GROUPS
def test_a_hook_that_raises_before_the_last_reduce_fails_the_update_and_leaves_every_state_as_it_was(
    started: LearnerGroup,
) -> None:
    before = started.check_sync()
    hooks = EACH_STEP if started.config.learner_class is rl.Faulty else (*EACH_STEP, "before_gradient_based_update")
    for hook, ranks in itertools.product(hooks, rank_sets(started)):
        last = NUM_STEPS - (2 if hook in AFTER_THE_REDUCE else 1)
        for step in (0,) if hook in ONCE else (0, last):
            started.foreach_learner(rl.arm, fault=rl.Fault(hook, ranks, step))
            expect_failure(started, hook, ranks, before)
    assert started.update(batch=rl.rows(ROWS, 2)).status == "applied"


@ALL_GROUPS
def test_a_hook_that_raises_on_all_ranks_after_the_last_reduce_fails_the_update(started: LearnerGroup) -> None:
    before = started.check_sync()
    everyone = tuple(range(max(1, len(started))))
    for hook in (*AFTER_THE_REDUCE, "after_gradient_based_update"):
        step = 0 if hook in ONCE else NUM_STEPS - 1
        started.foreach_learner(rl.arm, fault=rl.Fault(hook, everyone, step))
        expect_failure(started, hook, everyone, before)
    assert started.update(batch=rl.rows(ROWS, 2)).status == "applied"


def kinds_of_state(learner: Any) -> tuple[Any, ...]:
    return (
        type(learner.window).__name__,
        learner.window.maxlen,
        type(learner.mood).__name__,
        type(learner.trace).__name__,
    )


@on((rl.FaultyFromTheStart, 2), (rl.FaultyFromTheStart, 3), (rl.Faulty, 2))
def test_a_hook_that_raises_on_some_ranks_after_the_last_reduce_adopts_the_others_state_and_the_update_applies(
    started: LearnerGroup,
) -> None:
    state, who, account = started.get_state(), pids(started), updates(started)
    started.update(batch=rl.rows(ROWS, 1))
    wanted = started.check_sync()
    hooks = (*AFTER_THE_REDUCE, "after_gradient_based_update")
    for hook, ranks in itertools.product(hooks, ((len(started) - 1,), (0,))):
        started.set_state(state)
        step = 0 if hook in ONCE else NUM_STEPS - 1
        started.foreach_learner(rl.arm, fault=rl.Fault(hook, ranks, step))
        result = started.update(batch=rl.rows(ROWS, 1))
        assert result.status == "applied"
        assert isinstance(result.error, UpdateFailed)
        assert result.error.cause_type == "ValueError"
        assert f"rank {ranks[0]} (learner {ranks[0]}, pid {who[ranks[0]]})" in str(result.error)
        assert hook in result.error.remote_traceback
        assert started.check_sync() == wanted
        kinds = [result.get() for result in started.foreach_learner(kinds_of_state)]
        assert kinds == [("deque", 3, "Mood", "dict")] * len(started)
    assert pids(started) == who
    assert updates(started)["applied"] == account["applied"] + 7
    assert updates(started)["failed"] == account["failed"]


@on((rl.FaultyFromTheStart, 0), (rl.FaultyFromTheStart, 2), (rl.FaultyFromTheStart, 3))
def test_a_build_batch_that_raises_fails_the_update(started: LearnerGroup) -> None:
    episodes = [rl.episode(length, length) for length in (7, 6, 5)]
    before = started.check_sync()
    for ranks in rank_sets(started):
        started.foreach_learner(rl.arm, fault=rl.Fault("build_batch", ranks))
        with pytest.raises(UpdateFailed, match="no luck in build_batch") as caught:
            started.update(episodes=episodes)
        assert "in build_batch" in caught.value.remote_traceback
        assert started.check_sync() == before
    assert started.update(episodes=episodes).status == "applied"


@on((rl.FaultyFromTheStart, 2), (rl.FaultyFromTheStart, 3), (rl.Faulty, 2))
@pytest.mark.parametrize("hook", ["forward", "apply_gradients"])
def test_updates_that_wait_behind_a_failed_one_are_applied_in_order(started: LearnerGroup, hook: str) -> None:
    state, account = started.get_state(), updates(started)
    started.foreach_learner(rl.arm, fault=rl.Fault(hook, [1], 0))
    first, *behind = [started.submit(batch=rl.rows(ROWS, seed)) for seed in (1, 2, 3)]
    with pytest.raises(UpdateFailed, match=f"no luck in {hook}"):
        first.result(20)
    results = [future.result(20) for future in behind]
    assert [result.status for result in results] == ["applied", "applied"]
    assert results[1].weights_version == results[0].weights_version + 1
    assert results[1].seq == results[0].seq + 1
    after_fault = started.check_sync()
    started.set_state(state)
    for seed in (2, 3):
        started.update(batch=rl.rows(ROWS, seed))
    assert started.check_sync() == after_fault
    now = updates(started)
    assert now["submitted"] - account["submitted"] == 5
    assert now["applied"] - account["applied"] == 4
    assert now["failed"]["user_error"] - account["failed"].get("user_error", 0) == 1


@on((rl.FaultyFromTheStart, 2))
def test_the_stream_of_asynchronous_results_has_the_failed_update_in_its_place(started: LearnerGroup) -> None:
    started.drain()
    started.foreach_learner(rl.arm, fault=rl.Fault("compute_gradients", [0], NUM_STEPS))  # in the second update
    found = []
    for seed in (1, 2, 3):
        found += started.update(batch=rl.rows(ROWS, seed), async_update=True, on_full="block")
    found += started.drain(20)
    assert [(result.status, result.reason) for result in found] == [
        ("applied", None),
        ("failed", "user_error"),
        ("applied", None),
    ]
    assert [result.seq for result in found] == sorted(result.seq for result in found)


def change_then_raise(learner: Any, ranks: tuple[int, ...]) -> int:
    learner.kl_coeff = 99.0
    learner.extra = 1
    learner.module["default_policy"].running.fill_(99.0)
    if learner.rank in ranks:
        raise KeyError("not on this one")
    return int(learner.rank)


@on((rl.FaultyFromTheStart, 0), (rl.FaultyFromTheStart, 2), (rl.FaultyFromTheStart, 3))
def test_a_call_that_raises_on_every_learner_changes_none(started: LearnerGroup) -> None:
    before, everyone = started.check_sync(), tuple(range(max(1, len(started))))
    results = started.foreach_learner(change_then_raise, ranks=everyone)
    assert [type(result.get()) for result in results] == [ActorError] * len(everyone)
    assert all("KeyError" in str(result.get()) and "change_then_raise" in str(result.get()) for result in results)
    assert started.check_sync() == before
    assert started.update(batch=rl.rows(ROWS, 2)).status == "applied"


@on((rl.FaultyFromTheStart, 2), (rl.FaultyFromTheStart, 3))
def test_a_learner_on_which_a_call_raises_adopts_what_it_did_on_the_others(started: LearnerGroup) -> None:
    account = updates(started)
    first, *others = started.foreach_learner(change_then_raise, ranks=(0,))
    assert isinstance(first.get(), ActorError)
    assert [result.get() for result in others] == list(range(1, len(started)))
    started.check_sync()
    assert [result.get() for result in started.foreach_learner(lambda learner: (learner.kl_coeff, learner.extra))] == [
        (99.0, 1)
    ] * len(started)
    assert updates(started) == account
    started.foreach_learner(lambda learner: delattr(learner, "extra"))


@on((rl.FaultyFromTheStart, 0), (rl.FaultyFromTheStart, 2))
def test_a_state_that_does_not_fit_changes_no_learner(started: LearnerGroup) -> None:
    before, state = started.check_sync(), started.get_state()
    weights = state["learner"]["rl_module"]["default_policy"]
    weights["first.weight"] = weights["first.weight"] + 1.0
    weights["last.weight"] = np.zeros((3, 3), dtype=np.float32)
    with pytest.raises(ActorError, match=r"last\.weight"):
        started.set_state(state)
    with pytest.raises(ActorError, match="no optimizer 'nobody'"):
        started.set_state({"learner": {"attributes": {"kl_coeff": 5.0}, "optimizer": {"nobody": {}}}})
    assert started.check_sync() == before
    assert started.update(batch=rl.rows(ROWS, 2)).status == "applied"


@on((rl.FaultyFromTheStart, 2))
def test_a_result_that_cannot_travel_is_an_error_and_the_learners_stay_in_step(started: LearnerGroup) -> None:
    first, second = started.foreach_learner(lambda learner: threading.Lock() if learner.rank else "fine")
    assert first.get() == "fine"
    assert "TypeError" in str(second.get())
    started.check_sync()


@on((rl.FaultyFromTheStart, 3))
def test_a_gradient_that_is_not_finite_fails_the_update_names_the_rank_and_changes_nothing(
    started: LearnerGroup,
) -> None:
    before, account = started.check_sync(), updates(started)
    batch = rl.rows(MINIBATCH * 3, 5)
    batch["y"][[5, 9]] = np.nan  # minibatches of 4 rows are cut 1, 1, 2: both are rank 1's, in the 2nd and 3rd step
    result = started.update(batch=batch)
    assert (result.status, result.reason) == ("failed", "nonfinite")
    assert "rank 1 (learner 1, pid" in str(result.error)
    assert "rank 0" not in str(result.error) and "rank 2" not in str(result.error)
    assert "default_policy.first.weight" in str(result.error)
    assert started.check_sync() == before
    assert updates(started)["failed"]["nonfinite"] == account["failed"].get("nonfinite", 0) + 1
    assert started.update(batch=rl.rows(ROWS, 6)).status == "applied"


def test_on_nonfinite_raise_raises_in_the_caller() -> None:
    config = rl.config_of(rl.Regression, 0, SPEC).fault_tolerance(on_nonfinite="raise")
    with LearnerGroup(config=config) as group:
        batch = rl.rows(4, 0)
        batch["y"][0] = np.inf
        with pytest.raises(UpdateFailed, match="the gradient was not finite") as caught:
            group.update(batch=batch)
        assert caught.value.reason == "nonfinite"


@on((rl.FaultyFromTheStart, 2), (rl.FaultyFromTheStart, 3))
def test_module_buffers_are_the_same_on_all_learners_whatever_rows_each_has_seen(started: LearnerGroup) -> None:
    near, far = rl.rows(6, 1), rl.rows(6, 2, mean=5.0)
    batch = {name: np.concatenate([near[name], far[name]]) for name in near}
    counted = int(started.get_weights()["default_policy"]["rows"])
    started.update(batch=batch, minibatch_size=12)
    digests = started.check_sync()
    assert any("running_mean" in path for path in digests)
    weights = started.get_weights()["default_policy"]
    assert int(weights["rows"]) == counted + 12 // len(started)  # the first learner's, who saw its own rows


def test_where_no_learner_is_replaced_a_dead_one_ends_every_pending_and_later_call_with_an_error_that_names_it(
    cluster: lgroup.Cluster,
) -> None:
    config = rl.config_of(rl.Regression, 2, SPEC).fault_tolerance(restart_failed_learners=False, min_learners=2)
    with LearnerGroup(config=config, cluster=cluster) as group:
        batch = rl.rows(ROWS, 0)
        group.update(batch=batch)
        victim = pids(group)[1]
        os.kill(victim, signal.SIGSTOP)  # so that nothing more is decided
        pending = [group.submit(batch=batch), group.submit(batch=batch)]
        assert group.update(batch=batch, async_update=True) == []
        os.kill(victim, signal.SIGKILL)
        died = rf"rank 1: .*pid[= ]{victim}.*SIGKILL"
        for future in pending:
            with pytest.raises(UpdateFailed, match=died) as caught:
                future.result(5)
            assert caught.value.reason == "worker_died"
        (streamed,) = group.drain(5)
        assert (streamed.status, streamed.reason) == ("failed", "worker_died")
        for call in (
            group.get_weights,
            group.get_state,
            group.check_sync,
            lambda: group.set_state({"learner": {}}),
            lambda: group.foreach_learner(lambda learner: None),
        ):
            with pytest.raises(ActorError, match=died):
                call()
        with pytest.raises(UpdateFailed, match=died):
            group.update(batch=batch)
        assert group.update(batch=batch, async_update=True)[0].reason == "worker_died"
        stats = updates(group)
        assert (stats["submitted"], stats["applied"], stats["failed"]) == (6, 1, {"worker_died": 5})
        assert group.get_stats()["env_steps"]["failed"] == {"worker_died": 5 * ROWS}
        assert group.get_stats()["num_healthy_learners"] == 0
