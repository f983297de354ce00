"""What worker processes write: one pipe each, read by the coordinator's I/O thread, forwarded line by line.

The last lines are kept for error messages. A pipe that nobody reads would stop its writer, so it is read until it is
closed, whatever becomes of the lines.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Literal

from lgroup.transport.io_thread import IOThread

WorkerOutput = Literal["print", "log"]

KEPT_LINES = 50
MAX_LINE_BYTES = 8192  # a longer line is forwarded in pieces
_CHUNK_BYTES = 65536

logger = logging.getLogger("lgroup.worker_output")


class Lines:
    """Cuts a stream of bytes into lines and keeps the last ones. Pure."""

    def __init__(self) -> None:
        self.last: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes."""
        *whole, rest = (self._rest + data).split(b"\n")
        while len(rest) > MAX_LINE_BYTES:
            whole.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest
        return self._kept(whole)

    def finish(self) -> list[str]:
        """The last line, if it has no end."""
        rest, self._rest = self._rest, b""
        return self._kept([rest] if rest else [])

    def _kept(self, raw: list[bytes]) -> list[str]:
        lines = [line.decode("utf-8", "backslashreplace").rstrip("\r") for line in raw]
        self.last.extend(lines)
        return lines


class OutputPipe:
    """The reading end for one process. Used on the I/O thread, but for its making."""

    def __init__(self, io: IOThread, forward: Callable[[str], None], ended: Callable[[], None] = lambda: None) -> None:
        """``forward`` gets each line, on the I/O thread; ``ended()`` is called there after the last one."""
        self._io = io
        self._forward = forward
        self._ended = ended
        self._lines = Lines()
        self._listeners: list[list[str]] = []
        reader, self._writer = os.pipe()
        os.set_blocking(reader, False)
        self._reader: int | None = reader
        io.add_reader(reader, self._readable)

    @property
    def writer(self) -> int:
        """The end to hand to the process; ``close_writer`` afterwards."""
        return self._writer

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines that came, oldest first."""
        return tuple(self._lines.last)

    def collect(self, into: list[str]) -> None:
        """Append each further line to ``into`` too, until ``stop_collecting``."""
        self._listeners.append(into)

    def stop_collecting(self, into: list[str]) -> None:
        """The end of ``collect``; reads what is there first."""
        while self._readable():
            pass
        self._listeners = [other for other in self._listeners if other is not into]

    def close_writer(self) -> None:
        """Close this process's copy of the writing end."""
        with contextlib.suppress(OSError):
            os.close(self._writer)
        self._writer = -1

    def close(self) -> None:
        """Read what is there and stop reading."""
        while self._reader is not None and self._readable():
            pass
        self.close_writer()
        self._end()

    def _readable(self) -> bool:
        if self._reader is None:
            return False
        try:
            data = os.read(self._reader, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        self._pass_on(self._lines.feed(data))
        return True

    def _pass_on(self, lines: list[str]) -> None:
        for line in lines:
            self._forward(line)
        for listener in self._listeners:
            listener.extend(lines)

    def _end(self) -> None:
        if self._reader is None:
            return
        self._pass_on(self._lines.finish())
        self._io.remove_reader(self._reader)
        os.close(self._reader)
        self._reader = None
        self._ended()


def label(name: str, node: str, pid: int | None) -> str:
    """Who wrote a line, such as ``"learner 1@local pid=123"``."""
    return f"{name}@{node}" if pid is None else f"{name}@{node} pid={pid}"


def forward_line(how: WorkerOutput, who: str, line: str) -> None:
    """Pass a line of ``who`` on: to this process's stderr, or to the logger ``lgroup.worker_output``."""
    if how == "log":
        logger.info("(%s) %s", who, line)
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed or missing
        sys.stderr.write(f"({who}) {line}\n")
        sys.stderr.flush()
