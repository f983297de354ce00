"""What the group's state machine is told, and what it answers. Plain frozen values: no socket, no clock, no process.

An *entry* is one request to the group. Entries that change the learners' state (updates and changes) form the group's
log; a rank's *position* is the last entry of the log that it decided.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class EntryKind(enum.Enum):
    """What a request does to the learners' state."""

    UPDATE = "update"  # trains: in the log, in the ledger
    CHANGE = "change"  # may change state (set_state, foreach_learner): in the log, not in the ledger
    READ = "read"  # reads state, behind everything admitted before it: in neither


class Outcome(enum.Enum):
    """What one rank says became of one entry."""

    APPLIED = "applied"  # the rank holds it
    NOOP = "noop"  # decided: there was nothing to train
    NONFINITE = "nonfinite"  # decided: the summed gradient was not finite, nothing changed
    READ_RAISED = "read_raised"  # decided: a read raised, nothing changed
    RAISED = "raised"  # user code raised; the rank undid the entry and left its process group
    LOST = "lost"  # a collective failed because a peer left; the rank undid the entry and left its process group
    VOID = "void"  # not looked at, because an earlier entry of this generation raised or was lost


#: Outcomes after which the rank's position is the entry.
DECIDED = frozenset({Outcome.APPLIED, Outcome.NOOP, Outcome.NONFINITE, Outcome.READ_RAISED})


@dataclass(eq=False, slots=True)
class Entry:
    """The coordinator's record of one request. It keeps `payload` until the group's verdict, for sending it again."""

    kind: EntryKind
    payload: Any
    nbytes: int = 0
    rows: int = 0
    env_steps: int = 0
    sampled_version: int | None = None  # weights version that the data was sampled under, if the caller said so
    only_rank: int | None = None  # a read may ask one rank; None means all
    seq: int = -1  # number of the training submission, from 1; -1 for others
    number: int = -1  # position in the order of admission, from 0
    replies: dict[int, RankReply] = field(default_factory=dict)
    sent_in: int | None = None  # generation of the last send


@dataclass(frozen=True, slots=True)
class RankReply:
    """One rank's answer to one entry."""

    outcome: Outcome
    body: Any = None  # result of an applied entry or a read; description of the error otherwise


# Events


@dataclass(frozen=True, slots=True)
class Submit:
    """A request is at the door. `may_wait` entries are refused without a trace when there is no room."""

    entry: Entry
    may_wait: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank is in the process group of `generation`, with the leader's state."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class JoinFailed:
    """A rank could not get into the process group of `generation`; `lost` if that is because of another rank."""

    rank: int
    generation: int
    error: Any
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Replied:
    """A rank answered an entry that was sent to it in `generation`."""

    rank: int
    generation: int
    number: int
    reply: RankReply


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A rank's process is gone, or was declared so. `cause` is what callers are told."""

    rank: int
    cause: Exception


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class Close:
    """The owner shuts the group down; what is in flight is given up."""


Event = Submit | Joined | JoinFailed | Replied | WorkerLost | Tick | Close


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
    error: Any = None  # a rank's description of what was raised, or the exception that ended the group
    weights_version: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Join:
    """Have `rank` join the process group of `generation`; ranks in `behind` adopt rank `lead`'s state there."""

    rank: int
    generation: int
    lead: int
    behind: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Send `entry` to `ranks`, for execution in `generation`."""

    entry: Entry
    ranks: tuple[int, ...]
    generation: int


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
class Stop:
    """End every worker process of the group."""

    cause: Exception | None


Instruction = Join | Send | Deliver | Refuse | Stop
