"""The coordinator's handle of one worker process: one incarnation, from the request to start it to its exit.

Each call gets exactly one ``Reply``: what the worker answered, or, once the process is gone and everything it sent has
been read, an error. The state and the table of pending calls change under one lock; everything else happens on the I/O
thread.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from lgroup.transport.errors import ConnectionClosed
from lgroup.transport.io_thread import IOThread
from lgroup.transport.messages import Buffer, Kind, Message
from lgroup.transport.wire import encode
from lgroup.workers._process import WorkerProcess
from lgroup.workers.calls import (
    OnReply,
    PreparedCall,
    RemoteError,
    Reply,
    Target,
    next_request_id,
    prepare_call,
    read_reply,
)
from lgroup.workers.errors import WorkerStartError
from lgroup.workers.health import Health, Look
from lgroup.workers.memory import MemoryWatch
from lgroup.workers.output import OutputPipe
from lgroup.workers.spec import TRANSITIONS, WorkerExit, WorkerSpec, WorkerState, exit_of
from lgroup.workers.start_policy import StartFailure

# A dead process's messages are read within a few milliseconds (until the router knows that it is gone), and the zygote
# reports its status about as soon. These are the limits in case either never happens.
PROBE_S = 0.001
READ_LIMIT_S = 0.2
STATUS_LIMIT_S = 0.5
STACKS_S = 0.5  # what faulthandler needs to write all stacks of a hung process, and the coordinator to read them
STACKS_SIGNAL = signal.SIGUSR2  # on which faulthandler writes them
STOP_GRACE_S = 1.0

logger = logging.getLogger("lgroup.workers")


class Surroundings(Protocol):
    """What a worker's handle needs of its cluster."""

    @property
    def io(self) -> IOThread: ...

    @property
    def memory(self) -> MemoryWatch: ...

    def later(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Call on the I/O thread after ``delay_s`` seconds, or when the cluster closes if that is sooner."""

    def send(self, identity: bytes, message: Message) -> None:
        """Send to the worker of that identity; thread-safe. Raises ``TypeError``, ``ConnectionClosed``."""

    def send_frames(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        """The same for an encoded message."""

    def withdraw(self, worker: Worker, *, stuck: bool) -> None:
        """``worker`` has no process yet and nobody wants it any more; ``stuck``: its time to start is over."""

    def gone(self, worker: Worker) -> None:
        """``worker`` has exited."""


class Worker:
    """One incarnation of one worker.

    Attributes:
        ready: ends with this worker once its actor is built. Raises ``WorkerStartError`` with the child's traceback.
        failure: why it did not come up, once ``ready`` has failed.
        exit: how it ended; ``None`` before that.
        health: what was last seen of it, once ``Cluster.watch`` was called for it.
        answered: it has answered a call in its life, be it with an exception.
        node: the machine it runs on.
    """

    def __init__(
        self, surroundings: Surroundings, id: int, spec: WorkerSpec, incarnation: int, output: OutputPipe
    ) -> None:
        self.id = id
        self.identity = f"w{id}".encode()
        self.spec = spec
        self.name = spec.name
        self.incarnation = incarnation
        self.node = "local"
        self.ready: Future[Worker] = Future()
        self.failure: StartFailure | None = None
        self.exit: WorkerExit | None = None
        self.health: Health | None = None
        self.answered = False
        self._process = WorkerProcess()
        self._kills_at_start = surroundings.memory.count()
        self._on_pong: Callable[[Any], None] | None = None
        self._surroundings = surroundings
        self._output = output
        self._lock = threading.Lock()
        self._state = WorkerState.STARTING
        self._pending: dict[int, OnReply] = {}
        self._on_exit: list[Callable[[WorkerExit], None]] = []
        self._expected = False  # the coordinator told it to end
        self._reason: str | None = None
        self._why, self._trace = "", ""  # what is known about a failed start
        self._cause_type: str | None = None
        self._joined = False  # it has said hello, so it may have sent more
        self._status: int | None = None
        self._status_known = False
        self._messages_read = False

    def __repr__(self) -> str:
        return f"<Worker {self.name} pid={self.pid} {self._state.value} pending={len(self._pending)}>"

    @property
    def state(self) -> WorkerState:
        """Where it is in its life."""
        return self._state

    @property
    def pid(self) -> int | None:
        """Its process; ``None`` before there is one."""
        return self._process.pid

    @property
    def num_pending(self) -> int:
        """Calls without a reply yet."""
        return len(self._pending)

    # --- calls, from any thread ---

    def call(
        self,
        target: Target,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        on_reply: OnReply,
        data_only: bool = False,
    ) -> int:
        """Call a method of the actor, or a function that gets the actor first; returns the request's number.

        ``on_reply`` gets the one reply on the I/O thread and must be quick. ``data_only`` travels without pickles
        either way. Arrays among the arguments must not be written to until the reply. Raises ``TypeError`` for
        arguments that cannot be sent.
        """
        prepared = prepare_call(target, args, kwargs, data_only=data_only)
        self.send(prepared, on_reply)
        return prepared.request_id

    def send(self, prepared: PreparedCall, on_reply: OnReply) -> None:
        """Make a prepared call. A call may be made to many workers, to each once."""
        self._request(prepared.request_id, prepared.frames, on_reply)

    def try_send(self, prepared: PreparedCall, on_reply: OnReply) -> bool:
        """Make a prepared call if the worker takes calls; ``False`` if not, and there will be no reply."""
        return self._accept(prepared.request_id, prepared.frames, on_reply)

    def ping(self, on_reply: OnReply) -> int:
        """Ask for ``[phase, request id in progress or None]``; answered even while user code runs."""
        request_id = next_request_id()
        self._request(request_id, encode(Message(Kind.PING, request_id, None)), on_reply)
        return request_id

    def interrupt(self, value: int) -> None:
        """Have ``current_worker().on_interrupt``'s callback called with ``value`` there, also while user code runs.

        Does nothing if the worker is not ready, or has lost its connection.
        """
        if self._state is WorkerState.READY:
            with contextlib.suppress(ConnectionClosed):
                self._surroundings.send(self.identity, Message(Kind.INTERRUPT, 0, value))

    def _request(self, request_id: int, frames: Sequence[Buffer], on_reply: OnReply) -> None:
        if self._accept(request_id, frames, on_reply):
            return
        if not self._surroundings.io.call_soon(on_reply, self._refusal(request_id)):
            on_reply(self._refusal(request_id))  # the cluster is closed and its thread has ended

    def _accept(self, request_id: int, frames: Sequence[Buffer], on_reply: OnReply) -> bool:
        with self._lock:
            if self._state is not WorkerState.READY:
                return False
            self._pending[request_id] = on_reply
        try:
            self._surroundings.send_frames(self.identity, frames)
        except ConnectionClosed:
            self._deliver(self._refusal(request_id))
        return True

    def _refusal(self, request_id: int) -> Reply:
        if self.exit is not None:
            text = self.exit.text
        else:
            text = f"{self.name} (pid {self.pid}) is {self._state.value} and takes no calls"
        return Reply(request_id, False, None, RemoteError("ActorError", text, "", self.name, self.pid, died=True))

    # --- for whoever watches it, on the I/O thread ---

    def on_pong(self, callback: Callable[[Any], None] | None) -> None:
        """Call ``callback([phase, request id or None])`` for every pong, whoever asked."""
        self._on_pong = callback

    def beat(self) -> None:
        """Ask for a pong that nobody waits for."""
        with contextlib.suppress(ConnectionClosed):
            self._surroundings.send(self.identity, Message(Kind.PING, 0, None))

    def look(self) -> Look | None:
        """What the system says of its process; ``None`` if that is gone."""
        return self._process.look()

    # --- its end, from any thread ---

    def on_exit(self, callback: Callable[[WorkerExit], None]) -> None:
        """Call ``callback`` once on the I/O thread when the process is gone and all calls have their replies."""
        with self._lock:
            if self.exit is None:
                self._on_exit.append(callback)
                return
        if not self._surroundings.io.call_soon(callback, self.exit):
            callback(self.exit)

    def kill(self, reason: str | None = None) -> None:
        """End the process with SIGKILL, its children too. ``reason`` is told in ``exit.text``; the first one counts."""
        self._expected = True
        self._reason = self._reason or reason
        self._enter(WorkerState.STOPPING)
        self._process.signal(signal.SIGKILL)
        if self.pid is None:
            self._surroundings.withdraw(self, stuck=False)

    def dump_stacks(self, done: Callable[[tuple[str, ...]], None]) -> None:
        """Have it write the stacks of all its threads, even while user code holds the GIL; then ``done(lines)``.

        ``lines`` are what it wrote within ``STACKS_S`` seconds; none, and at once, if it is gone or stopped. ``done``
        runs on the I/O thread. From any thread.
        """
        if not self._surroundings.io.call_soon(self._dump_stacks, done):
            done(())  # the cluster is closed and its thread has ended

    def _dump_stacks(self, done: Callable[[tuple[str, ...]], None]) -> None:
        if not self._process.running or self._process.stopped:
            done(())
            return
        lines: list[str] = []
        self._output.collect(lines)
        self._process.signal(STACKS_SIGNAL)

        def end() -> None:
            self._output.stop_collecting(lines)
            done(tuple(lines))

        self._surroundings.later(STACKS_S, end)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Let it finish the calls it has, then end; kill it after ``grace_s`` seconds. Returns at once."""
        self._expected = True
        was = self._state
        self._enter(WorkerState.STOPPING)
        if was is WorkerState.STARTING:
            self.kill()
        if was is not WorkerState.READY:
            return  # on its way already
        self._say_stop()
        self._surroundings.io.call_later(grace_s, self._process.signal, signal.SIGKILL)

    def _say_stop(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            self._surroundings.send(self.identity, Message(Kind.STOP, 0, None))

    def _enter(self, state: WorkerState) -> bool:
        """Change the state; ``False`` if it is there, or past it, already."""
        with self._lock:
            if state not in TRANSITIONS[self._state]:
                return False
            self._state = state
            return True

    # --- what happens to it, on the I/O thread ---

    def process_started(self, pid: int, pidfd: int) -> None:
        """The zygote has forked it. It may have said that it is ready before this is read."""
        self._process.started(pid, pidfd)
        self._surroundings.io.add_reader(pidfd, partial(self._process_ended, pidfd))
        if self._state in (WorkerState.STOPPING, WorkerState.EXITED):  # nobody wants it any more
            self._process.signal(signal.SIGKILL)

    def process_not_started(self, failure: StartFailure, why: str) -> None:
        """There will be no process."""
        self._fail(failure, why)
        self._finish()

    def status_known(self, status: int) -> None:
        """The zygote has reaped it."""
        self._status, self._status_known = status, True
        self._finish_if_settled()

    def watch_start(self) -> None:
        """Start the clock of the start deadline."""
        self._start_timer = self._surroundings.io.call_later(self.spec.start_timeout_s, self._deadline)

    def _deadline(self) -> None:
        if self._state is not WorkerState.STARTING:
            return
        limit = f"within {self.spec.start_timeout_s:.3g} s"
        if not self._process.running:
            self._fail(StartFailure.DEADLINE, f"the zygote did not start it {limit}: it is still importing, or stuck")
            self._surroundings.withdraw(self, stuck=True)
            return
        self._fail(StartFailure.DEADLINE, f"its constructor did not return {limit}; where it was is in its last lines")
        self._expected = True
        self._dump_stacks(lambda _: self._process.signal(signal.SIGKILL))

    def take(self, message: Message) -> None:
        """A message from the process."""
        kind = message.kind
        if kind is Kind.CALL_REPLY or kind is Kind.DATA_REPLY:
            self.answered = True
            self._deliver(self._reply(message))
        elif kind is Kind.PONG:
            if self._on_pong is not None:
                self._on_pong(message.body)
            self._deliver(Reply(message.request_id, True, message.body))
        elif kind is Kind.HELLO:
            self._hello()
        elif kind is Kind.READY:
            if self._enter(WorkerState.READY):
                self._start_timer.cancel()
                self.ready.set_result(self)
        elif kind is Kind.START_ERROR:
            self._refused(message.body)
        elif kind is Kind.STOP:
            self._say_stop()  # everything it sent before has arrived: it may end

    def _reply(self, message: Message) -> Reply:
        try:
            body = message.loaded().body
        except Exception as error:  # what it returned is of a class that this process cannot load, say
            text = f"the result of {self.name} (pid {self.pid}) cannot be loaded here: {error}"
            record = RemoteError(type(error).__name__, text, "", self.name, self.pid)
            return Reply(message.request_id, False, None, record)
        return read_reply(message.request_id, body, self.name, self.pid)

    def _hello(self) -> None:
        self._joined = True
        if self._state is not WorkerState.STARTING:
            return
        spec = self.spec
        body = [spec.actor_class, list(spec.args), dict(spec.kwargs)]
        try:
            self._surroundings.send(self.identity, Message(Kind.SPEC, 0, body))
        except Exception as error:
            self._fail(StartFailure.PERMANENT, f"its class or arguments cannot be sent: {error}")
            self._process.signal(signal.SIGKILL)

    def _refused(self, body: Any) -> None:
        permanent, (type_name, message, trace) = body
        failure = StartFailure.PERMANENT if permanent else StartFailure.RAISED
        self._fail(failure, f"its constructor raised {type_name}: {message}", trace, type_name)
        self._say_stop()
        self._surroundings.io.call_later(STOP_GRACE_S, self._process.signal, signal.SIGKILL)

    def _deliver(self, reply: Reply) -> None:
        on_reply = self._pending.pop(reply.request_id, None)
        if on_reply is None:
            return  # its call was given up
        try:
            on_reply(reply)
        except Exception:
            logger.exception("a callback for a reply of %s raised", self.name)

    def _fail(self, failure: StartFailure, why: str, trace: str = "", cause_type: str | None = None) -> None:
        """It did not come up; the first reason counts."""
        if self._enter(WorkerState.STOPPING) and self.failure is None:
            self.failure, self._why, self._trace, self._cause_type = failure, why, trace, cause_type

    def _process_ended(self, pidfd: int) -> None:
        self._surroundings.io.remove_reader(pidfd)
        self._process.ended()
        self._fail_if_starting()
        self._enter(WorkerState.STOPPING)
        self._messages_read = not self._joined
        self._probe()
        self._surroundings.io.call_later(READ_LIMIT_S, self.messages_read)
        self._surroundings.io.call_later(STATUS_LIMIT_S, self._status_unknown)

    def _fail_if_starting(self) -> None:
        if self._state is WorkerState.STARTING:
            self._fail(StartFailure.STOPPED if self._expected else StartFailure.DIED, "it ended before it was ready")

    def _probe(self) -> None:
        # Its connection ends after its last byte was read, so once it cannot be reached, its replies are all here.
        if self._messages_read or self._state is WorkerState.EXITED:
            return
        with contextlib.suppress(ConnectionClosed):
            self._surroundings.send(self.identity, Message(Kind.PING, 0, None))
        self._surroundings.io.call_later(PROBE_S, self._probe)

    def unreachable(self) -> None:
        """Its connection is gone."""
        if not self._process.running and self.pid is not None:
            self._surroundings.io.call_soon(self.messages_read)  # behind what this wake of the thread still reads

    def messages_read(self) -> None:
        """Everything it sent has been taken."""
        self._messages_read = True
        self._finish_if_settled()

    def _status_unknown(self) -> None:
        self._status_known = True
        self._finish_if_settled()

    def _finish_if_settled(self) -> None:
        if not self._process.running and self._messages_read and self._status_known:
            self._finish()

    def _finish(self) -> None:
        if self._state is WorkerState.EXITED:
            return
        self._start_timer.cancel()
        self._output.close()
        self.exit = exit_of(
            self.name,
            self.pid,
            self._status,
            expected=self._expected,
            last_lines=self._output.last_lines,
            memory_hint=self._memory_hint(),
            reason=self._reason,
            node=self.node,
        )
        self._enter(WorkerState.EXITED)
        for request_id in list(self._pending):
            self._deliver(self._refusal(request_id))
        self._resolve_ready()
        with self._lock:
            callbacks, self._on_exit = self._on_exit, []
        for callback in callbacks:
            try:
                callback(self.exit)
            except Exception:
                logger.exception("a callback for the exit of %s raised", self.name)
        self._surroundings.gone(self)

    def _memory_hint(self) -> str | None:
        killed = self._status is None or self._status == -signal.SIGKILL
        if self.pid is None or self._expected or not killed:
            return None
        return self._surroundings.memory.hint(self._kills_at_start)

    def _resolve_ready(self) -> None:
        if self.ready.done():
            return
        failure = self.failure or StartFailure.STOPPED
        self.failure = failure
        self.ready.set_exception(self._start_error())

    def _start_error(self) -> WorkerStartError:
        """Who, why, how it ended, and the child's traceback."""
        lines = [f"{self.name} (pid {self.pid}) did not start: {self._why or 'it was stopped'}"]
        if self.exit is not None and self.pid is not None and not self._trace:
            lines.append(self.exit.text)
        return WorkerStartError(
            "\n".join(lines),
            cause_type=self._cause_type,
            remote_traceback=self._trace,
            permanent=self.failure in (StartFailure.PERMANENT, StartFailure.STOPPED),
        )
