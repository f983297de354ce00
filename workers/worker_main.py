"""Inside a worker: the main thread runs user code, one request after the other; one I/O thread owns the channel.

Requests are carried out in the order they came in. Each gets exactly one reply, whatever user code raises or returns;
only ``SystemExit`` and death leave it without. The process ends when the coordinator says so, is gone, or drops the
channel.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import queue
import shutil
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from lgroup.transport.endpoints import Dealer
from lgroup.transport.errors import ConnectionClosed
from lgroup.transport.io_thread import IOThread
from lgroup.transport.messages import Kind, Message
from lgroup.workers import process_setup
from lgroup.workers.calls import error_record, invoke, make_readonly, next_request_id
from lgroup.workers.context import WorkerContext, enter_worker
from lgroup.workers.interrupts import Interrupts

# A failed worker waits this long for the coordinator's word before it ends unasked.
FAREWELL_S = 5.0
PERMANENT = (ImportError, SyntaxError)


def worker_process(settings: dict[str, Any], *, output: int, coordinator: int) -> NoReturn:
    """Be the worker that ``settings`` describe, in a fresh fork of the zygote. Never returns.

    ``output`` is a pipe for stdout and stderr, ``coordinator`` a pidfd of the coordinator's process.
    """
    process_setup.detach(output)
    process_setup.forget_exit_functions()
    process_setup.adopt_surroundings(settings["env"], settings["sys_path"], settings["cwd"])
    process_setup.limit_threads(settings["num_threads"])
    process_setup.seed_generators(settings["seed"], settings["actor_index"], settings["incarnation"])
    channel = Channel(settings, coordinator)
    context = WorkerContext(
        id=settings["worker"],
        name=settings["name"],
        actor_index=settings["actor_index"],
        incarnation=settings["incarnation"],
        num_threads=settings["num_threads"],
        seed=settings["seed"],
        pid=os.getpid(),
        coordinator_pid=settings["coordinator_pid"],
        ask=channel.ask,
        interrupts=channel.interrupts,
    )
    enter_worker(context)
    channel.open(context)
    requests = Requests(channel, context)
    try:
        requests.run()
    except SystemExit as stop:  # user code wants the process to end
        requests.leave(_exit_code(stop))
    except BaseException:
        traceback.print_exc()
        _run_exit_functions()
        os._exit(1)


class Channel:
    """The worker's connection to its coordinator. Its callbacks run on the I/O thread."""

    def __init__(self, settings: dict[str, Any], coordinator: int) -> None:
        self.requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._settings = settings
        self._coordinator = coordinator
        self._io = IOThread(f"lgroup-worker-{settings['worker']}")
        self.interrupts = Interrupts(self._io.call_soon)
        self._context: WorkerContext | None = None
        self._running: int | None = None  # the request user code is carrying out
        self._asked: dict[int, queue.SimpleQueue[Any]] = {}

    def open(self, context: WorkerContext) -> None:
        """Connect and say hello."""
        self._context = context
        self._io.start()
        self._io.add_reader(self._coordinator, self._coordinator_ended)
        self._dealer = Dealer(
            self._io,
            self._settings["address"],
            self._settings["identity"].encode(),
            self._on_message,
            on_disconnected=self._disconnected,
        )
        self.send(Kind.HELLO, 0, [context.id, context.pid])

    def send(self, kind: Kind, request_id: int, body: Any) -> None:
        """Send a message; from any thread. Raises ``TypeError`` for a body that cannot be sent."""
        self._dealer.send(Message(kind, request_id, body))

    def ask(self, question: list[Any], timeout_s: float) -> Sequence[Any]:
        """The coordinator's answer to a question to its store table. Raises ``TimeoutError``."""
        if self._io.in_thread():
            raise RuntimeError("the store cannot be used from the worker's I/O thread")
        request_id = next_request_id()
        answer = self._asked[request_id] = queue.SimpleQueue()
        try:
            self.send(Kind.STORE, request_id, question)
            reply: Sequence[Any] = answer.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no answer from the coordinator to {question[:2]} within {timeout_s} s") from None
        finally:
            del self._asked[request_id]
        return reply

    def running(self, request_id: int | None) -> None:
        """Note which request is carried out, for heartbeats."""
        self._running = request_id

    def _on_message(self, message: Message) -> None:
        kind = message.kind
        if kind is Kind.PING:
            phase = self._context.phase if self._context is not None else "starting"
            self.send(Kind.PONG, message.request_id, [phase, self._running])
        elif kind is Kind.INTERRUPT:
            self.interrupts.arrived(int(message.body))
        elif kind is Kind.STORE_REPLY:
            waiting = self._asked.get(message.request_id)
            if waiting is not None:
                waiting.put(message.body)
        else:
            self.requests.put(message)

    def _disconnected(self) -> None:
        print("the connection to the coordinator is lost, so this worker ends", file=sys.stderr)
        os.killpg(0, signal.SIGKILL)

    def _coordinator_ended(self) -> None:
        # The zygote does the same; this also works when it was killed first, and that works while the GIL is held.
        shutil.rmtree(self._settings["runtime_dir"], ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


class Requests:
    """The main thread's loop."""

    def __init__(self, channel: Channel, context: WorkerContext) -> None:
        self._channel = channel
        self._context = context
        self._actor: Any = None

    def run(self) -> NoReturn:
        """Build the actor, then serve until told to stop."""
        if not self._build():
            self.leave(1)
        while True:
            message = self._channel.requests.get()
            if message.kind is Kind.STOP:
                break
            self._serve(message)
        self._actor = None
        self.leave(0)

    def _build(self) -> bool:
        spec = self._channel.requests.get()
        if spec.kind is not Kind.SPEC:  # stopped before it began
            self._channel.requests.put(spec)
            return True
        try:
            actor_class, args, kwargs = spec.loaded().body
            _check_arguments(actor_class, args, kwargs)
        except Exception as error:
            return self._refuse(error, permanent=True)
        try:
            self._actor = actor_class(*args, **kwargs)
        except Exception as error:
            return self._refuse(error, permanent=isinstance(error, PERMANENT))
        self._context.phase = "idle"  # before it says so
        self._channel.send(Kind.READY, spec.request_id, None)
        return True

    def _refuse(self, error: Exception, *, permanent: bool) -> bool:
        self._channel.send(Kind.START_ERROR, 0, [permanent, error_record(error)])
        return False

    def _serve(self, message: Message) -> None:
        reply_kind = Kind.DATA_REPLY if message.kind is Kind.DATA else Kind.CALL_REPLY
        self._context.phase = "calling"
        self._channel.running(message.request_id)
        try:
            target, args, kwargs = message.loaded().body
            if message.kind is Kind.CALL:
                make_readonly(args)
                make_readonly(kwargs)
            body = [True, invoke(self._actor, target, args, kwargs)]
        except SystemExit:
            raise
        except BaseException as error:
            body = [False, error_record(error)]
        self._channel.running(None)
        self._context.phase = "idle"
        try:
            self._channel.send(reply_kind, message.request_id, body)
        except Exception as error:  # what user code returned cannot be sent
            self._channel.send(reply_kind, message.request_id, [False, error_record(error)])

    def leave(self, code: int) -> NoReturn:
        """End the process, once the coordinator has everything that was sent: it answers the last message then."""
        _run_exit_functions()
        with contextlib.suppress(queue.Empty, ConnectionClosed):
            self._channel.send(Kind.STOP, 0, None)
            while self._channel.requests.get(timeout=FAREWELL_S).kind is not Kind.STOP:
                pass
        os._exit(code)  # not the interpreter's way out: a process group's destructors may wait for peers


def _run_exit_functions() -> None:
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1


def _check_arguments(actor_class: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise ``TypeError`` if ``actor_class`` does not take these arguments."""
    try:
        signature = inspect.signature(actor_class)
    except (TypeError, ValueError):
        return  # some built-in and extension types have none
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{getattr(actor_class, '__name__', actor_class)}{signature}: {error}") from None
