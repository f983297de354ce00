"""Any learner may die at any moment: real processes, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Deadline
from dying_learners import arm, batch_of, config_of, pid_of, same_state, train_until
from group_learners import FULL_SIZE, adds_up

import lgroup

NUM_LEARNERS = 3


def check(group: lgroup.LearnerGroup) -> dict[str, Any]:
    """Learners are identical and everything is accounted for; returns the stats."""
    group.check_sync()
    stats = group.get_stats()
    assert adds_up(stats["updates"]) and adds_up(stats["env_steps"])
    return stats


def whole(group: lgroup.LearnerGroup) -> None:
    """Train until everybody takes part."""
    train_until(group, lambda result: len(result) == len(group), Deadline())


PLACES = [
    ("between", "SIGKILL"),
    ("loss", "SIGKILL"),
    ("sum", "SIGKILL"),
    ("step", "SIGKILL"),
    ("step", "exit0"),
    ("step", "exit7"),
    ("after", "SIGSEGV"),
    ("before", "SIGSTOP"),
]


@pytest.mark.parametrize(("place", "how"), PLACES)
def test_wherever_a_learner_dies_the_group_trains_on_and_nothing_is_lost(tmp_path: Path, place: str, how: str) -> None:
    """Case C10 (elastic#134)."""
    with lgroup.LearnerGroup(config=config_of(NUM_LEARNERS, tmp_path, update_retries=3)) as group:
        group.update(batch=batch_of())
        if place == "between":
            os.kill(pid_of(group, 1), signal.SIGKILL)
        else:
            arm(tmp_path, place, 1, how)
            if place == "sum":
                arm(tmp_path, "loss", 0, "gil0.2")  # the others wait in the sum meanwhile
        futures = [group.submit(batch=batch_of(number)) for number in range(3)]
        assert [future.result(20).status for future in futures] == ["applied"] * 3
        whole(group)
        stats = check(group)
        assert stats["num_restarts"] == 1
        assert stats["updates"]["failed"] == {} and stats["updates"]["dropped"] == {}


def test_two_learners_may_die_at_once_and_the_replacement_while_it_starts(tmp_path: Path) -> None:
    with lgroup.LearnerGroup(config=config_of(NUM_LEARNERS, tmp_path)) as group:
        group.update(batch=batch_of())
        arm(tmp_path, "constructor", 1, "SIGKILL")
        for slot in (0, 1):
            os.kill(pid_of(group, slot), signal.SIGKILL)
        whole(group)
        assert check(group)["num_restarts"] == 2, "the one that died while it started never was up"


@pytest.mark.parametrize("snapshot_every", [3, 1000])
def test_when_all_die_the_state_comes_back_and_training_goes_on_as_if_nothing_had_been(snapshot_every: int) -> None:
    states = []
    for dies in (False, True):
        config = config_of(2, min_learners=2, snapshot_every=snapshot_every)
        with lgroup.LearnerGroup(config=config) as group:
            for number in range(10):
                group.update(batch=batch_of(number))
                if dies and number in (4, 7):
                    for slot in (0, 1):
                        os.kill(pid_of(group, slot), signal.SIGKILL)
            states.append(group.get_state())
            stats = check(group)
            assert (stats["weights_version"], stats["updates"]["applied"]) == (10, 10)
    assert same_state(*states)


def test_a_kill_during_set_state_leaves_all_learners_with_the_new_state_or_raises() -> None:
    with lgroup.LearnerGroup(config=config_of(NUM_LEARNERS)) as group:
        group.update(batch=batch_of())
        state = group.get_state()
        group.update(batch=batch_of(1))
        os.kill(pid_of(group, 2), signal.SIGKILL)
        group.set_state(state)
        assert same_state(group.get_state(), state)
        whole(group)
        check(group)


def test_what_a_call_changed_is_in_the_replacement_too() -> None:
    """Case C4 (ray#63819), the kill after a change; learners take no new modules in this version."""
    with lgroup.LearnerGroup(config=config_of(2)) as group:
        group.update(batch=batch_of())
        group.foreach_learner(lambda learner: setattr(learner, "coefficient", 0.5))
        os.kill(pid_of(group, 0), signal.SIGKILL)
        assert len(group.foreach_learner(lambda learner: setattr(learner, "added", [1, 2, 3]))) >= 1
        whole(group)
        values = group.foreach_learner(lambda learner: (learner.added, learner.coefficient))
        assert [result.unwrap()[0] for result in values] == [[1, 2, 3]] * 2
        check(group)


def test_a_batch_that_kills_its_learner_each_time_fails_as_poison_and_the_next_is_trained() -> None:
    with lgroup.LearnerGroup(config=config_of(2, update_retries=1)) as group:
        poison = group.submit(batch=batch_of(segv=np.ones(24, np.float32)))
        after = group.submit(batch=batch_of(1))
        with pytest.raises(lgroup.UpdateFailed, match="SIGSEGV") as caught:
            poison.result(20)
        assert caught.value.reason == "poison"
        assert after.result(20).status == "applied"
        whole(group)
        assert check(group)["env_steps"]["failed"] == {"poison": 24}


def test_without_retries_the_callers_error_names_rank_node_pid_signal_and_last_lines(tmp_path: Path) -> None:
    config = config_of(2, tmp_path, update_retries=0)
    with lgroup.LearnerGroup(config=config) as group:
        group.foreach_learner(lambda learner: print("about to die", flush=True))
        victim = pid_of(group, 1)
        arm(tmp_path, "loss", 1, "SIGKILL")
        with pytest.raises(lgroup.UpdateFailed) as caught:
            group.update(batch=batch_of())
        text = str(caught.value)
        for part in ("rank 1", "learner 1", f"pid {victim}", "node local", "SIGKILL", "about to die"):
            assert part in text
        assert caught.value.reason == "worker_died"
        whole(group)
        check(group)


def test_an_incident_is_written_down_once_and_told_to_each_callback_once(tmp_path: Path, inbox: Any) -> None:
    logs, faults = tmp_path / "logs", tmp_path / "faults"
    faults.mkdir()
    config = config_of(NUM_LEARNERS, faults).debugging(log_dir=logs)
    config.callbacks(
        on_worker_died=lambda event: inbox.put("died", event),
        on_worker_restarted=lambda event: inbox.put("restarted", event),
    )
    with lgroup.LearnerGroup(config=config) as group:
        group.foreach_learner(lambda learner: print("hello from", learner.rank, flush=True))
        victim = pid_of(group, 1)
        arm(faults, "loss", 1, "SIGKILL")
        group.update(batch=batch_of())
        whole(group)
        events = inbox.wait(2)
        incident = json.loads((logs / "post-mortem-0001.json").read_text())
        (kept,) = group.post_mortems()
    assert [(name, event.actor_id) for name, event in events] == [("died", 1), ("restarted", 1)]
    assert events[0][1].pid == victim and "SIGKILL" in events[0][1].text
    first = incident["first"]
    assert (first["rank"], first["node"], first["pid"], first["signal"]) == (1, "local", victim, "SIGKILL")
    assert first["last_lines"] == ["hello from 1"]
    assert incident["in_flight"] == ["update 1"]
    assert "update 1 is tried again" in incident["consequences"]
    assert incident["others"] == []
    assert kept["first"] == first
    assert len(list(logs.glob("post-mortem-*.json"))) == 1
    assert any("hello from 1" in path.read_text() for path in logs.glob("learner-1-*.log"))


def test_without_restarts_the_rest_train_on_until_too_few_are_left(wait_gone: Callable[..., None]) -> None:
    config = config_of(NUM_LEARNERS, restart_failed_learners=False, min_learners=2, update_retries=9)
    with lgroup.LearnerGroup(config=config) as group:
        group.update(batch=batch_of())
        pids = [pid_of(group, slot) for slot in range(NUM_LEARNERS)]
        os.kill(pids[0], signal.SIGKILL)
        train_until(group, lambda result: len(result) == 2, Deadline())
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(lgroup.UpdateFailed, match=rf"min_learners=2[\s\S]*pid {pids[2]}[\s\S]*SIGKILL"):
            group.update(batch=batch_of())
            group.update(batch=batch_of())
        wait_gone(pids)
        assert group.get_stats()["num_healthy_learners"] == 0


def test_a_crash_loop_at_start_ends_within_the_budget_and_leaves_no_process(
    tmp_path: Path, wait_gone: Callable[..., None]
) -> None:
    config = config_of(2, tmp_path, min_learners=2, max_restarts=3, update_retries=9)
    with lgroup.LearnerGroup(config=config) as group:
        group.update(batch=batch_of())
        arm(tmp_path, "constructor", 1, "always exit9")
        survivor = pid_of(group, 0)
        os.kill(pid_of(group, 1), signal.SIGKILL)
        with pytest.raises(lgroup.UpdateFailed, match=r"max_restarts"):
            for number in range(2):
                group.update(batch=batch_of(number))
        wait_gone([survivor])
        assert adds_up(group.get_stats()["updates"])


def test_a_dead_zygote_is_replaced_before_the_next_learner_is_needed() -> None:
    with lgroup.LearnerGroup(config=config_of(2)) as group:
        group.update(batch=batch_of())
        assert group.cluster is not None and group.cluster.zygote_pid is not None
        os.kill(group.cluster.zygote_pid, signal.SIGKILL)
        os.kill(pid_of(group, 0), signal.SIGKILL)
        whole(group)
        check(group)


def test_kills_soon_after_each_recovery_always_end_in_a_whole_group_again() -> None:
    """Case C12 (distributed#7312), here with kills at once after a recovery; at random moments in full size."""
    rounds = 50 if FULL_SIZE else 12
    chance = random.Random(12)
    with lgroup.LearnerGroup(config=config_of(2)) as group:
        deaths = 0
        for _ in range(rounds):
            whole(group)
            for _ in range(chance.randrange(20 if FULL_SIZE else 4)):
                group.update(batch=batch_of())
            victims = (0, 1) if chance.random() < 0.3 else (1,)
            for slot in victims:
                os.kill(pid_of(group, slot), signal.SIGKILL)
            deaths += len(victims)
        whole(group)
        assert check(group)["num_restarts"] == deaths


def test_a_hundred_submissions_with_a_kill_and_broadcasts_between_add_up_per_reason() -> None:
    """Case C7 (ray#63302): queue 4; broadcasts add nothing to the account."""
    config = config_of(NUM_LEARNERS).learners(max_requests_in_flight_per_learner=4)
    with lgroup.LearnerGroup(config=config) as group:
        results = []
        for number in range(100):
            results += group.update(batch=batch_of(number, rows=10), async_update=True)
            if number % 2:
                group.set_weights(group.get_weights(wait=False))
            if number == 50:
                os.kill(pid_of(group, 1), signal.SIGKILL)
        results += group.drain()
        stats = check(group)
    assert [result.seq for result in results] == list(range(1, 101))
    for unit, size in (("updates", 1), ("env_steps", 10)):
        account = stats[unit]
        assert account["submitted"] == 100 * size
        assert account["applied"] == size * sum(result.status == "applied" for result in results)
        assert account["dropped"].get("queue_full", 0) == size * sum(r.reason == "queue_full" for r in results)
        assert account["failed"] == {}


def test_stale_data_are_dropped_when_their_turn_comes_and_never_trained() -> None:
    """Case C8 (prime-rl#2674)."""
    config = config_of(2, max_staleness=2).learners(max_requests_in_flight_per_learner=16)
    with lgroup.LearnerGroup(config=config) as group:
        results = [group.submit(batch=batch_of(n), weights_version=0, on_full="block") for n in range(10)]
        statuses = []
        for future in results:
            try:
                statuses.append(future.result(20).status)
            except lgroup.UpdateDropped as dropped:
                statuses.append(dropped.reason)
        stats = check(group)
    assert statuses == ["applied"] * 3 + ["stale"] * 7
    assert stats["env_steps"]["dropped"] == {"stale": 7 * 24}
    assert stats["staleness"] == {"histogram": {0: 1, 1: 1, 2: 1}, "max": 2}


def test_the_others_answer_throughout_while_one_is_stopped_with_a_full_queue_and_killed() -> None:
    """Case C6 (verifiers#951, libzmq#4665), second half."""
    with lgroup.LearnerGroup(config=config_of(NUM_LEARNERS, heartbeat_timeout_s=60)) as group:
        group.update(batch=batch_of())
        victim = pid_of(group, 2)
        os.kill(victim, signal.SIGSTOP)
        futures = [group.submit(batch=batch_of(n), on_full="drop") for n in range(6)]
        assert {row["pid"] for row in group.get_stats()["learners"]} >= {victim}
        os.kill(victim, signal.SIGKILL)
        outcomes = [future.exception(20) for future in futures]
        assert [type(error) for error in outcomes] == [type(None)] * 3 + [lgroup.UpdateDropped] * 3
        whole(group)
        check(group)


def _states(num_updates: int, num_kills: int, **settings: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    chance = random.Random(5)
    kills = sorted(chance.sample(range(num_updates), num_kills))
    with lgroup.LearnerGroup(config=config_of(2, update_retries=50, **settings)) as group:
        futures = []
        for number in range(num_updates):
            futures.append(group.submit(batch=batch_of(number)))
            if kills and kills[0] == number:
                kills.pop(0)
                with contextlib.suppress(ProcessLookupError):  # it is dead already, and not replaced yet
                    os.kill(pid_of(group, chance.randrange(2)), signal.SIGKILL)
        results = [future.result(60) for future in futures]
        whole_stats = check(group)
        return group.get_state(), results, whole_stats


def test_with_all_learners_needed_kills_change_not_one_bit_of_the_outcome() -> None:
    """Dropout, batch norm, shuffling, a Python attribute that hooks change, up to three updates in flight."""
    num_updates, num_kills = (400, 60) if FULL_SIZE else (60, 9)
    calm, calm_results, _ = _states(num_updates, 0, min_learners=2)
    wild, wild_results, stats = _states(num_updates, num_kills, min_learners=2)
    assert stats["num_restarts"] >= num_kills // 2
    assert stats["updates"]["applied"] == num_updates and stats["updates"]["failed"] == {}
    assert same_state(calm, wild)
    losses = [
        [result[0]["default_policy"]["total_loss"], result.reduced["default_policy"]["total_loss"]]
        for result in calm_results
    ]
    for loss, result in zip(losses, wild_results, strict=True):
        # Who died after an update was decided, and before it could say so, reported nothing of its part.
        if len(result) == 2:
            assert [result[0]["default_policy"]["total_loss"], result.reduced["default_policy"]["total_loss"]] == loss
    assert sum(len(result) == 2 for result in wild_results) >= num_updates - num_kills


def test_shrinking_instead_of_waiting_gives_the_same_up_to_rounding() -> None:
    num_updates, num_kills = (400, 60) if FULL_SIZE else (60, 9)
    calm, _, _ = _states(num_updates, 0, plain=True)
    wild, _, stats = _states(num_updates, num_kills, plain=True, min_learners=1)
    assert stats["updates"]["applied"] == num_updates and stats["updates"]["failed"] == {}
    left, right = (state["learner"]["rl_module"]["default_policy"] for state in (calm, wild))
    for name, tensor in left.items():
        np.testing.assert_allclose(tensor.numpy(), right[name].numpy(), atol=1e-4)
