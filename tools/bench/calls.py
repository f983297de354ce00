"""Calls that train nothing: an actor's method with 1 KiB there and back, and get_weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

import lgroup
from tools.bench.figures import Figure
from tools.bench.group import group_config

CALLS_PER_ROUND = 50
WARM_UP_CALLS = 50
ACTOR_CALL_GOAL_MS = 0.12
GET_WEIGHTS_GOAL_MS = 0.4


class Echo:
    """Returns what it is given."""

    def echo(self, payload: bytes) -> bytes:
        return payload


def calls(repeat: int) -> list[Figure]:
    """Medians, from the call to its result in the caller's thread."""
    kwargs = {"payload": np.random.default_rng(0).bytes(1024)}
    with lgroup.ActorGroup(Echo, num_actors=1) as actors:
        actor_ms = _milliseconds(lambda: actors.foreach_actor("echo", kwargs=kwargs), repeat)
    with lgroup.LearnerGroup(config=group_config()) as group:
        weights_ms = _milliseconds(group.get_weights, repeat)
    return [
        Figure("actor call and reply, 1 KiB", statistics.median(actor_ms), "ms", ACTOR_CALL_GOAL_MS, _spread(actor_ms)),
        Figure(
            "get_weights, 67,586 parameters",
            statistics.median(weights_ms),
            "ms",
            GET_WEIGHTS_GOAL_MS,
            _spread(weights_ms),
        ),
    ]


def _milliseconds(call: Callable[[], object], repeat: int) -> list[float]:
    for _ in range(WARM_UP_CALLS):
        call()
    return [_one(call) for _ in range(repeat * CALLS_PER_ROUND)]


def _one(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _spread(samples: list[float]) -> dict[str, list[float]]:
    low, _, high = statistics.quantiles(samples, n=4)
    return {"quartiles_ms": [low, high]}
