"""Frames to a message's tree. Nothing in the frames is trusted: each number is checked before it is used."""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import msgpack
import numpy as np
import torch
import zmq

from lgroup.transport._wire_dtypes import NUMPY_DTYPES, TORCH_TYPES, numpy_dtype
from lgroup.transport._wire_layout import (
    ALIGNMENT,
    ARRAY_BY_SIZE,
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
from lgroup.transport.errors import ProtocolError
from lgroup.transport.messages import PICKLE_KINDS, Buffer, Kind, Message, Pickled

Frame: TypeAlias = "bytes | bytearray | memoryview | zmq.Frame"

_KINDS = {int(kind): kind for kind in Kind}
# Below both, a header that lies about its lengths can make msgpack allocate no more than 100 lists of 4,096 pointers.
_SMALL_HEADER_NBYTES = 4096
_SMALL_CONTAINERS = 100


class _MarkSeen:
    """A mark in the header before the list it opens is complete. Never leaves this module."""

    __slots__ = ("mark",)

    def __init__(self, mark: Mark) -> None:
        self.mark = mark


_MARKS = {bytes([mark]): _MarkSeen(mark) for mark in Mark}


class _Decoder:
    """Decoding of one message. Buffers are taken in the order in which they lie; one left at the end is an error."""

    __slots__ = (
        "arena",
        "arena_nbytes",
        "buffers",
        "end",
        "limits",
        "num_frames",
        "num_pickles",
        "open_marks",
        "pickles",
        "readonly",
    )

    def __init__(self, arena: Buffer, buffers: Sequence[Any], *, pickles: bool, readonly: bool, limits: Limits) -> None:
        self.arena = arena
        self.arena_nbytes = len(arena)
        self.buffers = buffers
        self.pickles = pickles
        self.readonly = readonly
        self.limits = limits
        self.end = 0  # of the part of the arena that was taken
        self.num_frames = 0  # that were taken
        self.open_marks = 0
        self.num_pickles = 0

    def take(self, frame: int, offset: int, nbytes: int) -> Any:
        """The buffer that holds ``[offset, offset + nbytes)``. Raises unless it is the next one."""
        if not frame:
            if offset != -(-self.end // ALIGNMENT) * ALIGNMENT or offset + nbytes > self.arena_nbytes:
                raise ProtocolError(f"arena offset {offset}, length {nbytes}: not the next of {self.arena_nbytes}")
            self.end = offset + nbytes
            return self.arena
        if frame != self.num_frames + 1 or frame > len(self.buffers) or offset:
            raise ProtocolError(f"frame {frame}, offset {offset}: not the next of {len(self.buffers)}")
        buffer = self.buffers[frame - 1]
        if len(buffer) != nbytes:
            raise ProtocolError(f"frame {frame} has {len(buffer)} bytes, announced were {nbytes}")
        self.num_frames = frame
        if not self.readonly:
            view = memoryview(buffer)
            return bytearray(view) if view.readonly else buffer
        return buffer

    def extension(self, code: int, data: bytes) -> Any:
        if code == 1:
            return self._numpy(data)
        if code == 9:
            self.open_marks += 1
            return _MARKS[data]
        if code == 2:
            return self._torch(data)
        return _EXTENSIONS[code](self, data)

    def _array(self, data: bytes, itemsize: int, values: tuple[int, ...]) -> tuple[Any, int, tuple[int, ...]]:
        shape = values[6:]
        if len(shape) > self.limits.max_ndim:
            raise ProtocolError(f"an array of {len(shape)} dimensions, allowed are {self.limits.max_ndim}")
        offset = values[4]
        nbytes = values[5]
        if prod(shape) * itemsize != nbytes:
            raise ProtocolError(f"shape {shape} of {itemsize} byte items does not take {nbytes} bytes")
        return self.take(values[3], offset, nbytes), offset, shape

    def _numpy(self, data: bytes) -> Any:
        values = ARRAY_BY_SIZE[len(data)].unpack(data)
        code, unit, count = values[:3]
        dtype = NUMPY_DTYPES.get(code) if not unit and not count else None
        if dtype is None:
            dtype = numpy_dtype(code, unit, count)
        buffer, offset, shape = self._array(data, dtype.itemsize, values)
        array = np.ndarray(shape, dtype, buffer, offset)
        if self.readonly:
            array.flags.writeable = False
        return array

    def _torch(self, data: bytes) -> Any:
        values = ARRAY_BY_SIZE[len(data)].unpack(data)
        known = TORCH_TYPES[values[0]]
        if values[1] or values[2]:
            raise ProtocolError("a tensor with a datetime unit")
        buffer, offset, shape = self._array(data, known.itemsize, values)
        if self.readonly:  # torch knows no read-only tensors
            buffer = bytearray(memoryview(buffer)[offset : offset + values[5]])
            offset = 0
        tensor = torch.from_numpy(np.ndarray(shape, known.numpy, buffer, offset))
        return tensor if known.carrier is None else tensor.view(known.dtype)

    def _raw(self, data: bytes) -> memoryview:
        frame, offset, nbytes = BUFFER.unpack(data)
        return memoryview(self.take(frame, offset, nbytes))[offset : offset + nbytes]

    def _bytes(self, data: bytes) -> bytes:
        return bytes(self._raw(data))

    def _str(self, data: bytes) -> str:
        return str(self._raw(data), "utf-8", "surrogatepass")

    def _pickle_buffer(self, data: bytes) -> _PickleBuffer:
        self.open_marks += 1
        return _PickleBuffer(self._raw(data))

    def _big_int(self, data: bytes) -> int:
        return int.from_bytes(data, "little", signed=True)

    def _complex(self, data: bytes) -> complex:
        return complex(*COMPLEX.unpack(data))

    def _scalar(self, data: bytes) -> Any:
        dtype = numpy_dtype(*SCALAR.unpack_from(data))
        value = data[SCALAR.size :]
        if len(value) != dtype.itemsize:
            raise ProtocolError(f"a numpy scalar of {len(value)} bytes, {dtype} takes {dtype.itemsize}")
        return np.frombuffer(value, dtype)[0]

    def sequence(self, items: list[Any]) -> Any:
        """msgpack calls this for every list: what it stands for."""
        if items:
            first = items[0]
            if type(first) is _MarkSeen:
                self.open_marks -= 1
                if first.mark is Mark.TUPLE:
                    return tuple(items[1:])
                return _SEQUENCES[first.mark](self, items[1:])
        return items

    def _set(self, items: list[Any]) -> set[Any]:
        return set(items)

    def _frozen_set(self, items: list[Any]) -> frozenset[Any]:
        return frozenset(items)

    def _ordered_dict(self, items: list[Any]) -> OrderedDict[Any, Any]:
        (content,) = items
        if type(content) is not dict:
            raise ProtocolError("an ordered dict that holds no map")
        return OrderedDict(content)

    def _named_tuple(self, items: list[Any]) -> Any:
        module, qualname, fields, *values = items
        if type(fields) is not list or len(fields) != len(values):
            raise ProtocolError("a named tuple whose fields do not fit its values")
        return tuple.__new__(_named_tuple_class(module, qualname, tuple(fields)), values)

    def _pickle(self, items: list[Any]) -> Pickled:
        if not self.pickles:
            raise ProtocolError("a pickle in a message that carries data only")
        blob, *buffers = items
        if type(blob) is not bytes or any(type(buffer) is not _PickleBuffer for buffer in buffers):
            raise ProtocolError("a pickle that is not bytes followed by buffers")
        self.open_marks -= len(buffers)
        self.num_pickles += 1
        return Pickled(blob, tuple(buffer.view for buffer in buffers))


class _PickleBuffer:
    """A pickle's buffer before its pickle is complete. Never leaves this module."""

    __slots__ = ("view",)

    def __init__(self, view: memoryview) -> None:
        self.view = view


_EXTENSIONS: dict[int, Callable[[_Decoder, bytes], Any]] = {
    Ext.BYTES: _Decoder._bytes,
    Ext.STR: _Decoder._str,
    Ext.PICKLE_BUFFER: _Decoder._pickle_buffer,
    Ext.BIG_INT: _Decoder._big_int,
    Ext.COMPLEX: _Decoder._complex,
    Ext.NUMPY_SCALAR: _Decoder._scalar,
}
_SEQUENCES: dict[Mark, Callable[[_Decoder, list[Any]], Any]] = {
    Mark.NAMED_TUPLE: _Decoder._named_tuple,
    Mark.SET: _Decoder._set,
    Mark.FROZEN_SET: _Decoder._frozen_set,
    Mark.ORDERED_DICT: _Decoder._ordered_dict,
    Mark.PICKLE: _Decoder._pickle,
}


def _named_tuple_class(module: Any, qualname: Any, fields: tuple[Any, ...]) -> type[tuple[Any, ...]]:
    """The class of that name if it is loaded here and has these fields, else one like it. Imports and runs nothing."""
    if type(module) is not str or type(qualname) is not str or any(type(field) is not str for field in fields):
        raise ProtocolError("a named tuple whose names are no strings")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if isinstance(found, type) and issubclass(found, tuple) and found.__dict__.get("_fields") == fields:
        return found
    return _stand_in(module, qualname.rpartition(".")[2], fields)


@lru_cache(maxsize=256)
def _stand_in(module: str, name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    if len(fields) > 1000:
        raise ProtocolError(f"a named tuple of {len(fields)} fields")
    return namedtuple(name, fields, rename=True, module=module)


def decode(
    frames: Sequence[Frame], limits: Limits = DEFAULT, *, load_pickles: bool = True, readonly: bool = False
) -> Message:
    """The message of some frames. Large arrays are views of the frames' memory, which should be nobody else's.

    ``readonly`` makes numpy arrays read-only (torch has no such thing). ``load_pickles=False`` leaves ``Pickled``
    objects in the body, for ``Message.loaded`` to load on another thread.

    Raises ``ProtocolError``, and nothing else, for bytes that are not exactly one message within ``limits`` or whose
    pickles do not load.
    """
    try:
        message = _decode(frames, limits, readonly=readonly)
        return message.loaded() if load_pickles else message
    except ProtocolError:
        raise
    except Exception as error:  # whatever msgpack, numpy, torch or a pickle make of bytes that nobody vouches for
        raise ProtocolError(f"malformed message: {type(error).__name__}: {error}") from error


def _decode(frames: Sequence[Any], limits: Limits, *, readonly: bool) -> Message:
    if not frames:
        raise ProtocolError("a message without frames")
    first = memoryview(frames[0])
    if len(first) < PREFIX.size:
        raise ProtocolError(f"a first frame of {len(first)} bytes, at least {PREFIX.size} are needed")
    magic, version, code, flags, request_id, header_nbytes, num_buffers, arena_nbytes = PREFIX.unpack_from(first)
    if magic != MAGIC or version != VERSION or flags:
        raise ProtocolError(f"not a message of version {VERSION}: starts with {bytes(first[:8])!r}")
    kind = _KINDS.get(code)
    if kind is None:
        raise ProtocolError(f"unknown kind {code}")
    header_end = PREFIX.size + header_nbytes
    arena_start = -(-header_end // ALIGNMENT) * ALIGNMENT if arena_nbytes else header_end
    if len(first) != arena_start + arena_nbytes:
        raise ProtocolError(f"a first frame of {len(first)} bytes, announced were {arena_start + arena_nbytes}")
    if num_buffers != len(frames) - 1 or num_buffers > limits.max_buffers:
        raise ProtocolError(f"{len(frames) - 1} buffers, announced {num_buffers}, allowed {limits.max_buffers}")
    if header_nbytes > limits.max_header_bytes or sum(map(len, frames)) > limits.max_message_bytes:
        raise ProtocolError("a message beyond the limits")
    decoder = _Decoder(
        _arena(first, arena_start, readonly),
        frames[1:],
        pickles=kind in PICKLE_KINDS,
        readonly=readonly,
        limits=limits,
    )
    body = _unpack(bytes(first[PREFIX.size : header_end]), decoder, limits)
    if decoder.open_marks:
        raise ProtocolError("a mark outside of its list")
    if decoder.end != arena_nbytes or decoder.num_frames != num_buffers:
        raise ProtocolError("buffers that nothing refers to")
    return Message(kind, request_id, body, decoder.num_pickles)


def _arena(first: memoryview, start: int, readonly: bool) -> Buffer:
    """The arena in memory of its own: a frame's memory has any alignment, a fresh buffer's is aligned to 16 bytes."""
    return bytes(first[start:]) if readonly else bytearray(first[start:])


def _unpack(header: bytes, decoder: _Decoder, limits: Limits) -> Any:
    containers = container_bound(header) if len(header) > limits.max_depth else 0
    if containers > _SMALL_CONTAINERS or len(header) > _SMALL_HEADER_NBYTES:
        _check_lengths(header)
    body = msgpack.unpackb(
        header,
        ext_hook=decoder.extension,
        list_hook=decoder.sequence,
        strict_map_key=False,
        unicode_errors="surrogatepass",
        timestamp=1,
    )
    if containers > limits.max_depth and depth_exceeds(body, limits.max_depth):
        raise ProtocolError(f"a body nested deeper than {limits.max_depth} levels")
    return body


def _check_lengths(header: bytes) -> None:
    """Raise unless every length in the header is true, allocating nothing: msgpack allocates what a list announces."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(header))
    unpacker.feed(header)
    unpacker.skip()
    if unpacker.tell() != len(header):
        raise ProtocolError("a header with something behind its end")
