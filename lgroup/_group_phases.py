"""The phases of a group's life and every way between them: one table, from which the documents are made, too."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple


class Phase(enum.Enum):
    """Where the group is in its life."""

    FORMING = "forming"  # a new generation: its members are told to join its process group
    RUNNING = "running"  # every member joined; requests are sent
    SETTLING = "settling"  # nothing more is sent; the members left answer what they have
    WAITING = "waiting"  # fewer learners than min_learners are up; replacements are on their way
    BROKEN = "broken"  # it will never run again: every request fails with the cause
    CLOSED = "closed"  # its owner shut it down


class Transition(NamedTuple):
    """One way from a phase to another. `when` says what moves the group along it."""

    source: Phase
    target: Phase
    when: str


TABLE: tuple[Transition, ...] = (
    Transition(Phase.FORMING, Phase.RUNNING, "every member joined"),
    Transition(Phase.FORMING, Phase.FORMING, "a member could not join or is gone; the others answered, tries are left"),
    Transition(Phase.FORMING, Phase.WAITING, "members are gone; fewer than min_learners are left"),
    Transition(Phase.FORMING, Phase.BROKEN, "no tries left, or too few learners and none to come"),
    Transition(Phase.RUNNING, Phase.SETTLING, "a member raised, lost its collective or is gone; a replacement is up"),
    Transition(Phase.SETTLING, Phase.FORMING, "every member left answered what it was sent"),
    Transition(Phase.SETTLING, Phase.WAITING, "the same, and fewer than min_learners are left"),
    Transition(Phase.SETTLING, Phase.BROKEN, "the same, and no replacement will come"),
    Transition(Phase.WAITING, Phase.FORMING, "replacements are up, min_learners is reached"),
    Transition(Phase.WAITING, Phase.BROKEN, "no replacement will come"),
    *(Transition(phase, Phase.CLOSED, "close") for phase in Phase if phase is not Phase.CLOSED),
)

TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    phase: frozenset(way.target for way in TABLE if way.source is phase) for phase in Phase
}


def as_mermaid() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> forming"]
    lines += [f"    {way.source.value} --> {way.target.value}: {way.when.replace(';', ',')}" for way in TABLE]
    return "\n".join([*lines, "    closed --> [*]"])


def as_markdown() -> str:
    """The table in Markdown."""
    rows = [f"| {way.source.value} | {way.target.value} | {way.when} |" for way in TABLE]
    return "\n".join(["| from | to | when |", "|---|---|---|", *rows])
