"""The process group of one generation.

Invariant: a `Collective` is joined once, and once closed it never opens again; whoever closes one makes every peer that
waits in it raise. A later generation is a new object over new sockets.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

#: How often a waiting rank looks whether its group was interrupted. Gloo itself does not always notice: where a peer
#: dies in the middle of a message, whoever was reading it is never told, and waits until the timeout.
WAIT_SLICE = timedelta(seconds=0.1)

_abandoned: list[Any] = []


class CollectiveLost(RuntimeError):
    """A collective did not complete: a peer closed its group, died, or the deadline passed."""


class Pending(Protocol):
    """A sum under way."""

    def wait(self) -> None:
        """Block until the sum is in place. Raises `CollectiveLost` if it will never be."""


class Collective(Protocol):
    """What a learner needs of its group."""

    rank: int
    world_size: int

    @property
    def lost(self) -> bool:
        """Whether a collective failed or the group was closed: nothing more will complete."""

    def sum(self, flat: torch.Tensor) -> Pending:
        """Start summing `flat` over all ranks, in place; the result is bit-identical on every rank."""

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """Copy rank `source`'s `flat` into everybody's."""

    def close(self) -> None:
        """Leave at once. Peers that wait for this rank raise `CollectiveLost`."""


class _Done:
    def wait(self) -> None:
        return None


class SingleRank:
    """The group of one learner: every sum is its own."""

    rank = 0
    world_size = 1
    lost = False

    def sum(self, flat: torch.Tensor) -> Pending:
        """Return at once: the sum over one rank is the rank's own."""
        return _Done()

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """Nobody else is there."""

    def close(self) -> None:
        """Nothing is open."""


def _sockets() -> dict[int, int]:
    """This process's open socket descriptors, with their inodes."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _is_connected(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as probe:
        try:
            probe.getpeername()
        except OSError:
            return False
        return probe.family in (socket.AF_INET, socket.AF_INET6)


class _GlooWork:
    __slots__ = ("_group", "_work")

    def __init__(self, group: GlooGroup, work: Any) -> None:
        self._group = group
        self._work = work

    def wait(self) -> None:
        self._group._wait(self._work)


class GlooGroup:
    """A gloo process group over a store of ours, on the loopback interface.

    The group is made directly rather than by ``init_process_group``: the worker's default process group stays free for
    the user, no host name is resolved (a host's own name may lead nowhere), and dropping this object is enough to
    leave.

    Args:
        connect_s: For each connection to come about. Gloo tries five times, so a peer that died after it had told its
            address costs five times as long: whoever waits for that should not be the main thread.
        collective_s: For each collective.
        waiting: Entered whenever a collective is waited for.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        connect_s: float,
        collective_s: float,
        waiting: AbstractContextManager[object] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._lost = False
        self._waiting = waiting or contextlib.nullcontext()
        self._timeout = timedelta(seconds=collective_s)
        self._closing = threading.Lock()
        before = _sockets()
        # torch's stubs know neither the options nor, everywhere, the group.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._timeout = timedelta(seconds=connect_s)
        options._threads = 1
        try:
            self._group: Any = gloo(store, rank, world_size, options)
        except RuntimeError as error:
            raise CollectiveLost(f"rank {rank} of {world_size} could not form its group: {error}") from None
        # Only connected sockets are ever shut down: doing so to gloo's listening one ends the process. The inode tells
        # whether a number still means the same socket.
        self._connections = {fd: inode for fd, inode in _sockets().items() if before.get(fd) != inode}
        self._connections = {fd: inode for fd, inode in self._connections.items() if _is_connected(fd)}

    @property
    def lost(self) -> bool:
        """Whether a collective failed, or the group was interrupted or closed."""
        return self._lost

    def sum(self, flat: torch.Tensor) -> Pending:
        """Start an all-reduce of `flat` (contiguous, any float dtype), in place."""
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        return _GlooWork(self, self._started(lambda group: group.allreduce([flat], options)))

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """Copy rank `source`'s `flat` into everybody's, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        options.timeout = self._timeout
        self._wait(self._started(lambda group: group.broadcast([flat], options)))

    def _started(self, start: Callable[[Any], Any]) -> Any:
        if self._lost:
            self.close()
            raise CollectiveLost(f"rank {self.rank} of {self.world_size}: the group is closed")
        try:
            return start(self._group)
        except RuntimeError as error:
            raise self._failed(error) from None

    def _wait(self, work: Any) -> None:
        with self._waiting:
            while True:
                try:
                    work.wait(WAIT_SLICE)
                    return
                except RuntimeError as error:
                    if self._lost or work.is_completed():
                        self._abandon_unless_completed(work)
                        raise self._failed(error) from None

    def _abandon_unless_completed(self, work: Any) -> None:
        if not work.is_completed():
            # Letting go of a group waits for its operations, so this one is kept for good. Nothing writes to its
            # tensors any more: all its connections are shut.
            _abandoned.append((self._group, work))

    def interrupt(self) -> None:
        """Shut the connections down: whoever waits in a collective raises, here and at the peers. From any thread."""
        self._lost = True
        with self._closing:
            now = _sockets() if self._connections else {}
            for descriptor, inode in self._connections.items():
                if now.get(descriptor) == inode:
                    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                        connection.shutdown(socket.SHUT_RDWR)
            self._connections = {}

    def close(self) -> None:
        """Shut the connections down and let go of the group. Not while a sum of its own is waited for."""
        self.interrupt()
        self._group = None

    def _failed(self, error: RuntimeError) -> CollectiveLost:
        self.close()
        return CollectiveLost(f"rank {self.rank} of {self.world_size}: {error}")
