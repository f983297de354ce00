"""The account of one incident: who failed first, and what followed from it. Pure.

An incident begins with the first death in a group that runs, and ends when the group runs again or never will. Deaths
in between belong to it: mostly they are consequences, and the first one is the cause to look for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Casualty:
    """A learner that was lost: its rank and slot, why in words, and a record of plain values."""

    slot: int
    rank: int | None
    text: str
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Incident:
    """See the module. `in_flight` is what was sent and not decided at the first death."""

    number: int
    generation: int
    first: Casualty
    in_flight: tuple[str, ...] = ()
    others: list[Casualty] = field(default_factory=list)
    consequences: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The account as a few lines."""
        lines = [f"incident {self.number}, generation {self.generation}: {self.first.text}"]
        if self.in_flight:
            lines.append(f"in flight: {', '.join(self.in_flight)}")
        lines += [f"then: {casualty.text.splitlines()[0]}" for casualty in self.others]
        return "\n".join([*lines, *self.consequences])

    def as_dict(self) -> dict[str, Any]:
        """The account as plain values, for JSON."""
        return {
            "incident": self.number,
            "generation": self.generation,
            "first": _casualty(self.first),
            "in_flight": list(self.in_flight),
            "others": [_casualty(casualty) for casualty in self.others],
            "consequences": list(self.consequences),
        }


def _casualty(casualty: Casualty) -> dict[str, Any]:
    return {"slot": casualty.slot, "rank": casualty.rank, "text": casualty.text, **casualty.record}
