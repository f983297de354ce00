"""What must not travel is refused by name at the sender, and at the receiver before it costs anything."""

from __future__ import annotations

import importlib.util
import sys
import tracemalloc
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from lgroup.transport import Kind, Limits, Message, Pickled, ProtocolError, decode, encode
from lgroup.transport._wire_layout import ARRAYS, BUFFER, MAGIC, PREFIX, VERSION, Ext, Mark


class Colour(IntEnum):
    RED = 1


def frames_of(
    tree: bytes, buffers: tuple[bytes, ...] = (), *, arena: bytes = b"", kind: int = Kind.DATA
) -> list[bytes]:
    """Frames with a header of one's own, otherwise right."""
    prefix = PREFIX.pack(MAGIC, VERSION, kind, 0, 1, len(tree), len(buffers), len(arena))
    pad = bytes(-(PREFIX.size + len(tree)) % 64) if arena else b""
    return [prefix + tree + pad + arena, *buffers]


def packed(tree: Any) -> bytes:
    return msgpack.packb(tree)  # type: ignore[no-any-return]


def array_record(shape: tuple[int, ...], *, code: int = 3, frame: int = 0, offset: int = 0, nbytes: int) -> Any:
    return msgpack.ExtType(Ext.NUMPY, ARRAYS[len(shape)].pack(code, 0, 0, frame, offset, nbytes, *shape))


def mark(value: int) -> Any:
    return msgpack.ExtType(Ext.MARK, bytes([value]))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "object"),
        (lambda: 1, "function"),
        (Colour.RED, "Colour"),
        (np.array([None]), "numpy.ndarray of dtype object"),
        (np.zeros(2, [("a", "f4")]), "numpy.ndarray of dtype"),
        (np.array(["text"]), "numpy.ndarray of dtype <U4"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (torch.zeros(2).to_sparse(), "Tensor of dtype torch.float32"),
        (Pickled(b""), "Pickled"),
    ],
)
@pytest.mark.parametrize("kind", [Kind.DATA, Kind.DATA_REPLY, Kind.STORE, Kind.HELLO, Kind.READY, Kind.CONTROL])
def test_data_messages_refuse_objects_and_say_where_they_are(value: Any, name: str, kind: Kind) -> None:
    body = {"batch": {"obs": [np.zeros(2), 1, (2, value)]}}
    with pytest.raises(TypeError) as caught:
        encode(Message(kind, 1, body))
    assert str(caught.value).startswith("body['batch']['obs'][2][1]: cannot send ")
    assert name in str(caught.value)
    assert kind.name in str(caught.value)


def test_a_key_that_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match=r"key <Colour.RED: 1> of body\['a'\]: cannot send"):
        encode(Message(Kind.DATA, 1, {"a": {Colour.RED: 1}}))


def test_an_encoder_is_as_good_as_new_after_it_refused() -> None:
    for _ in range(3):
        with pytest.raises(TypeError):
            encode(Message(Kind.DATA, 1, [np.zeros(5), object()]))
        assert decode(encode(Message(Kind.DATA, 1, [np.ones(5)]))).body[0].sum() == 5


def test_encoding_inside_of_pickling_works() -> None:
    class Nested:
        def __reduce__(self) -> Any:
            return (bytes, (b"".join(map(bytes, encode(Message(Kind.DATA, 1, np.zeros(3))))),))

    assert decode(encode(Message(Kind.CALL, 1, [np.ones(2), Nested()]))).body[1][:4] == MAGIC


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {"a": 1, "b": [x]}])
def test_depth_is_bounded_at_both_ends(wrap: Callable[[Any], Any]) -> None:
    body: Any = 1
    for _ in range(60):
        body = wrap(body)
    generous, strict = Limits(max_depth=200), Limits(max_depth=50)
    frames = encode(Message(Kind.DATA, 1, body), generous)
    assert decode(frames, generous).body == body
    with pytest.raises(ValueError, match="deeper than 50"):
        encode(Message(Kind.DATA, 1, body), strict)
    with pytest.raises(ProtocolError, match="deeper than 50"):
        decode(frames, strict)


def test_a_body_that_contains_itself_is_refused() -> None:
    body: list[Any] = []
    body.append(body)
    with pytest.raises(ValueError):
        encode(Message(Kind.DATA, 1, body))


@pytest.mark.parametrize(
    ("limits", "body"),
    [
        (Limits(max_header_bytes=100), list(range(200))),
        (Limits(max_buffers=2), [np.zeros(10_000)] * 3),
        (Limits(max_message_bytes=100_000), np.zeros(20_000)),
    ],
)
def test_limits_hold_at_both_ends(limits: Limits, body: Any) -> None:
    message = Message(Kind.DATA, 1, body)
    with pytest.raises(ValueError, match="allowed"):
        encode(message, limits)
    with pytest.raises(ProtocolError):
        decode(encode(message), limits)


def test_dimensions_are_bounded() -> None:
    frames = encode(Message(Kind.DATA, 1, np.zeros((1,) * 8)))
    with pytest.raises(ProtocolError, match="8 dimensions, allowed are 4"):
        decode(frames, Limits(max_ndim=4))


