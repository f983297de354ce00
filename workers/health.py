"""Whether a silent worker is stopped, stuck or busy, and how long it has been silent. Pure.

Silence is measured in the coordinator's *awake* time: a pause of the coordinator itself (SIGSTOP, a machine that was
suspended, an I/O thread that a callback blocked) must not make anybody look silent.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

LATE_S = 1.0  # a beat that is later than this shows a pause
BUSY_SHARE = 0.05  # of one core: a process that uses less does nothing
KEPT_LOOKS = 6  # so that CPU time is compared over five intervals: a computing process may wait for the disk in one


class AwakeClock:
    """Seconds that the coordinator was awake. Never goes back; ``now`` may be called from any thread.

    While beats are awaited it runs at most ``LATE_S`` past the next one, so that a pause that no beat has shown yet
    does not count either.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._paused_s, self._due = 0.0, float("inf")
        self._reading = (self._paused_s, self._due)  # both at once, for other threads

    def now(self) -> float:
        """Seconds since some fixed moment."""
        paused_s, due = self._reading
        return min(self._monotonic(), due + LATE_S) - paused_s

    def expect(self, interval_s: float) -> None:
        """The next beat comes in ``interval_s`` seconds."""
        self._due = self._monotonic() + interval_s
        self._reading = (self._paused_s, self._due)

    def beat(self) -> float:
        """The expected beat has come. Returns the seconds of the pause that it shows, 0 for none."""
        pause_s = max(0.0, self._monotonic() - self._due - LATE_S)
        self._paused_s += pause_s
        self.rest()
        return pause_s

    def rest(self) -> None:
        """No beat is expected any more."""
        self._due = float("inf")
        self._reading = (self._paused_s, self._due)


@dataclass(frozen=True, slots=True)
class Look:
    """What the system says of a process: its state, such as ``"R"`` or ``"T"``, and the CPU seconds it has used."""

    state: str
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Health:
    """What is known of a watched worker.

    Attributes:
        silent_s: seconds since it last answered, or since it was watched or ready, in the coordinator's awake time. An
            idle worker answers once per interval.
        phase: what it said it was doing when it last answered.
        request_id: the request it was carrying out then.
        stopped: its process is stopped (SIGSTOP).
        cpu_advancing: it used CPU time, 5 % of a core or more, over the last looks since it fell silent; ``True`` as
            long as there are no two looks to compare.
        cpu_s: CPU seconds of the process at the last look; ``None`` while it is not silent.
    """

    silent_s: float = 0.0
    phase: str = "starting"
    request_id: int | None = None
    stopped: bool = False
    cpu_advancing: bool = True
    cpu_s: float | None = None

    def stuck(self, timeout_s: float) -> bool:
        """Silent for ``timeout_s`` and not because it computes: stopped, or using no CPU time."""
        return self.silent_s >= timeout_s and (self.stopped or not self.cpu_advancing)

    @property
    def text(self) -> str:
        """Such as ``"silent for 10.2 s in phase calling, its process is stopped"``."""
        why = "its process is stopped" if self.stopped else "using CPU time" if self.cpu_advancing else "using no CPU"
        return f"silent for {self.silent_s:.1f} s in phase {self.phase}, {why}"


class Pulse:
    """The account of one watched worker. All times are those of an ``AwakeClock``."""

    def __init__(self, now: float, interval_s: float) -> None:
        self.health = Health()
        self._interval_s = interval_s
        self._heard_at = now
        self._asked_at: float | None = None
        self._next_at = now
        self._beat_at = now
        self._turn_at = now
        self._looks: collections.deque[tuple[float, Look]] = collections.deque(maxlen=KEPT_LOOKS)

    def heard(self, now: float, phase: str, request_id: int | None) -> None:
        """It answered."""
        self._heard_at, self._asked_at = now, None
        self._looks.clear()
        self.health = Health(0.0, phase, request_id)

    def not_ready(self, now: float) -> None:
        """It is not ready, so it is not asked, and owes no answer."""
        self._heard_at = self._beat_at = now

    def turn(self, now: float) -> bool:
        """Whether an interval of its own has passed since this was last true: others may be watched more often."""
        if now < self._turn_at + 0.9 * self._interval_s:
            return False
        self._turn_at = now
        return True

    def due(self, now: float) -> bool:
        """Whether to ask it now. At most one question is open: a busy worker must not find hundreds."""
        return self._asked_at is None and now >= self._next_at

    def asked(self, now: float) -> None:
        """It was asked."""
        self._asked_at = now
        self._next_at = now + 0.9 * self._interval_s  # one beat later, though that one may be a little early

    def overdue(self, now: float) -> bool:
        """Whether its answer is late by more than an interval, so that a look at its process is worth its cost."""
        return self._asked_at is not None and now - self._asked_at > 1.5 * self._interval_s

    def beat(self, now: float, *, paused: bool) -> None:
        """An interval has passed. ``paused``: with a pause of the coordinator in it, so that it counts for nobody."""
        if paused:
            lost_s = now - self._beat_at  # its answers may be here, unread
            self._heard_at = min(now, self._heard_at + lost_s)
            if self._asked_at is not None:
                self._asked_at = min(now, self._asked_at + lost_s)
            self._looks.clear()
        self._beat_at = now
        self.health = replace(self.health, silent_s=now - self._heard_at)

    def looked(self, now: float, look: Look) -> None:
        """A look at its process, which is silent."""
        self._looks.append((now, look))
        began, first = self._looks[0]
        elapsed_s = now - began
        advancing = elapsed_s <= 0.0 or look.cpu_s - first.cpu_s >= BUSY_SHARE * elapsed_s
        self.health = replace(
            self.health,
            stopped=look.state == "T",
            cpu_advancing=advancing,
            cpu_s=look.cpu_s,
            silent_s=now - self._heard_at,
        )


def parse_stat(text: str, ticks_per_s: int) -> Look:
    """The content of /proc/<pid>/stat. Raises ``ValueError`` or ``IndexError`` for anything else.

    The program's name stands in parentheses and may hold any character, so what follows the last one counts.
    """
    fields = text[text.rindex(")") + 1 :].split()
    return Look(fields[0], (int(fields[11]) + int(fields[12])) / ticks_per_s)
