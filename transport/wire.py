"""Messages to frames and back.

The format is described in ``_wire_layout``. Bodies are trees of None, bool, int of any size, float (bits of a NaN too),
complex, str, bytes, list, tuple, named tuple, dict, OrderedDict, set, frozenset, numpy arrays and scalars (bool,
integers, floats of 16 to 64 bits, complex, datetime64 and timedelta64, both byte orders) and torch tensors on the CPU
(bfloat16 and float8 too). bytearray and memoryview arrive as bytes; Parameters as plain tensors without gradient.

A named tuple in a data message arrives as its own class if that is loaded at the receiver, else as a look-alike: a data
message never makes anybody import or run anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from lgroup.transport import _wire_decode, _wire_encode
from lgroup.transport._wire_decode import Frame
from lgroup.transport._wire_encode import OWN_FRAME_NBYTES
from lgroup.transport._wire_layout import DEFAULT, Limits
from lgroup.transport.messages import Buffer, Message

__all__ = ["DEFAULT", "OWN_FRAME_NBYTES", "Frame", "Limits", "decode", "encode"]


def encode(message: Message, limits: Limits = DEFAULT) -> list[Buffer]:
    """The frames of a message. Large contiguous buffers are views of the caller's memory: keep it unchanged until sent.

    Raises ``TypeError`` naming the place in the body for what cannot travel in a message of this kind, ``ValueError``
    for a body beyond ``limits``. What pickling raises passes through.
    """
    return _wire_encode.encode(message, limits)


def decode(
    frames: Sequence[Frame], limits: Limits = DEFAULT, *, load_pickles: bool = True, readonly: bool = False
) -> Message:
    """The message of some frames. Large arrays are views of the frames' memory, which should be nobody else's.

    ``readonly`` makes numpy arrays read-only (torch has no such thing). ``load_pickles=False`` leaves ``Pickled``
    objects in the body, for ``Message.loaded`` to load on another thread.

    Raises ``ProtocolError``, and nothing else, for bytes that are not exactly one message within ``limits`` or whose
    pickles do not load.
    """
    return _wire_decode.decode(frames, limits, load_pickles=load_pickles, readonly=readonly)
