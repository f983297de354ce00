from __future__ import annotations

from pathlib import Path

import pytest

from lgroup.workers.memory import MemoryWatch, find_cgroup


class Version:
    """A cgroup of one version in a folder: what stands in its files, and in this process's own list."""

    def __init__(self, folder: Path, version: int, inside: str = "job/1") -> None:
        self.mount = folder / "mount"
        self.own = folder / "own"
        self.version = version
        self.folder = (self.mount / "memory" if version == 1 else self.mount) / inside
        self.folder.mkdir(parents=True)
        self.own.write_text("11:cpu,cpuacct:/x\n9:memory:/job/1\n0::/other\n" if version == 1 else "0::/job/1\n")

    def write(self, kills: int, limit: str) -> None:
        events = "memory.oom_control" if self.version == 1 else "memory.events"
        before = "oom_kill_disable 0\nunder_oom 0\n" if self.version == 1 else "low 0\nhigh 0\nmax 7\noom 9\n"
        (self.folder / events).write_text(f"{before}oom_kill {kills}\n")
        (self.folder / ("memory.limit_in_bytes" if self.version == 1 else "memory.max")).write_text(f"{limit}\n")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("inside", ["job/1", ""])
def test_the_kills_of_the_own_cgroup_are_found(tmp_path: Path, version: int, inside: str) -> None:
    """In a container the path is one of the host, and the mount's root is the container's own."""
    files = Version(tmp_path, version, inside)
    files.write(3, str(2 << 30))
    found = find_cgroup(files.mount, files.own)
    assert found is not None and (found.num_kills(), found.limit_bytes()) == (3, 2 << 30)


@pytest.mark.parametrize(("version", "limit"), [(1, str(0x7FFFFFFFFFFFF000)), (2, "max")])
def test_a_cgroup_without_a_limit_has_none(tmp_path: Path, version: int, limit: str) -> None:
    files = Version(tmp_path, version)
    files.write(0, limit)
    found = find_cgroup(files.mount, files.own)
    assert found is not None and found.limit_bytes() is None
    watch = MemoryWatch(found)
    files.write(1, limit)
    hint = watch.hint(0)
    assert hint is not None and "limit" not in hint


@pytest.mark.parametrize("own", ["", "nonsense\n", "0::/job/1\n", "9:memory:/job/1\n", None])
def test_without_a_cgroup_that_counts_there_is_no_hint(tmp_path: Path, own: str | None) -> None:
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert find_cgroup(tmp_path, tmp_path / "own") is None
    watch = MemoryWatch(None)
    assert watch.count() is None and watch.hint(None) is None and watch.hint(0) is None


def test_a_kernel_that_counts_no_kills_gives_no_cgroup(tmp_path: Path) -> None:
    files = Version(tmp_path, 1)
    (files.folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\n")
    assert find_cgroup(files.mount, files.own) is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_counter_that_rose_is_evidence_once_for_each_kill(tmp_path: Path, version: int) -> None:
    files = Version(tmp_path, version)
    files.write(4, str(512 << 20))
    watch = MemoryWatch(find_cgroup(files.mount, files.own))
    at_start = watch.count()
    assert at_start == 4 and watch.hint(at_start) is None
    files.write(6, str(512 << 20))
    first, second, third = (watch.hint(at_start) for _ in range(3))
    assert first is not None and "ended 2 processes" in first and "oom_kill 4 -> 6" in first and "512 MiB" in first
    assert second is not None and "ended 1 process (" in second and "oom_kill 5 -> 6" in second
    assert third is None
    assert watch.hint(None) is None


def test_a_counter_that_cannot_be_read_any_more_is_no_evidence(tmp_path: Path) -> None:
    files = Version(tmp_path, 2)
    files.write(4, "max")
    watch = MemoryWatch(find_cgroup(files.mount, files.own))
    (files.folder / "memory.events").unlink()
    assert watch.count() is None and watch.hint(4) is None
