"""How much may be under way to one peer.

Invariant: ``0 <= count <= max_count``, and ``nbytes <= max_bytes`` unless a single item larger than that is under way.
"""

from __future__ import annotations


class CreditWindow:
    """Room for ``max_count`` items of together ``max_bytes``. Pure and unsynchronised: its owner holds a lock."""

    __slots__ = ("_count", "_nbytes", "max_bytes", "max_count")

    def __init__(self, max_count: int, max_bytes: int) -> None:
        """Raises ``ValueError`` unless both are at least 1."""
        if max_count < 1 or max_bytes < 1:
            raise ValueError(f"max_count {max_count} and max_bytes {max_bytes} must be at least 1")
        self.max_count = max_count
        self.max_bytes = max_bytes
        self._count = 0
        self._nbytes = 0

    def has_room(self, nbytes: int) -> bool:
        """Whether ``try_reserve(nbytes)`` would succeed now."""
        if not self._count:
            return True  # else an item larger than the window could never travel
        return self._count < self.max_count and self._nbytes + nbytes <= self.max_bytes

    def try_reserve(self, nbytes: int) -> bool:
        """Take room for one item of ``nbytes``; False, changing nothing, if there is none."""
        if nbytes < 0:
            raise ValueError(f"nbytes {nbytes} must not be negative")
        if not self.has_room(nbytes):
            return False
        self._count += 1
        self._nbytes += nbytes
        return True

    def release(self, nbytes: int) -> None:
        """Give back the room of one item. Raises ``ValueError`` for more than is in use."""
        count, left = self._count - 1, self._nbytes - nbytes
        if count < 0 or left < 0 or (not count and left):
            raise ValueError(f"release of {nbytes} bytes from {self!r}")
        self._count = count
        self._nbytes = left

    @property
    def in_use(self) -> tuple[int, int]:
        """Items and bytes under way."""
        return self._count, self._nbytes

    def __repr__(self) -> str:
        return f"<CreditWindow {self._count}/{self.max_count} items, {self._nbytes}/{self.max_bytes} bytes>"
