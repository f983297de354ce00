"""What a run has done so far. Pure: it is told what happened and when, and keeps no clock.

Invariant: `env_steps`, `episodes` and the returns count what env runners reported; `updates` what the group decided.
The ledger itself is the group's: what is shown of it is read from ``LearnerGroup.get_stats()``, never counted here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

RETURN_WINDOW = 100  # episodes that a mean return is taken over
_RATE_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One instant of a run, for the display, the logs and the stop rules."""

    seconds: float
    env_steps: int  # sampled by env runners; of behaviour cloning, trained rows
    env_steps_per_s: float
    episodes: int
    episode_return_mean: float  # of the last RETURN_WINDOW episodes; NaN before the first
    episode_len_mean: float
    updates: int  # applied
    updates_per_s: float
    in_flight: int
    dropped: int
    failed: int
    staleness_mean: float  # of the last updates, in weights versions; NaN if unknown
    staleness_max: int
    weights_version: int
    is_window_full: bool  # whether the means are over RETURN_WINDOW episodes
    learner: Mapping[str, float] = field(default_factory=dict)  # what the learners reported last


@dataclass(slots=True)
class _Rate:
    """Events per second over the last few seconds."""

    marks: deque[tuple[float, int]] = field(default_factory=lambda: deque([(0.0, 0)]))

    def at(self, seconds: float, count: int) -> float:
        self.marks.append((seconds, count))
        while len(self.marks) > 2 and self.marks[1][0] < seconds - _RATE_WINDOW_S:
            self.marks.popleft()
        since, before = self.marks[0]
        return (count - before) / (seconds - since) if seconds > since else 0.0


class Progress:
    """Counts what happens in a run."""

    def __init__(self) -> None:
        self.env_steps = 0
        self.episodes = 0
        self.returns: deque[float] = deque(maxlen=RETURN_WINDOW)
        self.lengths: deque[int] = deque(maxlen=RETURN_WINDOW)
        self.first_return_mean = math.nan  # of the first RETURN_WINDOW episodes
        self.best_return_mean = math.nan  # of any RETURN_WINDOW episodes in a row
        self.learner: dict[str, float] = {}
        self._staleness: deque[int] = deque(maxlen=RETURN_WINDOW)
        self._staleness_max = 0
        self._step_rate, self._update_rate = _Rate(), _Rate()

    def sampled(self, env_steps: int, returns: Iterable[float], lengths: Iterable[int]) -> None:
        """An env runner reported this many steps, and these finished episodes."""
        self.env_steps += env_steps
        for episode_return, length in zip(returns, lengths, strict=True):
            self._episode(float(episode_return), int(length))

    def _episode(self, episode_return: float, length: int) -> None:
        self.episodes += 1
        self.returns.append(episode_return)
        self.lengths.append(length)
        if len(self.returns) < RETURN_WINDOW:
            return
        mean = self.return_mean
        if self.episodes == RETURN_WINDOW:
            self.first_return_mean = self.best_return_mean = mean
        self.best_return_mean = max(self.best_return_mean, mean)

    def trained(self, reduced: Mapping[str, Any], staleness: int | None = None) -> None:
        """An update was applied: what its learners reported together, and how old its data's policy was."""
        self.learner = {key: float(value) for key, value in reduced.items() if isinstance(value, (int, float))}
        if staleness is not None:
            self._staleness.append(staleness)
            self._staleness_max = max(self._staleness_max, staleness)

    @property
    def return_mean(self) -> float:
        """Mean return of the last RETURN_WINDOW episodes, or of all if there are fewer."""
        return _mean(self.returns)

    def snapshot(self, seconds: float, stats: Mapping[str, Any]) -> Snapshot:
        """The run at `seconds` after its start; `stats` are those of ``LearnerGroup.get_stats()``."""
        updates = stats["updates"]
        return Snapshot(
            seconds=seconds,
            env_steps=self.env_steps,
            env_steps_per_s=self._step_rate.at(seconds, self.env_steps),
            episodes=self.episodes,
            episode_return_mean=self.return_mean,
            episode_len_mean=_mean(self.lengths),
            updates=updates["applied"],
            updates_per_s=self._update_rate.at(seconds, updates["applied"]),
            in_flight=updates["in_flight"],
            dropped=sum(updates["dropped"].values()),
            failed=sum(updates["failed"].values()),
            staleness_mean=_mean(self._staleness),
            staleness_max=self._staleness_max,
            weights_version=stats["weights_version"],
            is_window_full=len(self.returns) == RETURN_WINDOW,
            learner=self.learner,
        )


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a run ends. None: not for this reason."""

    episode_return: float | None
    env_steps: int | None
    seconds: float | None = None

    def reason(self, snapshot: Snapshot) -> str | None:
        """Why the run should end now, in words; None if it should go on."""
        goal, limit = self.episode_return, self.seconds
        if goal is not None and snapshot.is_window_full and snapshot.episode_return_mean >= goal:
            return f"mean return {snapshot.episode_return_mean:.1f} reached the goal of {goal:g}"
        if self.env_steps is not None and snapshot.env_steps >= self.env_steps:
            return f"{snapshot.env_steps:,} env steps reached the limit of {self.env_steps:,}"
        if limit is not None and snapshot.seconds >= limit:
            return f"{snapshot.seconds:.0f} seconds reached the limit of {limit:g}"
        return None


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else math.nan
