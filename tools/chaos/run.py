"""One run: training with a few updates in flight, faults one after the other, checks after each."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import lgroup
from tools.chaos import checks
from tools.chaos.faults import SLOW, Faults
from tools.chaos.learner import FEATURES, ROWS, ChaosLearner, Net

IN_FLIGHT = 3
HUNG = 3
#: Descriptors that may be open in the middle of a recovery: pipes and pidfds of processes that come or go.
SLACK = 16


@dataclass(frozen=True)
class Options:
    """What to do. `rate` is faults per second at most, 0: as many as there can be."""

    faults: int
    learners: int
    seed: int
    kinds: Sequence[str]
    min_learners: int = 1
    rate: float = 0.0
    hang_limit_s: float = 90.0
    slow_share: float = 0.02


@dataclass
class Outcome:
    """What was seen."""

    count: Counter[str] = field(default_factory=Counter)
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, list[str]] = field(default_factory=dict)
    updates: dict[str, Any] = field(default_factory=dict)
    num_restarts: int = 0
    seconds: float = 0.0

    def add(self, subject: str, kind: str, found: Sequence[str]) -> None:
        """Note mistakes found after a fault of `kind`."""
        self.errors.setdefault(subject, []).extend(f"after {kind}: {text}" for text in found)

    def num_errors(self, subject: str) -> int:
        """How many mistakes of one subject there are."""
        return len(self.errors.get(subject, []))


class Watchdog:
    """Ends the program with all stacks if nothing has happened for `limit_s` seconds of awake time."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._beats = 0
        self.doing = "starting"
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def alive(self, doing: str) -> None:
        """Something happened."""
        self._beats += 1
        self.doing = doing

    def _watch(self) -> None:
        seen, quiet_s = self._beats, 0.0
        while quiet_s < self._limit_s:
            time.sleep(0.5)
            quiet_s = quiet_s + 0.5 if self._beats == seen else 0.0
            seen = self._beats
        print(f"hang: nothing happened for {quiet_s:.0f} s; last: {self.doing}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(HUNG)


def run(options: Options) -> Outcome:
    """The whole run, from nothing to nothing."""
    outcome, processes, started = Outcome(), _Processes(), time.monotonic()
    watchdog = Watchdog(options.hang_limit_s)
    gc.collect()
    shared, descriptors = _shared_memory(), _num_descriptors()
    with tempfile.TemporaryDirectory() as armed, tempfile.TemporaryDirectory() as own:
        tempfile.tempdir = own  # whatever is left in it is ours
        with lgroup.LearnerGroup(config=_config(options, armed)) as group:
            _Session(group, options, Path(armed), outcome, processes, watchdog).run()
        watchdog.alive("closed")
        outcome.add("leaks", "the end", checks.leftover_errors([], os.listdir(own)))
        tempfile.tempdir = None
    gc.collect()
    outcome.add("orphans", "the end", _repeated(lambda: checks.process_errors([], processes.states())))
    outcome.add("leaks", "the end", checks.descriptor_errors(descriptors, _num_descriptors(), 0))
    outcome.add("leaks", "the end", checks.leftover_errors(shared, _shared_memory()))
    outcome.seconds = time.monotonic() - started
    return outcome


def _config(options: Options, armed: str) -> lgroup.LearnerGroupConfig:
    return (
        lgroup.LearnerGroupConfig()
        .learners(num_learners=options.learners, num_cpus_per_learner=1, max_requests_in_flight_per_learner=IN_FLIGHT)
        .training(
            learner_class=ChaosLearner,
            learner_config_dict={"faults": armed},
            num_epochs=2,
            minibatch_size=ROWS // 2,
            shuffle_batch_per_epoch=True,
        )
        .rl_module(rl_module_spec=lgroup.RLModuleSpec(module_class=Net))
        .fault_tolerance(
            min_learners=options.min_learners,
            max_restarts=10**6,
            update_retries=5,
            update_timeout_s=20,
            heartbeat_timeout_s=2,
            snapshot_every=20,
        )
        .debugging(seed=options.seed)
    )


class _Session:
    def __init__(
        self,
        group: lgroup.LearnerGroup,
        options: Options,
        armed: Path,
        outcome: Outcome,
        processes: _Processes,
        watchdog: Watchdog,
    ) -> None:
        self._group = group
        self._options = options
        self._outcome = outcome
        self._processes = processes
        self._watchdog = watchdog
        self._random = random.Random(options.seed)
        self._data = np.random.default_rng(options.seed)
        self._pending: deque[Any] = deque()
        self._results: list[Any] = []
        self._num_submitted = 0
        self._faults = Faults(group, self._submit, armed, self._random)
        self._descriptors = 0

    def run(self) -> None:
        for _ in range(5):
            self._submit()
        self._finish()
        self._descriptors = _num_descriptors()
        for number in range(self._options.faults):
            began = time.monotonic()
            self._one_fault(self._choose())
            self._watchdog.alive(f"fault {number}")
            if self._options.rate:
                time.sleep(max(0.0, 1 / self._options.rate - (time.monotonic() - began)))
        stats = self._group.get_stats()
        self._outcome.updates, self._outcome.num_restarts = stats["updates"], stats["num_restarts"]

    def _choose(self) -> str:
        slow = [kind for kind in self._options.kinds if kind in SLOW]
        quick = [kind for kind in self._options.kinds if kind not in SLOW]
        if slow and (not quick or self._random.random() < self._options.slow_share):
            return self._random.choice(slow)
        return self._random.choice(quick)

    def _submit(self, poison: bool = False) -> None:
        obs = self._data.standard_normal((ROWS, FEATURES), dtype=np.float32)
        batch = {"obs": obs, "actions": self._data.integers(0, 2, ROWS)}
        if poison:
            batch["poison"] = np.ones(ROWS, np.float32)
        self._pending.append(self._group.submit(batch=batch))
        self._num_submitted += 1
        self._collect()

    def _collect(self) -> None:
        while self._pending and self._pending[0].done():
            self._take()

    def _take(self) -> None:
        future = self._pending.popleft()
        try:
            self._results.append(future.result())
        except (lgroup.UpdateFailed, lgroup.UpdateDropped) as error:
            self._results.append(error.result)
        self._watchdog.alive(f"result {len(self._results)}")

    def _finish(self) -> None:
        while self._pending:
            self._take()

    def _one_fault(self, kind: str) -> None:
        outcome = self._outcome
        outcome.count[kind] += 1
        for _ in range(self._random.randrange(1, IN_FLIGHT + 1)):
            self._submit()
        self._faults.make(kind)
        began, before = time.monotonic(), len(self._results) + len(self._pending)
        while not any(result.status == "applied" for result in self._results[before:]):
            self._submit()
            self._finish()
        outcome.recovery_s.setdefault(kind, []).append(time.monotonic() - began)
        self._until_whole(kind)
        self._check(kind)

    def _until_whole(self, kind: str) -> None:
        while True:
            stats = self._group.get_stats()
            if stats["phase"] == "running" and stats["num_healthy_learners"] == self._options.learners:
                return
            self._watchdog.doing = f"waiting for all learners after {kind}: {stats}"
            time.sleep(0.001)

    def _check(self, kind: str) -> None:
        self._finish()
        outcome, group = self._outcome, self._group
        try:
            group.check_sync()
        except lgroup.LGroupError as error:
            outcome.add("digests", kind, [str(error)])
        stats = group.get_stats()
        outcome.add("ledger", kind, checks.ledger_errors(stats))
        outcome.add("ledger", kind, checks.result_errors(self._results, stats, self._num_submitted))
        assert group.cluster is not None
        expected = [*(row["pid"] for row in stats["learners"]), group.cluster.zygote_pid]
        outcome.add("orphans", kind, _repeated(lambda: checks.process_errors(expected, self._processes.states())))
        outcome.add("leaks", kind, checks.descriptor_errors(self._descriptors, _num_descriptors(), SLACK))


def _repeated(check: Any, limit_s: float = 1.0) -> list[str]:
    """What a check finds, once it finds nothing or `limit_s` seconds are over: the dead need a moment to be reaped."""
    deadline = time.monotonic() + limit_s
    while (found := check()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return list(found)


class _Processes:
    """All processes that the run ever had: descendants of this one, and those whose parent died before them."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def states(self) -> dict[int, str]:
        """The state of each that is there."""
        for process in psutil.Process().children(recursive=True):
            self._known[process.pid] = process
        found = {}
        for pid, process in list(self._known.items()):
            try:
                state, parent = process.status(), process.ppid()
            except psutil.NoSuchProcess:
                del self._known[pid]
                continue
            # What a killed zygote left behind is for the system's first process to reap, which takes its time.
            if state != psutil.STATUS_ZOMBIE or parent == os.getpid() or parent in self._known:
                found[pid] = state
        return found


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
