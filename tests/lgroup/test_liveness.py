"""Who is stuck and who is busy, from looks alone; and limits that follow from one another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lgroup._building import recovery_policy
from lgroup._liveness import IN_COLLECTIVE, Judgement, Limits, judge
from lgroup.config import LearnerGroupConfig
from lgroup.workers import Health

LIMITS = Limits(heartbeat_s=4.0, update_s=10.0)
WAITING = Health(phase=IN_COLLECTIVE)


def judged(
    looks: dict[int, Health], owing: list[int], waited_s: float = 0.0, interrupted_s: float | None = None
) -> Judgement:
    return judge(looks, owing, waited_s=waited_s, limits=LIMITS, what="answer update 7", interrupted_s=interrupted_s)


def test_a_stopped_learner_is_stuck_by_no_doing_of_its_own() -> None:
    blame = judged({0: Health(silent_s=4.5, stopped=True), 1: Health()}, []).kill
    assert list(blame) == [0] and not blame[0].own


def test_a_silent_learner_without_cpu_time_is_stuck_and_one_that_computes_is_busy() -> None:
    looks = {0: Health(silent_s=4.5, cpu_advancing=False), 1: Health(silent_s=9.0, cpu_advancing=True)}
    assert list(judged(looks, [0, 1]).kill) == [0]


def test_a_busy_learner_has_until_the_update_limit() -> None:
    looks = {0: Health(silent_s=9.0, cpu_advancing=True, phase="calling"), 1: WAITING}
    assert judged(looks, [0, 1], waited_s=9.9) == Judgement()
    blame = judged(looks, [0, 1], waited_s=10.1).kill
    assert list(blame) == [0], "who waits for it is not to blame"
    assert "update_timeout_s=10" in blame[0].reason and blame[0].own


def test_if_all_wait_in_the_collective_they_are_interrupted_once_and_killed_only_if_that_does_not_help() -> None:
    looks = {0: WAITING, 1: WAITING}
    assert judged(looks, [0, 1], waited_s=10.1) == Judgement(interrupt=True)
    assert judged(looks, [0, 1], waited_s=10.2, interrupted_s=0.1) == Judgement()
    assert sorted(judged(looks, [0, 1], waited_s=12.2, interrupted_s=2.1).kill) == [0, 1]


def test_a_learner_that_does_not_leave_its_collective_when_it_is_told_to_is_killed_soon() -> None:
    looks = {0: WAITING, 1: Health(phase="calling"), 2: Health(phase="idle")}
    assert judged(looks, [0, 1], waited_s=1.0, interrupted_s=1.9) == Judgement()
    blame = judged(looks, [0, 1], waited_s=1.0, interrupted_s=2.1).kill
    assert list(blame) == [0] and not blame[0].own


def test_a_learner_that_fell_silent_after_it_waited_is_no_longer_taken_for_waiting() -> None:
    gone_on = Health(silent_s=9.0, cpu_advancing=True, phase=IN_COLLECTIVE)
    assert list(judged({0: gone_on, 1: WAITING}, [0, 1], waited_s=10.1).kill) == [0]


@given(st.floats(0.01, 1e5), st.floats(0.01, 1e5))
def test_limits_nest_whatever_is_set(heartbeat_s: float, update_s: float) -> None:
    """Case C13 (torchtitan#2899)."""
    limits = Limits.nested(heartbeat_s=heartbeat_s, update_s=update_s)
    assert limits.beat_s < limits.heartbeat_s <= limits.update_s < limits.collective_s


def test_setting_the_update_limit_alone_moves_the_others() -> None:
    """Case C13 (torchtitan#2899): ``update_timeout_s=5`` alone."""
    config = LearnerGroupConfig().learners(num_learners=2).fault_tolerance(update_timeout_s=5)
    limits = recovery_policy(config, seed=0).limits
    assert (limits.heartbeat_s, limits.update_s) == (5.0, 5.0)
    assert limits.update_s < limits.collective_s < 30.0
