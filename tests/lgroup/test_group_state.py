"""The group's state machine under random orders of events, against learners that are modelled in twenty lines."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lgroup._group_events import (
    Close,
    Deliver,
    Entry,
    EntryKind,
    Instruction,
    Join,
    Joined,
    JoinFailed,
    Outcome,
    RankReply,
    Refuse,
    Replied,
    Send,
    Status,
    Stop,
    Submit,
    Tick,
    WorkerLost,
)
from lgroup._group_state import TRANSITIONS, GroupState, Phase, Room
from lgroup.errors import LGroupError

ERROR = {"type": "ValueError", "message": "no", "traceback": "..."}


@dataclass
class Rank:
    """A learner: an inbox in order, the log it holds, and the generation it is in (None: it left)."""

    inbox: deque[Any] = field(default_factory=deque)
    log: list[int] = field(default_factory=list)
    generation: int | None = None


class World:
    """A group state with modelled learners: each step lets one rank do one thing, chosen at random."""

    def __init__(self, world_size: int, rng: random.Random, max_updates: int = 3) -> None:
        self.state = GroupState(world_size, Room(max_updates, 1 << 20), update_timeout_s=10.0)
        self.ranks = [Rank() for _ in range(world_size)]
        self.rng = rng
        self.verdicts: dict[int, Any] = {}
        self.delivered: list[Entry] = []
        self.arrived: dict[tuple[int, int], set[int]] = {}
        self.completed: set[tuple[int, int]] = set()
        self.broken: set[int] = set()
        self.fates: dict[tuple[int, int], str] = {}
        self.refused: list[Entry] = []
        self.stopped = False
        self.carry_out(self.state.start(0.0))

    def handle(self, event: Any, now: float = 0.0) -> list[Instruction]:
        instructions = self.state.handle(event, now)
        self.state.check()
        self.carry_out(instructions)
        return instructions

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Join):
                self.ranks[instruction.rank].inbox.append(instruction)
            elif isinstance(instruction, Send):
                for rank in instruction.ranks:
                    self.ranks[rank].inbox.append(instruction)
            elif isinstance(instruction, Deliver):
                assert id(instruction.entry) not in self.verdicts, "two verdicts for one entry"
                self.verdicts[id(instruction.entry)] = instruction.verdict
                self.delivered.append(instruction.entry)
            elif isinstance(instruction, Refuse):
                self.refused.append(instruction.entry)
            elif isinstance(instruction, Stop):
                self.stopped = True

    # Ranks

    def act(self, number: int) -> bool:
        """Let a rank do the next thing in its inbox. False if it has to wait for its peers, or has nothing to do."""
        rank = self.ranks[number]
        if not rank.inbox:
            return False
        head = rank.inbox[0]
        if isinstance(head, Join):
            return self._join(number, head)
        reply = self._outcome(number, head)
        if reply is None:
            return False
        rank.inbox.popleft()
        self.handle(Replied(number, head.generation, head.entry.number, reply))
        return True

    def _join(self, number: int, join: Join) -> bool:
        rank, key = self.ranks[number], (join.generation, -1)
        here = self.arrived.setdefault(key, set())
        here.add(number)
        if len(here) < len(self.ranks):
            return False
        rank.inbox.popleft()
        if number in join.behind:
            # What the leader holds; it cannot have trained in this generation before every rank has joined.
            rank.log = list(self.ranks[join.lead].log)
        rank.generation = join.generation
        self.handle(Joined(number, join.generation))
        return True

    def _outcome(self, number: int, send: Send) -> RankReply | None:
        rank, entry, generation = self.ranks[number], send.entry, send.generation
        if rank.generation != generation:
            return RankReply(Outcome.VOID)
        if entry.kind is EntryKind.READ:
            return RankReply(Outcome.APPLIED, {"value": list(rank.log)})
        fate = self.fates.get((entry.number, number), "ok")
        if entry.kind is EntryKind.CHANGE:  # no collective in it: a rank may run ahead of its peers
            return self._leave(number, Outcome.RAISED) if fate.startswith("raise") else self._hold(number, entry)
        key = (generation, entry.number)
        if fate == "raise before" and key not in self.completed:
            return self._leave(number, Outcome.RAISED)
        here = self.arrived.setdefault(key, set())
        here.add(number)
        if len(here) == len(self.ranks):
            self.completed.add(key)
        if key not in self.completed:
            return self._leave(number, Outcome.LOST) if generation in self.broken else None
        return self._after_the_sum(number, entry, fate)

    def _after_the_sum(self, number: int, entry: Entry, fate: str) -> RankReply:
        if any(self.fates.get((entry.number, r)) == "nonfinite" for r in range(len(self.ranks))):
            return RankReply(Outcome.NONFINITE, {"parameter": None})
        if fate == "raise after":
            return self._leave(number, Outcome.RAISED)
        return self._hold(number, entry)

    def _hold(self, number: int, entry: Entry) -> RankReply:
        self.ranks[number].log.append(entry.number)
        return RankReply(Outcome.APPLIED, {"metrics": []})

    def _leave(self, number: int, outcome: Outcome) -> RankReply:
        rank = self.ranks[number]
        assert rank.generation is not None
        self.broken.add(rank.generation)
        rank.generation = None
        return RankReply(outcome, ERROR)

    # Driving

    def submit(self, kind: EntryKind, fates: dict[int, str] | None = None, **fields: Any) -> Entry:
        entry = Entry(kind, payload=None, **fields)
        for rank, fate in (fates or {}).items():
            self.fates[self.state._number, rank] = fate
        self.handle(Submit(entry))
        return entry

    def run(self) -> None:
        """Let the ranks act in random order until nobody can."""
        while True:
            order = list(range(len(self.ranks)))
            self.rng.shuffle(order)
            moved = [self.act(number) for number in order]
            if not any(moved):
                return


def settled(world_size: int = 2, **room: int) -> World:
    world = World(world_size, random.Random(0), **room)
    world.run()
    assert world.state.phase is Phase.RUNNING
    return world


FATES = ["ok", "ok", "ok", "raise before", "raise after", "nonfinite"]


@settings(deadline=None, max_examples=150)
@given(rng=st.randoms(use_true_random=False), world_size=st.integers(1, 4))
def test_whatever_happens_in_whatever_order_learners_hold_the_same_log_and_the_ledger_adds_up(
    rng: random.Random, world_size: int
) -> None:
    world = World(world_size, rng)
    submitted = []
    for _ in range(60):
        if rng.random() < 0.4:
            kind = rng.choice([EntryKind.UPDATE, EntryKind.UPDATE, EntryKind.CHANGE, EntryKind.READ])
            fates = {r: rng.choice(FATES) for r in range(world_size)} if kind is not EntryKind.READ else {}
            only = rng.randrange(world_size) if kind is EntryKind.READ else None
            submitted.append(world.submit(kind, fates, env_steps=rng.randrange(5), only_rank=only))
        else:
            world.act(rng.randrange(world_size))
    world.run()

    state = world.state
    assert state.phase is Phase.RUNNING and state.num_outstanding == 0
    assert len(world.verdicts) == len(submitted), "every entry has exactly one verdict"
    assert all(rank.log == world.ranks[0].log for rank in world.ranks)
    applied = [e for e in submitted if world.verdicts[id(e)].status is Status.APPLIED and e.kind is not EntryKind.READ]
    assert [entry.number for entry in applied] == world.ranks[0].log
    assert state.weights_version == sum(entry.kind is EntryKind.UPDATE for entry in applied)
    assert state.ledger.env_steps.submitted == sum(e.env_steps for e in submitted if e.kind is EntryKind.UPDATE)


@settings(deadline=None, max_examples=100)
@given(
    rng=st.randoms(use_true_random=False), world_size=st.integers(1, 3), by=st.sampled_from(["loss", "close", "tick"])
)
def test_whenever_the_group_ends_every_entry_gets_its_verdict_at_once(
    rng: random.Random, world_size: int, by: str
) -> None:
    world = World(world_size, rng)
    submitted = []
    for _ in range(rng.randrange(40)):
        if rng.random() < 0.5:
            fates = {r: rng.choice(FATES) for r in range(world_size)}
            submitted.append(world.submit(rng.choice([EntryKind.UPDATE, EntryKind.CHANGE]), fates, env_steps=1))
        else:
            world.act(rng.randrange(world_size))
    waits = world.state.num_outstanding > 0 or world.state.phase is Phase.FORMING
    if by == "loss":
        world.handle(WorkerLost(rng.randrange(world_size), RuntimeError("killed by SIGKILL")))
    elif by == "close":
        world.handle(Close())
    else:
        world.handle(Tick(), now=11.0)
    assert len(world.verdicts) == len(submitted)
    assert world.stopped == (by != "tick" or waits)
    assert world.state.in_flight == 0
    world.run()  # late answers change nothing
    assert len(world.verdicts) == len(submitted)


def test_an_update_goes_to_every_rank_or_to_none() -> None:
    world = settled(world_size=3, max_updates=2)
    sent = [world.handle(Submit(Entry(EntryKind.UPDATE, None, env_steps=7))) for _ in range(4)]
    assert [type(instructions[0]).__name__ for instructions in sent] == ["Send", "Send", "Deliver", "Deliver"]
    assert all(instructions[0].ranks == (0, 1, 2) for instructions in sent[:2])  # type: ignore[union-attr]
    assert world.state.ledger.env_steps.dropped == {"queue_full": 14}
    assert world.state.ledger.dropped_env_steps() == 14


def test_a_submission_that_chose_to_wait_leaves_no_trace_when_there_is_no_room() -> None:
    world = settled(max_updates=1)
    world.submit(EntryKind.UPDATE)
    assert isinstance(world.handle(Submit(Entry(EntryKind.UPDATE, None), may_wait=True))[0], Refuse)
    assert world.state.ledger.updates.submitted == 1


def test_room_is_counted_in_bytes_too_but_one_update_always_fits() -> None:
    world = settled(max_updates=3)
    big = (1 << 20) + 1
    world.submit(EntryKind.UPDATE, nbytes=big)
    assert not world.state.has_room(1)
    world.run()
    assert world.state.has_room(1)


def test_reads_and_changes_need_no_room_and_never_touch_the_ledger() -> None:
    world = settled(max_updates=1)
    world.submit(EntryKind.UPDATE)
    for kind in (EntryKind.READ, EntryKind.CHANGE):
        world.submit(kind)
    world.run()
    assert world.state.ledger.updates.submitted == 1
    assert [entry.kind for entry in world.delivered] == [EntryKind.UPDATE, EntryKind.READ, EntryKind.CHANGE]


def test_a_rank_that_raises_before_the_sum_fails_the_update_for_all_and_the_group_forms_again() -> None:
    world = settled(world_size=3)
    entry = world.submit(EntryKind.UPDATE, {1: "raise before"})
    world.run()
    verdict = world.verdicts[id(entry)]
    assert (verdict.status, verdict.reason, verdict.error) == (Status.FAILED, "user_error", ERROR)
    assert world.state.generation == 2 and world.state.phase is Phase.RUNNING


def test_a_rank_that_raises_after_the_sum_adopts_the_others_state_and_the_update_is_applied() -> None:
    world = settled(world_size=2)
    entry = world.submit(EntryKind.UPDATE, {0: "raise after"})
    world.run()
    verdict = world.verdicts[id(entry)]
    assert (verdict.status, verdict.error) == (Status.APPLIED, ERROR)
    assert [rank.log for rank in world.ranks] == [[0], [0]]


def test_if_all_ranks_raise_after_the_sum_nobody_holds_the_update() -> None:
    world = settled(world_size=2)
    entry = world.submit(EntryKind.UPDATE, {0: "raise after", 1: "raise after"})
    world.run()
    assert world.verdicts[id(entry)].reason == "user_error"
    assert [rank.log for rank in world.ranks] == [[], []]


def test_a_nonfinite_gradient_fails_the_update_without_forming_again() -> None:
    world = settled(world_size=2)
    entry = world.submit(EntryKind.UPDATE, {1: "nonfinite"})
    world.run()
    assert world.verdicts[id(entry)].reason == "nonfinite"
    assert world.state.generation == 1 and world.state.weights_version == 0


def test_what_was_queued_behind_a_failed_update_is_sent_again_in_order() -> None:
    world = settled(world_size=2)
    first = world.submit(EntryKind.UPDATE, {0: "raise before"})
    later = [world.submit(EntryKind.UPDATE) for _ in range(2)]
    world.run()
    assert world.verdicts[id(first)].status is Status.FAILED
    assert [world.verdicts[id(entry)].weights_version for entry in later] == [1, 2]
    assert {entry.sent_in for entry in later} == {2}


def test_an_answer_nobody_asked_for_is_a_mistake_of_the_driver() -> None:
    world = settled()
    with pytest.raises(AssertionError, match="was not asked"):
        world.state.handle(Replied(0, 1, 99, RankReply(Outcome.APPLIED)), 0.0)


def test_a_group_that_never_forms_ends_with_the_reason() -> None:
    world = World(2, random.Random(0))
    for generation in (1, 2, 3):
        for rank in (0, 1):
            world.handle(JoinFailed(rank, generation, "no route"))
    assert world.state.phase is Phase.BROKEN
    assert "no route" in str(world.state.cause)


def test_a_broken_group_answers_at_once_and_names_the_cause() -> None:
    world = settled()
    cause = RuntimeError("rank 1 (pid 7) was killed by SIGKILL")
    world.handle(WorkerLost(1, cause))
    entry = world.submit(EntryKind.UPDATE, env_steps=3)
    assert world.verdicts[id(entry)].error is cause
    assert world.state.ledger.env_steps.failed == {"worker_died": 3}


def test_a_closed_group_refuses_requests() -> None:
    world = settled()
    world.handle(Close())
    with pytest.raises(LGroupError, match="shut down"):
        world.state.handle(Submit(Entry(EntryKind.UPDATE, None)), 0.0)


def test_what_is_in_flight_at_a_close_is_dropped_and_counted() -> None:
    world = settled()
    world.submit(EntryKind.UPDATE, env_steps=5)
    world.handle(Close())
    assert world.state.ledger.env_steps.dropped == {"shutdown": 5}


def test_a_deadline_names_the_ranks_that_are_silent() -> None:
    world = settled(world_size=2)
    world.submit(EntryKind.CHANGE)
    world.act(0)
    world.handle(Tick(), now=10.5)
    assert "ranks [1]" in str(world.state.cause)


def test_an_idle_group_has_no_deadline() -> None:
    world = settled()
    world.handle(Tick(), now=1e6)
    assert world.state.phase is Phase.RUNNING


def test_staleness_counts_commits_between_sampling_and_training() -> None:
    world = settled()
    for sampled in (0, 0, 2):
        world.submit(EntryKind.UPDATE, sampled_version=sampled)
        world.run()
    assert world.state.staleness == {0: 2, 1: 1}


def test_no_phase_can_be_left_but_as_the_table_says() -> None:
    assert set(TRANSITIONS) == set(Phase)
    world = settled()
    world.handle(Close())
    with pytest.raises(AssertionError, match="no way from closed"):
        world.state._move(Phase.RUNNING)
