"""Whatever may travel arrives unchanged: value, type, dtype, shape, bits."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lgroup.transport import Kind, Message, Pickled, decode, encode
from lgroup.transport._wire_dtypes import NUMPY_DTYPES, TORCH_TYPES
from lgroup.transport.wire import OWN_FRAME_NBYTES

NUMPY_TYPES = [*NUMPY_DTYPES.values(), *map(np.dtype, ("<M8[ns]", ">M8[D]", "<m8[25s]", "<M8", "m8[Y]"))]
# Named tuples of calls are pickled, and numpy's pickles turn a big-endian datetime's bytes around.
TREE_TYPES = [dtype for dtype in NUMPY_TYPES if dtype.kind != "b" and dtype.str[:2] not in (">M", ">m")]
TORCH_DTYPES = [known.dtype for known in TORCH_TYPES.values()]


class Point(NamedTuple):
    x: Any
    y: Any


class Thing:
    def __init__(self, content: Any) -> None:
        self.content = content


def round_trip(body: Any, kind: Kind = Kind.DATA, **options: Any) -> Any:
    frames = [bytearray(frame) for frame in encode(Message(kind, 7, body))]
    message = decode(frames, **options)
    assert message == Message(kind, 7, message.body)
    return message.body


def same(left: Any, right: Any) -> bool:
    """Equal in type and bits, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and _bits(left) == _bits(right)
    if isinstance(left, (np.ndarray, np.generic)):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    return bool(left == right)


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def numpy_arrays() -> st.SearchStrategy[Any]:
    return st.builds(
        lambda dtype, shape, seed: _random_bytes(dtype.itemsize * math.prod(shape), seed).view(dtype).reshape(shape),
        st.sampled_from(TREE_TYPES),
        st.lists(st.integers(0, 4), max_size=4).map(tuple),
        st.integers(0, 1000),
    )


def tensors() -> st.SearchStrategy[torch.Tensor]:
    return st.builds(
        lambda dtype, rows, seed: _tensor(_random_bytes(16 * rows, seed), dtype).reshape(2, -1 if rows else 0),
        st.sampled_from([dtype for dtype in TORCH_DTYPES if dtype is not torch.bool]),
        st.integers(0, 3).map(lambda half: 2 * half),
        st.integers(0, 1000),
    )


def _tensor(raw: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(raw).view(dtype) if raw.size else torch.empty(0, dtype=dtype)


def _random_bytes(count: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]),
    st.complex_numbers(),
    st.text(),
    st.text(st.characters(categories=("Cs", "L"))),
    st.binary(),
    st.sampled_from(TREE_TYPES).map(lambda dtype: _random_bytes(dtype.itemsize, 3).view(dtype)[0]),
)
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.text(), st.tuples(st.integers())))
trees = st.recursive(
    st.one_of(scalars, numpy_arrays(), tensors(), st.frozensets(keys, max_size=3), st.sets(keys, max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict),
        st.builds(Point, inner, inner),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(body=trees, kind=st.sampled_from([Kind.DATA, Kind.CALL]), readonly=st.booleans())
def test_any_tree_arrives_unchanged(body: Any, kind: Kind, readonly: bool) -> None:
    assert same(round_trip(body, kind, readonly=readonly), body)


@pytest.mark.parametrize("dtype", NUMPY_TYPES, ids=str)
@pytest.mark.parametrize("length", [0, 3, OWN_FRAME_NBYTES])
def test_every_numpy_type_arrives_small_and_large(dtype: np.dtype[Any], length: int) -> None:
    raw = _random_bytes(length * dtype.itemsize, 1)
    array = (raw & 1 if dtype.kind == "b" else raw).view(dtype)
    assert same(round_trip([array, array[:0], array.reshape(1, -1)]), [array, array[:0], array.reshape(1, -1)])


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 3, OWN_FRAME_NBYTES])
def test_every_torch_type_arrives_small_and_large(dtype: torch.dtype, length: int) -> None:
    raw = _random_bytes(length * dtype.itemsize, 1)
    tensor = _tensor(raw & 1 if dtype is torch.bool else raw, dtype)
    assert same(round_trip({"t": tensor, "rows": tensor.reshape(1, -1)}), {"t": tensor, "rows": tensor.reshape(1, -1)})
    if length:
        assert same(round_trip(tensor[0]), tensor[0])


def test_arrays_that_are_not_contiguous_arrive_in_c_order() -> None:
    array = np.arange(240_000.0).reshape(400, 600)
    for view in (array.T, array[::2], array[:, ::-1], array[3:5, 7], np.asfortranarray(array), array[::40, ::40]):
        received = round_trip(view)
        assert same(received, np.ascontiguousarray(view))
        assert received.flags.c_contiguous
    tensor = torch.arange(240_000.0).reshape(400, 600)
    for part in (tensor.T, tensor[::2], tensor[3:5, 7], tensor.expand(2, 400, 600)):
        assert torch.equal(round_trip(part), part)


def test_a_tensor_loses_its_gradient_and_nothing_else() -> None:
    parameter = torch.nn.Parameter(torch.randn(5))
    received = round_trip([parameter, parameter * 2])
    assert [type(tensor) for tensor in received] == [torch.Tensor, torch.Tensor]
    assert torch.equal(received[0], parameter.detach())
    assert not any(tensor.requires_grad for tensor in received)


