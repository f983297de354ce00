"""Messages to frames and back.

The format is described in ``_wire_layout``. Bodies are trees of None, bool, int of any size, float (bits of a NaN too),
complex, str, bytes, list, tuple, named tuple, dict, OrderedDict, set, frozenset, numpy arrays and scalars (bool,
integers, floats of 16 to 64 bits, complex, datetime64 and timedelta64, both byte orders) and torch tensors on the CPU
(bfloat16 and float8 too). bytearray and memoryview arrive as bytes; Parameters as plain tensors without gradient.

A named tuple in a data message arrives as its own class if that is loaded at the receiver, else as a look-alike: a data
message never makes anybody import or run anything.
"""

from __future__ import annotations

from lgroup.transport._wire_decode import Frame, decode
from lgroup.transport._wire_encode import OWN_FRAME_NBYTES, encode
from lgroup.transport._wire_layout import DEFAULT, Limits

__all__ = ["DEFAULT", "OWN_FRAME_NBYTES", "Frame", "Limits", "decode", "encode"]
