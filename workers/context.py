"""What code that runs inside a worker can learn about its worker.

A process has at most one context, set once before the actor's constructor runs; only its phase changes afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lgroup.workers.interrupts import Interrupts, OnInterrupt
from lgroup.workers.store import Ask, ChannelStore


@dataclass
class WorkerContext:
    """The worker this code runs in.

    Attributes:
        id: unique in the cluster, never reused.
        name: such as ``"learner 0"``.
        actor_index: the actor's number in its group.
        incarnation: 0 for the actor's first process, one more for each restart.
        num_threads: the threads torch and the BLAS libraries may use.
        seed: the group's seed, from which this worker's generators were seeded with ``actor_index`` and
            ``incarnation``; ``None`` if none was given.
        phase: a word for what the worker does now; heartbeats carry it.
    """

    id: int
    name: str
    actor_index: int
    incarnation: int
    num_threads: int
    seed: int | None
    pid: int
    coordinator_pid: int
    ask: Ask = field(repr=False)
    interrupts: Interrupts = field(repr=False)
    phase: str = "starting"
    # A process group written in C++ holds a store without keeping its Python half alive.
    _stores: dict[str, ChannelStore] = field(default_factory=dict, repr=False)

    def store(self, prefix: str) -> ChannelStore:
        """The ``torch.distributed.Store`` that all workers of the cluster see under ``prefix``.

        The same object for the same prefix, until ``forget_store``.
        """
        return self._stores.setdefault(prefix, ChannelStore(self.ask, prefix))

    def forget_store(self, prefix: str) -> None:
        """Let go of this worker's object for ``prefix``; nothing may use it any more. Keys stay where they are."""
        self._stores.pop(prefix, None)

    def in_phase(self, phase: str) -> InPhase:
        """``with current_worker().in_phase("reducing"):`` heartbeats carry the word meanwhile, then the former one."""
        return InPhase(self, phase)

    def on_interrupt(self, callback: OnInterrupt) -> None:
        """Call ``callback(value)`` on the worker's I/O thread whenever the coordinator interrupts this worker.

        That happens also while user code runs or blocks outside the interpreter. There is one callback, the last one
        registered. Of the values that came before the first registration it gets the highest, soon. What it raises is
        printed.
        """
        self.interrupts.register(callback)


class InPhase:
    """A phase for the length of a ``with`` block. A class of its own: a generator costs five times as much."""

    __slots__ = ("_before", "_context", "_phase")

    def __init__(self, context: WorkerContext, phase: str) -> None:
        self._context = context
        self._phase = phase
        self._before = phase

    def __enter__(self) -> None:
        self._before = self._context.phase
        self._context.phase = self._phase

    def __exit__(self, *_: object) -> None:
        self._context.phase = self._before


_current: WorkerContext | None = None


def current_worker() -> WorkerContext:
    """The worker this code runs in. Raises ``RuntimeError`` in any other process."""
    if _current is None:
        raise RuntimeError("current_worker() is for code that runs in a worker; this process is none")
    return _current


def in_worker() -> bool:
    """Whether this process is a worker."""
    return _current is not None


def enter_worker(context: WorkerContext) -> None:
    """Make this process the worker of ``context``. Once only."""
    global _current
    if _current is not None:
        raise RuntimeError(f"this process is already the worker {_current.name}")
    _current = context
