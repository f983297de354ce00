"""The group's entries from the door to their verdicts: admission, order of sending, ledger, snapshots. Pure.

Invariants: an update is in the ledger exactly as long as it has been admitted or dropped; verdicts are given once; what
was applied is kept for a replay as far as `Log` has room for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lgroup._group_events import Deliver, Entry, EntryKind, Instruction, Send, Status, Warn
from lgroup._group_log import Log
from lgroup._group_slots import RecoveryPolicy
from lgroup._incidents import Incidents, describe_error
from lgroup._ledger import Ledger
from lgroup._verdict import Decision


@dataclass(frozen=True, slots=True)
class Room:
    """How much may be in flight: updates, and bytes of their data. One update is admitted whatever its size."""

    max_updates: int
    max_bytes: int


class Entries:
    """See the module.

    Args:
        room: How much may be in flight.
        policy: What is done about losses.
        snapshot_payload: The payload of the reads that take snapshots; None: there are none.
        incidents: Where it is noted what was rolled back.
        out: Where instructions go.
    """

    def __init__(
        self,
        room: Room,
        policy: RecoveryPolicy,
        snapshot_payload: Any,
        incidents: Incidents,
        out: list[Instruction],
    ) -> None:
        self.room = room
        self.ledger = Ledger()
        self.log = Log(policy.max_kept_bytes)
        self.weights_version = 0
        #: Applied updates by how many commits lay between the weights their data was sampled under and their own.
        self.staleness: Counter[int] = Counter()
        #: The generation that entries are sent in, and the position that it begins at.
        self.generation = 0
        self.target = -1
        #: The time of the event that is being handled, and since when the first in line has been so.
        self.now = 0.0
        self.since = 0.0
        self._policy = policy
        self._snapshot_payload = snapshot_payload
        self._snapshot_asked = False
        self._incidents = incidents
        self._out = out
        self._seq = 0
        self._number = 0

    # What callers may read

    @property
    def in_flight(self) -> int:
        """Admitted updates without a verdict."""
        return sum(1 for _ in self.log.updates())

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of data of the admitted updates without a verdict."""
        return sum(entry.nbytes for entry in self.log.updates())

    @property
    def in_flight_env_steps(self) -> int:
        """Env steps of the admitted updates without a verdict."""
        return sum(entry.env_steps for entry in self.log.updates())

    @property
    def num_outstanding(self) -> int:
        """Requests of callers without a verdict."""
        return sum(entry.kind is not EntryKind.SNAPSHOT for entry in self.log.table.values())

    def has_room(self, nbytes: int) -> bool:
        """Whether an update of `nbytes` would be admitted now."""
        in_flight = self.in_flight
        if in_flight >= self.room.max_updates:
            return False
        return in_flight == 0 or self.in_flight_bytes + nbytes <= self.room.max_bytes

    def check(self) -> None:
        """Assert the invariants that can be looked at from outside."""
        self.ledger.check(self.in_flight, self.in_flight_env_steps)
        self.log.check()
        assert self.in_flight <= self.room.max_updates, "more updates in flight than there is room for"

    # The door

    def admit(self, entry: Entry) -> None:
        """Take an entry in."""
        if entry.kind is EntryKind.UPDATE:
            self._number_update(entry)
        entry.number = self._number
        self._number += 1
        if not self.log.table:
            self.since = self.now
        self.log.table[entry.number] = entry

    def drop_at_the_door(self, entry: Entry, reason: str, error: Any = None) -> None:
        """Account for an update that is dropped before admission."""
        self._number_update(entry)
        self.deliver(entry, Decision(Status.DROPPED, reason, error))

    def _number_update(self, entry: Entry) -> None:
        self._seq += 1
        entry.seq = self._seq
        self.ledger.submit(entry.env_steps)

    # Sending

    def flush(self, members: tuple[int, ...]) -> None:
        """Send what this generation, of `members`, was not sent yet, in order."""
        version = self.weights_version  # at the latest, when the entry's turn comes
        for place, entry in enumerate(self.log.pending()):
            if entry.doom is not None:
                continue  # its verdict waits for those before it
            if entry.sent_in != self.generation:
                if self._is_stale(entry, version):
                    if place == 0:
                        self.pop(entry)
                        self.deliver(entry, Decision(Status.DROPPED, "stale"))
                        self.flush(members)
                    return  # it waits for its turn: some update before it may fail
                self._send(entry, members)
            version += entry.number in self.log.table and entry.kind is EntryKind.UPDATE

    def _is_stale(self, entry: Entry, version: int) -> bool:
        limit = self._policy.max_staleness
        if limit is None or entry.sampled_version is None or entry.number in self.log.replays:
            return False
        return version - entry.sampled_version > limit

    def _send(self, entry: Entry, members: tuple[int, ...]) -> None:
        entry.replies = {}
        entry.sent_in = self.generation
        entry.sent_to = members[:1] if entry.one_learner else members
        self._out.append(Send(entry, entry.sent_to, self.generation, members))

    def sent(self) -> list[Entry]:
        """Entries that this generation was sent and that have no verdict."""
        return [entry for entry in self.log.pending() if entry.sent_in == self.generation]

    # Verdicts

    def pop(self, entry: Entry) -> bool:
        """Remove an entry that is decided; says whether it was a replay."""
        self.since = self.now
        return self.log.take(entry)

    def conclude(self, entry: Entry, decision: Decision) -> None:
        """Give an entry of the log its verdict."""
        was_replay = self.pop(entry)
        if entry.kind is EntryKind.SNAPSHOT:
            self._take_snapshot(entry, decision)
            return
        if not was_replay:
            self.deliver(entry, decision)
        elif decision.status is not Status.APPLIED:
            self._roll_back(entry)
        if decision.status is Status.APPLIED and entry.in_log and self._snapshot_payload is not None:
            self.log.keep(entry)
            self._ask_for_snapshot()

    def deliver(self, entry: Entry, decision: Decision) -> None:
        """Enter a verdict in the ledger and have the caller told."""
        if entry.kind is EntryKind.UPDATE:
            self._account(entry, decision)
        replies = {slot: entry.replies[slot] for slot in entry.sent_to if slot in entry.replies}
        self._out.append(Deliver(entry, decision.verdict(self.weights_version, self.generation, replies)))

    def _account(self, entry: Entry, decision: Decision) -> None:
        if decision.status is Status.DROPPED:
            self.ledger.drop(decision.reason, entry.env_steps)  # type: ignore[arg-type]
        elif decision.status is Status.FAILED:
            self.ledger.fail(decision.reason, entry.env_steps)  # type: ignore[arg-type]
        else:
            # Decided by all, with nothing to train: the data was taken, the weights are what they were.
            self.ledger.apply(entry.env_steps)
        if decision.status is Status.APPLIED:
            if entry.sampled_version is not None:
                self.staleness[self.weights_version - entry.sampled_version] += 1
            self.weights_version += 1

    def give_up(self, of_updates: Decision, of_others: Decision) -> None:
        """Nothing of what is pending will be carried out."""
        for entry in list(self.log.table.values()):
            self.pop(entry)
            if entry.kind is not EntryKind.SNAPSHOT:
                self.deliver(entry, of_updates if entry.kind is EntryKind.UPDATE else of_others)

    # Snapshots

    def _ask_for_snapshot(self) -> None:
        due = self.log.num_kept >= self._policy.snapshot_every or self.log.is_half_full
        if due and not self._snapshot_asked:
            self._snapshot_asked = True
            self.admit(Entry(EntryKind.SNAPSHOT, self._snapshot_payload, one_learner=True))

    def _take_snapshot(self, entry: Entry, decision: Decision) -> None:
        self._snapshot_asked = False
        if decision.status is Status.APPLIED:
            # Asked again in a later generation, it holds what that one began with, too.
            position = max(entry.number, self.target)
            self.log.snapshot_taken(next(iter(entry.replies.values())).body["value"], position)
        elif decision.reason == "user_error":
            self._snapshot_payload = None
            self.log.forget_all()
            why = describe_error(decision.error)
            self._out.append(Warn(f"no snapshots can be taken, so that the death of all learners is the end: {why}"))

    def rewind(self, members: Sequence[int]) -> Any:
        """Nobody holds the log any more: `members` go back to the snapshot, which is returned, and carry out again
        what came after it.
        """
        for entry in self.log.rewind():
            self._roll_back(entry)
        if self.log.replays:
            again = len(self.log.replays)
            self._incidents.note(f"learners {list(members)} go back to the last snapshot; {again} entries again")
        return self.log.snapshot

    def _roll_back(self, entry: Entry) -> None:
        if entry.kind is EntryKind.UPDATE:
            self.ledger.roll_back(entry.env_steps)
        self._incidents.note(f"{entry}, applied before, is rolled back")
