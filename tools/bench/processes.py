"""What processes use, from /proc: memory as PSS (shared pages split among those who share them), CPU time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import psutil

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def family() -> dict[str, int]:
    """This process and all that descend from it: a name such as "worker 0", and the pid."""
    me = psutil.Process()
    zygotes = me.children()
    names = {"coordinator": me.pid}
    for number, zygote in enumerate(zygotes):
        names["zygote" if not number else f"child {number}"] = zygote.pid
    workers = sorted({child.pid for zygote in zygotes for child in zygote.children(recursive=True)})
    return names | {f"worker {number}": pid for number, pid in enumerate(workers)}


def pss_mb(pid: int) -> float:
    """Proportional set size in MB (10^6 bytes)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"the kernel does not tell the PSS of pid {pid}")


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds these processes have used since they started, user and system."""
    return sum(_cpu_ticks(pid) for pid in pids) / TICKS_PER_S


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
