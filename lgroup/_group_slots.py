"""The group's slots: which process fills each, who is in the generation, who holds the furthest state. Pure.

Invariants: a slot is filled by at most one process; a slot's `position` is the last entry of the log that its process
decided, None while it holds nothing of the log yet; only a slot in state MEMBER is in the current generation.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from lgroup._liveness import Blame, Limits
from lgroup.errors import LGroupError
from lgroup.workers.start_policy import RestartBudget, RestartPolicy


class SlotState(enum.Enum):
    """What there is in a slot."""

    STARTING = "starting"  # a process is on its way, or will be after a pause
    READY = "ready"  # its process is up, and in no generation yet
    MEMBER = "member"  # in the current generation
    GONE = "gone"  # empty for good


SLOT_TRANSITIONS: Mapping[SlotState, frozenset[SlotState]] = {
    SlotState.STARTING: frozenset({SlotState.READY, SlotState.STARTING, SlotState.GONE}),
    SlotState.READY: frozenset({SlotState.MEMBER, SlotState.STARTING, SlotState.GONE}),
    SlotState.MEMBER: frozenset({SlotState.STARTING, SlotState.GONE}),
    SlotState.GONE: frozenset(),
}


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """What is done about losses. The fields are `LearnerGroupConfig.fault_tolerance`'s.

    Attributes:
        snapshot_every: Updates between two snapshots.
        max_kept_bytes: Data of applied updates kept for a replay.
    """

    restart: bool = True
    min_learners: int = 1
    max_restarts: int = 100
    restart_window_s: float = 3600.0
    update_retries: int = 1
    snapshot_every: int = 100
    max_kept_bytes: int = 256 << 20
    max_staleness: int | None = None
    limits: Limits = field(default_factory=Limits)
    seed: int = 0


@dataclass(slots=True)
class Slot:
    """One learner's place."""

    state: SlotState = SlotState.READY
    position: int | None = None
    useful: bool = False  # its process decided an entry
    streak: int = 0  # deaths in a row of processes that never became useful
    blame: Blame | None = None  # it is being killed for this


class Slots:
    """All slots of a group."""

    def __init__(self, count: int, policy: RecoveryPolicy) -> None:
        self._slots = [Slot() for _ in range(count)]
        self._policy = policy
        self._restarts = RestartPolicy()
        self._budget = RestartBudget(policy.max_restarts, policy.restart_window_s)
        self._random = random.Random(policy.seed)
        #: Slots of the current generation as it was formed; ranks are places in here.
        self.members: tuple[int, ...] = ()
        self.num_restarts = 0
        #: Why a slot is empty for good, as far as it is known.
        self.why_gone: Exception | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    def _in(self, *states: SlotState) -> tuple[int, ...]:
        return tuple(number for number, slot in enumerate(self._slots) if slot.state in states)

    @property
    def live(self) -> tuple[int, ...]:
        """Members of the generation whose processes are there."""
        return self._in(SlotState.MEMBER)

    @property
    def up(self) -> tuple[int, ...]:
        """Slots whose processes are there, in the generation or not."""
        return self._in(SlotState.MEMBER, SlotState.READY)

    @property
    def ready(self) -> tuple[int, ...]:
        """Slots whose processes wait to be taken into a generation."""
        return self._in(SlotState.READY)

    @property
    def starting(self) -> tuple[int, ...]:
        """Slots whose processes are on their way."""
        return self._in(SlotState.STARTING)

    def rank(self, slot: int) -> int | None:
        """The slot's rank in the current generation; None if it is not in it."""
        return self.members.index(slot) if slot in self.members else None

    def _move(self, slot: int, state: SlotState) -> None:
        if state not in SLOT_TRANSITIONS[self._slots[slot].state]:
            raise AssertionError(f"slot {slot}: no way from {self._slots[slot].state.value} to {state.value}")
        self._slots[slot].state = state

    # Positions

    @property
    def furthest(self) -> int | None:
        """The furthest position that any process holds; None if all that is left is new."""
        return max((p for slot in self.up if (p := self._slots[slot].position) is not None), default=None)

    def at(self, position: int | None) -> tuple[int, ...]:
        """Slots whose processes are at a position."""
        return tuple(slot for slot in self.up if self._slots[slot].position == position)

    def decided(self, slot: int, position: int) -> None:
        """The slot's process decided an entry of the log."""
        self._slots[slot].position = position
        self._slots[slot].useful = True
        self._slots[slot].streak = 0

    # Coming and going

    def form(self) -> tuple[int, ...]:
        """Take everybody who is up into a new generation; returns its members."""
        for slot in self.ready:
            self._move(slot, SlotState.MEMBER)
        self.members = self.live
        return self.members

    def came_up(self, slot: int) -> None:
        """A new process is up."""
        self._move(slot, SlotState.READY)
        self._slots[slot].position, self._slots[slot].useful, self._slots[slot].blame = None, False, None
        self.num_restarts += 1

    def lost(self, slot: int, now: float) -> float | None:
        """The slot's process is gone; returns the pause before the next one, None if there will be none."""
        own = self._slots[slot]
        own.position = None
        own.streak = self._restarts.streak(own.streak, own.useful)
        own.useful = False
        return self._restart(slot, now)

    def did_not_start(self, slot: int, now: float, error: Exception, *, permanent: bool) -> float | None:
        """A new process did not come up; returns the pause before the next one, None if there will be none."""
        self.why_gone = error
        self._slots[slot].streak += 1
        if permanent:
            self._move(slot, SlotState.GONE)
            return None
        return self._restart(slot, now)

    def _restart(self, slot: int, now: float) -> float | None:
        policy = self._policy
        if policy.restart and self._budget.take(now):
            self._move(slot, SlotState.STARTING)
            return self._restarts.pause_before(self._slots[slot].streak, self._random)
        self._move(slot, SlotState.GONE)
        if policy.restart:
            self.why_gone = LGroupError(self._budget.text)
        return None

    def enough(self) -> bool:
        """Whether a generation may be formed of those who are up."""
        return len(self.up) >= max(1, self._policy.min_learners)

    def can_become_enough(self) -> bool:
        """Whether those who are up and on their way will be enough."""
        return len(self.up) + len(self.starting) >= max(1, self._policy.min_learners)

    def check(self) -> None:
        """Assert the invariants that can be looked at from outside."""
        for number, slot in enumerate(self._slots):
            in_use = slot.state in (SlotState.MEMBER, SlotState.READY)
            assert in_use or slot.position is None, f"slot {number} is {slot.state.value} and has a position"
            assert slot.state is not SlotState.MEMBER or number in self.members, f"slot {number} is no member"
