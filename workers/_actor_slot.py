"""One actor of a group: its place, its incarnations one after the other, and whether it is taken for healthy.

States:

    STARTING -> UP        its process is ready; the calls made meanwhile are sent, in order
    STARTING -> STARTING  it did not come up again; the next try follows after a pause
    STARTING -> DOWN      it did not come up and is not tried again; calls get an error
    UP       -> STARTING  its process died and it is started again
    UP       -> DOWN      its process died and it is not
    any      -> REMOVED   it belongs to no group any more

A call gets exactly one reply. An actor that died is unhealthy until somebody says otherwise, even when its next process
is up: it may lack state that only the caller can restore.
"""

from __future__ import annotations

import enum
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from lgroup.transport.io_thread import IOThread
from lgroup.workers._supervision import Supervision
from lgroup.workers._watch import OnBeat
from lgroup.workers.calls import OnReply, PreparedCall, RemoteError, Reply
from lgroup.workers.errors import WorkerStartError
from lgroup.workers.event_thread import WorkerEvent
from lgroup.workers.spec import WorkerExit, WorkerSpec
from lgroup.workers.start_policy import RestartPolicy, StartPolicy
from lgroup.workers.worker import Worker

# A restart makes one attempt at a time: its slot decides whether and when the next one follows.
ONE_ATTEMPT = StartPolicy(max_attempts=1)


