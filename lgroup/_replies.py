"""What a learner's answer to one entry means."""

from __future__ import annotations

from typing import Any

from lgroup._group_events import EntryKind, Outcome, RankReply
from lgroup.workers import RemoteError


def read_answer(answer: dict[str, Any]) -> RankReply:
    """The reply in a `LearnerHost`'s answer."""
    outcome = Outcome(answer["outcome"])
    return RankReply(
        outcome, answer.get("error") if outcome in (Outcome.RAISED, Outcome.LOST, Outcome.READ_RAISED) else answer
    )


def read_error(error: RemoteError, kind: EntryKind) -> RankReply:
    """The reply behind an error of the call itself: the learner answered, and its answer could not be sent.

    `LearnerHost` reports what user code raises as an answer, so the entry was carried out; what a foreign function
    returned is what could not travel.
    """
    body = {"type": error.type_name, "message": error.message, "traceback": error.traceback}
    if kind is EntryKind.READ:
        return RankReply(Outcome.READ_RAISED, body)
    return RankReply(Outcome.APPLIED, {"outcome": "applied", "error": body})
