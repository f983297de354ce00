"""Who is stuck, who is merely busy, and what is done about it. Pure arithmetic: looks in, judgements out.

A learner that waits in a collective is never to blame: some other one has not come. A learner whose process is stopped,
or that answers nothing and uses no CPU time, is stuck. One that answers nothing but computes (a C call that holds the
interpreter's lock, say) is busy, and has until the limit of what it does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lgroup.workers.health import Health

#: Seconds that an interrupted learner has for leaving its collective. Its sockets are shut, which mostly takes
#: milliseconds; but where a peer died in the middle of a message, gloo was seen to wait on, about once in 300 deaths.
#: Longer than two beats, so that what the learner last said of itself is newer than the interrupt.
LEAVE_S = 2.0


#: What a learner says it does while it waits for its peers.
IN_COLLECTIVE = "in collective"


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that something may take. Each is longer than those it contains.

    Attributes:
        heartbeat_s: How long a learner that uses no CPU time may be silent.
        update_s: From the moment an entry is the first in line to its last answer; also, for all members to join.
    """

    heartbeat_s: float = 10.0
    update_s: float = 600.0

    @classmethod
    def nested(cls, *, heartbeat_s: float, update_s: float) -> Limits:
        """Limits in order: a heartbeat that could be missed for longer than an update may take says nothing."""
        return cls(heartbeat_s=min(heartbeat_s, update_s), update_s=update_s)

    @property
    def beat_s(self) -> float:
        """Between two looks."""
        return min(1.0, self.heartbeat_s / 4)

    @property
    def collective_s(self) -> float:
        """After which a collective gives up by itself: only if nobody judged its ranks in time."""
        return self.update_s + 2 * self.heartbeat_s + 10.0


@dataclass(frozen=True, slots=True)
class Blame:
    """Why a process is to be ended. `own`: by its own doing, so that the entry it was at may be poison."""

    reason: str
    own: bool


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whose process is to be ended, and whether all are to leave their collective instead."""

    kill: Mapping[int, Blame] = field(default_factory=dict)
    interrupt: bool = False


def judge(
    looks: Mapping[int, Health],
    owing: Collection[int],
    *,
    waited_s: float,
    limits: Limits,
    what: str,
    interrupted_s: float | None,
) -> Judgement:
    """What is to be done about the learners now.

    Args:
        looks: By slot; of all learners that are up.
        owing: Slots that have not answered what is first in line.
        waited_s: How long that has been so.
        limits: The limits.
        what: What they owe, such as "answer update 7".
        interrupted_s: How long ago they were told to leave their collective; None: they were not.
    """
    idle = Health()
    kill = {slot: blame for slot, look in looks.items() if (blame := _stuck(look, limits)) is not None}
    waiting = [slot for slot in owing if _waits_for_peers(looks.get(slot, idle), limits)]
    if interrupted_s is not None and interrupted_s > LEAVE_S:
        kill |= {slot: Blame(f"it did not leave its collective within {LEAVE_S:g} s", own=False) for slot in waiting}
    late = [slot for slot in owing if slot not in kill]
    if not late or waited_s <= limits.update_s:
        return Judgement(kill)
    culprits = [slot for slot in late if slot not in waiting]
    if not culprits and interrupted_s is None:
        return Judgement(kill, interrupt=True)
    for slot in culprits:
        phase = looks.get(slot, idle).phase or "unknown"
        kill[slot] = Blame(f"it did not {what} within update_timeout_s={limits.update_s:g} (phase: {phase})", own=True)
    return Judgement(kill)


def _stuck(look: Health, limits: Limits) -> Blame | None:
    if not look.stuck(limits.heartbeat_s):
        return None
    silent = f"silent for {look.silent_s:.1f} s (heartbeat_timeout_s={limits.heartbeat_s:g})"
    if look.stopped:
        return Blame(f"its process is stopped, and {silent}", own=False)
    return Blame(f"it uses no CPU time, and is {silent}", own=True)


def _waits_for_peers(look: Health, limits: Limits) -> bool:
    # Whoever waits in a collective answers at once; a silent one has gone on to something else.
    return look.phase == IN_COLLECTIVE and look.silent_s <= 3 * limits.beat_s