class SlotState(enum.Enum):
    """See the module."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"
    REMOVED = "removed"


class Launcher(Protocol):
    """Starts workers: a cluster."""

    @property
    def io(self) -> IOThread: ...

    @property
    def closed(self) -> bool: ...

    def later(self, delay_s: float, callback: Callable[[], object]) -> None: ...

    def watch(self, worker: Worker, interval_s: float = 1.0, on_beat: OnBeat | None = None) -> None: ...

    def launch(
        self, spec: WorkerSpec, *, policy: StartPolicy | None = None, incarnation: int = 0
    ) -> Future[Worker]: ...


class ActorSlot:
    """Thread-safe."""

    def __init__(self, launcher: Launcher, actor_id: int, spec: WorkerSpec, supervision: Supervision) -> None:
        self.actor_id = actor_id
        self.healthy = True
        self.num_restarts = 0
        self.started: Future[Worker] = launcher.launch(spec)
        self._launcher = launcher
        self._spec = spec
        self._supervision = supervision
        self._policy = RestartPolicy()
        self._random = random.Random()
        self._lock = threading.RLock()
        self._state = SlotState.STARTING
        self._worker: Worker | None = None
        self._waiting: list[tuple[PreparedCall, OnReply]] = []
        self._why_down = ""
        self._streak = 0
        self._incarnation = 0  # the one that is up or being started; of the first launch, known once it is up
        self._launch = self.started
        self.started.add_done_callback(self._first_launched)

    def __repr__(self) -> str:
        health = "healthy" if self.healthy else "unhealthy"
        return f"<ActorSlot {self._spec.name} {self._state.value} {health} {self._worker}>"

    @property
    def state(self) -> SlotState:
        """See the module."""
        return self._state

    @property
    def worker(self) -> Worker | None:
        """The process it lives in; ``None`` before the first one is ready."""
        return self._worker

    def send(self, prepared: PreparedCall, on_reply: OnReply) -> None:
        """Make a call. ``on_reply`` runs on the I/O thread."""
        with self._lock:
            if self._state is SlotState.UP and self._worker is not None and self._worker.try_send(prepared, on_reply):
                return
            if self._state in (SlotState.STARTING, SlotState.UP):  # UP: it has died, and what follows from it is next
                self._waiting.append((prepared, on_reply))
                return
        self._launcher.io.call_soon(on_reply, self._refusal(prepared))

    def remove(self, grace_s: float | None) -> None:
        """Let it go: stop its process after the calls it has (``None``: kill it now)."""
        with self._lock:
            self._state = SlotState.REMOVED
            worker, self._why_down = self._worker, "it was removed from its group"
            waiting, self._waiting = self._waiting, []
        for prepared, on_reply in waiting:
            self._launcher.io.call_soon(on_reply, self._refusal(prepared))
        self._launch.cancel()  # kills what is starting; does nothing to what is ready
        if worker is not None:
            worker.kill() if grace_s is None else worker.stop(grace_s)

    def died(self) -> None:
        """A reply says that its process is gone: take that in now, before whoever gets the reply acts on it."""
        worker = self._worker
        if worker is not None and worker.exit is not None:
            self._lost(worker, worker.exit)

    def _first_launched(self, future: Future[Worker]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._down(str(error))
        else:
            self._up(future.result())

    def _launched_again(self, future: Future[Worker]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            worker = future.result()
            if self._up(worker):
                text = f"{worker.name} (pid {worker.pid}) is up again, incarnation {worker.incarnation}"
                self._supervision.callbacks.restarted(self._event(worker.node, worker.pid, text))
            return
        with self._lock:
            if self._state is not SlotState.STARTING:
                return  # removed
            self._streak = self._policy.streak(self._streak, False)
        permanent = not isinstance(error, WorkerStartError) or error.permanent
        self._recover("local", None, str(error), permanent=permanent)

    def _up(self, worker: Worker) -> bool:
        with self._lock:
            if self._state is SlotState.REMOVED:
                worker.kill()
                return False
            self._state, self._worker, self._incarnation = SlotState.UP, worker, worker.incarnation
            self.num_restarts += self._launch is not self.started
            waiting, self._waiting = self._waiting, []
            for prepared, on_reply in waiting:
                worker.send(prepared, on_reply)
        self._launcher.watch(worker, self._supervision.interval_s, self._supervision.beat)
        worker.on_exit(lambda exit: self._lost(worker, exit))
        return True

    def _lost(self, worker: Worker, exit: WorkerExit) -> None:
        with self._lock:
            if worker is not self._worker or self._state is not SlotState.UP:
                return  # removed, or known already
            self.healthy = False
            self._state = SlotState.STARTING
            self._streak = self._policy.streak(self._streak, worker.answered)
        self._recover(exit.node, exit.pid, exit.text, permanent=not self._supervision.restart)

    def _recover(self, node: str, pid: int | None, why: str, *, permanent: bool) -> None:
        """It is gone, as ``why`` says: have it started again after a pause, or give it up; then tell of it."""
        if self._launcher.closed:
            self._down(why)  # nobody is told: that is no fault
            return
        used_up = None if permanent else self._supervision.take_restart()
        if used_up is not None:
            why = f"{used_up}, so it stays down; {why}"
        event = self._event(node, pid, why)
        if permanent or used_up is not None:
            self._down(why)
        else:
            self._launcher.later(self._policy.pause_before(self._streak, self._random), self._relaunch)
        self._supervision.callbacks.died(event)

    def _relaunch(self) -> None:
        with self._lock:
            if self._state is not SlotState.STARTING:
                return
            self._incarnation += 1
            try:
                self._launch = self._launcher.launch(self._spec, policy=ONE_ATTEMPT, incarnation=self._incarnation)
            except Exception as error:
                self._down(str(error))
                return
        self._launch.add_done_callback(self._launched_again)

    def _event(self, node: str, pid: int | None, text: str) -> WorkerEvent:
        return WorkerEvent(self._spec.name, self.actor_id, self._incarnation, node, pid, text)

    def _down(self, why: str) -> None:
        with self._lock:
            self.healthy = False
            if self._state is not SlotState.REMOVED:
                self._state, self._why_down = SlotState.DOWN, why
            waiting, self._waiting = self._waiting, []
        for prepared, on_reply in waiting:
            on_reply(self._refusal(prepared))

    def _refusal(self, prepared: PreparedCall) -> Reply:
        text = f"{self._spec.name} has no process: {self._why_down}"
        error = RemoteError("ActorError", text, "", self._spec.name, None, died=True)
        return Reply(prepared.request_id, False, None, error)
