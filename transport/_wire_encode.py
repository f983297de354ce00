"""A message's tree to frames. The tree is walked by msgpack in C; Python is called for what msgpack does not know."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgpack
import numpy as np
import torch

from lgroup.transport._wire_dtypes import NUMPY_CODES, TORCH_CODES, TORCH_TYPES, numpy_code
from lgroup.transport._wire_layout import (
    ALIGNMENT,
    ARRAYS,
    BUFFER,
    COMPLEX,
    DEFAULT,
    MAGIC,
    PREFIX,
    SCALAR,
    VERSION,
    Ext,
    Limits,
    Mark,
    container_bound,
    depth_exceeds,
)
from lgroup.transport.messages import PICKLE_KINDS, Buffer, Message, Pickled

OWN_FRAME_NBYTES = 32 << 10
"""From this size a buffer gets its own frame and is not copied; below, copying costs less than a frame."""

_MOVE_HEADER_NBYTES = 256 << 10  # a header beyond this is searched for long bytes and strings to move into frames
_PADS = tuple(bytes(n) for n in range(ALIGNMENT))
_ext_type = msgpack.ExtType
_new_tuple = tuple.__new__
_NUMPY, _TORCH = int(Ext.NUMPY), int(Ext.TORCH)
_STRIDED = torch.strided
_Tensor = torch.Tensor


def _ext(code: int, data: bytes) -> Any:
    # ExtType's own constructor checks its arguments in Python, 0.4 us each; these are right by construction.
    return _new_tuple(_ext_type, (code, data))


_MARKS = {mark: _ext(int(Ext.MARK), bytes([mark])) for mark in Mark}
_TUPLE = _MARKS[Mark.TUPLE]


class _Unsendable(Exception):
    """``value`` cannot travel in this kind of message; the caller finds out where it is and raises ``TypeError``."""

    def __init__(self, value: object, why: str) -> None:
        super().__init__(why)
        self.value = value


class _Encoder:
    """Scratch state of one encoding, kept for the next. ``pack`` visits the tree; buffers are placed as they come."""

    __slots__ = ("_packer", "arena", "arena_nbytes", "frames", "pickles")

    def __init__(self) -> None:
        self._packer = msgpack.Packer(default=self._default, strict_types=True)
        self.reset(pickles=False)

    def reset(self, *, pickles: bool) -> None:
        self.arena: list[bytes | memoryview] = []
        self.arena_nbytes = 0
        self.frames: list[Buffer] = []
        self.pickles = pickles

    def pack(self, body: Any) -> bytes:
        try:
            return self._packer.pack(body)  # type: ignore[no-any-return]
        except UnicodeEncodeError:  # lone surrogates, as os.fsdecode makes them; a packer that takes them is slower
            self.reset(pickles=self.pickles)
            lenient = msgpack.Packer(default=self._default, strict_types=True, unicode_errors="surrogatepass")
            return lenient.pack(body)  # type: ignore[no-any-return]

    def _default(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            return self._numpy(value)
        if kind is _Tensor:
            return self._tensor(value)
        if kind is tuple:
            for item in value:
                if type(item) is bytes and len(item) >= _MOVE_HEADER_NBYTES:
                    return [_TUPLE, *map(self._moved, value)]
            return [_TUPLE, *value]
        return _handler_of(kind)(self, value)

    def _moved(self, value: Any) -> Any:
        return self.long_bytes(value) if type(value) is bytes and len(value) >= OWN_FRAME_NBYTES else value

    def place(self, data: bytes | memoryview) -> tuple[int, int, int]:
        """Put a buffer behind the others. Returns frame (0: arena), offset, nbytes."""
        nbytes = len(data)
        if nbytes >= OWN_FRAME_NBYTES:
            self.frames.append(data)
            return len(self.frames), 0, nbytes
        end = self.arena_nbytes
        pad = -end % ALIGNMENT
        if pad:
            self.arena.append(_PADS[pad])
            end += pad
        self.arena.append(data)
        self.arena_nbytes = end + nbytes
        return 0, end, nbytes

    def long_bytes(self, value: bytes) -> Any:
        return _ext(Ext.BYTES, BUFFER.pack(*self.place(value)))

    def long_str(self, value: str) -> Any:
        return _ext(Ext.STR, BUFFER.pack(*self.place(value.encode("utf-8", "surrogatepass"))))

    def _numpy(self, array: np.ndarray[Any, np.dtype[Any]]) -> Any:
        dtype = array.dtype
        code = NUMPY_CODES.get(dtype)
        unit = count = 0
        if code is None:
            found = numpy_code(dtype)
            if found is None:
                return self._other(array)
            code, unit, count = found
        place = self.place(array.tobytes() if array.nbytes < OWN_FRAME_NBYTES else _bytes_of(array))
        shape = array.shape
        return _new_tuple(_ext_type, (_NUMPY, ARRAYS[len(shape)].pack(code, unit, count, *place, *shape)))

    def _tensor(self, tensor: torch.Tensor) -> Any:
        code = TORCH_CODES.get(tensor.dtype)
        if code is None or tensor.layout is not _STRIDED:
            return self._other(tensor)
        if not tensor.is_cpu:
            raise _Unsendable(tensor, f"a tensor on {tensor.device} (move it to the CPU first)")
        carrier = TORCH_TYPES[code].carrier
        try:
            array = (tensor if carrier is None else tensor.view(carrier)).numpy()
        except RuntimeError:  # needs a gradient, or is lazily conjugated or negated; each check costs 0.4 us
            plain = tensor.detach().resolve_conj().resolve_neg()
            array = (plain if carrier is None else plain.view(carrier)).numpy()
        place = self.place(array.tobytes() if array.nbytes < OWN_FRAME_NBYTES else _bytes_of(array))
        shape = tensor.shape
        return _new_tuple(_ext_type, (_TORCH, ARRAYS[len(shape)].pack(code, 0, 0, *place, *shape)))

    def _scalar(self, value: np.generic) -> Any:
        code = numpy_code(value.dtype)
        if code is None:
            return self._other(value)
        return _ext(Ext.NUMPY_SCALAR, SCALAR.pack(*code) + value.tobytes())

    def _big_int(self, value: int) -> Any:
        return _ext(Ext.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))

    def _complex(self, value: complex) -> Any:
        return _ext(Ext.COMPLEX, COMPLEX.pack(value.real, value.imag))

    def _set(self, value: set[Any]) -> Any:
        return [_MARKS[Mark.SET], *value]

    def _frozen_set(self, value: frozenset[Any]) -> Any:
        return [_MARKS[Mark.FROZEN_SET], *value]

    def _ordered_dict(self, value: OrderedDict[Any, Any]) -> Any:
        return [_MARKS[Mark.ORDERED_DICT], dict(value)]

    def _named_tuple(self, value: Any) -> Any:
        kind = type(value)
        if self.pickles:  # where pickles may travel the class does too, even one of __main__
            return self._other(value)
        return [_MARKS[Mark.NAMED_TUPLE], kind.__module__, kind.__qualname__, list(kind._fields), *value]

    def _pickled(self, value: Pickled) -> Any:
        if not self.pickles:
            raise _Unsendable(value, "a Pickled")
        blob = value.blob if len(value.blob) < OWN_FRAME_NBYTES else self.long_bytes(value.blob)
        buffers = [_ext(Ext.PICKLE_BUFFER, BUFFER.pack(*self.place(_flat(buffer)))) for buffer in value.buffers]
        return [_MARKS[Mark.PICKLE], blob, *buffers]

    def _other(self, value: object) -> Any:
        if self.pickles:
            return self._pickled(Pickled.dump(value))
        raise _Unsendable(value, _described(value))


_Handler: TypeAlias = Callable[[_Encoder, Any], Any]

_HANDLERS: dict[type, _Handler] = {
    torch.Tensor: _Encoder._tensor,
    torch.nn.Parameter: _Encoder._tensor,
    set: _Encoder._set,
    frozenset: _Encoder._frozen_set,
    int: _Encoder._big_int,
    complex: _Encoder._complex,
    OrderedDict: _Encoder._ordered_dict,
    Pickled: _Encoder._pickled,
    np.memmap: _Encoder._numpy,
}


def _handler_of(kind: type) -> _Handler:
    handler = _HANDLERS.get(kind)
    if handler is not None:
        return handler
    if issubclass(kind, np.generic):
        return _Encoder._scalar
    if issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
        return _Encoder._named_tuple
    return _Encoder._other


def _bytes_of(array: np.ndarray[Any, np.dtype[Any]]) -> memoryview:
    """The array's memory in C order, without a copy where it lies so already."""
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    return memoryview(flat.view(np.uint8))  # through uint8: datetimes export no buffer


