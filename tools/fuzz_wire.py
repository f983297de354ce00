"""Feed damaged messages to the decoder and see that it only ever raises ProtocolError, soon, and in little memory.

    python tools/fuzz_wire.py [--messages 1000000] [--seed 0]

Each message starts as a valid one and is damaged once to four times: bits, bytes, lengths, frames, numbers of the
prefix, the header's msgpack. What still decodes must encode again, so nothing half decoded gets out. Pickles are left
unloaded: a damaged pickle may do anything, and only authenticated peers may send one.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import struct
import sys
import time
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgpack
import numpy as np
import torch

from lgroup.transport import Kind, Limits, Message, ProtocolError, decode, encode
from lgroup.transport._wire_layout import ARRAYS, BUFFER, PREFIX

MAX_SECONDS_EACH = 1.0
MAX_GROWTH_MIB = 64
_HEADROOM_BYTES = 1 << 30  # address space beyond what is in use at the start
_LIMITS = Limits(max_header_bytes=1 << 20, max_depth=40, max_buffers=64, max_message_bytes=16 << 20)
_NUMBERS = (0, 1, 2, 7, 31, 63, 64, 65, 127, 255, 256, 4095, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)

Frames: TypeAlias = "list[bytes]"
Point = namedtuple("Point", "x y")


@dataclass
class Report:
    """What happened to the messages. ``reasons`` counts the starts of the errors' texts."""

    messages: int = 0
    rejected: int = 0
    accepted: int = 0
    slowest_s: float = 0.0
    growth_mib: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)


def seeds() -> list[Message]:
    """Valid messages in which every kind of record occurs."""
    big = np.arange(20_000, dtype=np.float32)
    return [
        Message(Kind.PING, 1),
        Message(Kind.DATA, 2, {f"c{i}": np.arange(16, dtype=np.float32) for i in range(5)}),
        Message(Kind.DATA, 3, {"big": big, "also": [big, torch.from_numpy(big)], "small": np.zeros((2, 0, 3))}),
        Message(Kind.DATA_REPLY, 4, {"t": torch.ones(3, 4, dtype=torch.bfloat16), "b": torch.tensor(True)}),
        Message(Kind.STORE, 5, ("set", "key", b"value" * 20, {1, 2.5}, frozenset({(1, "a")}), 1 << 90, 2j)),
        Message(
            Kind.CONTROL, 6, [Point(1, [Point(2, None)]), OrderedDict(a=1), np.float64(3), np.datetime64("2020", "s")]
        ),
        Message(Kind.CALL, 7, {"method": "f", "args": (lambda: 1, _Thing(big), _Thing(b"")), "kwargs": {"x": 1}}),
        Message(Kind.CALL_REPLY, 8, {(1, ("a", 2)): np.array(["2020-01-01", "NaT"], "M8[25s]"), 3: -1, None: "é"}),
        Message(Kind.DATA, 9, [[[[[[[[[1]]]]]]]], {"a": {"b": {"c": {"d": ()}}}}, "x" * 300_000, b"y" * 40_000]),
    ]


class _Thing:
    def __init__(self, content: Any) -> None:
        self.content = content


def flip_bits(rng: random.Random, frames: Frames) -> None:
    index, data = _any_frame(rng, frames)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if data:
            data[_position(rng, data)] ^= 1 << rng.randrange(8)
    frames[index] = bytes(data)


