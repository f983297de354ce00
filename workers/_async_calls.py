"""The account of asynchronous calls: which are outstanding, which are answered and not yet fetched. Pure.

A call is outstanding from the moment it is sent until its result is fetched or its actor is removed; counts are derived
from the table, never kept beside it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from lgroup.workers.results import CallResult, RemoteCallResults, ResultOrError

Key = tuple[int, int]  # actor id, request id


@dataclass
class AsyncCalls:
    """Not thread-safe."""

    limit_per_actor: int
    _tags: dict[Key, str | None] = field(default_factory=dict)
    _answers: dict[Key, CallResult] = field(default_factory=dict)  # in the order they came in

    def has_room(self, actor_id: int, tag: str | None) -> bool:
        """Whether one more call with ``tag`` may go to the actor."""
        taken = sum(1 for key, other in self._tags.items() if key[0] == actor_id and other == tag)
        return taken < self.limit_per_actor

    def sent(self, key: Key, tag: str | None) -> None:
        """A call is on its way."""
        self._tags[key] = tag

    def answered(self, key: Key, result: ResultOrError) -> None:
        """Its result is there; nothing happens if the call was forgotten."""
        if key in self._tags:
            self._answers[key] = CallResult(key[0], result, self._tags[key])

    def num_outstanding(self, tag: str | None = None) -> int:
        """Calls whose results were not fetched: those with ``tag``, or all."""
        return len(self._tags) if tag is None else sum(1 for other in self._tags.values() if other == tag)

    def num_awaited(self, tags: Collection[str | None]) -> int:
        """Calls with one of ``tags`` (none: all) that were not fetched."""
        return sum(1 for tag in self._tags.values() if not tags or tag in tags)

    def num_answered(self, tags: Collection[str | None]) -> int:
        """Those of them whose results are there."""
        return sum(1 for result in self._answers.values() if not tags or result.tag in tags)

    def fetch(self, tags: Collection[str | None]) -> RemoteCallResults:
        """Take the results that are there."""
        taken = {key: result for key, result in self._answers.items() if not tags or result.tag in tags}
        for key in taken:
            del self._tags[key], self._answers[key]
        return RemoteCallResults(list(taken.values()))

    def forget(self, actor_id: int) -> None:
        """Nobody waits for the actor's results any more."""
        for key in [key for key in self._tags if key[0] == actor_id]:
            del self._tags[key]
            self._answers.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._tags.clear()
        self._answers.clear()
