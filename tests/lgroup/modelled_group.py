"""A group's state machine with learners that are modelled: they hold a log, wait for each other, die and come back."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lgroup._group_entries import Room
from lgroup._group_events import (
    Deliver,
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
    RankReply,
    Refuse,
    Replied,
    Report,
    Send,
    Start,
    StartFailed,
    Stop,
    Submit,
    WorkerLost,
    WorkerReady,
)
from lgroup._group_phases import Phase
from lgroup._group_slots import RecoveryPolicy
from lgroup._group_state import GroupState

ERROR = {"type": "ValueError", "message": "no", "traceback": "..."}
SNAPSHOT = "a request for a snapshot"


@dataclass(eq=False)
class Process:
    """A learner: an inbox in order, the log it holds, the generation it is in (None: it left), those that are over."""

    inbox: deque[Any] = field(default_factory=deque)
    log: list[int] = field(default_factory=list)
    generation: int | None = None
    over: int = 0


class World:
    """Each step lets one learner do one thing; `rng` chooses.

    A learner's fate in an update is "ok", "raise before" or "raise after" the sum, "nonfinite", "die before" or "die
    after" it, by (number of the entry, slot); fates that end in "once" are forgotten after the first time.
    """

    def __init__(
        self, num_learners: int, rng: random.Random, policy: RecoveryPolicy | None = None, max_updates: int = 3
    ) -> None:
        self.policy = policy or RecoveryPolicy()
        self.state = GroupState(num_learners, Room(max_updates, 1 << 20), self.policy, SNAPSHOT)
        self.processes: list[Process | None] = [Process() for _ in range(num_learners)]
        self.starting: set[int] = set()
        self.rng = rng
        self.now = 0.0
        self.num_events = 0
        self.verdicts: dict[int, Any] = {}
        self.delivered: list[Entry] = []
        self.arrived: dict[tuple[int, int], set[int]] = {}
        self.completed: set[tuple[int, int]] = set()
        self.members: dict[int, tuple[int, ...]] = {}
        self.broken: set[int] = set()
        self.held: dict[int, list[int]] = {}  # what the lead of a generation held when it began
        self.fates: dict[tuple[int, int], str] = {}
        self.refused: list[Entry] = []
        self.reports: list[Any] = []
        self.killed: list[Kill] = []
        self.stopped = False
        self.carry_out(self.state.start(0.0))

    def handle(self, event: Event) -> list[Instruction]:
        self.num_events += 1
        instructions = self.state.handle(event, self.now)
        self.state.check()
        self.carry_out(instructions)
        return instructions

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            getattr(self, f"_{type(instruction).__name__.lower()}", lambda _: None)(instruction)

    def _join(self, join: Join) -> None:
        self.members[join.generation] = join.members
        process = self.processes[join.slot]
        if process is not None:
            process.inbox.append(join)

    def _send(self, send: Send) -> None:
        assert send.slots == send.members or send.entry.one_learner, "an update goes to every member"
        for slot in send.slots:
            process = self.processes[slot]
            if process is not None:
                process.inbox.append(send)

    def _interrupt(self, interrupt: Interrupt) -> None:
        for slot in interrupt.slots:
            process = self.processes[slot]
            assert process is not None, "an interrupt for a dead learner"
            process.over = max(process.over, interrupt.generation)

    def _deliver(self, deliver: Deliver) -> None:
        assert id(deliver.entry) not in self.verdicts, "two verdicts for one entry"
        self.verdicts[id(deliver.entry)] = deliver.verdict
        self.delivered.append(deliver.entry)

    def _refuse(self, refuse: Refuse) -> None:
        self.refused.append(refuse.entry)

    def _start(self, start: Start) -> None:
        assert self.processes[start.slot] is None and start.slot not in self.starting
        self.starting.add(start.slot)

    def _kill(self, kill: Kill) -> None:
        self.killed.append(kill)

    def _report(self, report: Report) -> None:
        self.reports.append(report.incident)

    def _stop(self, stop: Stop) -> None:
        self.stopped = True

    # Learners

    def act(self, slot: int) -> bool:
        """Let a learner do the next thing in its inbox. False if it waits for its peers, or has nothing to do."""
        process = self.processes[slot]
        if process is None or not process.inbox:
            return False
        head = process.inbox[0]
        if isinstance(head, Join):
            return self._enter(slot, process, head)
        reply = self._outcome(slot, process, head)
        if reply is None or self.processes[slot] is not process:
            return reply is not None
        process.inbox.popleft()
        self.handle(Replied(slot, head.generation, head.entry.number, reply))
        return True

    def _enter(self, slot: int, process: Process, join: Join) -> bool:
        key = (join.generation, -1)
        here = self.arrived.setdefault(key, set())
        here.add(slot)
        if process.over >= join.generation:
            process.inbox.popleft()
            self.handle(JoinFailed(slot, join.generation, "the generation is over", lost=True))
            return True
        if slot == join.lead and join.generation not in self.held:
            if join.snapshot is not None:
                process.log = list(join.snapshot)
            self.held[join.generation] = list(process.log)
        if not here >= set(join.members) or join.generation not in self.held:
            return False
        process.inbox.popleft()
        if slot in join.behind:
            process.log = list(self.held[join.generation])
        process.generation = join.generation
        self.handle(Joined(slot, join.generation))
        return True

    def _outcome(self, slot: int, process: Process, send: Send) -> RankReply | None:
        entry, generation = send.entry, send.generation
        if process.generation != generation or (process.over >= generation and entry.kind is not EntryKind.UPDATE):
            return RankReply(Outcome.VOID)
        if entry.kind in (EntryKind.READ, EntryKind.SNAPSHOT):
            return RankReply(Outcome.APPLIED, {"value": list(process.log)})
        fate = self._fate(entry.number, slot)
        if entry.kind is EntryKind.CHANGE:  # no collective in it: a learner may run ahead of its peers
            return self._in_change(slot, process, entry, fate)
        key = (generation, entry.number)
        if key not in self.completed and fate in ("raise before", "die before"):
            self._forget_fate(entry.number, slot)
            return self._leave(process, Outcome.RAISED) if fate == "raise before" else self._die(slot)
        here = self.arrived.setdefault(key, set())
        if process.over < generation:
            here.add(slot)
        if here >= set(send.members):
            self.completed.add(key)
        if key not in self.completed or slot not in here:
            is_over = generation in self.broken or process.over >= generation
            return self._leave(process, Outcome.LOST) if is_over else None
        return self._after_the_sum(slot, process, send, fate)

    def _in_change(self, slot: int, process: Process, entry: Entry, fate: str) -> RankReply | None:
        if fate.startswith(("raise", "die")):
            self._forget_fate(entry.number, slot)
            return self._leave(process, Outcome.RAISED) if fate.startswith("raise") else self._die(slot)
        return self._hold(process, entry)

    def _after_the_sum(self, slot: int, process: Process, send: Send, fate: str) -> RankReply | None:
        number = send.entry.number
        if any(self._fate(number, other) == "nonfinite" for other in send.members):
            return RankReply(Outcome.NONFINITE, {"parameter": None})
        if fate in ("raise after", "die after"):
            self._forget_fate(number, slot)
            return self._leave(process, Outcome.RAISED) if fate == "raise after" else self._die(slot)
        return self._hold(process, send.entry)

    def _fate(self, number: int, slot: int) -> str:
        return self.fates.get((number, slot), "ok").removesuffix(" once")

    def _forget_fate(self, number: int, slot: int) -> None:
        if self.fates[number, slot].endswith(" once"):
            del self.fates[number, slot]

    def _hold(self, process: Process, entry: Entry) -> RankReply:
        assert entry.number not in process.log, "trained twice on the same entry"
        process.log.append(entry.number)
        return RankReply(Outcome.APPLIED, {"metrics": []})

    def _leave(self, process: Process, outcome: Outcome) -> RankReply:
        assert process.generation is not None
        self.broken.add(process.generation)
        process.generation = None
        return RankReply(outcome, ERROR)

    def _die(self, slot: int) -> RankReply:
        self.kill(slot, own=True)
        return RankReply(Outcome.VOID)  # nobody hears it

    # Deaths and births

    def kill(self, slot: int, *, own: bool = False) -> None:
        """A learner's process ends; its neighbours may notice before anybody tells them."""
        process, self.processes[slot] = self.processes[slot], None
        assert process is not None
        if process.generation is not None and self.rng.random() < 0.5:
            self.broken.add(process.generation)
        self.handle(WorkerLost(slot, RuntimeError(f"learner {slot} died"), own, {"pid": slot}))

    def start(self, slot: int, *, fails: bool = False, permanent: bool = False) -> None:
        """A process that was asked for comes up, or not."""
        self.starting.remove(slot)
        if fails:
            self.handle(StartFailed(slot, RuntimeError("no such module"), permanent))
            return
        self.processes[slot] = Process()
        self.handle(WorkerReady(slot))

    @property
    def alive(self) -> list[int]:
        return [slot for slot, process in enumerate(self.processes) if process is not None]

    # Driving

    def submit(self, kind: EntryKind, fates: dict[int, str] | None = None, **fields: Any) -> Entry:
        entry = Entry(kind, payload=None, **fields)
        for slot, fate in (fates or {}).items():
            self.fates[self.state.entries._number, slot] = fate
        self.handle(Submit(entry))
        return entry

    def run(self, *, births: bool = True) -> None:
        """Let learners act in random order until nobody can; those that are to start do, unless `births` is False."""
        while True:
            moved = self.start_any() if births else False
            order = list(range(len(self.processes)))
            self.rng.shuffle(order)
            if not [slot for slot in order if self.act(slot)] and not moved:
                return

    def start_any(self) -> bool:
        """All that are to start come up. False if there was none."""
        waiting = sorted(self.starting)
        for slot in waiting:
            self.start(slot)
        return bool(waiting)


def settled(num_learners: int = 2, policy: RecoveryPolicy | None = None, **room: int) -> World:
    """A group that runs."""
    world = World(num_learners, random.Random(0), policy, **room)
    world.run()
    assert world.state.phase is Phase.RUNNING
    return world
