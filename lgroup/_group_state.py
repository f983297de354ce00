"""The group's state machine: events in, instructions out. It does no I/O and reads no clock.

Invariants:

1. `_table` holds exactly the entries that were admitted and have no verdict, in order of admission. Verdicts are given
   from its head, so results leave in that order and a read never overtakes an update that it must see.
2. An update is sent to every rank of the generation or to none.
3. The ledger's equation holds after every event (`check`).
4. An entry is applied if any rank decided it: ranks that did not adopt the state of one that did, before the next
   generation trains. So states are equal at equal positions.

Phases and what moves between them; anything else is a mistake of the driver and raises::

    FORMING   --(every rank joined)--------------------------> RUNNING
    FORMING   --(every rank answered, some could not join)---> FORMING      next generation, bounded tries
    RUNNING   --(a rank raised, or lost its collective)------> SETTLING     nothing more is sent
    SETTLING  --(every rank answered everything it was sent)-> FORMING      next generation, leader is the furthest rank
    FORMING | RUNNING | SETTLING --(a rank's process is gone, a deadline passed, no generation forms)--> BROKEN
    FORMING | RUNNING | SETTLING | BROKEN --(close)----------> CLOSED
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lgroup._group_events import (
    DECIDED,
    Close,
    Deliver,
    Entry,
    EntryKind,
    Event,
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
    Verdict,
    WorkerLost,
)
from lgroup._ledger import Ledger
from lgroup.errors import LGroupError


class Phase(enum.Enum):
    """Where the group is in its life."""

    FORMING = "forming"
    RUNNING = "running"
    SETTLING = "settling"
    BROKEN = "broken"
    CLOSED = "closed"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset({Phase.FORMING, Phase.RUNNING, Phase.BROKEN, Phase.CLOSED}),
    Phase.RUNNING: frozenset({Phase.SETTLING, Phase.BROKEN, Phase.CLOSED}),
    Phase.SETTLING: frozenset({Phase.FORMING, Phase.BROKEN, Phase.CLOSED}),
    Phase.BROKEN: frozenset({Phase.CLOSED}),
    Phase.CLOSED: frozenset(),
}

#: How often an undecided generation, or an update that every rank merely lost, is tried again.
MAX_TRIES = 3


@dataclass(frozen=True, slots=True)
class Room:
    """How much may be in flight: updates, and bytes of their data. One update is admitted whatever its size."""

    max_updates: int
    max_bytes: int


class GroupState:
    """The group's phase, generation, table of requests and ledger."""

    def __init__(self, world_size: int, room: Room, update_timeout_s: float) -> None:
        self.world_size = world_size
        self.room = room
        self.update_timeout_s = update_timeout_s
        self.phase = Phase.FORMING
        self.generation = 0
        self.weights_version = 0
        self.ledger = Ledger()
        self.cause: Exception | None = None
        #: Applied updates by how many commits lay between the weights their data was sampled under and their own.
        self.staleness: Counter[int] = Counter()
        self._table: dict[int, Entry] = {}
        self._seq = 0
        self._number = 0
        self._joins: dict[int, Joined | JoinFailed] = {}
        self._lead, self._behind = 0, tuple(range(1, world_size))
        self._tries_to_form = 0
        self._tries_of_head = 0
        self._waiting_since = 0.0
        self._out: list[Instruction] = []
        self._now = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Submit: self._on_submit,
            Joined: self._on_join,
            JoinFailed: self._on_join,
            Replied: self._on_reply,
            WorkerLost: self._on_worker_lost,
            Tick: self._on_tick,
            Close: self._on_close,
        }

    # What callers may read

    @property
    def in_flight(self) -> int:
        """Admitted updates without a verdict."""
        return sum(entry.kind is EntryKind.UPDATE for entry in self._table.values())

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of data of the admitted updates without a verdict."""
        return sum(entry.nbytes for entry in self._table.values() if entry.kind is EntryKind.UPDATE)

    @property
    def in_flight_env_steps(self) -> int:
        """Env steps of the admitted updates without a verdict."""
        return sum(entry.env_steps for entry in self._table.values() if entry.kind is EntryKind.UPDATE)

    @property
    def num_outstanding(self) -> int:
        """Requests of any kind without a verdict."""
        return len(self._table)

    def has_room(self, nbytes: int) -> bool:
        """Whether an update of `nbytes` would be admitted now."""
        in_flight = self.in_flight
        if in_flight >= self.room.max_updates:
            return False
        return in_flight == 0 or self.in_flight_bytes + nbytes <= self.room.max_bytes

    def check(self) -> None:
        """Assert the invariants that can be looked at from outside.

        Raises:
            AssertionError: naming what does not hold.
        """
        self.ledger.check(self.in_flight, self.in_flight_env_steps)
        numbers = list(self._table)
        assert numbers == sorted(set(numbers)), f"table out of order: {numbers}"
        assert self.in_flight <= self.room.max_updates, "more updates in flight than there is room for"
        if self.phase in (Phase.BROKEN, Phase.CLOSED):
            assert not self._table, f"{self.phase.value} with {len(self._table)} entries pending"

    # The one door for events

    def start(self, now: float) -> list[Instruction]:
        """Form the first generation: every rank adopts rank 0's state."""
        self._now = now
        self._form()
        return self._take()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event at time `now` (monotonic, seconds) and say what is to be done, in order."""
        self._now = now
        self._handlers[type(event)](event)
        return self._take()

    def drop_at_the_door(self, entry: Entry, reason: str, error: Any, now: float) -> list[Instruction]:
        """Account for an update that is dropped before admission for a reason outside this machine."""
        self._now = now
        self._number_update(entry)
        self._drop(entry, reason, error)
        return self._take()

    def _take(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out

    def _move(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"no way from {self.phase.value} to {phase.value}")
        self.phase = phase

    # Admission

    def _on_submit(self, event: Submit) -> None:
        entry = event.entry
        if self.phase is Phase.CLOSED:
            raise LGroupError("the learner group is shut down: it takes no more requests")
        if entry.kind is EntryKind.UPDATE and self.phase is not Phase.BROKEN and not self.has_room(entry.nbytes):
            if event.may_wait:
                self._out.append(Refuse(entry))
                return
            self._number_update(entry)
            self._drop(entry, "queue_full")
            return
        self._admit(entry)
        if self.phase is Phase.BROKEN:
            self._give_up()
        elif self.phase is Phase.RUNNING:
            self._send(entry)

    def _number_update(self, entry: Entry) -> None:
        self._seq += 1
        entry.seq = self._seq
        self.ledger.submit(entry.env_steps)

    def _admit(self, entry: Entry) -> None:
        if entry.kind is EntryKind.UPDATE:
            self._number_update(entry)
        entry.number = self._number
        self._number += 1
        if not self._table:
            self._waiting_since = self._now
        self._table[entry.number] = entry

    def _send(self, entry: Entry) -> None:
        entry.replies.clear()
        entry.sent_in = self.generation
        self._out.append(Send(entry, self._targets(entry), self.generation))

    def _targets(self, entry: Entry) -> tuple[int, ...]:
        return tuple(range(self.world_size)) if entry.only_rank is None else (entry.only_rank,)

    # Verdicts

    def _verdict(self, status: Status, reason: str | None = None, error: Any = None) -> Verdict:
        return Verdict(status, reason, error, self.weights_version, self.generation)

    def _drop(self, entry: Entry, reason: Any, error: Any = None) -> None:
        self.ledger.drop(reason, entry.env_steps)
        self._out.append(Deliver(entry, self._verdict(Status.DROPPED, reason, error)))

    def _fail(self, entry: Entry, reason: Any, error: Any) -> None:
        if entry.kind is EntryKind.UPDATE:
            self.ledger.fail(reason, entry.env_steps)
        self._out.append(Deliver(entry, self._verdict(Status.FAILED, reason, error)))

    def _decide(self, entry: Entry, error: Any = None) -> None:
        """Deliver an entry that at least one rank decided."""
        outcomes = {reply.outcome for reply in entry.replies.values()}
        if Outcome.NONFINITE in outcomes:
            self._fail(entry, "nonfinite", error)
            return
        if Outcome.READ_RAISED in outcomes:
            self._fail(
                entry, "user_error", next(r.body for r in entry.replies.values() if r.outcome is Outcome.READ_RAISED)
            )
            return
        status = Status.APPLIED if Outcome.APPLIED in outcomes else Status.NOOP
        if entry.kind is EntryKind.UPDATE:
            # Decided by every rank, with nothing to train: the data was taken, the weights are what they were.
            self.ledger.apply(entry.env_steps)
            if status is Status.APPLIED:
                if entry.sampled_version is not None:
                    self.staleness[self.weights_version - entry.sampled_version] += 1
                self.weights_version += 1
        self._out.append(Deliver(entry, self._verdict(status, error=error)))

    def _answered(self, entry: Entry) -> bool:
        return len(entry.replies) == len(self._targets(entry))

    # Replies

    def _on_reply(self, event: Replied) -> None:
        if event.generation != self.generation or self.phase not in (Phase.RUNNING, Phase.SETTLING):
            return
        entry = self._table.get(event.number)
        if entry is None or entry.sent_in != self.generation or event.rank in entry.replies:
            raise AssertionError(f"rank {event.rank} answered entry {event.number}, which it was not asked")
        entry.replies[event.rank] = event.reply
        if self.phase is Phase.RUNNING and event.reply.outcome in (Outcome.RAISED, Outcome.LOST):
            self._move(Phase.SETTLING)
        self._deliver_decided()
        if self.phase is Phase.SETTLING and all(self._answered(entry) for entry in self._sent()):
            self._settle()

    def _sent(self) -> list[Entry]:
        """Entries that this generation's ranks have been sent; what came while it settles was not."""
        return [entry for entry in self._table.values() if entry.sent_in == self.generation]

    def _pop(self, entry: Entry) -> Entry:
        self._waiting_since = self._now
        return self._table.pop(entry.number)

    def _deliver_decided(self) -> None:
        """Deliver from the head of the table while every rank asked has decided."""
        for entry in list(self._table.values()):
            if not self._answered(entry) or not all(r.outcome in DECIDED for r in entry.replies.values()):
                return
            self._decide(self._pop(entry))

    # Settling: every rank has left its process group and answered everything

    def _settle(self) -> None:
        positions = self._positions()
        furthest = max(positions.values())
        self._lead = min(rank for rank, position in positions.items() if position == furthest)
        self._behind = tuple(rank for rank, position in positions.items() if position < furthest)
        undecided = []
        for entry in self._sent():
            if entry.kind is EntryKind.READ:
                continue  # asked again: it changes nothing, and must see what was before it
            if entry.number <= furthest:
                self._decide(self._pop(entry), _first_error(entry))
            else:
                undecided.append(entry)
        if undecided:
            self._settle_head(undecided[0])
        self._move(Phase.FORMING)
        self._form()

    def _positions(self) -> dict[int, int]:
        """Each rank's last decided entry of the log; what all decided is no longer in the table and counts as -1."""
        positions = dict.fromkeys(range(self.world_size), -1)
        for entry in self._sent():
            for rank, reply in entry.replies.items():
                if entry.kind is not EntryKind.READ and reply.outcome in DECIDED:
                    positions[rank] = entry.number
        return positions

    def _settle_head(self, entry: Entry) -> None:
        """The first entry of the log that no rank decided: it raised somewhere, or all lost their collective."""
        error = _first_error(entry)
        if error is not None:
            self._fail(self._pop(entry), "user_error", error)
            self._tries_of_head = 0
            return
        self._tries_of_head += 1
        if self._tries_of_head >= MAX_TRIES:
            lost = next(reply.body for reply in entry.replies.values() if reply.outcome is Outcome.LOST)
            self._fail(self._pop(entry), "worker_died", lost)
            self._tries_of_head = 0

    # Forming

    def _form(self) -> None:
        self.generation += 1
        self._joins = {}
        self._waiting_since = self._now
        self._out += [Join(rank, self.generation, self._lead, self._behind) for rank in range(self.world_size)]

    def _on_join(self, event: Joined | JoinFailed) -> None:
        if event.generation != self.generation or self.phase is not Phase.FORMING:
            return
        self._joins[event.rank] = event
        if len(self._joins) < self.world_size:
            return
        failed = [join for join in self._joins.values() if isinstance(join, JoinFailed)]
        if failed:
            self._tries_to_form += 1
            if self._tries_to_form >= MAX_TRIES:
                first = min(failed, key=lambda join: (join.lost, join.rank))
                self._break(LGroupError(f"rank {first.rank} could not join its process group: {first.error}"))
                return
            self._move(Phase.FORMING)
            self._form()
            return
        self._tries_to_form = 0
        self._behind = ()
        self._move(Phase.RUNNING)
        self._waiting_since = self._now
        for entry in self._table.values():
            self._send(entry)

    # The end

    def _on_worker_lost(self, event: WorkerLost) -> None:
        if self.phase not in (Phase.BROKEN, Phase.CLOSED):
            self._break(event.cause)

    def _on_tick(self, event: Tick) -> None:
        idle = self.generation == 0 or (self.phase is Phase.RUNNING and not self._table)
        if idle or self.phase in (Phase.BROKEN, Phase.CLOSED):
            return
        if self._now - self._waiting_since <= self.update_timeout_s:
            return
        if self.phase is Phase.FORMING:
            answered, what = set(self._joins), "join their process group"
        else:
            late = next(entry for entry in self._sent() if not self._answered(entry))
            answered, what = set(late.replies), f"answer the {late.kind.value} that they were sent"
        silent = sorted(set(range(self.world_size)) - answered)
        self._break(LGroupError(f"ranks {silent} did not {what} within update_timeout_s={self.update_timeout_s:g}"))

    def _break(self, cause: Exception) -> None:
        self.cause = cause
        self._move(Phase.BROKEN)
        self._give_up()
        self._out.append(Stop(cause))

    def _give_up(self) -> None:
        for entry in list(self._table.values()):
            self._fail(self._pop(entry), "worker_died", self.cause)

    def _on_close(self, event: Close) -> None:
        if self.phase is Phase.CLOSED:
            return
        self._move(Phase.CLOSED)
        for entry in list(self._table.values()):
            self._pop(entry)
            if entry.kind is EntryKind.UPDATE:
                self._drop(entry, "shutdown")
            else:
                self._fail(entry, "shutdown", None)
        self._out.append(Stop(None))


def _first_error(entry: Entry) -> Any:
    """What the lowest rank that raised says of it; None if nobody raised."""
    replies: Iterable[tuple[int, RankReply]] = sorted(entry.replies.items())
    return next((reply.body for _, reply in replies if reply.outcome is Outcome.RAISED), None)
