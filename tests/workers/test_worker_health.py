from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lgroup.workers.health import KEPT_LOOKS, LATE_S, AwakeClock, Health, Look, Pulse, parse_stat

TICKS = st.integers(0, 10**9)


class Hands:
    """The hands of a clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_clock_without_beats_runs_with_the_systems() -> None:
    hands = Hands()
    clock = AwakeClock(hands)
    hands.now_s += 100.0
    assert clock.now() == 1100.0


def test_a_beat_that_is_a_little_late_is_no_pause() -> None:
    hands = Hands()
    clock = AwakeClock(hands)
    clock.expect(1.0)
    hands.now_s += 1.0 + LATE_S
    assert clock.beat() == 0.0 and clock.now() == hands.now_s


def test_a_pause_counts_neither_before_nor_after_its_beat_shows_it() -> None:
    hands = Hands()
    clock = AwakeClock(hands)
    clock.expect(1.0)
    hands.now_s += 61.0
    assert clock.now() == 1001.0 + LATE_S
    assert clock.beat() == 60.0 - LATE_S
    assert clock.now() == 1001.0 + LATE_S
    hands.now_s += 5.0
    assert clock.now() == 1006.0 + LATE_S


@given(st.lists(st.tuples(st.floats(0.1, 5), st.floats(0, 100), st.booleans()), max_size=30))
def test_awake_time_never_goes_back_and_never_runs_faster_than_time(steps: list[tuple[float, float, bool]]) -> None:
    hands = Hands()
    clock = AwakeClock(hands)
    before_s, began_s = clock.now(), hands.now_s
    for interval_s, passes_s, rests in steps:
        clock.expect(interval_s)
        hands.now_s += passes_s
        for act in (clock.now, clock.rest if rests else clock.beat):
            act()
            assert before_s - 1e-6 <= clock.now() <= began_s + (hands.now_s - began_s) + 1e-6
            if not rests:
                before_s = clock.now()
        before_s = clock.now()


def test_a_worker_that_answers_is_never_silent() -> None:
    pulse = Pulse(0.0, 1.0)
    for second in range(1, 20):
        pulse.beat(float(second), paused=False)
        assert pulse.turn(float(second)) and pulse.due(float(second)) and not pulse.overdue(float(second))
        pulse.asked(float(second))
        pulse.heard(second + 0.001, "idle", None)
        assert pulse.health.silent_s == 0.0 and pulse.health.phase == "idle"


def test_a_silent_worker_is_asked_once_and_looked_at_when_its_answer_is_late() -> None:
    pulse = Pulse(0.0, 1.0)
    pulse.beat(1.0, paused=False)
    pulse.asked(1.0)
    assert [pulse.due(now) for now in (2.0, 3.0, 60.0)] == [False, False, False]
    assert [pulse.overdue(now) for now in (2.0, 2.4, 2.6)] == [False, False, True]
    pulse.beat(8.0, paused=False)
    assert pulse.health.silent_s == 8.0


def test_a_worker_has_its_turn_at_its_own_interval_however_often_others_are_watched() -> None:
    pulse = Pulse(0.0, 1.0)
    turns = [tenth / 10 for tenth in range(1, 31) if pulse.turn(tenth / 10)]
    assert turns == [0.9, 1.8, 2.7]


def test_a_pause_of_the_coordinator_makes_nobody_look_silent() -> None:
    pulse = Pulse(0.0, 1.0)
    pulse.asked(1.0)
    pulse.beat(1.0, paused=False)
    pulse.looked(1.0, Look("S", 0.0))
    pulse.beat(3.0, paused=True)
    assert pulse.health.silent_s == 1.0 and not pulse.overdue(3.0)
    pulse.looked(3.0, Look("S", 0.0))
    assert pulse.health.cpu_advancing  # the looks before the pause are forgotten, and one says nothing


def test_a_worker_that_is_not_ready_owes_no_answer() -> None:
    pulse = Pulse(0.0, 1.0)
    pulse.not_ready(50.0)
    pulse.beat(51.0, paused=False)
    assert pulse.health.silent_s == 1.0


@pytest.mark.parametrize(
    ("cpu_per_s", "state", "stuck"),
    [(0.0, "S", True), (0.04, "S", True), (0.06, "S", False), (1.0, "R", False), (0.0, "T", True), (1.0, "T", True)],
)
def test_silent_workers_are_stuck_if_they_are_stopped_or_use_no_cpu(cpu_per_s: float, state: str, stuck: bool) -> None:
    pulse = Pulse(0.0, 1.0)
    for second in range(1, 12):
        pulse.beat(float(second), paused=False)
        pulse.looked(float(second), Look(state, 10.0 + cpu_per_s * second))
        assert pulse.health.stopped == (state == "T")
    assert pulse.health.stuck(10.0) == stuck and not pulse.health.stuck(11.5)
    assert pulse.health.cpu_s == pytest.approx(10.0 + 11 * cpu_per_s)
    pulse.heard(11.5, "idle", None)
    assert not pulse.health.stuck(0.1) and pulse.health.cpu_s is None


def test_cpu_time_of_long_ago_does_not_count() -> None:
    pulse = Pulse(0.0, 1.0)
    for second in range(1, 4 + KEPT_LOOKS):
        pulse.looked(float(second), Look("S", min(second, 3.0)))
    assert not pulse.health.cpu_advancing


@given(silent_s=st.floats(0, 100), timeout_s=st.floats(0.1, 100), stopped=st.booleans(), advancing=st.booleans())
def test_nobody_is_stuck_before_the_timeout_or_while_it_computes(
    silent_s: float, timeout_s: float, stopped: bool, advancing: bool
) -> None:
    health = Health(silent_s, stopped=stopped, cpu_advancing=advancing)
    assert health.stuck(timeout_s) == (silent_s >= timeout_s and (stopped or not advancing))


@pytest.mark.parametrize(
    ("health", "words"),
    [
        (Health(10.24, "calling", stopped=True), "silent for 10.2 s in phase calling, its process is stopped"),
        (Health(3.0, "idle"), "silent for 3.0 s in phase idle, using CPU time"),
        (Health(3.0, "idle", cpu_advancing=False), "silent for 3.0 s in phase idle, using no CPU"),
    ],
)
def test_health_says_what_was_seen(health: Health, words: str) -> None:
    assert health.text == words


@given(
    name=st.text(max_size=15), user=st.integers(0, 10**9), system=st.integers(0, 10**9), state=st.sampled_from("RSDTZ")
)
def test_a_processs_stat_is_read_whatever_its_name_holds(name: str, user: int, system: int, state: str) -> None:
    text = f"123 ({name}) {state} 1 123 123 0 -1 4194304 5 0 0 0 {user} {system} 0 0 20 0 1 0 99\n"
    assert parse_stat(text, 100) == Look(state, (user + system) / 100)


@pytest.mark.parametrize("text", ["", "123 (python) S 1", "123 python S", "1 (a) S 1 1 1 1 1 1 1 1 1 1 x y"])
def test_what_is_no_stat_is_refused(text: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        parse_stat(text, 100)
