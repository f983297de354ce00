"""One file per worker for the lines it writes. Used on the I/O thread, but for its making.

A file that cannot be written costs a warning, once per cluster, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TextIO

logger = logging.getLogger("lgroup.workers")


class LogFolder:
    """Where a cluster's workers have their files; ``None``: nowhere."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._warned = False

    def open(self, name: str, pid: int) -> TextIO | None:
        """The file ``<name>-<pid>.log``, to append to; ``None`` if there is no folder or it cannot be written."""
        if self.path is None:
            return None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = self.path / f"{_in_file_names(name)}-{pid}.log"
            return open(file, "a", buffering=1, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            self.failed(error)
            return None

    def failed(self, error: OSError) -> None:
        """Warn, unless that was done before."""
        if not self._warned:
            self._warned = True
            logger.warning("the workers' lines go to no file in log_dir=%s: %s", self.path, error)


class LogFile:
    """One worker's file. It is made with the first line that comes once the pid is known; earlier ones wait for it."""

    def __init__(self, folder: LogFolder, name: str) -> None:
        """``name``: such as ``"learner 1-0"``, with the incarnation."""
        self._folder = folder
        self._name = name
        self._file: TextIO | None = None
        self._early: list[str] = []
        self._over = folder.path is None

    def write(self, line: str, pid: int | None) -> None:
        """Append a line."""
        if self._over:
            return
        self._early.append(line)
        if pid is None:
            return
        if self._file is None:
            self._file = self._folder.open(self._name, pid)
        lines, self._early = self._early, []
        if self._file is None:
            self._over = True
            return
        try:
            self._file.writelines(f"{line}\n" for line in lines)
        except OSError as error:  # the disk is full, say
            self._folder.failed(error)
            self.close()

    def close(self) -> None:
        """The worker has ended."""
        self._over = True
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def _in_file_names(name: str) -> str:
    return name.replace(" ", "-").replace(os.sep, "-").replace("\0", "-")
