"""The group's state machine when learners die: modelled learners, every order of events."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from modelled_group import World, settled

from lgroup._group_events import Entry, EntryKind, Status
from lgroup._group_phases import TABLE, Phase
from lgroup._group_slots import RecoveryPolicy

FATES = ["ok"] * 8 + ["raise before", "raise after", "nonfinite", "die before once", "die after once", "die before"]
SEEN: Counter[tuple[Phase, Phase]] = Counter()


def live_for_a_while(world: World, steps: int) -> list[Entry]:
    """Random submissions, deaths, births and steps of learners."""
    rng, submitted = world.rng, []
    slots = range(len(world.processes))
    for _ in range(steps):
        chance, before = rng.random(), world.state.phase
        if chance < 0.25 and not world.state.is_over:
            kind = rng.choice([EntryKind.UPDATE, EntryKind.UPDATE, EntryKind.CHANGE, EntryKind.READ])
            fates = {slot: rng.choice(FATES) for slot in slots} if kind is not EntryKind.READ else {}
            one = kind is EntryKind.READ and rng.random() < 0.5
            nbytes = rng.choice([0, 10, 200])
            submitted.append(world.submit(kind, fates, env_steps=rng.randrange(5), one_learner=one, nbytes=nbytes))
        elif chance < 0.30 and world.alive and not world.state.is_over:
            world.kill(rng.choice(world.alive), own=rng.random() < 0.3)
        elif chance < 0.40 and world.starting and not world.state.is_over:
            world.start(rng.choice(sorted(world.starting)), fails=rng.random() < 0.2)
        else:
            world.act(rng.randrange(len(world.processes)))
        SEEN[before, world.state.phase] += 1
    return submitted


@settings(deadline=None, max_examples=500)
@given(
    rng=st.randoms(use_true_random=True),
    num_learners=st.integers(1, 4),
    all_needed=st.booleans(),
    update_retries=st.integers(0, 3),
    snapshot_every=st.integers(1, 6),
)
def test_whoever_dies_whenever_nothing_is_lost_and_the_survivors_hold_the_same_log(
    rng: random.Random, num_learners: int, all_needed: bool, update_retries: int, snapshot_every: int
) -> None:
    policy = RecoveryPolicy(
        min_learners=num_learners if all_needed else 1,
        max_restarts=1000,
        update_retries=update_retries,
        snapshot_every=snapshot_every,
        max_kept_bytes=500,
    )
    world = World(num_learners, rng, policy)
    submitted = live_for_a_while(world, 200)
    for key, fate in list(world.fates.items()):
        if fate == "die before":
            world.fates[key] = "die before once"  # else a learner could die for ever in a change that nobody gives up
    world.run()

    state = world.state
    assert state.phase is Phase.RUNNING and state.entries.num_outstanding == 0
    assert len(world.verdicts) == len(submitted), "every entry has exactly one verdict"
    logs = [process.log for process in world.processes if process is not None]
    assert len(logs) == num_learners and all(log == logs[0] for log in logs)
    applied = [e for e in submitted if world.verdicts[id(e)].status is Status.APPLIED and e.in_log]
    rolled_back = state.entries.ledger.updates.failed["rolled_back"]
    held = set(logs[0])
    assert logs[0] == sorted(held) and held <= {entry.number for entry in applied}
    updates = [entry for entry in applied if entry.kind is EntryKind.UPDATE]
    assert len([entry for entry in updates if entry.number not in held]) == rolled_back
    assert state.entries.ledger.updates.applied == len(updates) - rolled_back
    assert state.entries.weights_version == len(updates), "it never decreases"
    env_steps = sum(entry.env_steps for entry in updates if entry.number in held)
    assert state.entries.ledger.env_steps.applied == env_steps


def test_a_random_life_is_checked_after_each_of_a_hundred_thousand_events_and_takes_every_way_of_the_table() -> None:
    SEEN.clear()
    seed, num_events = 0, 0
    while num_events < 100_000:
        rng = random.Random(seed)
        num_learners = 1 + seed % 4
        policy = RecoveryPolicy(
            min_learners=1 + seed % num_learners,
            max_restarts=rng.choice([2, 20, 1000]),
            update_retries=seed % 3,
            snapshot_every=1 + seed % 5,
            max_kept_bytes=rng.choice([100, 1000]),
        )
        world = World(num_learners, rng, policy)
        live_for_a_while(world, 400)
        num_events += world.num_events
        seed += 1
    possible = {(way.source, way.target) for way in TABLE if way.target is not Phase.CLOSED}
    taken = {(source, target) for source, target in SEEN if source is not target}
    assert taken >= {way for way in possible if way[0] is not way[1]} - {(Phase.FORMING, Phase.BROKEN)}, (
        "a way of the table that nobody ever goes"
    )


def test_survivors_go_on_without_the_dead_and_the_update_is_tried_again() -> None:
    world = settled(num_learners=3)
    entry = world.submit(EntryKind.UPDATE)
    world.act(0)
    world.kill(1)
    world.run(births=False)
    assert world.verdicts[id(entry)].status is Status.APPLIED
    assert world.state.slots.members == (0, 2)
    assert world.state.generation == 2


def test_a_replacement_joins_with_a_survivors_state_in_the_place_of_the_dead() -> None:
    world = settled(num_learners=3)
    world.submit(EntryKind.UPDATE)
    world.kill(1)
    world.run(births=False)
    world.submit(EntryKind.UPDATE)
    world.run()
    assert world.state.slots.members == (0, 1, 2)
    assert [process.log for process in world.processes if process] == [[0, 1]] * 3
    assert world.state.slots.num_restarts == 1


def test_with_min_learners_the_survivors_wait_for_the_replacement() -> None:
    world = settled(num_learners=2, policy=RecoveryPolicy(min_learners=2))
    entry = world.submit(EntryKind.UPDATE)
    world.kill(0)
    world.run(births=False)
    assert world.state.phase is Phase.WAITING and id(entry) not in world.verdicts
    world.run()
    assert world.verdicts[id(entry)].status is Status.APPLIED


def test_an_update_that_one_learner_had_decided_before_the_others_lost_it_is_applied_once() -> None:
    world = settled(num_learners=3)
    entry = world.submit(EntryKind.UPDATE, {1: "die after once"})
    for slot in (0, 1, 2, 0):  # the sum is complete when the last one comes; 0 holds the update, 1 dies
        world.act(slot)
    world.run()
    assert world.verdicts[id(entry)].status is Status.APPLIED
    assert [process.log for process in world.processes if process] == [[0]] * 3


def test_an_update_that_kills_its_learner_each_time_is_poison_and_the_next_one_goes_on() -> None:
    world = settled(num_learners=2, policy=RecoveryPolicy(update_retries=2))
    poison = world.submit(EntryKind.UPDATE, {1: "die before"}, env_steps=7)
    after = world.submit(EntryKind.UPDATE, env_steps=5)
    world.run()
    assert world.verdicts[id(poison)].reason == "poison"
    assert world.verdicts[id(after)].status is Status.APPLIED
    assert world.state.entries.ledger.env_steps.failed == {"poison": 7}
    assert world.state.slots.num_restarts == 3, "it was tried once and twice again"


def test_a_replacement_may_come_to_the_poison_in_the_dead_ones_place() -> None:
    world = settled(num_learners=1, policy=RecoveryPolicy(update_retries=1))
    poison = world.submit(EntryKind.UPDATE, {0: "die before"})
    after = world.submit(EntryKind.UPDATE)
    world.run()
    assert world.verdicts[id(poison)].reason == "poison"
    assert world.verdicts[id(after)].status is Status.APPLIED


def test_deaths_by_others_hands_never_make_an_update_poison() -> None:
    world = settled(num_learners=2, policy=RecoveryPolicy(update_retries=1))
    entry = world.submit(EntryKind.UPDATE)
    for _ in range(2):
        world.kill(1)
        while world.state.phase is not Phase.RUNNING or world.processes[1] is None:
            world.start_any()
            for slot in (0, 1):
                world.act(slot) if world.state.phase is not Phase.RUNNING else None
    world.run()
    assert world.verdicts[id(entry)].reason in (None, "worker_died")
    assert "poison" not in world.state.entries.ledger.updates.failed


def test_when_all_die_the_snapshot_is_restored_and_what_came_after_it_is_carried_out_again() -> None:
    world = settled(num_learners=2, policy=RecoveryPolicy(snapshot_every=2))
    for _ in range(3):
        world.submit(EntryKind.UPDATE, env_steps=1)
        world.run()
    for slot in (0, 1):
        world.kill(slot)
    world.run()
    logs = [process.log for process in world.processes if process]
    numbers = [entry.number for entry in world.delivered]
    assert logs == [numbers, numbers] and len(numbers) == 3
    assert world.state.entries.weights_version == 3
    assert world.state.entries.ledger.updates.failed == {}


def test_what_could_not_be_kept_is_rolled_back_to_the_row() -> None:
    world = settled(num_learners=2, policy=RecoveryPolicy(snapshot_every=1000, max_kept_bytes=100))
    world.state.entries._snapshot_asked = True  # as if the answer were under way all the time
    for env_steps in (3, 5, 7):
        world.submit(EntryKind.UPDATE, env_steps=env_steps, nbytes=60)
        world.run()
    for slot in (0, 1):
        world.kill(slot)
    world.run()
    assert world.state.entries.ledger.env_steps.failed == {"rolled_back": 8}
    assert world.state.entries.ledger.env_steps.applied == 7
    assert world.state.entries.weights_version == 3, "versions never decrease"


def test_without_restarts_the_group_ends_when_too_few_are_left_and_names_the_first_death() -> None:
    world = settled(num_learners=3, policy=RecoveryPolicy(restart=False, min_learners=2))
    world.kill(2)
    world.run()
    assert world.state.phase is Phase.RUNNING and world.state.slots.members == (0, 1)
    entry = world.submit(EntryKind.UPDATE, env_steps=3)
    world.kill(1)
    world.run()
    assert world.state.phase is Phase.BROKEN and world.stopped
    assert "learner 1 died" in str(world.state.cause) and "restart_failed_learners=False" in str(world.state.cause)
    assert world.verdicts[id(entry)].error is world.state.cause
    assert world.state.entries.ledger.env_steps.failed == {"worker_died": 3}


def test_a_crash_loop_at_start_uses_up_the_budget_and_ends_with_the_reason() -> None:
    world = settled(num_learners=1, policy=RecoveryPolicy(max_restarts=4))
    world.kill(0)
    for _ in range(4):
        assert world.state.phase is Phase.WAITING
        world.start(0, fails=True)
    assert world.state.phase is Phase.BROKEN
    assert "max_restarts" in str(world.state.cause) and not world.starting


def test_an_error_that_no_further_try_can_help_ends_the_slot_at_once() -> None:
    world = settled(num_learners=2)
    world.kill(0)
    world.start(0, fails=True, permanent=True)
    world.run()
    assert not world.starting
    assert world.state.phase is Phase.RUNNING and world.state.slots.members == (1,)


def test_an_incident_is_told_once_with_the_first_death_first_and_what_followed() -> None:
    world = settled(num_learners=3)
    world.submit(EntryKind.UPDATE)
    world.kill(2)
    world.kill(0)
    world.run()
    (incident,) = world.reports
    assert (incident.first.slot, [casualty.slot for casualty in incident.others]) == (2, [0])
    assert incident.in_flight == ("update 1",)
    assert "update 1 is tried again" in incident.consequences
    assert incident.as_dict()["first"]["pid"] == 2


def test_a_question_that_saw_what_was_taken_back_is_asked_again() -> None:
    world = settled(num_learners=2)
    world.submit(EntryKind.CHANGE, {1: "raise before"})
    question = world.submit(EntryKind.READ, one_learner=True)
    world.submit(EntryKind.CHANGE)
    for slot in (0, 0, 1):  # 0 holds the first change and answers the question before 1 raises
        world.act(slot)
    world.kill(0)
    world.run()
    (reply,) = world.verdicts[id(question)].replies.values()
    assert reply.body["value"] == []
