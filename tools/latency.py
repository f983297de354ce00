"""Print what a message costs between two processes, with every change of threads that a call of an actor makes.

The client's main thread sends by a Router and waits for a queue; the server's I/O thread receives by a Dealer, hands
the message to its main thread through a queue, which answers. Besides: the same with the answer coming from the
server's I/O thread, sockets of ZeroMQ alone, and the time of encoding and decoding.

    python tools/latency.py [--rounds 3000] [--tcp]
"""

from __future__ import annotations

import argparse
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import zmq

from lgroup.transport import Dealer, IOThread, Kind, Message, Router, decode, encode

_MIB = 1 << 20


def serve(address: str) -> None:
    """Answer every DATA message with its own body, CONTROL ones from the I/O thread; end at STOP."""
    sys.setswitchinterval(0.0005)
    requests: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def on_message(message: Message) -> None:
        if message.kind is Kind.CONTROL:
            dealer.send(Message(Kind.CONTROL, message.request_id, message.body))
        else:
            requests.put(None if message.kind is Kind.STOP else message)

    with IOThread("server") as io:
        dealer = Dealer(io, address, b"server", on_message, lambda: requests.put(None))
        dealer.send(Message(Kind.HELLO, 0))
        while (message := requests.get()) is not None:
            body = len(message.body) if message.kind is Kind.CALL else message.body
            dealer.send(Message(Kind.DATA_REPLY, message.request_id, body))
        dealer.close()


def serve_raw(address: str) -> None:
    """Echo on a plain socket until an empty frame."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        socket.send(b"hello")
        while data := socket.recv(copy=False).bytes:
            socket.send(data)


def timed(rounds: int, once: Callable[[int], object]) -> str:
    """Median, and the 10th and 90th percentile, in microseconds."""
    times = []
    for number in range(rounds + rounds // 5):
        start = time.perf_counter()
        once(number)
        times.append((time.perf_counter() - start) * 1e6)
    times = sorted(times[rounds // 5 :])
    return f"{statistics.median(times):9.1f} us   ({times[rounds // 10]:.1f} .. {times[rounds * 9 // 10]:.1f})"


def measure_codec(rounds: int) -> None:
    arrays = {f"column {i}": np.zeros(64, np.float32) for i in range(10)}
    bodies: dict[str, Any] = {
        "10 numpy arrays of 256 bytes": arrays,
        "10 tensors of 256 bytes": {name: torch.from_numpy(array) for name, array in arrays.items()},
        "a call with 1 KiB of bytes": {"method": "step", "args": (bytes(1024),), "kwargs": {}},
        "None": None,
    }
    for name, body in bodies.items():
        message = Message(Kind.DATA, 1, body)
        frames = encode(message)
        print(f"encode {name:30}", timed(rounds, lambda _, m=message: encode(m)))
        print(f"decode {name:30}", timed(rounds, lambda _, f=frames: decode(f)))


def measure_link(address: str, rounds: int) -> None:
    replies: queue.SimpleQueue[Message] = queue.SimpleQueue()
    with IOThread("client") as io:
        router = Router(io, address, lambda identity, message: replies.put(message))
        server = subprocess.Popen([sys.executable, __file__, "--serve", router.address])

        def call(kind: Kind, body: Any) -> Callable[[int], object]:
            def once(number: int) -> object:
                router.send(b"server", Message(kind, number, body))
                return replies.get(timeout=60)

            return once

        replies.get(timeout=60)
        one_kib = np.zeros(1024, np.uint8)
        print(f"{'round trip, 1 KiB array':37}", timed(rounds, call(Kind.DATA, one_kib)))
        print(f"{'round trip, 1 KiB bytes':37}", timed(rounds, call(Kind.DATA, bytes(1024))))
        print(f"{'round trip, 1 KiB, I/O thread answers':37}", timed(rounds, call(Kind.CONTROL, one_kib)))
        print(f"{'round trip, 10 arrays':37}", timed(rounds, call(Kind.DATA, {str(i): one_kib for i in range(10)})))
        for nbytes in (32 << 10, 128 << 10, _MIB, 16 * _MIB, 128 * _MIB):
            body = np.zeros(nbytes, np.uint8)
            few = max(5, min(rounds, (256 * _MIB) // nbytes))
            print(f"{f'{nbytes >> 10:,} KiB there, a number back':37}", timed(few, call(Kind.CALL, body)))
        router.send(b"server", Message(Kind.STOP, 0))
        server.wait(timeout=60)
        router.close()


def measure_raw(address: str, rounds: int) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(address)
        last = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        server = subprocess.Popen([sys.executable, __file__, "--serve-raw", last])
        identity, _ = socket.recv_multipart()

        def once(_: int) -> object:
            socket.send_multipart([identity, bytes(1024)])
            return socket.recv_multipart()

        print(f"{'plain ZeroMQ, 1 KiB, no thread':37}", timed(rounds, once))
        socket.send_multipart([identity, b""])
        server.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--tcp", action="store_true", help="loopback tcp instead of ipc")
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--serve-raw", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    if options.serve_raw:
        return serve_raw(options.serve_raw)
    with tempfile.TemporaryDirectory() as folder:
        addresses = [f"ipc://{folder}/{name}" for name in "ab"]
        if options.tcp:
            addresses = ["tcp://127.0.0.1:*"] * 2
        measure_codec(options.rounds)
        measure_raw(addresses[0], options.rounds)
        measure_link(addresses[1], options.rounds)
    return None


if __name__ == "__main__":
    main()
