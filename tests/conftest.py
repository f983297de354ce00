"""What all tests share: ways to wait that never sleep, and a look at what a test left behind.

Waiting: `wait_until` waits on a condition variable, `inbox` collects what callbacks deliver and waits for it,
`wait_gone` waits for processes to end, however they are related to us. Each fails the test when its deadline passes.

Every process that descends from this test run carries `MARK` in its environment, forks of forks and orphans included,
so that leftovers are found whoever their parent is. Tests in tests/processes are checked for leftovers without
asking; others ask for it with the fixture `nothing_left`.
"""

from __future__ import annotations

import gc
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

TIMEOUT_S = 20.0
SETTLE_S = 5.0
MARK = "LGROUP_TEST_RUN"
PROCESSES_DIR = Path(__file__).parent / "processes"

os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"


class Deadline:
    """A moment after which waiting is a failure; carried through a test that waits several times."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def check(self, what: str) -> None:
        if self.left_s == 0.0:
            pytest.fail(f"{what}: not within {self.timeout_s:g} s")


class Inbox:
    """A thread-safe list that callbacks `put` into and tests wait on."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._changed = threading.Condition()

    def put(self, *item: Any) -> None:
        """Usable as a callback: one argument is kept as it is, several as a tuple."""
        with self._changed:
            self._items.append(item[0] if len(item) == 1 else item)
            self._changed.notify_all()

    @property
    def items(self) -> list[Any]:
        with self._changed:
            return list(self._items)

    def wait_for(self, predicate: Callable[[list[Any]], Any], timeout_s: float = TIMEOUT_S) -> list[Any]:
        """The items, once `predicate(items)` holds."""
        with self._changed:
            if not self._changed.wait_for(lambda: predicate(self._items), timeout_s):
                pytest.fail(f"not within {timeout_s:g} s; the {len(self._items)} items are {self._items[-5:]!r}")
            return list(self._items)

    def wait(self, count: int = 1, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """The items, once there are `count` of them."""
        return self.wait_for(lambda items: len(items) >= count, timeout_s)


def wait_until_true(changed: threading.Condition, predicate: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> None:
    with changed:
        if not changed.wait_for(predicate, timeout_s):
            pytest.fail(f"not within {timeout_s:g} s")


def still_running(pids: Iterable[int], timeout_s: float) -> set[int]:
    """Which of these processes have not ended after `timeout_s`. A zombie has ended."""
    deadline = Deadline(timeout_s)
    running = set(pids)
    for pid in sorted(running):
        if _ended(pid, deadline.left_s):
            running.discard(pid)
    return running


def _ended(pid: int, timeout_s: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))
    finally:
        os.close(pidfd)


@pytest.fixture
def deadline() -> Callable[..., Deadline]:
    return Deadline


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """`wait_until(condition, predicate, timeout_s)`: wait on a `threading.Condition`."""
    return wait_until_true


@pytest.fixture
def wait_gone() -> Callable[..., None]:
    """`wait_gone(pids, timeout_s)`: every process has ended."""

    def wait(pids: Iterable[int], timeout_s: float = TIMEOUT_S) -> None:
        if left := still_running(pids, timeout_s):
            pytest.fail(f"after {timeout_s:g} s still running: {[_describe(pid) for pid in sorted(left)]}")

    return wait


@dataclass(frozen=True)
class Belongings:
    """What this process owns at one moment: marked processes, Python threads, open descriptors."""

    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]

    @classmethod
    def now(cls) -> Belongings:
        return cls(frozenset(marked_processes()), frozenset(threading.enumerate()), frozenset(_descriptors()))


def marked_processes() -> set[int]:
    """Processes of this test run, unreaped children included, other than this process itself."""
    children = {child.pid for child in psutil.Process().children()}
    return children | {pid for pid in psutil.pids() if pid != os.getpid() and _is_marked(pid)}


def _is_marked(pid: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{MARK}={os.environ[MARK]}".encode() in environment.split(b"\0")


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"pid {pid} ({process.status()}: {' '.join(process.cmdline())[:80]})"
    except psutil.Error:
        return f"pid {pid} (gone)"


def left_since(before: Belongings) -> list[str]:
    """What is there now and was not before, in words; all of it gets `SETTLE_S` to end."""
    gc.collect()
    limit = Deadline(SETTLE_S)
    still_running(marked_processes() - before.processes, limit.left_s)
    for thread in set(threading.enumerate()) - before.threads:
        thread.join(limit.left_s)
    while (now := Belongings.now()).descriptors - before.descriptors and limit.left_s:
        # A cluster that outlives the test closes a dead worker's descriptors in its own threads, one of them ZeroMQ's,
        # and no event tells when: the only place in the tests that looks again and again.
        select.select([], [], [], 0.01)
    return [
        *(_describe(pid) for pid in sorted(now.processes - before.processes)),
        *(f"thread {thread.name}" for thread in now.threads - before.threads),
        *(f"descriptor {fd} -> {target}" for fd, target in sorted(now.descriptors - before.descriptors)),
    ]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails the test if it leaves processes, threads or descriptors behind."""
    before = Belongings.now()
    yield
    if left := left_since(before):
        pytest.fail("left behind: " + "; ".join(left))


@pytest.fixture(autouse=True)
def _checked_in_processes(request: pytest.FixtureRequest) -> None:
    """First of a test's own fixtures to be set up, thus the last to be torn down: what they close is not a leftover."""
    if PROCESSES_DIR in request.path.parents:
        request.getfixturevalue("nothing_left")
