"""Figures that need a coordinator of their own: `python -m tools.bench.probe start | memory | idle` prints one as JSON.

Each is a fresh interpreter, so that nothing of the benchmark itself is in the figure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import lgroup
from tools.bench.group import group_config
from tools.bench.processes import cpu_s, family, pss_mb
from tools.bench.work import LEARNERS, make_batch

UPDATES = 20
IDLE_S = 5.0
SETTLE_S = 0.5


def ask(name: str) -> dict[str, Any]:
    """Run the probe of this name in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench.probe", name], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the probe {name!r} failed:\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def start() -> dict[str, Any]:
    """Seconds until a group of two is ready: the first of a cluster, then one whose cluster has its zygote."""
    times = [time.perf_counter()]
    with lgroup.Cluster() as cluster:
        for _ in range(2):
            with lgroup.LearnerGroup(config=group_config(), cluster=cluster) as group:
                times.append(time.perf_counter())
                group.update(batch=make_batch(64))
                times.append(time.perf_counter())
            times.append(time.perf_counter())
    return {
        "cold_s": times[1] - times[0],
        "cold_first_update_s": times[2] - times[1],
        "warm_s": times[4] - times[3],
        "warm_first_update_s": times[5] - times[4],
    }


def memory() -> dict[str, Any]:
    """PSS in MB of every process of groups of two and of four learners that have trained."""
    return {str(count): _memory_of(count) for count in (LEARNERS, LEARNERS + 2)}


def _memory_of(num_learners: int) -> dict[str, float]:
    with lgroup.LearnerGroup(config=group_config(num_learners)) as group:
        for _ in range(UPDATES):
            group.update(batch=make_batch(1_024))
        return {name: pss_mb(pid) for name, pid in family().items()}


def idle() -> dict[str, Any]:
    """CPU seconds per second, over all processes of a group that has trained and now has nothing to do."""
    with lgroup.LearnerGroup(config=group_config()) as group:
        for _ in range(UPDATES):
            group.update(batch=make_batch(64))
        time.sleep(SETTLE_S)
        pids = family()
        before, start_s = {name: cpu_s([pid]) for name, pid in pids.items()}, time.perf_counter()
        time.sleep(IDLE_S)
        lasted_s = time.perf_counter() - start_s
        return {name: (cpu_s([pid]) - before[name]) / lasted_s for name, pid in pids.items()}


PROBES = {"start": start, "memory": memory, "idle": idle}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
