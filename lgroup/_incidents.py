"""The group's incidents: the one that is going on, if any. Pure; see `lgroup._incident` for what one is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lgroup._incident import Casualty, Incident
from lgroup.errors import LGroupError

if TYPE_CHECKING:
    from lgroup._group_events import WorkerLost


class Incidents:
    """Counts incidents, and collects what belongs to the one that is open."""

    def __init__(self) -> None:
        self.count = 0
        self.open: Incident | None = None
        self.last: Incident | None = None

    def lost(self, event: WorkerLost, rank: int | None, generation: int, in_flight: Sequence[str]) -> None:
        """A learner's process is gone."""
        casualty = Casualty(event.slot, rank, str(event.cause), event.record)
        if self.open is None:
            self.count += 1
            self.open = Incident(self.count, generation, casualty, tuple(in_flight))
            self.last = self.open
        else:
            self.open.others.append(casualty)

    def note(self, text: str) -> None:
        """Something followed from the open incident. Without one, nothing happens."""
        if self.open is not None:
            self.open.consequences.append(text)

    def over(self, outcome: str) -> Incident | None:
        """The open incident is over; `outcome` says how it ended."""
        ended, self.open = self.open, None
        if ended is not None:
            ended.consequences.append(outcome)
        return ended

    def the_end(self, why_gone: Exception | None, min_learners: int, restart: bool) -> Exception:
        """What callers of a group are told that has too few learners for good."""
        needed = f"the group has fewer than min_learners={min_learners} learners"
        if why_gone is not None:
            reason = f"{needed}, and none can be started: {why_gone}"
        else:
            reason = f"{needed}, and none is started again" + ("" if restart else " (restart_failed_learners=False)")
        if self.open is None:
            return LGroupError(reason)
        return LGroupError(f"{reason}\n{self.open.text()}")


def describe_generation(generation: int, members: Sequence[int]) -> str:
    """How an incident ended for the group, in words."""
    if not members:
        return "the group ended"
    return f"generation {generation} runs with learners {list(members)}"


def describe_error(error: Any) -> str:
    """A learner's description of an exception in one line."""
    return f"{error['type']}: {error['message']}" if isinstance(error, dict) else str(error)
