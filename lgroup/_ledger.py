"""The account of what became of every update and every env step.

Invariant, at every instant, in updates and in env steps::

    submitted == in_flight + applied + sum(dropped.values()) + sum(failed.values())

`submitted` grows when an update is admitted or dropped at the door; `in_flight` is no counter here but the sum over the
group's table of requests, so that the two sides of the equation are counted independently. All numbers are integers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

DropReason = Literal["queue_full", "stale", "ref_lost", "no_such_module", "shutdown"]
FailReason = Literal["worker_died", "user_error", "nonfinite", "poison", "rolled_back"]


@dataclass(slots=True)
class Account:
    """One unit's columns: updates, or env steps."""

    submitted: int = 0
    applied: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def as_dict(self, in_flight: int) -> dict[str, Any]:
        """The account as plain numbers, with what is `in_flight` now."""
        return {
            "submitted": self.submitted,
            "in_flight": in_flight,
            "applied": self.applied,
            "dropped": dict(self.dropped),
            "failed": dict(self.failed),
        }

    def settled(self) -> int:
        """What is no longer in flight."""
        return self.applied + sum(self.dropped.values()) + sum(self.failed.values())


@dataclass(slots=True)
class Ledger:
    """Both accounts. Every change is one update and its env steps together."""

    updates: Account = field(default_factory=Account)
    env_steps: Account = field(default_factory=Account)

    def submit(self, env_steps: int) -> None:
        """An update was admitted, or is about to be dropped at the door."""
        self.updates.submitted += 1
        self.env_steps.submitted += env_steps

    def apply(self, env_steps: int) -> None:
        """Every learner holds the update."""
        self.updates.applied += 1
        self.env_steps.applied += env_steps

    def drop(self, reason: DropReason, env_steps: int) -> None:
        """The update was not trained, by decision."""
        self.updates.dropped[reason] += 1
        self.env_steps.dropped[reason] += env_steps

    def fail(self, reason: FailReason, env_steps: int) -> None:
        """The update was admitted and could not be applied."""
        self.updates.failed[reason] += 1
        self.env_steps.failed[reason] += env_steps

    def roll_back(self, env_steps: int) -> None:
        """An applied update is lost: every learner died, and it could not be carried out again."""
        for account, amount in ((self.updates, 1), (self.env_steps, env_steps)):
            account.applied -= amount
            account.failed["rolled_back"] += amount

    def dropped_env_steps(self) -> int:
        """Env steps dropped so far, over all reasons."""
        return sum(self.env_steps.dropped.values())

    def check(self, in_flight: int, in_flight_env_steps: int) -> None:
        """Assert the invariant.

        Raises:
            AssertionError: if an update or an env step is unaccounted for.
        """
        for unit, account, flying in (
            ("updates", self.updates, in_flight),
            ("env_steps", self.env_steps, in_flight_env_steps),
        ):
            if account.submitted != flying + account.settled():
                raise AssertionError(f"ledger of {unit} does not add up: {account.as_dict(flying)}")
