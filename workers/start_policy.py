"""Whether a worker that did not come up is started again. Pure.

A failure that would happen again the same way ends it at once; any other is tried again a few times, each time after a
longer pause, and never past the start deadline.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass


class StartFailure(enum.Enum):
    """Why a worker did not come up."""

    PERMANENT = "permanent"  # its class cannot be imported or takes other arguments: the same again next time
    RAISED = "raised"  # its constructor raised something else
    DIED = "died"  # the process ended in the middle of it
    NO_PROCESS = "no process"  # the zygote could not fork, or ended itself
    DEADLINE = "deadline"  # no answer within the start deadline
    STOPPED = "stopped"  # the coordinator wanted it no more


FINAL = frozenset({StartFailure.PERMANENT, StartFailure.DEADLINE, StartFailure.STOPPED})


@dataclass(frozen=True)
class StartPolicy:
    """How often and how soon a failed start is tried again.

    Attributes:
        max_attempts: the first one included.
        backoff_s: the pause after the first failure; doubled after each further one, up to ``max_backoff_s``.
        jitter: each pause is multiplied by a random factor in ``1 ± jitter``, so that many workers that failed
            together do not come back together.
    """

    max_attempts: int = 3
    backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    jitter: float = 0.25

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts={self.max_attempts}: at least 1 is allowed")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter={self.jitter}: allowed is 0 up to, not including, 1")

    def pause_s(
        self, failure: StartFailure, *, attempt: int, left_s: float, random_source: random.Random
    ) -> float | None:
        """The pause before attempt ``attempt + 1`` after attempt ``attempt`` (1 for the first) failed.

        ``None`` means: give up. ``left_s`` is the time left until the start deadline.
        """
        if failure in FINAL or attempt >= self.max_attempts:
            return None
        pause = min(self.backoff_s * 2 ** (attempt - 1), self.max_backoff_s)
        pause *= 1 + self.jitter * random_source.uniform(-1, 1)
        return pause if pause < left_s else None


@dataclass(frozen=True)
class RestartPolicy:
    """How soon an actor whose process died is started again.

    The first time at once. An actor that dies again within ``settled_s`` of being ready waits, twice as long each time,
    up to ``max_pause_s``: one that cannot live must not keep the machine busy with its births.
    """

    settled_s: float = 10.0
    pause_s: float = 0.1
    max_pause_s: float = 5.0

    def streak(self, streak: int, lived_s: float) -> int:
        """The number of early deaths in a row, after one more that came ``lived_s`` after being ready."""
        return streak + 1 if lived_s < self.settled_s else 1

    def pause_before(self, streak: int) -> float:
        """Seconds to wait after the early death number ``streak``."""
        return 0.0 if streak <= 1 else float(min(self.pause_s * 2 ** (streak - 2), self.max_pause_s))
