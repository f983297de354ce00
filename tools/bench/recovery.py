"""From the kill of a learner to the next applied update, and to an update that its replacement took part in."""

from __future__ import annotations

import os
import signal
import statistics
import time

import lgroup
from tools.bench.figures import Figure
from tools.bench.group import group_config
from tools.bench.work import LEARNERS, make_batch

KILLS_PER_ROUND = 5  # 100 with the default of 20 rounds
ROWS = 64
NEXT_MEDIAN_S, NEXT_WORST_S, TRAINED_MEDIAN_S = 0.1, 0.5, 0.3


def recovery(repeat: int) -> list[Figure]:
    """Kills a learner, each in turn, while updates are in flight; one sample per kill."""
    batch = make_batch(ROWS)
    to_next, to_trained = [], []
    config = group_config().fault_tolerance(max_restarts=10**6)
    with lgroup.LearnerGroup(config=config) as group:
        for number in range(repeat * KILLS_PER_ROUND):
            _settle(group, batch)
            first, whole = _one_kill(group, batch, number % LEARNERS)
            to_next.append(first)
            to_trained.append(whole)
    kills = {"kills": len(to_next)}
    return [
        Figure("kill to next applied update, median", statistics.median(to_next), "s", NEXT_MEDIAN_S, kills),
        Figure("kill to next applied update, worst", max(to_next), "s", NEXT_WORST_S, kills),
        Figure(
            "kill to replacement trained, median",
            statistics.median(to_trained),
            "s",
            TRAINED_MEDIAN_S,
            kills | {"worst": max(to_trained)},
        ),
    ]


def _settle(group: lgroup.LearnerGroup, batch: object) -> None:
    """Train until everybody takes part, so that each kill meets a whole group."""
    while len(group.update(batch=batch)) < LEARNERS:
        pass


def _one_kill(group: lgroup.LearnerGroup, batch: object, victim: int) -> tuple[float, float]:
    """Seconds from the kill to the result of an update that no dead learner decided, and of one that all took part in.

    An update is in flight at the kill; if it had been decided before, the one after it counts.
    """
    generation = group.get_stats()["generation"]
    pid = group.get_stats()["learners"][victim]["pid"]
    future = group.submit(batch=batch)
    start = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    result = future.result()
    while result.generation == generation:
        result = group.update(batch=batch)
    to_next = time.perf_counter() - start
    while len(result) < LEARNERS:
        result = group.update(batch=batch)
    return to_next, time.perf_counter() - start