BAD: dict[str, list[bytes]] = {
    "no frames": [],
    "an empty frame": [b""],
    "another protocol": [b"GET / HTTP/1.1\r\n" * 4],
    "another version": [PREFIX.pack(MAGIC, VERSION + 1, Kind.PING, 0, 1, 1, 0, 0) + b"\xc0"],
    "unknown flags": [PREFIX.pack(MAGIC, VERSION, Kind.PING, 1, 1, 1, 0, 0) + b"\xc0"],
    "an unknown kind": frames_of(b"\xc0", kind=99),
    "a header shorter than announced": [PREFIX.pack(MAGIC, VERSION, Kind.PING, 0, 1, 9, 0, 0) + b"\xc0"],
    "something behind the header": frames_of(b"\xc0\xc0"),
    "a truncated header": frames_of(b"\x93\x01"),
    "a byte msgpack does not use": frames_of(b"\xc1"),
    "text that is not UTF-8": frames_of(b"\xa1\xff"),
    "a frame nothing refers to": frames_of(b"\xc0", (b"abc",)),
    "an arena nothing refers to": frames_of(b"\xc0", arena=b"abc"),
    "an array without its frame": frames_of(packed(array_record((9,), frame=1, nbytes=9))),
    "a frame used twice": frames_of(packed([array_record((4,), frame=1, nbytes=4)] * 2), (b"abcd",)),
    "frames out of order": frames_of(
        packed([array_record((1,), frame=2, nbytes=1), array_record((1,), frame=1, nbytes=1)]), (b"a", b"b")
    ),
    "arrays that overlap": frames_of(packed([array_record((4,), nbytes=4)] * 2), arena=b"abcd"),
    "an array beyond the arena": frames_of(packed(array_record((5,), nbytes=5)), arena=b"abcd"),
    "an array that leaves a gap": frames_of(packed(array_record((4,), offset=64, nbytes=4)), arena=bytes(68)),
    "a shape that does not fit": frames_of(packed(array_record((5,), nbytes=4)), arena=b"abcd"),
    "a shape whose product is past 64 bits": frames_of(packed(array_record((2**32, 2**32 + 1), nbytes=2**32))),
    "a huge array": frames_of(packed(array_record((2**62,), nbytes=2**62))),
    "an unknown dtype": frames_of(packed(array_record((4,), code=200, nbytes=4)), arena=b"abcd"),
    "an array record cut short": frames_of(packed(msgpack.ExtType(Ext.NUMPY, b"abc"))),
    "an unknown extension": frames_of(packed(msgpack.ExtType(100, b"abc"))),
    "a mark outside of a list": frames_of(packed(mark(Mark.TUPLE))),
    "a mark inside of a list": frames_of(packed([1, mark(Mark.TUPLE)])),
    "a mark as a key": frames_of(packed({mark(Mark.TUPLE): 1})),
    "an unknown mark": frames_of(packed([mark(77)])),
    "a set of lists": frames_of(packed([mark(Mark.SET), []])),
    "a list as a key": frames_of(b"\x81\x90\xc0"),
    "a named tuple without fields": frames_of(packed([mark(Mark.NAMED_TUPLE), "m", "n"])),
    "a named tuple whose name is no name": frames_of(packed([mark(Mark.NAMED_TUPLE), "m", "a b", ["x"], 1])),
    "an ordered dict of a list": frames_of(packed([mark(Mark.ORDERED_DICT), []])),
    "a pickle's buffer without the pickle": frames_of(packed(msgpack.ExtType(Ext.PICKLE_BUFFER, BUFFER.pack(0, 0, 0)))),
    "a pickle that is a number": frames_of(packed([mark(Mark.PICKLE), 1]), kind=Kind.CALL),
    "a pickle that does not load": frames_of(packed([mark(Mark.PICKLE), b"junk"]), kind=Kind.CALL),
    "a pickle in a data message": frames_of(packed([mark(Mark.PICKLE), Pickled.dump(1).blob])),
}


@pytest.mark.parametrize("frames", BAD.values(), ids=BAD.keys())
def test_malformed_frames_raise_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames)


def test_no_pickle_of_a_data_message_is_ever_loaded() -> None:
    loaded: list[int] = []
    sys.modules["_pickle_probe"] = probe = ModuleType("_pickle_probe")
    probe.append = loaded.append  # type: ignore[attr-defined]
    blob = b"c_pickle_probe\nappend\n(I1\ntR."
    for kind in Kind:
        frames = frames_of(packed([mark(Mark.PICKLE), blob, mark(Mark.TUPLE)]), kind=kind)  # broken behind the pickle
        with pytest.raises(ProtocolError):
            decode(frames)
    assert loaded == []
    decode(frames_of(packed([mark(Mark.PICKLE), blob]), kind=Kind.CALL))
    assert loaded == [1]
    del sys.modules["_pickle_probe"]


def test_a_data_message_imports_nothing() -> None:
    decode(frames_of(packed([mark(Mark.NAMED_TUPLE), "this", "Point", ["x"], 1])))
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    "opening", [b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x10\x00\x00", b"\xdf\x00\x10\x00\x00", b"\x91"]
)
@pytest.mark.parametrize("times", [1, 50, 1000, 200_000])
def test_lists_that_lie_about_their_length_cost_no_memory(opening: bytes, times: int) -> None:
    frames = frames_of(opening * times)
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        decode(frames)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(frames[0]) + 4_000_000


def test_damaged_messages_are_rejected_or_read_in_bounded_time_and_memory() -> None:
    path = Path(__file__).parents[2] / "tools" / "fuzz_wire.py"
    spec = importlib.util.spec_from_file_location("fuzz_wire", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_wire"] = module
    spec.loader.exec_module(module)
    report = module.run(messages=10_000, seed=20)
    assert report.messages == report.rejected + report.accepted == 10_000
    assert report.accepted > 100
    assert len(report.reasons) > 20
