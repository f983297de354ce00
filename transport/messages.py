"""What travels between processes: a message is a kind, a request id and a body."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

from lgroup.transport import _pickling

Buffer: TypeAlias = "bytes | bytearray | memoryview"


class Kind(IntEnum):
    """What a message is about; one byte on the wire, so values never change their meaning."""

    HELLO = 1
    SPEC = 2
    READY = 3
    START_ERROR = 4
    CALL = 5
    CALL_REPLY = 6
    DATA = 7
    DATA_REPLY = 8
    STORE = 9
    STORE_REPLY = 10
    PING = 11
    PONG = 12
    STOP = 13
    CONTROL = 14
    INTERRUPT = 15


PICKLE_KINDS = frozenset({Kind.SPEC, Kind.CALL, Kind.CALL_REPLY})
"""The only kinds whose body may hold a pickle."""


@dataclass(frozen=True, slots=True, eq=False)
class Pickled:
    """An object as a protocol 5 pickle with its out-of-band buffers; nothing of it runs before ``load``.

    Put one into the body of a SPEC, CALL or CALL_REPLY message to pickle once and send many times. A receiver that
    does not load pickles while decoding finds these in their place (see ``Message.loaded``).
    """

    blob: bytes
    buffers: Sequence[Buffer] = ()

    @classmethod
    def dump(cls, value: object) -> Pickled:
        """Pickle ``value`` by cloudpickle. Contiguous buffers are kept as views: do not write to them before sending.

        Raises what the value's pickling raises, often ``TypeError`` or ``pickle.PicklingError``.
        """
        found: list[pickle.PickleBuffer] = []
        blob = _pickling.dumps(value, found.append)
        return cls(blob, tuple(buffer.raw() for buffer in found))

    def load(self) -> Any:
        """The object. Runs whatever code the pickle names, so only for bytes of an authenticated peer.

        Raises what unpickling raises.
        """
        return pickle.loads(self.blob, buffers=self.buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of the pickle and its buffers."""
        return len(self.blob) + sum(memoryview(buffer).nbytes for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``request_id`` is an unsigned 64 bit number whose meaning is the sender's.

    ``num_pickles`` is set by decoding: how many ``Pickled`` leaves the body still holds.
    """

    kind: Kind
    request_id: int
    body: Any = None
    num_pickles: int = field(default=0, compare=False)

    def loaded(self) -> Message:
        """This message with every ``Pickled`` leaf of the body replaced by its object.

        Raises what unpickling raises. Returns ``self`` if there is nothing to load.
        """
        if not self.num_pickles:
            return self
        return Message(self.kind, self.request_id, load_pickles(self.body))


def load_pickles(tree: Any) -> Any:
    """``tree`` with every ``Pickled`` leaf replaced by its object; lists and dicts are changed in place.

    Raises what unpickling raises.
    """
    if isinstance(tree, Pickled):
        return tree.load()
    if isinstance(tree, list):
        tree[:] = map(load_pickles, tree)
    elif isinstance(tree, dict):
        loaded = [(load_pickles(key), load_pickles(value)) for key, value in tree.items()]
        tree.clear()
        tree.update(loaded)
    elif isinstance(tree, tuple):
        return tuple.__new__(type(tree), map(load_pickles, tree))
    elif isinstance(tree, (set, frozenset)):
        return type(tree)(map(load_pickles, tree))
    return tree
