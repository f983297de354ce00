"""The numbers of the wire format, in one place for both directions.

A message is one or more frames. The first:

    offset  size  field
    0       4     magic b"lgrp"
    4       1     version
    5       1     kind
    6       2     flags, 0
    8       8     request id
    16      4     length of the header
    20      4     number of frames that follow
    24      8     length of the arena
    32            header: one msgpack value, the body's tree
                  zeros up to the next multiple of 64, if there is an arena
                  arena: the small buffers, each at a multiple of 64 from the arena's start

Every following frame is one large buffer. Header and small buffers share the first frame because a frame costs more
than copying it: a message of small arrays is one frame, one system call. Buffers are referred to in the order in which
they lie, each exactly once, so that neither overlap nor waste can be expressed.

What msgpack does not know is an extension (codes below), or a list whose first element is a mark.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

MAGIC = b"lgrp"
VERSION = 1
PREFIX = struct.Struct("<4sBBHQIIQ")
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """What one message may be at most; checked before anything is allocated."""

    max_header_bytes: int = 16 << 20
    max_depth: int = 100
    max_buffers: int = 65_536
    max_message_bytes: int = 64 << 30
    max_ndim: int = 32


DEFAULT = Limits()


class Ext(IntEnum):
    """msgpack extension codes."""

    NUMPY = 1
    TORCH = 2
    BYTES = 3
    STR = 4
    PICKLE_BUFFER = 5
    BIG_INT = 6
    COMPLEX = 7
    NUMPY_SCALAR = 8
    MARK = 9


class Mark(IntEnum):
    """First element of a list that stands for something else; one byte inside ``Ext.MARK``."""

    TUPLE = 1
    NAMED_TUPLE = 2
    SET = 3
    FROZEN_SET = 4
    ORDERED_DICT = 5
    PICKLE = 6


# dtype code, unit code, unit count (datetimes only), frame (0 is the arena), offset, nbytes; then the shape.
ARRAYS = tuple(struct.Struct(f"<BBIIQQ{ndim}Q") for ndim in range(65))
ARRAY_BY_SIZE = {array.size: array for array in ARRAYS}
BUFFER = struct.Struct("<IQQ")  # frame, offset, nbytes
SCALAR = struct.Struct("<BBI")  # dtype code, unit code, unit count; then the value's bytes
COMPLEX = struct.Struct("<dd")


_CONTAINERS = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
_NOT_CONTAINERS = bytes(sorted(set(range(256)) - set(_CONTAINERS)))


def container_bound(header: bytes) -> int:
    """An upper bound, cheap to get, of the number of lists and maps in a msgpack header, hence of its depth."""
    return len(header.translate(None, _NOT_CONTAINERS))


def depth_exceeds(tree: Any, max_depth: int) -> bool:
    """Whether containers are nested deeper than ``max_depth``. Walks by levels, so depth costs no stack."""
    level: Sequence[Any] = [tree]
    for _ in range(max_depth + 1):
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below += node.values()
                below += [key for key in node if isinstance(key, (tuple, frozenset))]
            elif isinstance(node, (list, tuple, set, frozenset)):
                below += node
        if not below:
            return False
        level = below
    return any(isinstance(node, (dict, list, tuple, set, frozenset)) for node in level)
