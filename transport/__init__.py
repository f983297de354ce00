"""Bytes between processes: messages, their wire format, sockets, and the thread that owns them."""

from lgroup.transport.credits import CreditWindow
from lgroup.transport.endpoints import Dealer, Router
from lgroup.transport.errors import ConnectionClosed, LGroupError, ProtocolError
from lgroup.transport.io_thread import IOThread, Timer
from lgroup.transport.messages import PICKLE_KINDS, Buffer, Kind, Message, Pickled, load_pickles
from lgroup.transport.wire import DEFAULT, Frame, Limits, decode, encode

__all__ = [
    "DEFAULT",
    "PICKLE_KINDS",
    "Buffer",
    "ConnectionClosed",
    "CreditWindow",
    "Dealer",
    "Frame",
    "IOThread",
    "Kind",
    "LGroupError",
    "Limits",
    "Message",
    "Pickled",
    "ProtocolError",
    "Router",
    "Timer",
    "decode",
    "encode",
    "load_pickles",
]
