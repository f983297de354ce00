"""The group's state machine: events in, instructions out. It does no I/O and reads no clock.

Invariants:

1. The log's table (`lgroup._group_log`) holds exactly the entries that were admitted and have no verdict, in order of
   admission. Verdicts are given from its head, so results leave in that order and a read never overtakes an update that
   it must see.
2. An update is sent to every member of the generation or to none. Membership changes between generations only.
3. The ledger's equation holds after every event (`check`).
4. An entry is applied if a learner that is alive decided it and every other one has adopted that state: results leave
   only then. So states are equal at equal positions.
5. After a total loss the learners hold the last snapshot, and what was applied since is carried out again, in order.

The phases and the ways between them stand in `lgroup._group_phases`; any other step is a mistake and raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lgroup._group_entries import Entries, Room
from lgroup._group_events import (
    DECIDED,
    Close,
    Entry,
    EntryKind,
    Event,
    Instruction,
    Interrupt,
    Join,
    Joined,
    JoinFailed,
    Kill,
    Outcome,
    Refuse,
    Replied,
    Report,
    Start,
    StartFailed,
    Status,
    Stop,
    Submit,
    Tick,
    Unsendable,
    Warn,
    WorkerLost,
    WorkerReady,
)
from lgroup._group_phases import TRANSITIONS, Phase
from lgroup._group_slots import RecoveryPolicy, Slots, SlotState
from lgroup._incidents import Incidents, describe_generation
from lgroup._liveness import judge
from lgroup._verdict import Decision, decision_of, first_error
from lgroup.errors import LGroupError

#: How often a generation that does not form, or an entry that every learner merely lost, is tried again.
MAX_TRIES = 3


class GroupState:
    """The group's phase, generation, slots, log and ledger.

    Args:
        num_learners: Slots, all of them filled.
        room: How much may be in flight.
        policy: What is done about losses.
        snapshot_payload: The payload of the reads that take snapshots; None: there are none, a total loss is the end.
    """

    def __init__(
        self, num_learners: int, room: Room, policy: RecoveryPolicy | None = None, snapshot_payload: Any = None
    ) -> None:
        self.policy = policy or RecoveryPolicy()
        self.phase = Phase.FORMING
        self.slots = Slots(num_learners, self.policy)
        self.incidents = Incidents()
        self._out: list[Instruction] = []
        self.entries = Entries(room, self.policy, snapshot_payload, self.incidents, self._out)
        self.cause: Exception | None = None
        self._joins: dict[int, Joined | JoinFailed] = {}
        self._tries_to_form = 0
        self._interrupted_at: float | None = None
        self._lost_here: dict[int, tuple[bool, Exception]] = {}  # members lost in this generation: own doing, cause
        self._handlers: dict[type, Callable[[Any], None]] = {
            Submit: self._on_submit,
            Joined: self._on_join,
            JoinFailed: self._on_join,
            Replied: self._on_reply,
            Unsendable: self._on_unsendable,
            WorkerLost: self._on_worker_lost,
            WorkerReady: self._on_worker_ready,
            StartFailed: self._on_start_failed,
            Tick: self._on_tick,
            Close: self._on_close,
        }

    # What callers may read

    @property
    def generation(self) -> int:
        """The number of the current membership, from 1."""
        return self.entries.generation

    @property
    def is_over(self) -> bool:
        """Whether the group will never run again."""
        return self.phase in (Phase.BROKEN, Phase.CLOSED)

    def check(self) -> None:
        """Assert the invariants that can be looked at from outside.

        Raises:
            AssertionError: naming what does not hold.
        """
        self.entries.check()
        self.slots.check()
        if self.is_over:
            assert not self.entries.log.table, f"{self.phase.value} with entries pending"
        if self.phase is Phase.RUNNING:
            positions = {self.slots[slot].position is None for slot in self.slots.live}
            assert positions == {False}, "running without members, or with one that holds nothing"

    # The one door for events

    def start(self, now: float) -> list[Instruction]:
        """Form the first generation: every learner adopts the first one's state."""
        self.entries.now = now
        self._form()
        return self._take()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event at time `now` (monotonic, seconds) and say what is to be done, in order."""
        self.entries.now = now
        self._handlers[type(event)](event)
        return self._take()

    def drop_at_the_door(self, entry: Entry, reason: str, error: Any, now: float) -> list[Instruction]:
        """Account for an update that is dropped before admission for a reason outside this machine."""
        self.entries.now = now
        self.entries.drop_at_the_door(entry, reason, error)
        return self._take()

    def _take(self) -> list[Instruction]:
        out = self._out[:]
        self._out.clear()
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
        is_open = self.phase is Phase.BROKEN or entry.kind is not EntryKind.UPDATE
        if not is_open and not self.entries.has_room(entry.nbytes):
            if event.may_wait:
                self._out.append(Refuse(entry))
            else:
                self.entries.drop_at_the_door(entry, "queue_full")
            return
        self.entries.admit(entry)
        if self.phase is Phase.BROKEN:
            self._give_up()
        else:
            self._flush()

    def _flush(self) -> None:
        if self.phase is Phase.RUNNING:
            self.entries.flush(self.slots.members)

    def _on_unsendable(self, event: Unsendable) -> None:
        entry = self.entries.log.find(event.number)
        if entry is None or entry.sent_in != event.generation:
            return
        entry.sent_to, entry.doom = (), ("user_error", event.error)
        self._deliver_decided()
        self._settle_if_answered()

    # Replies and verdicts

    def _on_reply(self, event: Replied) -> None:
        if event.generation != self.generation or self.phase not in (Phase.RUNNING, Phase.SETTLING):
            return
        entry, slot = self.entries.log.find(event.number), event.slot
        if entry is None or entry.sent_in != self.generation or slot in entry.replies or slot not in entry.sent_to:
            raise AssertionError(f"learner {slot} answered entry {event.number}, which it was not asked")
        entry.replies[slot] = event.reply
        if entry.in_log and event.reply.outcome in DECIDED:
            self.slots.decided(slot, entry.number)
        if self.phase is Phase.RUNNING and event.reply.outcome not in DECIDED:
            self._move(Phase.SETTLING)
        self._deliver_decided()
        self._settle_if_answered()

    def _deliver_decided(self) -> None:
        """Deliver from the head of the log while every learner asked has decided, or nothing can help any more."""
        for entry in self.entries.log.pending():
            if entry.doom is not None:
                self.entries.conclude(entry, Decision(Status.FAILED, *entry.doom))
            elif self._is_decided(entry):
                self.entries.conclude(entry, decision_of(entry))
            else:
                break
        self._flush()  # a snapshot may be due, and what waited for its turn may have it now

    def _is_decided(self, entry: Entry) -> bool:
        if entry.sent_in != self.generation:
            return False
        # A dead learner's answer to a question is needed, its decision of an update is not.
        asked = [s for s in entry.sent_to if s in self.slots.live] if entry.in_log else entry.sent_to
        replies = entry.replies
        return bool(asked) and all(slot in replies and replies[slot].outcome in DECIDED for slot in asked)

    # Settling: nothing more is sent, every member left answers everything it was sent

    def _owing(self, entry: Entry) -> list[int]:
        return [slot for slot in entry.sent_to if slot not in entry.replies and slot in self.slots.live]

    def _settle_if_answered(self) -> None:
        if self.phase is Phase.SETTLING and not any(self._owing(entry) for entry in self.entries.sent()):
            self._settle()

    def _settle(self) -> None:
        furthest = self.slots.furthest
        undecided = [e for e in self.entries.sent() if not e.in_log or furthest is None or e.number > furthest]
        for number, why in self._blamed(undecided).items():
            self._interrupted_by_death(self.entries.log.find(number), *why)
        head = next((entry for entry in undecided if entry.in_log), None)
        if head is not None:
            # Whoever answered a question behind it may have seen what is taken back now.
            for entry in undecided:
                if not entry.in_log and entry.number > head.number:
                    entry.sent_in, entry.replies = None, {}
        if head is not None and head.doom is None:
            error = first_error(head)
            if error is not None:
                head.doom = ("user_error", error)
            elif not self._lost_here and head.replies:
                self._merely_lost(head)
        self._deliver_decided()
        self._regroup()

    def _blamed(self, undecided: list[Entry]) -> dict[int, tuple[bool, Exception]]:
        """The entries that members died in: what each had been sent and not answered, the first of it."""
        found: dict[int, tuple[bool, Exception]] = {}
        for slot, (own, cause) in self._lost_here.items():
            at = next((e for e in undecided if slot in e.sent_to and slot not in e.replies), None)
            if at is not None:
                own_before, first_cause = found.get(at.number, (False, cause))
                found[at.number] = (own or own_before, first_cause)
        return found

    def _interrupted_by_death(self, entry: Entry | None, own: bool, cause: Exception) -> None:
        assert entry is not None
        entry.interruptions += 1
        entry.own_deaths += own
        retries = self.policy.update_retries
        if entry.interruptions > retries:
            reason = "poison" if entry.own_deaths > retries else "worker_died"
            entry.doom = (reason, cause)
            self.incidents.note(f"{entry} fails ({reason}): learners died {entry.interruptions} times in it")
        else:
            self.incidents.note(f"{entry} is tried again")

    def _merely_lost(self, head: Entry) -> None:
        head.losses += 1
        if head.losses >= MAX_TRIES:
            lost = next((r.body for r in head.replies.values() if r.outcome is Outcome.LOST), None)
            head.doom = ("worker_died", lost or {"type": "CollectiveLost", "message": "no collective", "traceback": ""})

    # Forming

    def _regroup(self) -> None:
        """Go on with whoever is up, or wait for more."""
        if self.slots.enough():
            self._move(Phase.FORMING)
            self._form()
        elif not self.slots.can_become_enough():
            self._end()
        elif self.phase is not Phase.WAITING:
            self._move(Phase.WAITING)
            self._lost_here = {}
            self.incidents.note(f"the group waits for replacements: min_learners={self.policy.min_learners}")

    def _form(self) -> None:
        entries = self.entries
        entries.generation += 1
        entries.since = entries.now
        self._joins, self._lost_here, self._interrupted_at = {}, {}, None
        furthest = self.slots.furthest
        members = self.slots.form()
        snapshot = None
        if furthest is None:
            snapshot = entries.rewind(members)
            lead, entries.target = members[0], entries.log.snapshot_position
        else:
            lead, entries.target = self.slots.at(furthest)[0], furthest
        behind = tuple(s for s in members if s != lead and (furthest is None or self.slots[s].position != furthest))
        self._out += [
            Join(slot, entries.generation, members, lead, behind, snapshot if slot == lead else None)
            for slot in members
        ]

    def _on_join(self, event: Joined | JoinFailed) -> None:
        slot = event.slot
        if event.generation != self.generation or self.phase is not Phase.FORMING or slot not in self.slots.live:
            return
        self._joins[slot] = event
        if isinstance(event, Joined):
            self.slots[slot].position = self.entries.target
        self._begin_if_joined()

    def _begin_if_joined(self) -> None:
        live = self.slots.live
        if any(slot not in self._joins for slot in live):
            return
        failed = [join for slot in live if isinstance(join := self._joins[slot], JoinFailed)]
        if not failed and len(live) == len(self.slots.members):
            self._begin()
            return
        if not self._lost_here:
            self._tries_to_form += 1
        if self._tries_to_form >= MAX_TRIES:
            first = min(failed, key=lambda join: (join.lost, join.slot))
            self._break(LGroupError(f"rank {first.slot} could not join its process group: {first.error}"))
            return
        self._regroup()

    def _begin(self) -> None:
        """Every member joined: deliver what the leader had decided, go on with the rest."""
        self._tries_to_form = 0
        self._move(Phase.RUNNING)
        self.entries.since = self.entries.now
        self._close_incident()
        for entry in self.entries.log.pending():
            if entry.in_log and entry.number <= self.entries.target:
                self.entries.conclude(entry, Decision(Status.FAILED, *entry.doom) if entry.doom else decision_of(entry))
        if self.slots.ready:
            self._grow()
        else:
            self._deliver_decided()

    def _grow(self) -> None:
        """A replacement is up: take it in behind what was sent."""
        self._move(Phase.SETTLING)
        self._settle_if_answered()

    # Coming and going

    def _on_worker_ready(self, event: WorkerReady) -> None:
        if self.is_over:
            self._out.append(Kill(event.slot, "the group is over"))
            return
        self.slots.came_up(event.slot)
        if self.phase is Phase.RUNNING:
            self._grow()
        elif self.phase is Phase.WAITING:
            self._regroup()

    def _on_start_failed(self, event: StartFailed) -> None:
        if self.is_over:
            return
        self._start_again(
            event.slot,
            self.slots.did_not_start(event.slot, self.entries.now, event.error, permanent=event.permanent),
        )
        self._out.append(Warn(f"learner {event.slot} could not be started: {event.error}"))
        self._end_if_hopeless()

    def _on_worker_lost(self, event: WorkerLost) -> None:
        if self.is_over:
            return
        slot, was = event.slot, self.slots[event.slot]
        blame, was_member = was.blame, was.state is SlotState.MEMBER
        self.incidents.lost(event, self.slots.rank(slot), self.generation, [str(e) for e in self.entries.sent()])
        own = event.own or (blame is not None and blame.own)
        self._start_again(slot, self.slots.lost(slot, self.entries.now))
        if was_member:
            self._lost_here[slot] = (own, event.cause)
            self._leave_collective()
        self._after_a_loss(was_member)
        if self.phase is Phase.RUNNING:
            self._close_incident()  # it was not in the generation yet: nothing follows

    def _close_incident(self) -> None:
        members = () if self.is_over else self.slots.members
        incident = self.incidents.over(describe_generation(self.generation, members))
        if incident is not None:
            self._out.append(Report(incident))

    def _leave_collective(self) -> None:
        if self.slots.live:
            self._interrupted_at = self.entries.now
            self._out.append(Interrupt(self.slots.live, self.generation))

    def _after_a_loss(self, was_member: bool) -> None:
        if self.phase is Phase.RUNNING and was_member:
            self._move(Phase.SETTLING)
            self._deliver_decided()
        if self.phase is Phase.SETTLING:
            self._deliver_decided()
            self._settle_if_answered()
        elif self.phase is Phase.FORMING and was_member:
            self._begin_if_joined()
        self._end_if_hopeless()

    def _start_again(self, slot: int, delay_s: float | None) -> None:
        if delay_s is not None:
            self._out.append(Start(slot, delay_s))
        else:
            self.incidents.note(f"learner {slot} is not started again")

    def _end_if_hopeless(self) -> None:
        if self.phase is Phase.WAITING and not self.slots.can_become_enough():
            self._end()

    def _end(self) -> None:
        policy = self.policy
        self._break(self.incidents.the_end(self.slots.why_gone, policy.min_learners, policy.restart))

    # Time

    def _on_tick(self, event: Tick) -> None:
        if self.is_over or self.generation == 0:
            return
        owing, what = self._first_in_line()
        judgement = judge(
            {slot: look for slot, look in event.looks.items() if slot in self.slots.up},
            owing,
            waited_s=self.entries.now - self.entries.since,
            limits=self.policy.limits,
            what=what,
            interrupted_s=None if self._interrupted_at is None else self.entries.now - self._interrupted_at,
        )
        for slot, blame in judgement.kill.items():
            if self.slots[slot].blame is None:
                self.slots[slot].blame = blame
                self._out.append(Kill(slot, blame.reason, dump=self.slots.up))
        if judgement.interrupt:
            self._leave_collective()

    def _first_in_line(self) -> tuple[list[int], str]:
        """Who has not done yet what the group waits for, and what that is."""
        if self.phase is Phase.FORMING:
            return [slot for slot in self.slots.live if slot not in self._joins], "join its process group"
        for entry in self.entries.sent():
            if owing := self._owing(entry):
                return owing, f"answer {entry}"
        return [], ""

    # The end

    def _break(self, cause: Exception) -> None:
        self.cause = cause
        self._move(Phase.BROKEN)
        self._give_up()
        self._close_incident()
        self._out.append(Stop(cause))

    def _give_up(self) -> None:
        died = Decision(Status.FAILED, "worker_died", self.cause)
        self.entries.give_up(died, died)

    def _on_close(self, event: Close) -> None:
        if self.phase is Phase.CLOSED:
            return
        self._move(Phase.CLOSED)
        self.entries.give_up(Decision(Status.DROPPED, "shutdown"), Decision(Status.FAILED, "shutdown"))
        self._out.append(Stop(None))
