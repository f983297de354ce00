"""The group's state machine under random orders of events, against modelled learners."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modelled_group import ERROR, World, settled

from lgroup._group_events import (
    Close,
    Entry,
    EntryKind,
    JoinFailed,
    Outcome,
    RankReply,
    Refuse,
    Replied,
    Status,
    Submit,
    Tick,
    Unsendable,
)
from lgroup._group_phases import TABLE, TRANSITIONS, Phase
from lgroup._group_slots import RecoveryPolicy
from lgroup._liveness import Limits
from lgroup.errors import LGroupError

FATES = ["ok", "ok", "ok", "raise before", "raise after", "nonfinite"]


@settings(deadline=None, max_examples=150)
@given(rng=st.randoms(use_true_random=True), num_learners=st.integers(1, 4))
def test_whatever_raises_in_whatever_order_learners_hold_the_same_log_and_the_ledger_adds_up(
    rng: random.Random, num_learners: int
) -> None:
    world = World(num_learners, rng)
    submitted = []
    for _ in range(60):
        if rng.random() < 0.4:
            kind = rng.choice([EntryKind.UPDATE, EntryKind.UPDATE, EntryKind.CHANGE, EntryKind.READ])
            fates = {r: rng.choice(FATES) for r in range(num_learners)} if kind is not EntryKind.READ else {}
            one = kind is EntryKind.READ and rng.random() < 0.5
            submitted.append(world.submit(kind, fates, env_steps=rng.randrange(5), one_learner=one))
        else:
            world.act(rng.randrange(num_learners))
    world.run()

    state = world.state
    assert state.phase is Phase.RUNNING and state.entries.num_outstanding == 0
    assert len(world.verdicts) == len(submitted), "every entry has exactly one verdict"
    logs = [process.log for process in world.processes if process is not None]
    assert all(log == logs[0] for log in logs)
    applied = [e for e in submitted if world.verdicts[id(e)].status is Status.APPLIED and e.kind is not EntryKind.READ]
    assert [entry.number for entry in applied] == logs[0]
    assert state.entries.weights_version == sum(entry.kind is EntryKind.UPDATE for entry in applied)
    assert state.entries.ledger.env_steps.submitted == sum(e.env_steps for e in submitted if e.kind is EntryKind.UPDATE)


@settings(deadline=None, max_examples=100)
@given(rng=st.randoms(use_true_random=True), num_learners=st.integers(1, 3), by=st.sampled_from(["loss", "close"]))
def test_whenever_the_group_ends_every_entry_gets_its_verdict_at_once(
    rng: random.Random, num_learners: int, by: str
) -> None:
    world = World(num_learners, rng, RecoveryPolicy(restart=False, min_learners=num_learners))
    submitted = []
    for _ in range(rng.randrange(40)):
        if rng.random() < 0.5:
            fates = {r: rng.choice(FATES) for r in range(num_learners)}
            submitted.append(world.submit(rng.choice([EntryKind.UPDATE, EntryKind.CHANGE]), fates, env_steps=1))
        else:
            world.act(rng.randrange(num_learners))
    if by == "loss":
        world.kill(rng.randrange(num_learners))
        world.run()
    else:
        world.handle(Close())
    assert world.stopped
    assert len(world.verdicts) == len(submitted)
    assert world.state.entries.in_flight == 0
    world.run()  # late answers change nothing
    assert len(world.verdicts) == len(submitted)


def test_an_update_goes_to_every_learner_or_to_none() -> None:
    world = settled(num_learners=3, max_updates=2)
    sent = [world.handle(Submit(Entry(EntryKind.UPDATE, None, env_steps=7))) for _ in range(4)]
    assert [type(instructions[0]).__name__ for instructions in sent] == ["Send", "Send", "Deliver", "Deliver"]
    assert all(instructions[0].slots == (0, 1, 2) for instructions in sent[:2])  # type: ignore[union-attr]
    assert world.state.entries.ledger.env_steps.dropped == {"queue_full": 14}
    assert world.state.entries.ledger.dropped_env_steps() == 14


def test_a_submission_that_chose_to_wait_leaves_no_trace_when_there_is_no_room() -> None:
    world = settled(max_updates=1)
    world.submit(EntryKind.UPDATE)
    assert isinstance(world.handle(Submit(Entry(EntryKind.UPDATE, None), may_wait=True))[0], Refuse)
    assert world.state.entries.ledger.updates.submitted == 1


def test_room_is_counted_in_bytes_too_but_one_update_always_fits() -> None:
    world = settled(max_updates=3)
    big = (1 << 20) + 1
    world.submit(EntryKind.UPDATE, nbytes=big)
    assert not world.state.entries.has_room(1)
    world.run()
    assert world.state.entries.has_room(1)


def test_reads_and_changes_need_no_room_and_never_touch_the_ledger() -> None:
    world = settled(max_updates=1)
    world.submit(EntryKind.UPDATE)
    for kind in (EntryKind.READ, EntryKind.CHANGE):
        world.submit(kind)
    world.run()
    assert world.state.entries.ledger.updates.submitted == 1
    assert [entry.kind for entry in world.delivered] == [EntryKind.UPDATE, EntryKind.READ, EntryKind.CHANGE]


def test_a_learner_that_raises_before_the_sum_fails_the_update_for_all_and_the_group_forms_again() -> None:
    world = settled(num_learners=3)
    entry = world.submit(EntryKind.UPDATE, {1: "raise before"})
    world.run()
    verdict = world.verdicts[id(entry)]
    assert (verdict.status, verdict.reason, verdict.error) == (Status.FAILED, "user_error", ERROR)
    assert world.state.generation == 2 and world.state.phase is Phase.RUNNING


def test_a_learner_that_raises_after_the_sum_adopts_the_others_state_and_the_update_is_applied() -> None:
    world = settled(num_learners=2)
    entry = world.submit(EntryKind.UPDATE, {0: "raise after"})
    world.run()
    verdict = world.verdicts[id(entry)]
    assert (verdict.status, verdict.error) == (Status.APPLIED, ERROR)
    assert [process.log for process in world.processes if process] == [[0], [0]]


def test_if_all_learners_raise_after_the_sum_nobody_holds_the_update() -> None:
    world = settled(num_learners=2)
    entry = world.submit(EntryKind.UPDATE, {0: "raise after", 1: "raise after"})
    world.run()
    assert world.verdicts[id(entry)].reason == "user_error"
    assert [process.log for process in world.processes if process] == [[], []]


def test_a_nonfinite_gradient_fails_the_update_without_forming_again() -> None:
    world = settled(num_learners=2)
    entry = world.submit(EntryKind.UPDATE, {1: "nonfinite"})
    world.run()
    assert world.verdicts[id(entry)].reason == "nonfinite"
    assert world.state.generation == 1 and world.state.entries.weights_version == 0


def test_what_was_queued_behind_a_failed_update_is_sent_again_in_order() -> None:
    world = settled(num_learners=2)
    first = world.submit(EntryKind.UPDATE, {0: "raise before"})
    later = [world.submit(EntryKind.UPDATE) for _ in range(2)]
    world.run()
    assert world.verdicts[id(first)].status is Status.FAILED
    assert [world.verdicts[id(entry)].weights_version for entry in later] == [1, 2]
    assert {entry.sent_in for entry in later} == {2}


def test_an_update_that_cannot_be_made_into_messages_fails_and_the_next_one_goes_on() -> None:
    world = settled()
    first = Entry(EntryKind.UPDATE, None, env_steps=2)
    world.state.handle(Submit(first), 0.0)  # nobody is sent it
    world.handle(Unsendable(first.number, 1, ERROR))
    second = world.submit(EntryKind.UPDATE)
    world.run()
    assert world.verdicts[id(first)].reason == "user_error"
    assert world.verdicts[id(second)].status is Status.APPLIED


def test_an_answer_nobody_asked_for_is_a_mistake_of_the_driver() -> None:
    world = settled()
    with pytest.raises(AssertionError, match="was not asked"):
        world.state.handle(Replied(0, 1, 99, RankReply(Outcome.APPLIED)), 0.0)


def test_a_group_that_never_forms_ends_with_the_reason() -> None:
    world = World(2, random.Random(0))
    for generation in (1, 2, 3):
        for slot in (0, 1):
            world.handle(JoinFailed(slot, generation, "no route"))
    assert world.state.phase is Phase.BROKEN
    assert "no route" in str(world.state.cause)


def test_a_closed_group_refuses_requests() -> None:
    world = settled()
    world.handle(Close())
    with pytest.raises(LGroupError, match="shut down"):
        world.state.handle(Submit(Entry(EntryKind.UPDATE, None)), 0.0)


def test_what_is_in_flight_at_a_close_is_dropped_and_counted() -> None:
    world = settled()
    world.submit(EntryKind.UPDATE, env_steps=5)
    world.handle(Close())
    assert world.state.entries.ledger.env_steps.dropped == {"shutdown": 5}


def test_an_idle_group_has_no_deadline() -> None:
    world = settled()
    world.now = 1e6
    world.handle(Tick())
    assert world.state.phase is Phase.RUNNING and not world.killed


def test_staleness_counts_commits_between_sampling_and_training() -> None:
    world = settled()
    for sampled in (0, 0, 2):
        world.submit(EntryKind.UPDATE, sampled_version=sampled)
        world.run()
    assert world.state.entries.staleness == {0: 2, 1: 1}


def test_an_update_that_is_too_stale_when_its_turn_comes_is_dropped_and_one_that_is_not_is_trained() -> None:
    world = settled(policy=RecoveryPolicy(max_staleness=1))
    entries = [world.submit(EntryKind.UPDATE, sampled_version=0, env_steps=3) for _ in range(3)]
    world.run()
    assert [world.verdicts[id(entry)].status for entry in entries] == [Status.APPLIED, Status.APPLIED, Status.DROPPED]
    assert world.state.entries.ledger.env_steps.dropped == {"stale": 3}


def test_an_update_is_not_dropped_as_stale_because_of_one_before_it_that_fails() -> None:
    world = settled(policy=RecoveryPolicy(max_staleness=0))
    first = world.submit(EntryKind.UPDATE, {0: "raise before"}, sampled_version=0)
    second = world.submit(EntryKind.UPDATE, sampled_version=0)
    world.run()
    assert world.verdicts[id(first)].reason == "user_error"
    assert world.verdicts[id(second)].status is Status.APPLIED


def test_no_phase_can_be_left_but_as_the_table_says() -> None:
    assert set(TRANSITIONS) == set(Phase) == {way.source for way in TABLE} | {Phase.CLOSED}
    world = settled()
    world.handle(Close())
    with pytest.raises(AssertionError, match="no way from closed"):
        world.state._move(Phase.RUNNING)


def test_a_learner_that_owes_its_answer_for_too_long_is_killed_after_all_stacks_were_written_down() -> None:
    world = settled(policy=RecoveryPolicy(limits=Limits(heartbeat_s=1.0, update_s=10.0)))
    world.submit(EntryKind.CHANGE)
    world.act(0)
    world.now = 10.5
    world.handle(Tick())
    assert [(kill.slot, kill.dump) for kill in world.killed] == [(1, (0, 1))]
    assert "update_timeout_s=10" in world.killed[0].reason
    world.handle(Tick())
    assert len(world.killed) == 1, "a learner is killed once"
