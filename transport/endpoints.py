"""The two ends of the coordinator's channel to its workers.

Callbacks run on the I/O thread. Sending encodes and queues on the caller's thread and never waits; messages of one
thread to one peer arrive in the order of the calls. How much may be queued is the owner's business (``CreditWindow``).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

import zmq

from lgroup.transport._link import Link, int_option
from lgroup.transport.errors import ConnectionClosed, ProtocolError
from lgroup.transport.io_thread import IOThread
from lgroup.transport.messages import Buffer, Message
from lgroup.transport.wire import DEFAULT, Limits, decode, encode

_REFUSAL = b""
"""Instead of a message: the Router will not listen to this peer any more. ZeroMQ has no way to end one connection."""


_RETRY_S = 0.02
# ZeroMQ would go on over a new connection as if nothing had been lost, so it must not get to it before this end closes
# the socket. -1 (never) also drops what has arrived and is not read yet; so: much later than anybody can be late.
_RECONNECT_MS = 600_000
_CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_FAILED = int(
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def _ignore(*_: object) -> None:
    pass


class Router:
    """The coordinator's end: one bound socket, each peer known by the identity it connected with.

    Invariant: once an identity is refused, because it sent malformed bytes or ``disconnect`` was called, nothing from
    it reaches ``on_message`` and nothing is sent to it. Identities are never reused, so a refusal is for good.
    """

    def __init__(
        self,
        io: IOThread,
        address: str,
        on_message: Callable[[bytes, Message], object],
        on_protocol_error: Callable[[bytes, ProtocolError], object] = _ignore,
        on_unreachable: Callable[[bytes], object] = _ignore,
        *,
        limits: Limits = DEFAULT,
        load_pickles: bool = True,
        readonly: bool = False,
    ) -> None:
        """Binds ``address``: ``ipc://PATH`` or ``tcp://HOST:PORT``, port 0 or ``*`` for a free one.

        on_message: gets identity and message.
        on_protocol_error: a peer sent bytes that are no message and was refused; its owner should end it.
        on_unreachable: a message could not be sent because no peer of that identity is connected.
        load_pickles, readonly: see ``decode``.

        Raises ``zmq.ZMQError`` if the address cannot be bound.
        """
        self._io = io
        self._limits = limits
        self._on_message = on_message
        self._on_protocol_error = on_protocol_error
        self._on_unreachable = on_unreachable
        self._load_pickles = load_pickles
        self._readonly = readonly
        self._refused: set[bytes] = set()
        self._num_protocol_errors = 0
        self._link = Link(io, zmq.ROUTER, limits, self._deliver, f"Router({address!r})")
        socket = self._link.socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        try:
            socket.bind(address)
        except zmq.ZMQError:
            socket.close()
            raise
        self.address: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where peers connect to, with the real port."""
        self._link.open()

    @property
    def num_protocol_errors(self) -> int:
        """How often bytes arrived that were no message."""
        return self._num_protocol_errors

    def send(self, identity: bytes, message: Message) -> None:
        """Send to one peer, from any thread. Large arrays are not copied: do not write to them until they are sent.

        A peer that is not connected is reported to ``on_unreachable``. Raises what ``encode`` raises,
        ``ConnectionClosed`` if this end is closed, ``RuntimeError`` after a fork.
        """
        self.send_frames(identity, encode(message, self._limits))

    def send_frames(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        """As ``send`` with a message that is encoded already, to send one to many peers."""
        if identity in self._refused:
            self._io.call_soon(self._on_unreachable, identity)
            return
        try:
            sent = self._link.send([identity, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # The send may have taken the edge that announced a message, of this peer or another.
            self._io.call_soon(self._link.receive_rest)
            self._io.call_soon(self._on_unreachable, identity)
            return
        if not sent:
            raise ConnectionClosed(f"{self!r} is closed")

    def disconnect(self, identity: bytes) -> None:
        """Ignore everything from this peer from now on, and send it nothing. From any thread."""
        self._refused.add(identity)

    def close(self, linger_s: float = 0.0) -> None:
        """Close; from any thread, any number of times. What was sent has ``linger_s`` to leave."""
        self._link.close(linger_s)

    def _deliver(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        if identity in self._refused:
            return
        try:
            message = decode(frames[1:], self._limits, load_pickles=self._load_pickles, readonly=self._readonly)
        except ProtocolError as error:
            self._num_protocol_errors += 1
            self._refused.add(identity)
            with contextlib.suppress(zmq.ZMQError):  # gone already
                self._link.send([identity, _REFUSAL])
            self._io.run(self._on_protocol_error, identity, error)
            return
        self._io.run(self._on_message, identity, message)

    def __repr__(self) -> str:
        state = "closed" if self._link.closed else "open"
        address = getattr(self, "address", "unbound")
        return f"<Router {address} {state}, {self._num_protocol_errors} protocol errors>"


class _State(Enum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    CLOSED = "closed"


class Dealer:
    """A worker's end: one connection, made once. A lost connection ends it; it never connects again.

    Invariant: the state only moves forward, CONNECTING -> CONNECTED -> CLOSED; ``_outbox`` holds messages only while
    CONNECTING; ``on_disconnected`` runs at most once, and only if this end did not call ``close`` first.
    """

    def __init__(
        self,
        io: IOThread,
        address: str,
        identity: bytes,
        on_message: Callable[[Message], object],
        on_disconnected: Callable[[], object] = _ignore,
        on_protocol_error: Callable[[ProtocolError], object] = _ignore,
        *,
        limits: Limits = DEFAULT,
        load_pickles: bool = False,
        readonly: bool = False,
        connect_timeout_s: float = 30.0,
    ) -> None:
        """Starts to connect to a Router's ``address`` under an ``identity`` nobody had before (1 to 255 bytes, not
        starting with a zero byte).

        on_message: gets each message.
        on_disconnected: the connection is lost, or the Router refuses this end because of malformed bytes, or it did
        not come about within ``connect_timeout_s``.
        on_protocol_error: the other end sent bytes that are no message; the connection is closed, ``on_disconnected``
        follows.
        load_pickles, readonly: see ``decode``.
        """
        self._io = io
        self._address = address
        self.identity = identity
        self._limits = limits
        self._on_message = on_message
        self._on_disconnected = on_disconnected
        self._on_protocol_error = on_protocol_error
        self._load_pickles = load_pickles
        self._readonly = readonly
        self._num_protocol_errors = 0
        self._state = _State.CONNECTING
        self._lock = threading.Lock()  # guards _state and _outbox
        self._outbox: deque[Sequence[Buffer]] = deque()
        self._link = Link(io, zmq.DEALER, limits, self._deliver, f"Dealer({address!r}, {identity!r})")
        socket = self._link.socket
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._timer = io.call_later(connect_timeout_s, self._give_up)
        self._watch = _ConnectionWatch(io, socket, self._connected, self._lost)
        socket.connect(address)
        self._link.open()

    @property
    def num_protocol_errors(self) -> int:
        """How often bytes arrived that were no message; the first ends the connection."""
        return self._num_protocol_errors

    def send(self, message: Message) -> None:
        """Send, from any thread. Large arrays are not copied: do not write to them until they are sent.

        Raises what ``encode`` raises, ``ConnectionClosed`` if the connection is closed or lost, ``RuntimeError`` after
        a fork.
        """
        self.send_frames(encode(message, self._limits))

    def send_frames(self, frames: Sequence[Buffer]) -> None:
        """As ``send`` with a message that is encoded already."""
        if self._state is _State.CONNECTING:
            self._link.refuse_after_fork()
            with self._lock:
                if self._state is _State.CONNECTING:
                    self._outbox.append(frames)
                    return
        try:
            sent = self._link.send(frames)
        except zmq.Again:  # the connection is lost, and the I/O thread is about to notice
            sent = False
        if not sent:
            raise ConnectionClosed(f"{self!r} is closed")

    def close(self, linger_s: float = 0.0) -> None:
        """Close; from any thread, any number of times. What was sent has ``linger_s`` to leave."""
        self._link.refuse_after_fork()
        with self._lock:
            self._state = _State.CLOSED
            self._outbox.clear()
        self._timer.cancel()
        self._watch.close()
        self._link.close(linger_s)

    def _connected(self) -> None:
        with self._lock:
            if self._state is not _State.CONNECTING:
                return
            while self._outbox:
                self._link.send(self._outbox.popleft())
            self._state = _State.CONNECTED
        self._timer.cancel()

    def _lost(self) -> None:
        if self._state is _State.CONNECTED:
            self._link.receive_rest()
            self._end()
        elif self._state is _State.CONNECTING:
            self._io.call_later(_RETRY_S, self._connect_again)

    def _connect_again(self) -> None:
        if self._state is _State.CONNECTING:
            self._link.reconnect(self._address)

    def _give_up(self) -> None:
        if self._state is _State.CONNECTING:
            self._end()

    def _end(self) -> None:
        if self._state is not _State.CLOSED:
            self.close()
            self._io.run(self._on_disconnected)

    def _deliver(self, frames: list[zmq.Frame]) -> None:
        if not len(frames[0]):
            self._end()
            return
        try:
            message = decode(frames, self._limits, load_pickles=self._load_pickles, readonly=self._readonly)
        except ProtocolError as error:
            self._num_protocol_errors += 1
            self._io.run(self._on_protocol_error, error)
            self._end()
            return
        self._io.run(self._on_message, message)

    def __repr__(self) -> str:
        return f"<Dealer {self.identity!r} to {self._address} {self._state.value}>"


class _ConnectionWatch:
    """Tells when a socket's connection is usable, and when it is lost or did not come about."""

    def __init__(
        self,
        io: IOThread,
        socket: zmq.Socket[bytes],
        on_connected: Callable[[], object],
        on_lost: Callable[[], object],
    ) -> None:
        self._io = io
        self._socket = socket
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._lock = threading.Lock()  # guards _monitor
        self._monitor: zmq.Socket[bytes] | None = socket.get_monitor_socket(_CONNECTED | _FAILED)
        self._fd = int_option(self._monitor, zmq.FD)
        io.add_closer(self.close)
        io.add_reader(self._fd, self._read)
        io.call_soon(self._read)  # what happened before the descriptor was watched

    def _read(self) -> None:
        while True:
            with self._lock:
                monitor = self._monitor
                if monitor is None or not int_option(monitor, zmq.EVENTS) & zmq.POLLIN:
                    return
                event = int.from_bytes(bytes(monitor.recv_multipart(zmq.NOBLOCK)[0])[:2], "little")
            if event == _CONNECTED:
                self._on_connected()
            else:
                self._on_lost()

    def close(self) -> None:
        with self._lock:
            monitor, self._monitor = self._monitor, None
            if monitor is None:
                return
            self._io.remove_reader(self._fd)
            monitor.close(linger=0)
        self._io.remove_closer(self.close)