def write_bytes(rng: random.Random, frames: Frames) -> None:
    index, data = _any_frame(rng, frames)
    start = _position(rng, data)
    data[start : start + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
    frames[index] = bytes(data)


def truncate(rng: random.Random, frames: Frames) -> None:
    index, data = _any_frame(rng, frames)
    frames[index] = bytes(data[: _position(rng, data)])


def extend(rng: random.Random, frames: Frames) -> None:
    index, data = _any_frame(rng, frames)
    frames[index] = bytes(data + rng.randbytes(rng.randrange(1, 100)))


def drop_frame(rng: random.Random, frames: Frames) -> None:
    if frames:
        del frames[rng.randrange(len(frames))]


def repeat_frame(rng: random.Random, frames: Frames) -> None:
    if frames:
        frames.insert(rng.randrange(len(frames) + 1), rng.choice(frames))


def swap_frames(rng: random.Random, frames: Frames) -> None:
    rng.shuffle(frames)


def edit_prefix(rng: random.Random, frames: Frames) -> None:
    """Another number in one field of the prefix."""
    if not frames or len(frames[0]) < PREFIX.size:
        return
    values = list(PREFIX.unpack_from(frames[0]))
    field_number = rng.randrange(1, len(values))
    values[field_number] = rng.choice((*_NUMBERS, values[field_number] + rng.choice((-1, 1))))
    with contextlib.suppress(struct.error):  # does not fit the field
        frames[0] = PREFIX.pack(*values) + frames[0][PREFIX.size :]


def edit_header(rng: random.Random, frames: Frames) -> None:
    """Damage the msgpack and put its new length into the prefix, to get past the first checks."""

    def change(header: bytearray) -> bytearray:
        start = _position(rng, header)
        header[start : start + rng.randrange(6)] = rng.choice((rng.randbytes(rng.randrange(6)), _piece(rng)))
        return header

    _with_header(frames, change)


def replace_header(rng: random.Random, frames: Frames) -> None:
    """A header made of random pieces of msgpack."""
    _with_header(frames, lambda _: bytearray(b"".join(_piece(rng) for _ in range(rng.randrange(1, 12)))))


def nest(rng: random.Random, frames: Frames) -> None:
    """Lists in lists, each of which may announce more than there is."""
    opening = rng.choice((b"\x91", b"\x81\x01", b"\xdd" + rng.randbytes(4), b"\xdc\xff\xff", b"\xdf\x00\x00\x40\x00"))
    _with_header(frames, lambda _: bytearray(opening * rng.randrange(1, 3000) + rng.choice((b"", b"\xc0"))))


MUTATIONS: tuple[Callable[[random.Random, Frames], None], ...] = (
    flip_bits, write_bytes, truncate, extend, drop_frame, repeat_frame, swap_frames,
    edit_prefix, edit_header, edit_header, edit_header, replace_header, nest,
)  # fmt: skip


def _any_frame(rng: random.Random, frames: Frames) -> tuple[int, bytearray]:
    if not frames:
        frames.append(b"")
    index = 0 if rng.random() < 0.7 else rng.randrange(len(frames))
    return index, bytearray(frames[index])


def _position(rng: random.Random, data: bytes | bytearray) -> int:
    """Mostly near the start, where the numbers are."""
    return rng.randrange(min(len(data), rng.choice((40, 200, 1 << 30))) or 1) if data else 0


def _with_header(frames: Frames, change: Callable[[bytearray], bytearray]) -> None:
    if not frames or len(frames[0]) < PREFIX.size:
        return
    first = frames[0]
    values = list(PREFIX.unpack_from(first))
    end = min(PREFIX.size + values[5], len(first))
    arena_nbytes = min(values[7], len(first) - end)
    header = bytes(change(bytearray(first[PREFIX.size : end])))
    arena = first[len(first) - arena_nbytes :] if arena_nbytes else b""
    values[5], values[6], values[7] = len(header), max(0, len(frames) - 1), len(arena)
    pad = bytes(-(PREFIX.size + len(header)) % 64) if arena else b""
    frames[0] = PREFIX.pack(*values) + header + pad + arena


def _piece(rng: random.Random) -> bytes:
    """A bit of msgpack: a value, a container's start, or an extension with half sensible content."""
    choice = rng.randrange(6)
    if choice == 0:
        return bytes([rng.randrange(256)])
    if choice == 1:
        return bytes([rng.choice((0x90, 0x80, 0xA0)) + rng.randrange(5)])
    if choice == 2:
        return msgpack.packb(rng.choice((None, True, rng.choice(_NUMBERS), "obs", b"ab", 1.5, [], {})))  # type: ignore[no-any-return]
    if choice == 3:
        shape = [rng.choice((0, 1, 2, 16, rng.choice(_NUMBERS))) for _ in range(rng.randrange(4))]
        numbers = [rng.choice(_NUMBERS[:9]) % 256, rng.randrange(3), rng.randrange(3)]
        place = [rng.choice((0, 0, 1, 2)), rng.choice((0, 0, 64, 1 << 40)), rng.choice((0, 8, 64, 80_000, 1 << 62))]
        return _extension(rng.choice((1, 2)), ARRAYS[len(shape)].pack(*numbers, *place, *shape))
    if choice == 4:
        place = [rng.choice((0, 1, 2)), rng.choice((0, 64)), rng.choice((0, 5, 40_000, 1 << 50))]
        return _extension(rng.choice((3, 4, 5)), BUFFER.pack(*place))
    return _extension(rng.randrange(-2, 13) % 256, rng.randbytes(rng.choice((0, 1, 1, 4, 8, 12, 16))))


def _extension(code: int, data: bytes) -> bytes:
    return b"\xc7" + bytes([len(data), code]) + data


def run(messages: int, seed: int) -> Report:
    """Decode that many damaged messages. Raises ``AssertionError`` naming the message's number at the first fault."""
    rng = random.Random(seed)
    valid = [[bytes(frame) for frame in encode(message)] for message in seeds()]
    for frames in valid:
        decode(frames, _LIMITS, load_pickles=False)
    report = Report()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(messages):
        frames = list(rng.choice(valid))
        for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
            rng.choice(MUTATIONS)(rng, frames)
        try:
            _one(frames, report)
        except Exception as error:
            raise AssertionError(f"message {number} of seed {seed}: {type(error).__name__}: {error}") from error
    report.growth_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if report.growth_mib > MAX_GROWTH_MIB:
        raise AssertionError(f"memory grew by {report.growth_mib:.0f} MiB, allowed are {MAX_GROWTH_MIB}")
    return report


def _one(frames: Frames, report: Report) -> None:
    report.messages += 1
    start = time.perf_counter()
    try:
        message = decode(frames, _LIMITS, load_pickles=False)
    except ProtocolError as error:
        if isinstance(error.__cause__, (MemoryError, RecursionError)):
            raise AssertionError("the decoder tried to allocate or recurse without bound") from error
        report.rejected += 1
        report.reasons[_reason(error)] += 1
    else:
        report.accepted += 1
        encode(message)
    elapsed = time.perf_counter() - start
    report.slowest_s = max(report.slowest_s, elapsed)
    if elapsed > MAX_SECONDS_EACH:
        raise AssertionError(f"took {elapsed:.1f} s")


def _reason(error: ProtocolError) -> str:
    """The text without its numbers."""
    words = str(error).removeprefix("malformed message: ").split()
    return " ".join(word for word in words[:6] if not any(char.isdigit() or char in "\"'\\" for char in word))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _HEADROOM_BYTES, resource.RLIM_INFINITY))
    start = time.perf_counter()
    report = run(options.messages, options.seed)
    print(f"{report.messages:,} messages in {time.perf_counter() - start:.0f} s, seed {options.seed}")
    print(f"{report.rejected:,} rejected, all by ProtocolError; {report.accepted:,} still valid, all encoded again")
    print(f"slowest {report.slowest_s * 1e3:.1f} ms, memory grew by {report.growth_mib:.1f} MiB")
    for reason, times in report.reasons.most_common(25):
        print(f"{times:10,}  {reason}")


if __name__ == "__main__":
    main()