def _flat(buffer: Buffer) -> bytes | memoryview:
    view = memoryview(buffer)
    return buffer if isinstance(buffer, bytes) else view.cast("B")


def _described(value: object) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    dtype = getattr(value, "dtype", None)
    return name if dtype is None else f"{name} of dtype {dtype}"


_encoders: list[_Encoder] = []  # idle ones; taken and given back by atomic list operations


def encode(message: Message, limits: Limits = DEFAULT) -> list[Buffer]:
    """The frames of a message. Large contiguous buffers are views of the caller's memory: keep it unchanged until sent.

    Raises ``TypeError`` naming the place in the body for what cannot travel in a message of this kind, ``ValueError``
    for a body beyond ``limits``. What pickling raises passes through.
    """
    try:
        encoder = _encoders.pop()
    except IndexError:
        encoder = _Encoder()
    encoder.reset(pickles=message.kind in PICKLE_KINDS)
    body = message.body
    try:
        header = encoder.pack(body)
        if len(header) > _MOVE_HEADER_NBYTES:
            encoder.reset(pickles=encoder.pickles)
            header = encoder.pack(_with_long_moved(encoder, body))
        if container_bound(header) > limits.max_depth and depth_exceeds(body, limits.max_depth):
            raise ValueError(f"body is nested deeper than {limits.max_depth} levels")
        frames = _frames(message, encoder, header)
        _check(frames, header, limits)
    except _Unsendable as error:
        raise TypeError(_where(message, error)) from None
    encoder.reset(pickles=False)  # lets go of the caller's memory
    _encoders.append(encoder)
    return frames


