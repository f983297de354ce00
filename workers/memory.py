"""Whether the kernel ended a process for want of memory: what the cgroup of this process says.

Reads ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1). Where there is neither, it says nothing.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # v1 writes a huge number where there is none


@dataclass(frozen=True)
class MemoryCgroup:
    """The files that tell of one cgroup: its counters, and its limit."""

    events: Path
    limit: Path

    def num_kills(self) -> int | None:
        """Processes of this cgroup that the out-of-memory killer has ended; ``None`` if that cannot be known."""
        with contextlib.suppress(OSError, ValueError):
            for line in self.events.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return None

    def limit_bytes(self) -> int | None:
        """How much memory its processes may use; ``None`` if there is no limit."""
        with contextlib.suppress(OSError, ValueError):
            limit = int(self.limit.read_text())
            return limit if limit < _NO_LIMIT else None
        return None


def find_cgroup(mount: Path = MOUNT, own: Path = OWN_CGROUPS) -> MemoryCgroup | None:
    """The memory cgroup of this process; ``None`` if there is none, or none that counts.

    In a container the path may be one of the host; then the mount's root is the container's own.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    for line in sorted(lines, key=lambda line: line.startswith("0::")):  # v1 first: where it has memory, v2 has not
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        for found in _candidates(mount, controllers.split(","), path):
            if found.num_kills() is not None:
                return found
    return None


def _candidates(mount: Path, controllers: list[str], path: str) -> list[MemoryCgroup]:
    inside = path.lstrip("/")
    if "memory" in controllers:
        roots, events, limit = [mount / "memory"], "memory.oom_control", "memory.limit_in_bytes"
    elif controllers == [""]:
        roots, events, limit = [mount, mount / "unified"], "memory.events", "memory.max"
    else:
        return []
    folders = [folder for root in roots for folder in (root / inside, root)]
    return [MemoryCgroup(folder / events, folder / limit) for folder in folders]


class MemoryWatch:
    """Tells of each death that came with a kill for want of memory, and of no more deaths than there were kills.

    Thread-safe.
    """

    def __init__(self, cgroup: MemoryCgroup | None) -> None:
        self._cgroup = cgroup
        self._lock = threading.Lock()
        self._explained = 0  # the counter, as far as it belongs to deaths that were told of

    def count(self) -> int | None:
        """The counter now; to be kept from a process's start for ``hint``."""
        return self._cgroup.num_kills() if self._cgroup is not None else None

    def hint(self, count_at_start: int | None) -> str | None:
        """Evidence that a process, killed just now, was killed for want of memory; ``None`` if there is none."""
        count = self.count()
        if self._cgroup is None or count is None or count_at_start is None:
            return None
        with self._lock:
            before = max(count_at_start, self._explained)
            if count <= before:
                return None
            self._explained = before + 1
        ended = "1 process" if count - before == 1 else f"{count - before} processes"
        counter = f"{self._cgroup.events.name}: oom_kill {before} -> {count}"
        limit = self._cgroup.limit_bytes()
        return f"the cgroup's out-of-memory killer ended {ended} ({counter})" + (
            f", limit {_size(limit)}" if limit is not None else ""
        )


def _size(number: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return f"{number} bytes"
