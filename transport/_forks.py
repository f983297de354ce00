"""Tells an object that it was made before a fork, at the price of one comparison.

``os.getpid()`` is a system call, 0.3 us here for each message.
"""

from __future__ import annotations

import os


class _Process:
    """Identifies this process; replaced in the child by each fork."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()


_current = _Process()


def _after_fork() -> None:
    global _current
    _current = _Process()


os.register_at_fork(after_in_child=_after_fork)


def current_process() -> _Process:
    """A token that stays the same until this process is a fork of another."""
    return _current


def refuse_after_fork(owner: _Process, what: object) -> None:
    """Raise ``RuntimeError`` unless ``owner`` is the current process."""
    if owner is not _current:
        raise RuntimeError(
            f"{what!r} belongs to process {owner.pid} and cannot be used after a fork, here {os.getpid()}"
        )
