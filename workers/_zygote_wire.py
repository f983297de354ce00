"""Notes between a coordinator and its zygote: one JSON object a packet, with descriptors beside it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

MAX_NOTE_BYTES = 65536
_MAX_DESCRIPTORS = 4

Note = dict[str, Any]


def send(channel: socket.socket, note: Note, descriptors: Sequence[int] = ()) -> None:
    """Send ``note`` and copies of ``descriptors``. Raises ``OSError``, ``BlockingIOError`` when the channel is full."""
    packet = json.dumps(note).encode()
    if len(packet) > MAX_NOTE_BYTES:
        raise ValueError(f"a note to or from the zygote has {len(packet)} bytes; {MAX_NOTE_BYTES} are allowed")
    socket.send_fds(channel, [packet], list(descriptors), socket.MSG_NOSIGNAL)


def receive(channel: socket.socket) -> tuple[Note, list[int]] | None:
    """The next note and its descriptors, which are the caller's to close; ``None`` once the other end is closed."""
    try:
        packet, descriptors, _, _ = socket.recv_fds(channel, MAX_NOTE_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    return (json.loads(packet), descriptors) if packet else None


def sealed_in_memory(payload: Note) -> int:
    """A descriptor of a memory file with ``payload``: an environment can be larger than a packet may be."""
    descriptor = os.memfd_create("lgroup-start", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(json.dumps(payload).encode())
    return descriptor


def read_in_memory(descriptor: int) -> Note:
    """What ``sealed_in_memory`` wrote. Closes the descriptor."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb") as file:
        note: Note = json.load(file)
    return note
