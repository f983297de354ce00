"""The faults: how each is made. All choices come from the run's own random source."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lgroup

#: Longer than the heartbeat limit of the run's config, so that a pause that counted would show.
PAUSE_S = 3.0
WAIT_S = 30.0


class Faults:
    """Makes faults in one group.

    Args:
        submit: Submits one update, with more columns if any are given.
        armed: The folder of `lgroup` learners' faults, see `tools.chaos.learner`.
    """

    def __init__(
        self, group: lgroup.LearnerGroup, submit: Callable[..., None], armed: Path, chance: random.Random
    ) -> None:
        self._group = group
        self._submit = submit
        self._armed = armed
        self._random = chance
        self.kinds: dict[str, Callable[[], None]] = {
            "sigkill": lambda: self._signal(1, signal.SIGKILL),
            "sigstop": lambda: self._signal(1, signal.SIGSTOP),
            **{name: (lambda name=name: self._arm(name)) for name in ARMED},
            "two_at_once": lambda: self._signal(2, signal.SIGKILL),
            "all_at_once": lambda: self._signal(len(self._group), signal.SIGKILL),
            "during_reforming": self._during_reforming,
            "during_start": self._during_start,
            "zygote_killed": self._zygote_killed,
            "coordinator_paused": self._coordinator_paused,
            "poison": lambda: self._submit(poison=True),
        }

    def make(self, kind: str) -> None:
        """Make one fault, at a random moment within the next few milliseconds."""
        time.sleep(self._random.random() * 0.01)
        self.kinds[kind]()

    def _rows(self) -> list[dict[str, Any]]:
        rows = [row for row in self._group.get_stats()["learners"] if row["state"] == "ready"]
        self._random.shuffle(rows)
        return rows

    def _signal(self, count: int, number: int) -> None:
        for row in self._rows()[:count]:
            _send(row["pid"], number)

    def _arm(self, fault: str) -> None:
        rows = self._rows()
        (self._armed / f"{fault}.{rows[0]['learner']}").touch()
        self._submit()

    def _during_reforming(self) -> None:
        self._signal(1, signal.SIGKILL)
        _until(lambda: self._group.get_stats()["phase"] != "running", 1.0)
        self._signal(1, signal.SIGKILL)

    def _during_start(self) -> None:
        self._signal(1, signal.SIGKILL)
        cluster = self._group.cluster
        assert cluster is not None
        starting: list[Any] = []

        def found() -> bool:
            starting[:] = [w for w in cluster.workers if w.state.value == "starting" and w.pid is not None]
            return bool(starting)

        if _until(found, 2.0):
            _send(starting[0].pid, signal.SIGKILL)

    def _zygote_killed(self) -> None:
        cluster = self._group.cluster
        assert cluster is not None and cluster.zygote_pid is not None
        _send(cluster.zygote_pid, signal.SIGKILL)
        self._signal(1, signal.SIGKILL)

    def _coordinator_paused(self) -> None:
        script = "import os,signal,sys,time; time.sleep(float(sys.argv[2])); os.kill(int(sys.argv[1]), signal.SIGCONT)"
        waker = subprocess.Popen([sys.executable, "-c", script, str(os.getpid()), str(PAUSE_S)])
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()


#: Faults that a learner has inside an update.
ARMED = ("exception", "exception_after", "nonfinite", "os_exit", "exit_in_step", "gil_held")
KINDS = (
    "sigkill",
    "sigstop",
    *ARMED,
    "two_at_once",
    "all_at_once",
    "during_reforming",
    "during_start",
    "zygote_killed",
    "coordinator_paused",
    "poison",
)
#: These take the heartbeat limit, or seconds of their own: a run has fewer of them.
SLOW = frozenset({"sigstop", "gil_held", "coordinator_paused", "zygote_killed"})


def _send(pid: int | None, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, number)


def _until(condition: Callable[[], bool], limit_s: float = WAIT_S) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True