def test_lazily_conjugated_and_negated_tensors_arrive_as_they_read() -> None:
    tensor = torch.randn(4, dtype=torch.complex64)
    for lazy in (tensor.conj(), tensor.conj().imag):
        assert torch.equal(round_trip(lazy), lazy)


def test_arrays_and_tensors_can_be_written_and_share_no_memory_with_the_sender() -> None:
    body = {"small": np.zeros(3), "large": np.zeros(OWN_FRAME_NBYTES), "tensor": torch.zeros(3)}
    received = round_trip(body)
    for name in body:
        received[name] += 1
        assert body[name].sum() == 0


def test_bytes_that_nobody_may_write_are_copied_before_they_become_writable_arrays() -> None:
    frames = [bytes(frame) for frame in encode(Message(Kind.DATA, 1, np.zeros(OWN_FRAME_NBYTES)))]
    decode(frames).body[:] = 1
    assert decode(frames).body.sum() == 0


def test_a_read_only_array_cannot_be_written_and_a_tensor_is_private() -> None:
    frames = encode(Message(Kind.DATA, 1, [np.zeros(3), np.zeros(OWN_FRAME_NBYTES), torch.zeros(OWN_FRAME_NBYTES)]))
    small, large, tensor = decode(frames, readonly=True).body
    assert not small.flags.writeable
    assert not large.flags.writeable
    tensor += 1
    assert decode(frames).body[2].sum() == 0


def test_small_arrays_are_aligned() -> None:
    received = round_trip([b"x", np.zeros(3, np.uint8), np.zeros(2), np.zeros(1, np.complex128)])
    assert all(array.flags.aligned and array.ctypes.data % 16 == 0 for array in received[1:])


def test_small_buffers_share_the_first_frame_and_large_ones_are_sent_without_a_copy() -> None:
    large = np.zeros(OWN_FRAME_NBYTES, np.uint8)
    first, second = encode(Message(Kind.DATA, 1, [np.zeros(100), large, np.zeros(100)]))
    assert len(first) < 2000
    assert np.shares_memory(np.frombuffer(second, np.uint8), large)


def test_large_arrays_are_views_of_the_received_frame() -> None:
    frames = [bytearray(frame) for frame in encode(Message(Kind.DATA, 1, np.zeros(OWN_FRAME_NBYTES)))]
    assert np.shares_memory(decode(frames).body, np.frombuffer(frames[1], np.uint8))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, 1), lambda x: {"a": [{"b": x}]}])
def test_long_bytes_and_strings_travel_outside_of_the_header(wrap: Any) -> None:
    for content in (b"x" * 5_000_000, "é" * 3_000_000, "\ud800" * 200_000):
        frames = encode(Message(Kind.DATA, 1, wrap(content)))
        assert len(frames) == 2
        assert len(frames[0]) < 500
        assert decode(frames).body == wrap(content)


def test_bytearray_and_memoryview_arrive_as_bytes() -> None:
    assert round_trip([bytearray(b"ab"), memoryview(b"cd")]) == [b"ab", b"cd"]
    assert round_trip([bytearray(b"ab") * 200_000])[0] == b"ab" * 200_000


def test_a_named_tuple_whose_class_is_not_loaded_arrives_as_one_like_it() -> None:
    Gone = namedtuple("Gone", ["a", "_1"], rename=True)
    Gone.__module__ = "not_loaded_here"
    received = round_trip(Gone(1, [2]))
    assert received == (1, [2])
    assert (type(received).__name__, received._fields, received.a) == ("Gone", ("a", "_1"), 1)


def test_objects_travel_in_calls_with_their_arrays_outside_of_the_pickle() -> None:
    large = np.arange(100_000)
    body = {"thing": Thing(large), "function": lambda x: x + large[1], "args": (Thing(1),), 3: {Thing}}
    frames = encode(Message(Kind.CALL, 1, body))
    assert any(len(frame) == large.nbytes for frame in frames[1:])
    received = decode(frames).body
    assert np.array_equal(received["thing"].content, large)
    assert received["function"](1) == 2
    assert received["args"][0].content == 1
    assert received[3] == {Thing}


def test_pickles_can_be_loaded_later() -> None:
    frames = encode(
        Message(Kind.CALL, 9, {"a": [Thing(1)], "b": (Point(Thing(2), 0),), "c": {frozenset({Kind.PING}): 3}})
    )
    message = decode(frames, load_pickles=False)
    assert message.num_pickles == 3
    assert isinstance(message.body["a"][0], Pickled)
    loaded = message.loaded()
    assert loaded.num_pickles == 0
    assert loaded.body["a"][0].content == 1
    assert loaded.body["b"][0].x.content == 2
    assert loaded.body["c"] == {frozenset({Kind.PING}): 3}
    assert loaded.loaded() is loaded


def test_an_object_can_be_pickled_once_for_many_messages() -> None:
    pickled = Pickled.dump(Thing(np.arange(50_000)))
    assert pickled.nbytes > 400_000
    for _ in range(2):
        received = round_trip({"args": (pickled,)}, Kind.SPEC)
        assert received["args"][0].content.sum() == sum(range(50_000))
