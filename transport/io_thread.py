"""One thread that owns sockets, descriptors and timers.

Invariant: callbacks run on the thread, one at a time, those of ``call_soon`` in the order of the calls. A call accepted
before ``close`` runs before the thread ends; after ``close`` nothing runs. A state only moves forward:
NEW -> RUNNING -> CLOSING -> CLOSED.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from itertools import count
from math import inf
from typing import Any, TypeAlias

import zmq

from lgroup.transport._forks import current_process, refuse_after_fork
from lgroup.transport.errors import ConnectionClosed

_log = logging.getLogger("lgroup.transport")

_Callback: TypeAlias = Callable[..., object]
_CANCELLED_BEFORE_CLEANING = 256  # timers of answered requests are cancelled: most of them, so the heap is cleaned
_MAX_BATCH = 1000  # queued calls between two looks at the descriptors


class _State(Enum):
    NEW = "new"
    RUNNING = "running"
    CLOSING = "closing"
    CLOSED = "closed"


class Timer:
    """A call that will happen once, unless cancelled before. ``cancel`` may be called from any thread, repeatedly."""

    __slots__ = ("_args", "_callback", "_owner", "deadline")

    def __init__(self, owner: IOThread, deadline: float, callback: _Callback, args: tuple[Any, ...]) -> None:
        self.deadline = deadline
        """When it is due, in seconds of ``time.monotonic()``."""
        self._owner = owner
        self._callback: _Callback | None = callback
        self._args = args

    def cancel(self) -> None:
        if self._callback is not None:
            self._callback = None
            self._args = ()
            self._owner._num_cancelled += 1

    @property
    def cancelled_or_done(self) -> bool:
        return self._callback is None

    def _take(self) -> tuple[_Callback | None, tuple[Any, ...]]:
        callback, args = self._callback, self._args
        self._callback = None
        self._args = ()
        return callback, args


class IOThread:
    """One thread that waits for descriptors, timers and calls from other threads, and runs their callbacks.

    ``on_error`` gets every exception that a callback raises (default: logged); none of them ends the thread.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], object] | None = None) -> None:
        self.name = name
        self._on_error = on_error or self._report
        self._process = current_process()
        self._state = _State.NEW
        self._lock = threading.Lock()  # guards _state, _context and the wake descriptors
        self._poll, self._poll_unit = _poll_object()
        self._readers: dict[int, _Callback] = {}
        self._calls: deque[tuple[_Callback, tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._new_timers: deque[Timer] = deque()  # of other threads, on their way into _timers
        self._sleeps_until = inf
        self._timer_numbers = count()
        self._num_cancelled = 0
        self._closers: list[Callable[[], object]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._wake_pending = False
        self._wake_read, self._wake_write = _wake_descriptors()
        self._poll.register(self._wake_read, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ident: int | None = None
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return f"<IOThread {self.name!r} {self._state.value}, {len(self._readers)} readers, {len(self._timers)} timers>"

    def __enter__(self) -> IOThread:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """The ZeroMQ context of the endpoints on this thread; ended with it. Raises ``ConnectionClosed`` after that."""
        refuse_after_fork(self._process, self)
        with self._lock:
            if self._state in (_State.CLOSING, _State.CLOSED):
                raise ConnectionClosed(f"{self!r} is closed")
            if self._context is None:
                self._context = zmq.Context()
            return self._context

    def start(self) -> None:
        """Start the thread; again is harmless. Raises ``RuntimeError`` once closed, or after a fork."""
        refuse_after_fork(self._process, self)
        with self._lock:
            if self._state is _State.RUNNING:
                return
            if self._state is not _State.NEW:
                raise RuntimeError(f"{self!r} cannot start again")
            self._state = _State.RUNNING
            self._thread.start()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Run the calls accepted so far, close the endpoints, end the thread. From any thread, any number of times.

        Returns whether the thread ended within ``timeout_s``. On the thread itself it only asks for the end.
        """
        refuse_after_fork(self._process, self)
        with self._lock:
            state = self._state
            if state in (_State.NEW, _State.RUNNING):
                self._state = _State.CLOSING
        if state is _State.NEW:
            self._finish()
            return True
        if state is not _State.CLOSED:
            self._wake()
        if self.in_thread():
            return False
        return self._ended.wait(timeout_s)

    def in_thread(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.get_ident() == self._ident

    def call_soon(self, callback: _Callback, *args: Any) -> bool:
        """Run ``callback(*args)`` on the thread, after all earlier calls. False if it is closed: it will not run."""
        refuse_after_fork(self._process, self)
        if self._state is not _State.RUNNING and self._state is not _State.NEW and not self.in_thread():
            return False
        self._calls.append((callback, args))
        if not self._wake_pending and threading.get_ident() != self._ident:
            self._wake()
        return True

    def call_later(self, delay_s: float, callback: _Callback, *args: Any) -> Timer:
        """Run ``callback(*args)`` on the thread ``delay_s`` seconds from now, to the next millisecond."""
        timer = Timer(self, time.monotonic() + delay_s, callback, args)
        if self.in_thread():
            self._schedule(timer)
            return timer
        refuse_after_fork(self._process, self)
        self._new_timers.append(timer)
        if timer.deadline < self._sleeps_until:
            self.call_soon(_nothing)
        return timer

    def add_reader(self, fd: int, callback: Callable[[], object]) -> None:
        """Call ``callback()`` on the thread while ``fd`` is readable, or at its end; now and then for nothing.

        From any thread. Replaces an earlier callback of ``fd``.
        """
        refuse_after_fork(self._process, self)
        new = fd not in self._readers
        self._readers[fd] = callback
        if new:
            self._poll.register(fd, select.POLLIN)

    def remove_reader(self, fd: int) -> None:
        """Forget ``fd``; call it before closing the descriptor. From any thread; harmless if it is not known."""
        if self._readers.pop(fd, None) is not None:
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile, the descriptor or the thread
                self._poll.unregister(fd)

    def add_closer(self, closer: Callable[[], object]) -> None:
        """Call ``closer()`` at the end of the thread, before its context ends; the last added first."""
        self._closers.append(closer)

    def remove_closer(self, closer: Callable[[], object]) -> None:
        """Forget ``closer``; harmless if it is not known."""
        if closer in self._closers:
            self._closers.remove(closer)

    def _wake(self) -> None:
        self._wake_pending = True
        with self._lock:  # else the number could be another's descriptor by now
            if self._state is not _State.CLOSED:
                with contextlib.suppress(BlockingIOError):  # full, so it is readable
                    os.write(self._wake_write, b"\1\0\0\0\0\0\0\0")

    def _run(self) -> None:
        self._ident = threading.get_ident()
        try:
            while self._state is _State.RUNNING:
                self._turn()
            while self._calls:
                self._run_calls()
        finally:
            self._finish()

    def _turn(self) -> None:
        for fd, _ in self._poll.poll(self._wait()):
            if fd == self._wake_read:
                _drain(fd)
                # Cleared before the calls are looked at: one appended from here on writes again.
                self._wake_pending = False
                continue
            callback = self._readers.get(fd)
            if callback is not None:  # else removed by a callback of this turn
                self.run(callback)
        if self._calls:
            self._run_calls()
        if self._timers or self._new_timers:
            self._run_timers()

    def _wait(self) -> float | None:
        """How long to wait for descriptors, in the unit of ``_poll``; None: for ever."""
        timers = self._timers
        while True:
            self._sleeps_until = timers[0][0] if timers else inf
            # Looked at after the line above: whoever adds a timer from here on sees when this thread wakes.
            if not self._new_timers:
                break
            while self._new_timers:
                self._schedule(self._new_timers.popleft())
        if self._calls:
            return 0.0
        return max(0.0, timers[0][0] - time.monotonic()) * self._poll_unit if timers else None

    def _run_calls(self) -> None:
        calls = self._calls
        for _ in range(min(len(calls), _MAX_BATCH)):
            callback, args = calls.popleft()
            self.run(callback, *args)

    def _run_timers(self) -> None:
        timers = self._timers
        now = time.monotonic()
        while timers and timers[0][0] <= now:
            callback, args = heapq.heappop(timers)[2]._take()
            if callback is None:
                self._num_cancelled -= 1
            else:
                self.run(callback, *args)
        if self._num_cancelled > _CANCELLED_BEFORE_CLEANING and self._num_cancelled * 2 > len(timers):
            timers[:] = [entry for entry in timers if not entry[2].cancelled_or_done]
            heapq.heapify(timers)
            self._num_cancelled = 0

    def _schedule(self, timer: Timer) -> None:
        heapq.heappush(self._timers, (timer.deadline, next(self._timer_numbers), timer))

    def run(self, callback: _Callback, *args: Any) -> None:
        """Run ``callback(*args)`` here and now; what it raises goes to ``on_error``. Only on the thread itself."""
        try:
            callback(*args)
        except BaseException as error:  # even SystemExit: it would end the thread and with it every peer
            try:
                self._on_error(error)
            except BaseException:
                _log.exception("on_error of %r raised", self)

    def _report(self, error: BaseException) -> None:
        _log.error("a callback on %r raised", self, exc_info=error)

    def _finish(self) -> None:
        for closer in reversed(self._closers):
            self.run(closer)
        self._closers.clear()
        with self._lock:
            self._state = _State.CLOSED
            context, self._context = self._context, None
            for fd in {self._wake_read, self._wake_write}:
                os.close(fd)
        if context is not None:
            context.term()
        self._calls.clear()
        self._timers.clear()
        self._readers.clear()
        self._new_timers.clear()
        if hasattr(self._poll, "close"):
            self._poll.close()
        self._ident = None  # a thread that starts from now on may get the same one
        self._ended.set()


def _wake_descriptors() -> tuple[int, int]:
    """A descriptor to read and one to write; an eventfd is both."""
    if hasattr(os, "eventfd"):
        fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return fd, fd
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write


def _poll_object() -> tuple[Any, float]:
    """What waits for descriptors, and how many of its units of time a second has. selectors costs 2 us more a turn."""
    if hasattr(select, "epoll"):
        return select.epoll(), 1.0
    return select.poll(), 1000.0


def _nothing() -> None:
    pass


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 4096)
