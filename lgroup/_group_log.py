"""The group's requests, in order: those without a verdict, those that may have to be carried out again. Pure.

Three parts, each in order of admission, every number in the one before smaller than any in the next (but for reads,
which see what the learners hold when their turn comes)::

    kept      applied since the last snapshot: what would be lost if every learner died now
    replays   kept ones that are being carried out again, after every learner died
    table     admitted, no verdict yet

`kept` is bounded by bytes; what had to be forgotten is remembered by its size alone, and can only be rolled back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from lgroup._group_events import Entry, EntryKind


class Log:
    """See the module."""

    def __init__(self, max_kept_bytes: int) -> None:
        self._max_kept_bytes = max_kept_bytes
        self.table: dict[int, Entry] = {}
        self.replays: dict[int, Entry] = {}
        self.kept: deque[Entry] = deque()
        self.kept_bytes = 0
        self.snapshot: Any = None
        #: Entries up to here are in the snapshot; -1: it is what learners are built as.
        self.snapshot_position = -1
        self._forgotten: deque[Entry] = deque()

    def pending(self) -> list[Entry]:
        """What is to be carried out, in order."""
        return [*self.replays.values(), *self.table.values()]

    def updates(self) -> Iterator[Entry]:
        """Admitted updates without a verdict."""
        return (entry for entry in self.table.values() if entry.kind is EntryKind.UPDATE)

    def find(self, number: int) -> Entry | None:
        """What is to be carried out, by its number."""
        return self.replays.get(number) or self.table.get(number)

    def take(self, entry: Entry) -> bool:
        """Remove an entry that is decided; says whether it was a replay."""
        if self.replays.pop(entry.number, None) is not None:
            return True
        del self.table[entry.number]
        return False

    def keep(self, entry: Entry) -> None:
        """An entry was applied: it can be carried out again, if need be."""
        entry.replies = {}
        self.kept.append(entry)
        self.kept_bytes += entry.nbytes
        while self.kept_bytes > self._max_kept_bytes:
            self._forget(self.kept.popleft())

    def _forget(self, entry: Entry) -> None:
        self.kept_bytes -= entry.nbytes
        self._forgotten.append(Entry(entry.kind, None, env_steps=entry.env_steps, number=entry.number))

    @property
    def is_half_full(self) -> bool:
        """Whether what is kept needs a snapshot soon."""
        return self.kept_bytes > self._max_kept_bytes // 2

    @property
    def num_kept(self) -> int:
        """Applied entries since the last snapshot."""
        return len(self._forgotten) + len(self.kept)

    def snapshot_taken(self, snapshot: Any, position: int) -> None:
        """Everything up to `position` is in `snapshot`."""
        self.snapshot, self.snapshot_position = snapshot, position
        while self.kept and self.kept[0].number <= position:
            self.kept_bytes -= self.kept.popleft().nbytes
        while self._forgotten and self._forgotten[0].number <= position:
            self._forgotten.popleft()

    def forget_all(self) -> None:
        """No snapshot can be taken: what is kept serves nothing."""
        while self.kept:
            self._forget(self.kept.popleft())

    def rewind(self) -> list[Entry]:
        """Every learner died: what is kept is to be carried out again. Returns what cannot be."""
        again = [*self.kept, *self.replays.values()]
        self.kept.clear()
        self.kept_bytes = 0
        self.replays = {entry.number: entry for entry in again}
        lost = list(self._forgotten)
        self._forgotten.clear()
        return lost

    def check(self) -> None:
        """Assert the order of the three parts."""
        numbers = [entry.number for entry in (*self.kept, *self.pending()) if entry.in_log]
        assert numbers == sorted(set(numbers)), f"log out of order: {numbers}"
        assert self.kept_bytes == sum(entry.nbytes for entry in self.kept)
