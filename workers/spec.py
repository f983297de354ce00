"""What a worker is to be, the states it goes through and how it ended. Pure.

A worker's state changes only along ``TRANSITIONS``; each change happens once, and EXITED is final.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WorkerSpec:
    """What one worker process hosts and how it is set up.

    Attributes:
        name: who it is in messages, such as ``"learner 0"``.
        actor_class: called with ``args`` and ``kwargs`` in the worker; the result is the actor.
        num_threads: threads of torch and of the BLAS libraries.
        seed: with ``actor_index`` and the incarnation it seeds ``random``, numpy and torch; ``None``: seeded by chance.
        env: environment variables on top of the coordinator's.
        start_timeout_s: from the request to the end of the constructor, further attempts included.
    """

    name: str
    actor_class: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_threads: int = 1
    seed: int | None = None
    actor_index: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise ValueError(f"num_threads={self.num_threads} of {self.name}: at least 1 is allowed")
        if not self.start_timeout_s > 0:
            raise ValueError(f"start_timeout_s={self.start_timeout_s} of {self.name}: it must be above 0")


class WorkerState(enum.Enum):
    """Where a worker is in its one life."""

    STARTING = "starting"  # asked for; its constructor has not returned
    READY = "ready"  # takes calls
    STOPPING = "stopping"  # told to end, or failed to start, or found dead and not yet accounted for
    EXITED = "exited"  # the process is gone and every call has its reply


TRANSITIONS: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset({WorkerState.READY, WorkerState.STOPPING, WorkerState.EXITED}),
    WorkerState.READY: frozenset({WorkerState.STOPPING, WorkerState.EXITED}),
    WorkerState.STOPPING: frozenset({WorkerState.EXITED}),
    WorkerState.EXITED: frozenset(),
}


# Signals that a process brings upon itself: a mistake in its code, or a limit on its own CPU time.
OWN_SIGNALS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP", "SIGXCPU", "SIGXFSZ"})


@dataclass(frozen=True)
class WorkerExit:
    """How a worker ended.

    Attributes:
        exit_code: its exit status; ``None`` if a signal ended it or nobody could say.
        signal_name: such as ``"SIGKILL"``; ``None`` if no signal ended it.
        expected: the coordinator had told it to stop, or killed it.
        last_lines: the last lines it wrote to stdout and stderr, oldest first.
        node: the machine it ran on.
        memory_hint: evidence that the kernel killed it for want of memory; ``None`` if there is none.
        reason: why the coordinator killed it, if it said so.
    """

    worker_name: str
    pid: int | None
    exit_code: int | None
    signal_name: str | None
    expected: bool
    last_lines: tuple[str, ...] = ()
    node: str = "local"
    memory_hint: str | None = None
    reason: str | None = None

    @property
    def own(self) -> bool:
        """Whether it ended by its own doing: an exit, a crash, or the memory limit.

        Not, if somebody killed it or told it to stop, and not if nobody can say how it ended.
        """
        if self.signal_name in OWN_SIGNALS:
            return True  # also if the coordinator killed it a moment later
        if self.exit_code is not None:
            return not (self.expected and self.exit_code == 0)
        return self.signal_name == "SIGKILL" and self.memory_hint is not None and not self.expected

    @property
    def how(self) -> str:
        """Such as ``"killed by SIGKILL"`` or ``"exited with status 1"``."""
        killed = self.signal_name == "SIGKILL" or (self.signal_name is None and self.exit_code is None)
        if self.reason is not None and self.expected and killed:
            return f"killed by lgroup: {self.reason}"
        if self.signal_name is not None:
            return f"killed by {self.signal_name}"
        if self.exit_code is not None:
            return f"exited with status {self.exit_code}"
        return "ended (its exit status is unknown, because the zygote ended too)"

    @property
    def text(self) -> str:
        """One paragraph for an error message: who, where, how, what to suspect, and the last lines it wrote."""
        head = f"{self.worker_name} (pid {self.pid}) on node {self.node} {self.how}"
        if self.memory_hint is not None:
            head += f"; {self.memory_hint}"
        elif self.signal_name == "SIGKILL" and not self.expected:
            head += "; if nobody killed it, the kernel did for want of memory (see the kernel log)"
        if not self.last_lines:
            return head
        return "\n".join([f"{head}; the last lines it wrote:", *(f"  {line}" for line in self.last_lines)])

    def as_dict(self) -> dict[str, Any]:
        """The same in plain values that JSON has."""
        return {
            "worker": self.worker_name,
            "node": self.node,
            "pid": self.pid,
            "exit_code": self.exit_code,
            "signal": self.signal_name,
            "memory_hint": self.memory_hint,
            "expected": self.expected,
            "reason": self.reason,
            "last_lines": list(self.last_lines[-50:]),
        }


def exit_of(
    name: str,
    pid: int | None,
    status: int | None,
    *,
    expected: bool,
    last_lines: tuple[str, ...] = (),
    memory_hint: str | None = None,
    reason: str | None = None,
    node: str = "local",
) -> WorkerExit:
    """The record for a process with this exit status (minus the signal's number; ``None``: nobody knows)."""
    by_signal = status is not None and status < 0
    return WorkerExit(
        worker_name=name,
        pid=pid,
        exit_code=None if by_signal else status,
        signal_name=_signal_name(-status) if status is not None and by_signal else None,
        expected=expected,
        last_lines=last_lines,
        node=node,
        memory_hint=memory_hint,
        reason=reason,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
