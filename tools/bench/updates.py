"""Updates through LearnerGroup against the bare loop, synchronous and asynchronous.

Both contenders' processes are alive all the time and take turns in blocks; who does not have the turn is blocked on a
read. Whatever else slows the machine down thus slows both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import lgroup
from tools.bench.bare import BareLoop
from tools.bench.figures import Figure, ratio_figure
from tools.bench.group import group_config
from tools.bench.work import make_batch

IN_FLIGHT = 3
WARM_UP_BLOCKS = 2
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Case:
    """One size: updates per block, and the most that lgroup may take as a multiple of the bare loop."""

    rows: int
    updates: int
    goal: float


SYNC = (Case(64, 40, 1.25), Case(1_024, 40, 1.15), Case(16_384, 10, 1.05))
ASYNC = (Case(64, 120, 1.10), Case(16_384, 20, 1.03))

Block = Callable[[int, int], list[float]]  # (rows, updates) -> samples in seconds


def sync(repeat: int) -> list[Figure]:
    """One sample per update: from the call to its results."""
    return _compare("sync", SYNC, repeat, lambda group: lambda rows, updates: _sync_block(group, rows, updates), _each)


def asynchronous(repeat: int) -> list[Figure]:
    """One sample per block: its time by the number of updates, from the first submission to the last result."""
    return _compare(
        "async", ASYNC, repeat, lambda group: lambda rows, updates: _async_block(group, rows, updates), _mean
    )


def _compare(
    kind: str,
    cases: tuple[Case, ...],
    repeat: int,
    block_of: Callable[[lgroup.LearnerGroup], Block],
    samples_of: Callable[[list[float]], list[float]],
) -> list[Figure]:
    with BareLoop() as bare, lgroup.LearnerGroup(config=group_config(in_flight=IN_FLIGHT)) as group:
        ours = block_of(group)
        figures = []
        for case in cases:
            theirs = _interleave(lambda rows, updates: samples_of(bare.run(rows, updates)), ours, case, repeat)
            name = f"{kind} update, {case.rows:,} rows" + (f", {IN_FLIGHT} in flight" if kind == "async" else "")
            figures.append(ratio_figure(name, theirs[1], theirs[0], case.goal))
        return figures


def _interleave(bare: Block, ours: Block, case: Case, repeat: int) -> tuple[list[list[float]], list[list[float]]]:
    """Blocks in turn, bare first; the samples of both, one list per round."""
    rounds: tuple[list[list[float]], list[list[float]]] = ([], [])
    for number in range(-WARM_UP_BLOCKS, repeat):
        for samples, block in zip(rounds, (bare, ours), strict=True):
            measured = block(case.rows, case.updates)
            if number >= 0:
                samples.append(measured)
    return rounds


def _sync_block(group: lgroup.LearnerGroup, rows: int, updates: int) -> list[float]:
    batch = make_batch(rows)
    return [_seconds(lambda: group.update(batch=batch)) for _ in range(updates)]


def _async_block(group: lgroup.LearnerGroup, rows: int, updates: int) -> list[float]:
    """`submit` waits where there is no room, so that there are never more than `IN_FLIGHT`, and mostly as many."""
    batch = make_batch(rows)
    start = time.perf_counter()
    futures = [group.submit(batch=batch) for _ in range(updates)]
    for future in futures:
        result = future.result(timeout=TIMEOUT_S)
        if result.status != "applied":
            raise RuntimeError(f"update {result.seq} was not applied: {result.status}, {result.reason}")
    return [(time.perf_counter() - start) / updates]


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _each(seconds: list[float]) -> list[float]:
    return seconds


def _mean(seconds: list[float]) -> list[float]:
    return [sum(seconds) / len(seconds)]
