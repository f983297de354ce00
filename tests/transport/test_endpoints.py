"""Router and Dealer over real sockets: nothing is lost or reordered, and one peer's fault stays its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from lgroup.transport import ConnectionClosed, Dealer, IOThread, Kind, Limits, Message, Pickled, Router, encode

WAIT_S = 20.0


@pytest.fixture
def io() -> Iterator[IOThread]:
    """The coordinator's thread."""
    with IOThread("router") as thread:
        yield thread


@pytest.fixture
def far() -> Iterator[IOThread]:
    """The workers' thread."""
    with IOThread("dealers") as thread:
        yield thread


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/socket" if request.param == "ipc" else "tcp://127.0.0.1:0"


@pytest.fixture
def ipc(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/socket"


def ping(number: int, body: Any = None) -> Message:
    return Message(Kind.DATA, number, body)


def test_messages_go_both_ways(io: IOThread, far: IOThread, address: str, inbox: Any) -> None:
    router = Router(io, address, lambda identity, message: router.send(identity, message))
    assert not router.address.endswith(":0")
    dealer = Dealer(far, router.address, b"worker", inbox.put)
    bodies = [None, {"obs": np.arange(5.0)}, torch.ones(400, 300), b"x" * 10_000_000, [np.zeros(50_000)] * 20]
    for number, body in enumerate(bodies):
        dealer.send(ping(number, body))
    received = inbox.wait(len(bodies))
    assert [message.request_id for message in received] == list(range(len(bodies)))
    assert np.array_equal(received[1].body["obs"], np.arange(5.0))
    assert torch.equal(received[2].body, torch.ones(400, 300))
    assert received[3].body == bodies[3]
    assert all(array.flags.writeable and array.sum() == 0 for array in received[4].body)


def test_a_dealer_may_connect_before_the_router_is_there(io: IOThread, far: IOThread, ipc: str, inbox: Any) -> None:
    dealer = Dealer(far, ipc, b"early", lambda message: None)
    for number in range(3):
        dealer.send(ping(number))
    assert "connecting" in repr(dealer)
    router = Router(io, ipc, inbox.put)
    assert [message.request_id for _, message in inbox.wait(3)] == [0, 1, 2]
    assert "open" in repr(router)


def test_threads_may_send_at_both_ends_at_once_and_nothing_is_lost(
    io: IOThread, far: IOThread, address: str, inbox: Any
) -> None:
    """The descriptor of a ZeroMQ socket signals edges, which sends may swallow: a lost one shows here as a hang."""
    num_threads, num_each = 4, 1000
    there: dict[bytes, list[int]] = {}
    back: list[int] = []

    def at_router(identity: bytes, message: Message) -> None:
        there.setdefault(identity, []).append(message.request_id)
        if sum(map(len, there.values())) == 2 * num_threads * num_each:
            inbox.put("there")

    def at_dealer(message: Message) -> None:
        back.append(message.request_id)
        if message.request_id % 10 == 0:
            io.call_soon(int)
        if len(back) == 2 * num_threads * num_each:
            inbox.put("back")

    router = Router(io, address, at_router)
    dealers = [Dealer(far, router.address, name, at_dealer) for name in (b"a", b"b")]
    hello = threading.Event()
    for dealer in dealers:
        dealer.send(ping(0))
    io.call_later(0.0, hello.set)
    inbox_of_hello = threading.Event()

    def wait_for_both() -> None:
        if len(there) == 2:
            there.clear()
            inbox_of_hello.set()
        else:
            io.call_later(0.002, wait_for_both)

    io.call_soon(wait_for_both)
    assert inbox_of_hello.wait(WAIT_S)

    def send(first: int) -> None:
        for number in range(first, first + num_each):
            for dealer in dealers:
                dealer.send(ping(number))
                router.send(dealer.identity, ping(number))

    threads = [threading.Thread(target=send, args=(index * num_each,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(inbox.wait(2)) == ["back", "there"]
    for numbers in there.values():
        assert sorted(numbers) == list(range(num_threads * num_each))
        for first in range(0, num_threads * num_each, num_each):
            own = [number for number in numbers if first <= number < first + num_each]
            assert own == sorted(own)
    assert sorted(back) == sorted(2 * list(range(num_threads * num_each)))


def test_replies_from_the_callback_keep_a_conversation_going(
    io: IOThread, far: IOThread, address: str, inbox: Any
) -> None:
    def at_dealer(message: Message) -> None:
        if message.request_id == 2000:
            inbox.put("done")
        else:
            dealer.send(ping(message.request_id + 1))

    router = Router(io, address, lambda identity, message: router.send(identity, message))
    dealer = Dealer(far, router.address, b"worker", at_dealer)
    for _ in range(3):
        dealer.send(ping(1))
    inbox.wait(3)


def test_an_unknown_peer_is_reported_and_the_others_are_served(
    io: IOThread, far: IOThread, address: str, inbox: Any
) -> None:
    unreachable: list[bytes] = []
    router = Router(io, address, inbox.put, on_unreachable=lambda identity: inbox.put(("unreachable", identity)))
    assert unreachable == []
    router.send(b"nobody", ping(1, np.zeros(100_000)))
    assert inbox.wait(1) == [("unreachable", b"nobody")]
    dealer = Dealer(far, router.address, b"somebody", lambda message: inbox.put("arrived"))
    dealer.send(ping(2))
    inbox.wait(2)
    router.send(b"somebody", ping(3))
    assert inbox.wait(3)[2] == "arrived"


def test_malformed_bytes_cost_their_sender_its_connection_and_nobody_else_anything(
    io: IOThread, far: IOThread, address: str, inbox: Any
) -> None:
    errors: list[tuple[bytes, str]] = []
    router = Router(
        io,
        address,
        inbox.put,
        on_protocol_error=lambda identity, error: errors.append((identity, str(error))),
        on_unreachable=lambda identity: inbox.put(("unreachable", identity)),
    )
    good = Dealer(far, router.address, b"good", lambda message: None)
    good.send(ping(1))
    inbox.wait(1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as bad:
        bad.setsockopt(zmq.IDENTITY, b"bad")
        bad.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        bad.connect(router.address)
        for frames in ([b"junk"], [b""], encode(ping(2)), [b"more", b"junk"]):
            bad.send_multipart(frames)
        assert bad.recv() == b""  # it is told
        good.send(ping(3))
        assert [message.request_id for _, message in inbox.wait(2)] == [1, 3]
        router.send(b"bad", ping(4))
        assert inbox.wait(3)[2] == ("unreachable", b"bad")
        assert bad.poll(0) == 0
    assert router.num_protocol_errors == 1
    assert [identity for identity, _ in errors] == [b"bad"]


def test_a_dealer_that_is_refused_is_disconnected(io: IOThread, far: IOThread, address: str, inbox: Any) -> None:
    router = Router(io, address, lambda *_: None, limits=Limits(max_header_bytes=50))
    dealer = Dealer(far, router.address, b"worker", inbox.put, on_disconnected=lambda: inbox.put("disconnected"))
    dealer.send(ping(1, list(range(1000))))
    assert inbox.wait(1) == ["disconnected"]
    with pytest.raises(ConnectionClosed):
        dealer.send(ping(2))
    assert router.num_protocol_errors == 1


def test_malformed_bytes_from_the_router_end_the_dealer(far: IOThread, address: str, inbox: Any) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        dealer = Dealer(
            far,
            router.getsockopt_string(zmq.LAST_ENDPOINT),
            b"worker",
            inbox.put,
            on_disconnected=lambda: inbox.put("disconnected"),
            on_protocol_error=lambda error: inbox.put("malformed"),
        )
        dealer.send(ping(1))
        identity, *_ = router.recv_multipart()
        router.send_multipart([identity, b"junk"])
        router.send_multipart([identity, *encode(ping(2))])
        assert inbox.wait(2) == ["malformed", "disconnected"]
        assert dealer.num_protocol_errors == 1


def test_a_disconnected_peer_is_not_heard_any_more(io: IOThread, far: IOThread, ipc: str, inbox: Any) -> None:
    router = Router(io, ipc, inbox.put)
    old, new = (Dealer(far, ipc, name, lambda message: None) for name in (b"old", b"new"))
    old.send(ping(1))
    inbox.wait(1)
    router.disconnect(b"old")
    old.send(ping(2))
    new.send(ping(3))
    new.send(ping(4))
    assert [(identity, message.request_id) for identity, message in inbox.wait(3)] == [
        (b"old", 1),
        (b"new", 3),
        (b"new", 4),
    ]


def test_a_second_peer_of_the_same_identity_changes_nothing_for_the_first(
    io: IOThread, far: IOThread, ipc: str, inbox: Any
) -> None:
    router = Router(io, ipc, lambda identity, message: router.send(identity, message))
    first = Dealer(far, ipc, b"same", lambda message: inbox.put(("first", message.request_id)))
    first.send(ping(1))
    inbox.wait(1)
    second = Dealer(far, ipc, b"same", lambda message: inbox.put(("second", message.request_id)))
    second.send(ping(2))
    for number in (3, 4, 5):
        first.send(ping(number))
    assert inbox.wait(4) == [("first", 1), ("first", 3), ("first", 4), ("first", 5)]


def test_a_lost_connection_ends_the_dealer_once(io: IOThread, far: IOThread, address: str, inbox: Any) -> None:
    router = Router(io, address, lambda identity, message: router.send(identity, message))
    dealer = Dealer(far, router.address, b"worker", inbox.put, on_disconnected=lambda: inbox.put("disconnected"))
    dealer.send(ping(1))
    inbox.wait(1)
    router.close()
    assert inbox.wait(2)[1:] == ["disconnected"]
    with pytest.raises(ConnectionClosed, match="is closed"):
        dealer.send(ping(2))
    dealer.close()
    assert far.close()
    assert len(inbox.items) == 2


def test_what_arrived_before_the_connection_was_lost_is_delivered(
    io: IOThread, far: IOThread, address: str, inbox: Any
) -> None:
    def at_router(identity: bytes, message: Message) -> None:
        for number in range(50):
            router.send(identity, ping(number))
        router.close(linger_s=WAIT_S)

    router = Router(io, address, at_router)
    Dealer(
        far, router.address, b"worker", lambda message: inbox.put(message.request_id), lambda: inbox.put("end")
    ).send(ping(0))
    assert inbox.wait(51) == [*range(50), "end"]


def test_a_connection_that_never_comes_about_ends_the_dealer(far: IOThread, ipc: str, inbox: Any) -> None:
    dealer = Dealer(far, ipc, b"w", inbox.put, on_disconnected=lambda: inbox.put("gone"), connect_timeout_s=0.05)
    dealer.send(ping(1))
    assert inbox.wait(1) == ["gone"]
    with pytest.raises(ConnectionClosed):
        dealer.send(ping(2))


def test_closing_a_dealer_oneself_is_no_disconnection(io: IOThread, far: IOThread, ipc: str, inbox: Any) -> None:
    router = Router(io, ipc, lambda identity, message: router.send(identity, message))
    dealer = Dealer(far, ipc, b"worker", inbox.put, on_disconnected=lambda: inbox.put("disconnected"))
    dealer.send(ping(1))
    inbox.wait(1)
    dealer.close()
    router.close()
    assert far.close()
    assert len(inbox.items) == 1


def test_a_message_sent_before_closing_with_a_linger_arrives(
    io: IOThread, far: IOThread, address: str, inbox: Any
) -> None:
    router = Router(io, address, inbox.put)
    dealer = Dealer(far, router.address, b"worker", lambda message: connected.set())
    connected = threading.Event()
    dealer.send(ping(0))
    inbox.wait(1)
    router.send(b"worker", ping(0))
    assert connected.wait(WAIT_S)
    dealer.send(ping(1, np.ones(2_000_000)))
    dealer.close(linger_s=WAIT_S)
    assert inbox.wait(2)[1][1].body.sum() == 2_000_000


def test_many_threads_may_close_while_others_send(io: IOThread, far: IOThread, address: str, inbox: Any) -> None:
    router = Router(io, address, inbox.put)
    dealer = Dealer(far, router.address, b"worker", lambda message: None)
    dealer.send(ping(0))
    inbox.wait(1)
    start = threading.Barrier(9)
    refused: list[str] = []

    def send(use: Callable[[], None], name: str) -> None:
        start.wait(WAIT_S)
        with pytest.raises(ConnectionClosed):
            while True:
                use()
        refused.append(name)

    def close() -> None:
        start.wait(WAIT_S)
        router.close()
        dealer.close()

    senders = [
        *(threading.Thread(target=send, args=(lambda: router.send(b"worker", ping(1)), "router")) for _ in range(2)),
        *(threading.Thread(target=send, args=(lambda: dealer.send(ping(1)), "dealer")) for _ in range(2)),
    ]
    threads = [*senders, *(threading.Thread(target=close) for _ in range(5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(refused) == ["dealer", "dealer", "router", "router"]
    assert "closed" in repr(router)
    assert "closed" in repr(dealer)


def test_ending_the_thread_closes_its_endpoints_and_leaves_nothing(tmp_path: Path, nothing_left: None) -> None:
    for number in range(5):
        with IOThread("a") as io, IOThread("b") as far:
            arrived = threading.Event()
            router = Router(io, f"ipc://{tmp_path}/{number}", lambda *_, arrived=arrived: arrived.set())
            dealer = Dealer(far, router.address, b"worker", lambda message: None)
            dealer.send(ping(1))
            assert arrived.wait(WAIT_S)
        with pytest.raises(ConnectionClosed):
            dealer.send(ping(1))
        with pytest.raises(ConnectionClosed):
            router.send(b"worker", ping(1))


def test_an_address_in_use_is_an_error_that_leaves_the_thread_usable(io: IOThread, inbox: Any) -> None:
    router = Router(io, "tcp://127.0.0.1:0", inbox.put)
    with pytest.raises(zmq.ZMQError):
        Router(io, router.address, inbox.put)
    io.call_soon(inbox.put, "alive")
    inbox.wait(1)


def test_a_callback_that_raises_costs_only_its_message(ipc: str, inbox: Any) -> None:
    errors: list[str] = []

    def at_router(identity: bytes, message: Message) -> None:
        if message.request_id == 1:
            raise ValueError("broken callback")
        inbox.put(message.request_id)

    with IOThread("router", on_error=lambda error: errors.append(str(error))) as io:
        Router(io, ipc, at_router)
        dealer = Dealer(io, ipc, b"worker", lambda message: None)
        for number in range(4):
            dealer.send(ping(number))
        assert inbox.wait(3) == [0, 2, 3]
    assert errors == ["broken callback"]


def test_a_dealer_leaves_pickles_to_its_owner_and_a_router_loads_them(
    io: IOThread, far: IOThread, ipc: str, inbox: Any
) -> None:
    router = Router(io, ipc, lambda identity, message: (inbox.put(message), router.send(identity, message)))
    dealer = Dealer(far, ipc, b"worker", inbox.put)
    dealer.send(Message(Kind.CALL, 1, Path("x")))
    at_router, at_dealer = inbox.wait(2)
    assert at_router.body == Path("x")
    assert isinstance(at_dealer.body, Pickled)
    assert at_dealer.loaded().body == Path("x")


def test_a_message_can_be_encoded_once_and_sent_to_many(io: IOThread, far: IOThread, ipc: str, inbox: Any) -> None:
    hello = threading.Semaphore(0)
    router = Router(io, ipc, lambda *_: hello.release())
    for name in (b"a", b"b", b"c"):
        Dealer(far, ipc, name, lambda message, name=name: inbox.put((name, message.body.sum()))).send(ping(0))
        assert hello.acquire(timeout=WAIT_S)
    frames = encode(ping(1, np.ones(100_000)))
    for name in (b"a", b"b", b"c"):
        router.send_frames(name, frames)
    assert sorted(inbox.wait(3)) == [(b"a", 100_000), (b"b", 100_000), (b"c", 100_000)]


def test_a_fork_may_not_use_the_parents_sockets(io: IOThread, far: IOThread, ipc: str) -> None:
    router = Router(io, ipc, lambda *_: None)
    dealer = Dealer(far, ipc, b"worker", lambda message: None)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        refused = 0
        for use in (lambda: router.send(b"worker", ping(1)), lambda: dealer.send(ping(1)), router.close, dealer.close):
            try:
                use()
            except RuntimeError as error:
                refused += "after a fork" in str(error)
        os.write(write, bytes([refused]))
        os._exit(0)
    os.close(write)
    assert os.read(read, 1) == bytes([4])
    os.close(read)
    os.waitpid(pid, 0)


PEER = """
import sys, threading
from lgroup.transport import Dealer, IOThread, Kind, Message
gone = threading.Event()
io = IOThread("peer")
io.start()
dealer = Dealer(io, sys.argv[1], b"peer", lambda message: dealer.send(message), gone.set)
dealer.send(Message(Kind.HELLO, 0))
gone.wait(60)
io.close()
"""


def test_a_killed_process_becomes_unreachable(io: IOThread, ipc: str, inbox: Any) -> None:
    unreachable = threading.Event()
    router = Router(io, ipc, inbox.put, on_unreachable=lambda identity: unreachable.set())
    peer = subprocess.Popen([sys.executable, "-c", PEER, router.address], cwd=Path(__file__).parents[2])
    inbox.wait(1, timeout_s=60)
    router.send(b"peer", ping(1, np.arange(10)))
    assert inbox.wait(2)[1][1].body.sum() == 45
    peer.send_signal(signal.SIGKILL)
    peer.wait(WAIT_S)

    def try_again() -> None:
        if not unreachable.is_set():
            router.send(b"peer", ping(2))
            io.call_later(0.01, try_again)

    io.call_soon(try_again)
    assert unreachable.wait(WAIT_S)