def _frames(message: Message, encoder: _Encoder, header: bytes) -> list[Buffer]:
    arena_nbytes = encoder.arena_nbytes
    frames = encoder.frames
    prefix = PREFIX.pack(MAGIC, VERSION, message.kind, 0, message.request_id, len(header), len(frames), arena_nbytes)
    if arena_nbytes:
        pad = -(PREFIX.size + len(header)) % ALIGNMENT
        first = b"".join([prefix, header, _PADS[pad], *encoder.arena])
    else:
        first = prefix + header
    return [first, *frames]


def _check(frames: list[Buffer], header: bytes, limits: Limits) -> None:
    if len(header) > limits.max_header_bytes:
        raise ValueError(
            f"the body's tree without its arrays takes {len(header)} bytes, allowed are {limits.max_header_bytes}: "
            "put numbers into arrays"
        )
    if len(frames) - 1 > limits.max_buffers:
        raise ValueError(f"the body has {len(frames) - 1} large buffers, allowed are {limits.max_buffers}")
    nbytes = sum(map(len, frames))
    if nbytes > limits.max_message_bytes:
        raise ValueError(f"the message takes {nbytes} bytes, allowed are {limits.max_message_bytes}")


def _with_long_moved(encoder: _Encoder, tree: Any) -> Any:
    """``tree`` with long bytes and strings moved out of the header, in the order in which packing meets them.

    Placing happens while packing, so each long value is wrapped here and placed by ``_Encoder._default``.
    """
    kind = type(tree)
    if kind in (bytes, bytearray, memoryview, str):
        return _Long(tree) if len(tree) >= OWN_FRAME_NBYTES else tree
    if kind is dict:
        return {key: _with_long_moved(encoder, value) for key, value in tree.items()}
    if kind is list or kind is tuple:
        if set(map(type, tree)) <= _SHORT:  # a long list of numbers: 20 ns each to see that nothing is to do
            return tree
        return kind([_with_long_moved(encoder, item) for item in tree])
    return tree


_SHORT = frozenset({int, float, bool, type(None), complex})


class _Long:
    """A long bytes or str on its way into a buffer."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _long(encoder: _Encoder, long: _Long) -> Any:
    value = long.value
    return encoder.long_str(value) if isinstance(value, str) else encoder.long_bytes(bytes(value))


_HANDLERS[_Long] = _long


def _where(message: Message, error: _Unsendable) -> str:
    path = next(_paths(message.body, error.value, "body", 0), "body")
    allowed = "" if message.kind in PICKLE_KINDS else f" in a {message.kind.name} message, which carries data only"
    return f"{path}: cannot send {error}{allowed}"


def _paths(tree: Any, wanted: object, path: str, depth: int) -> Iterator[str]:
    if tree is wanted:
        yield path
    if depth > 512:
        return
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key is wanted:
                yield f"key {key!r} of {path}"
            yield from _paths(value, wanted, f"{path}[{key!r}]", depth + 1)
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for index, value in enumerate(tree):
            yield from _paths(value, wanted, f"{path}[{index}]", depth + 1)
