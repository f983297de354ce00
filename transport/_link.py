"""What Router and Dealer have in common: one ZeroMQ socket, sent on by any thread, received from on the I/O thread.

Invariant: the socket is touched only with ``_lock`` held, and ``_closed`` is set in the same hold that closes it.
Nothing waits unseen behind the descriptor, unless ``_receiving`` is set: a promise that the I/O thread will look.

Sending happens on the caller's thread: handing the frames to the I/O thread would cost a wake and a change of threads
for each message. The price is one look at the socket's events after a send: its descriptor signals an edge, and a send
may take the edge that announced a message to the I/O thread. (A look is two system calls, 3 us here; receiving what is
there already costs none. So looks are what is saved below.)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.backend import Socket as _Raw

from lgroup.transport._forks import current_process, refuse_after_fork
from lgroup.transport._wire_layout import Limits
from lgroup.transport.io_thread import IOThread
from lgroup.transport.messages import Buffer

ZERO_COPY_NBYTES = 256 << 10
"""Frames from this size are sent from the caller's memory; below, pyzmq's bookkeeping costs as much as a copy."""

_MAX_BATCH = 256  # messages received before the thread looks at its other descriptors again
_POLLIN = int(zmq.POLLIN)
_EVENTS = int(zmq.EVENTS)
_NOBLOCK = int(zmq.NOBLOCK)
_SNDMORE_NOBLOCK = int(zmq.SNDMORE) | int(zmq.NOBLOCK)
# The wrappers of zmq.Socket check what is known here already: 1 us of 4 for each frame.
_send: Any = _Raw.send
_recv: Any = _Raw.recv
_get: Any = _Raw.get


def int_option(socket: zmq.Socket[bytes], option: int) -> int:
    """The value of a socket option that is a number."""
    return int(socket.getsockopt(option))


class Link:
    """One socket on an I/O thread; ``deliver`` gets the frames of each message, on that thread."""

    def __init__(
        self,
        io: IOThread,
        kind: int,
        limits: Limits,
        deliver: Callable[[list[zmq.Frame]], None],
        name: str,
    ) -> None:
        self._io = io
        self._deliver = deliver
        self._name = name
        self._process = current_process()
        self._lock = threading.Lock()
        self._closed = False
        self._receiving = False
        self.socket: zmq.Socket[bytes] = io.context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)

    def open(self) -> None:
        """Start receiving; the socket is bound or connecting by now."""
        self._fd: int = int_option(self.socket, zmq.FD)
        self._io.add_closer(self.close)
        self._io.add_reader(self._fd, self._receive)
        self._io.call_soon(self._receive)  # what came before the descriptor was watched

    @property
    def closed(self) -> bool:
        return self._closed

    def refuse_after_fork(self) -> None:
        """Raise ``RuntimeError`` in a fork of the process that made this."""
        refuse_after_fork(self._process, self)

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Queue the frames as one message, without waiting. False if this end is closed.

        Raises ``zmq.ZMQError`` as the socket does.
        """
        self.refuse_after_fork()
        last = len(frames) - 1
        with self._lock:
            if self._closed:
                return False
            socket = self.socket
            for frame in frames[:last]:
                _send(socket, frame, _SNDMORE_NOBLOCK, len(frame) < ZERO_COPY_NBYTES)
            frame = frames[last]
            _send(socket, frame, _NOBLOCK, len(frame) < ZERO_COPY_NBYTES)
            if self._receiving or not _get(socket, _EVENTS) & _POLLIN:
                return True
            self._receiving = True
        self._io.call_soon(self._receive)
        return True

    def reconnect(self, address: str) -> None:
        """Connect once more after a connection failed; its pipe goes, or messages would be dealt to it too."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(zmq.ZMQError):
                    self.socket.disconnect(address)
                self.socket.connect(address)

    def receive_rest(self) -> None:
        """On the I/O thread, once the connection is lost: deliver what arrived before."""
        while not self._closed and (frames := self._next(self.socket, check=True)) is not None:
            self._deliver(frames)

    def _receive(self) -> None:
        """Deliver what has arrived, up to a batch.

        Each message is delivered only after looking for the next one. A thread that the delivery wakes can then go on
        at once, where it would wait for this one to let go of the interpreter.
        """
        socket = self.socket
        deliver = self._deliver
        frames = self._next(socket, check=False)
        for _ in range(_MAX_BATCH):
            if frames is None:
                return
            following = self._next(socket, check=True)
            deliver(frames)
            if self._closed:  # by what was just delivered: the next is not for anybody
                return
            frames = following
        if frames is not None:
            deliver(frames)
            self._io.call_soon(self._receive)

    def _next(self, socket: zmq.Socket[bytes], *, check: bool) -> list[zmq.Frame] | None:
        """The next message's frames; None, and ``_receiving`` is off, if there is none."""
        with self._lock:
            try:
                if not self._closed and (not check or _get(socket, _EVENTS) & _POLLIN):
                    frame: Any = _recv(socket, _NOBLOCK, False)
                    frames = [frame]
                    while frame.more:
                        frame = _recv(socket, _NOBLOCK, False)
                        frames.append(frame)
                    self._receiving = True
                    return frames
            except zmq.Again:
                pass
            self._receiving = False
            return None

    def close(self, linger_s: float = 0.0) -> bool:
        """Close the socket; what was sent has ``linger_s`` to leave. False if it was closed before."""
        self.refuse_after_fork()
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._io.remove_reader(self._fd)
            self.socket.close(linger=round(linger_s * 1000))
        self._io.remove_closer(self.close)
        return True

    def __repr__(self) -> str:
        return self._name
