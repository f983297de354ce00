"""What callers are told about requests other than updates."""

from __future__ import annotations

from typing import Any

from lgroup._group_events import Outcome, RankReply, Status, Verdict
from lgroup.errors import ActorError, LGroupError
from lgroup.workers import RemoteCallResults, ResultOrError


def error_of(description: dict[str, str], what: str) -> ActorError:
    """An exception that a learner described."""
    return ActorError(
        f"{what} raised {description['type']}: {description['message']}",
        cause_type=description["type"],
        remote_traceback=description["traceback"],
    )


def raise_unless_applied(verdict: Verdict, what: str) -> None:
    """Raise what kept a request from being carried out.

    Raises:
        ActorError: if a learner raised or is gone.
        LGroupError: if the group was shut down meanwhile.
    """
    if verdict.status is not Status.FAILED:
        return
    if isinstance(verdict.error, dict):
        raise error_of(verdict.error, f"{what} on a learner")
    if verdict.error is None:
        raise LGroupError(f"{what} was not carried out: the learner group was shut down")
    raise ActorError(f"{what} was not carried out: {verdict.error}") from verdict.error


def call_results(verdict: Verdict) -> RemoteCallResults:
    """Each learner's result of a call, by slot. Raises `ActorError` if none could carry it out."""
    results = RemoteCallResults()
    if verdict.status is Status.FAILED and not isinstance(verdict.error, dict):
        raise_unless_applied(verdict, "foreach_learner()")
    for slot, reply in verdict.replies.items():
        results.add_result(slot, _result_of(slot, reply))
    return results


def _result_of(rank: int, reply: RankReply) -> ResultOrError:
    body: Any = reply.body
    if reply.outcome is Outcome.APPLIED and "error" not in body:
        return ResultOrError(result=body["value"])
    if reply.outcome in (Outcome.VOID, Outcome.LOST):
        return ResultOrError(error=ActorError(f"rank {rank} did not run the call: it adopted the others' state"))
    description = body["error"] if reply.outcome is Outcome.APPLIED else body
    return ResultOrError(error=error_of(description, f"rank {rank}"))
