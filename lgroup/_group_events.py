"""What the group's state machine is told, and what it answers. Plain values: no socket, no clock, no process.

An *entry* is one request to the group. Entries that change the learners' state (updates and changes) form the group's
log; a learner's *position* is the last entry of the log that it decided.

A *slot* is a learner's place in the group, from 0 to ``num_learners - 1``, whichever process fills it; its *rank* in a
generation is its place among that generation's members.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lgroup._incident import Incident
from lgroup.workers.health import Health


class EntryKind(enum.Enum):
    """What a request does to the learners' state."""

    UPDATE = "update"  # trains: in the log, in the ledger
    CHANGE = "change"  # may change state (set_state, foreach_learner): in the log, not in the ledger
    READ = "read"  # reads state, behind everything admitted before it: in neither
    SNAPSHOT = "snapshot"  # a read of the group's own: the state that a total loss goes back to


class Outcome(enum.Enum):
    """What one learner says became of one entry."""

    APPLIED = "applied"  # the learner holds it
    NOOP = "noop"  # decided: there was nothing to train
    NONFINITE = "nonfinite"  # decided: the summed gradient was not finite, nothing changed
    READ_RAISED = "read_raised"  # decided: a read raised, nothing changed
    RAISED = "raised"  # user code raised; the learner undid the entry and left its process group
    LOST = "lost"  # a collective failed because a peer left; the learner undid the entry and left its process group
    VOID = "void"  # not looked at, because the generation is over for this learner


#: Outcomes after which the learner's position is the entry.
DECIDED = frozenset({Outcome.APPLIED, Outcome.NOOP, Outcome.NONFINITE, Outcome.READ_RAISED})


@dataclass(frozen=True, slots=True)
class RankReply:
    """One learner's answer to one entry."""

    outcome: Outcome
    body: Any = None  # result of an applied entry or a read; description of the error otherwise


@dataclass(eq=False, slots=True)
class Entry:
    """The coordinator's record of one request. It keeps `payload` for as long as the entry may be sent again."""

    kind: EntryKind
    payload: Any
    nbytes: int = 0
    rows: int = 0
    env_steps: int = 0
    sampled_version: int | None = None  # weights version that the data was sampled under, if the caller said so
    one_learner: bool = False  # a read may ask one learner, whichever; else all
    seq: int = -1  # number of the training submission, from 1; -1 for others
    number: int = -1  # position in the order of admission, from 0
    replies: dict[int, RankReply] = field(default_factory=dict)  # by slot, of the last send
    sent_in: int | None = None  # generation of the last send
    sent_to: tuple[int, ...] = ()  # slots of the last send
    doom: tuple[str, Any] | None = None  # it will fail when it is the first in line: the ledger's reason, the error
    losses: int = 0  # how often all learners merely lost their collective in it, without a death
    interruptions: int = 0  # how often a learner died while it was at this entry
    own_deaths: int = 0  # how many of these by the learner's own doing: an exit, a crash, the memory limit, a hang

    @property
    def in_log(self) -> bool:
        """Whether the entry may change the learners' state."""
        return self.kind in (EntryKind.UPDATE, EntryKind.CHANGE)

    def __str__(self) -> str:
        return f"update {self.seq}" if self.kind is EntryKind.UPDATE else self.kind.value


# Events


@dataclass(frozen=True, slots=True)
class Submit:
    """A request is at the door. `may_wait` entries are refused without a trace when there is no room."""

    entry: Entry
    may_wait: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """A member is in the process group of `generation`, with the leader's state."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class JoinFailed:
    """A member could not get into the process group of `generation`; `lost` if that is because of another one."""

    slot: int
    generation: int
    error: Any
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Replied:
    """A learner answered an entry that was sent to it in `generation`."""

    slot: int
    generation: int
    number: int
    reply: RankReply


@dataclass(frozen=True, slots=True)
class Unsendable:
    """An entry could not be made into messages; nobody was sent any of it."""

    number: int
    generation: int
    error: Any


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A learner's process is gone, and every answer it gave has been taken.

    Attributes:
        cause: What callers are told.
        own: Whether the learner's own doing ended it: an exit, a crash, the memory limit.
        record: The same for a post-mortem: plain values.
    """

    slot: int
    cause: Exception
    own: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The process that was to fill a slot is up: its learner is built."""

    slot: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The process that was to fill a slot did not come up; `permanent` if it never will."""

    slot: int
    error: Exception
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. `looks` is how each learner that could be looked at was a moment ago."""

    looks: Mapping[int, Health] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Close:
    """The owner shuts the group down; what is in flight is given up."""


Event = Submit | Joined | JoinFailed | Replied | Unsendable | WorkerLost | WorkerReady | StartFailed | Tick | Close


# Verdicts and instructions


class Status(enum.Enum):
    """What became of an entry."""

    APPLIED = "applied"
    NOOP = "noop"
    DROPPED = "dropped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The group's word on an entry."""

    status: Status
    reason: str | None = None
    error: Any = None  # a learner's description of what was raised, or the exception that says who died
    weights_version: int = 0
    generation: int = 0
    replies: Mapping[int, RankReply] = field(default_factory=dict)  # by slot, in the order of ranks


@dataclass(frozen=True, slots=True)
class Join:
    """Have a slot's learner join the process group of `generation`.

    Attributes:
        members: All slots of the generation; a slot's rank is its place there.
        lead: The member whose state counts; it restores `snapshot` first, if there is one.
        behind: Members that adopt the lead's state.
    """

    slot: int
    generation: int
    members: tuple[int, ...]
    lead: int
    behind: tuple[int, ...]
    snapshot: Any = None

    @property
    def rank(self) -> int:
        """The learner's rank in the generation."""
        return self.members.index(self.slot)


@dataclass(frozen=True, slots=True)
class Send:
    """Send `entry` to `slots`, for execution in `generation`, whose members are `members`."""

    entry: Entry
    slots: tuple[int, ...]
    generation: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Deliver:
    """Tell whoever waits for `entry`. The verdict is final."""

    entry: Entry
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Refuse:
    """There is no room and the caller chose to wait: `entry` was not admitted and left no trace."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Have `slots` leave the process group of `generation` at once, whatever they wait for in it."""

    slots: tuple[int, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process in `slot` for `reason`, after all stacks of the processes in `dump` were written down."""

    slot: int
    reason: str
    dump: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """Fill `slot` with a new process, after a pause of `delay_s` seconds."""

    slot: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """An incident is over: write its post-mortem."""

    incident: Incident


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the log."""

    text: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End every worker process of the group."""

    cause: Exception | None


Instruction = Join | Send | Deliver | Refuse | Interrupt | Kill | Start | Report | Warn | Stop
