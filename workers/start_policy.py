"""Whether a worker that did not come up is started again. Pure.

A failure that would happen again the same way ends it at once; any other is tried again a few times, each time after a
longer pause, and never past the start deadline.
"""

from __future__ import annotations

import collections
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

    The first time at once. While its incarnations die without having become *useful* (whatever that is for the actor:
    having answered a call, say), each waits twice as long as the one before, up to ``max_pause_s``: one that cannot
    live must not keep the machine busy with its births.

    Attributes:
        jitter: each pause is multiplied by a random factor in ``1 ± jitter``.
    """

    pause_s: float = 0.1
    max_pause_s: float = 5.0
    jitter: float = 0.25

    def streak(self, streak: int, was_useful: bool) -> int:
        """How many useless incarnations died in a row, after one more death; 0 if that one was useful."""
        return 0 if was_useful else streak + 1

    def pause_before(self, streak: int, random_source: random.Random) -> float:
        """Seconds to wait before the next start, after ``streak`` useless incarnations in a row."""
        if streak <= 1:
            return 0.0
        pause = min(self.pause_s * 2.0 ** min(streak - 2, 60), self.max_pause_s)
        return pause * (1 + self.jitter * random_source.uniform(-1, 1))


class RestartBudget:
    """At most ``max_restarts`` within any ``window_s`` seconds. Not thread-safe.

    Raises ``ValueError`` for numbers that are not possible.
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        if max_restarts < 0:
            raise ValueError(f"max_restarts={max_restarts}: at least 0 is allowed")
        if not window_s > 0:
            raise ValueError(f"restart_window_s={window_s}: it must be above 0")
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._taken: collections.deque[float] = collections.deque()

    def take(self, now: float) -> bool:
        """Take one restart at ``now``, in seconds of any clock; ``False``, and nothing taken, if none is left."""
        while self._taken and self._taken[0] <= now - self.window_s:
            self._taken.popleft()
        if len(self._taken) >= self.max_restarts:
            return False
        self._taken.append(now)
        return True

    @property
    def text(self) -> str:
        """Such as ``"all 100 restarts within 3600 s (max_restarts) are used up"``."""
        return f"all {self.max_restarts} restarts within {self.window_s:g} s (max_restarts) are used up"
