from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lgroup.workers.start_policy import FINAL, RestartBudget, RestartPolicy, StartFailure, StartPolicy


@pytest.mark.parametrize("failure", sorted(FINAL, key=lambda failure: failure.value))
def test_a_failure_that_would_repeat_is_final(failure: StartFailure) -> None:
    assert StartPolicy().pause_s(failure, attempt=1, left_s=60, random_source=random.Random(0)) is None


@given(attempt=st.integers(1, 10), left_s=st.floats(0, 100), seed=st.integers(), jitter=st.floats(0, 0.9))
def test_a_retry_comes_within_its_attempts_and_before_the_deadline(
    attempt: int, left_s: float, seed: int, jitter: float
) -> None:
    policy = StartPolicy(max_attempts=4, backoff_s=0.2, jitter=jitter)
    pause = policy.pause_s(StartFailure.RAISED, attempt=attempt, left_s=left_s, random_source=random.Random(seed))
    if attempt >= 4:
        assert pause is None
    elif pause is not None:
        assert pause < left_s
        middle = 0.2 * 2 ** (attempt - 1)
        assert middle * (1 - jitter) <= pause * 1.000001 and pause <= middle * (1 + jitter) * 1.000001


def test_a_retry_that_would_miss_the_deadline_is_not_made() -> None:
    policy = StartPolicy(backoff_s=1.0, jitter=0)
    assert policy.pause_s(StartFailure.DIED, attempt=1, left_s=0.9, random_source=random.Random(0)) is None


def test_pauses_stay_under_their_limit() -> None:
    policy = StartPolicy(max_attempts=100, backoff_s=1.0, max_backoff_s=3.0, jitter=0)
    pauses = [
        policy.pause_s(StartFailure.RAISED, attempt=attempt, left_s=1e9, random_source=random.Random(0))
        for attempt in range(1, 6)
    ]
    assert pauses == [1.0, 2.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("setting", [{"max_attempts": 0}, {"jitter": 1.0}, {"jitter": -0.1}])
def test_an_impossible_policy_is_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        StartPolicy(**setting)  # type: ignore[arg-type]


def test_an_actor_that_dies_useless_again_and_again_waits_longer_each_time() -> None:
    policy = RestartPolicy(pause_s=0.1, max_pause_s=0.5, jitter=0)
    streak, pauses = 0, []
    for _ in range(6):
        streak = policy.streak(streak, was_useful=False)
        pauses.append(policy.pause_before(streak, random.Random(0)))
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.5, 0.5]
    assert policy.pause_before(10_000, random.Random(0)) == 0.5


def test_one_useful_incarnation_makes_the_next_start_immediate() -> None:
    policy = RestartPolicy()
    assert policy.pause_before(policy.streak(7, was_useful=True), random.Random(0)) == 0.0


@given(streak=st.integers(2, 200), seed=st.integers(), jitter=st.floats(0, 0.9))
def test_pauses_before_restarts_are_spread_around_their_middle(streak: int, seed: int, jitter: float) -> None:
    policy = RestartPolicy(pause_s=0.1, max_pause_s=5.0, jitter=jitter)
    middle = min(0.1 * 2.0 ** (streak - 2), 5.0)
    pause = policy.pause_before(streak, random.Random(seed))
    assert middle * (1 - jitter) * 0.999999 <= pause <= middle * (1 + jitter) * 1.000001


def test_a_budget_is_used_up_and_comes_back_as_its_window_slides() -> None:
    budget = RestartBudget(max_restarts=2, window_s=10.0)
    assert [budget.take(now) for now in (0.0, 1.0, 5.0, 9.9)] == [True, True, False, False]
    assert [budget.take(now) for now in (10.0, 10.5, 11.0, 11.1)] == [True, False, True, False]


@given(st.lists(st.floats(0, 100), max_size=60).map(sorted), st.integers(0, 5), st.floats(0.1, 50))
def test_no_window_ever_holds_more_restarts_than_the_budget(times: list[float], most: int, window_s: float) -> None:
    budget = RestartBudget(most, window_s)
    taken = [now for now in times if budget.take(now)]
    assert all(sum(now - window_s < other <= now for other in taken) <= most for now in taken)


@pytest.mark.parametrize(("most", "window_s", "word"), [(-1, 1.0, "max_restarts"), (1, 0.0, "restart_window_s")])
def test_an_impossible_budget_is_refused(most: int, window_s: float, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        RestartBudget(most, window_s)
