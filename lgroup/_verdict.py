"""What the learners' answers to one entry come to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lgroup._group_events import Entry, Outcome, RankReply, Status, Verdict


class Decision(NamedTuple):
    """What became of an entry, before it is entered anywhere."""

    status: Status
    reason: str | None = None
    error: Any = None

    def verdict(self, weights_version: int, generation: int, replies: Mapping[int, RankReply]) -> Verdict:
        """The same as the group's word to a caller."""
        return Verdict(self.status, self.reason, self.error, weights_version, generation, replies)


def decision_of(entry: Entry) -> Decision:
    """What became of an entry that at least one learner decided; the others have that one's state."""
    replies = entry.replies.values()
    outcomes = {reply.outcome for reply in replies}
    if Outcome.NONFINITE in outcomes:
        return Decision(Status.FAILED, "nonfinite")
    if Outcome.READ_RAISED in outcomes:
        raised = next(reply.body for reply in replies if reply.outcome is Outcome.READ_RAISED)
        return Decision(Status.FAILED, "user_error", raised)
    return Decision(Status.APPLIED if Outcome.APPLIED in outcomes else Status.NOOP, error=first_error(entry))


def first_error(entry: Entry) -> Any:
    """What the lowest learner that raised says of it; None if nobody raised."""
    replies = sorted(entry.replies.items())
    return next((reply.body for _, reply in replies if reply.outcome is Outcome.RAISED), None)
