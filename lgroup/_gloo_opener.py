"""Opens a learner's end of a generation's process group, inside a worker, in a way that can be given up.

Gloo's own connecting cannot: where a peer dies after it told its address, the others wait for it through all of
gloo's tries (measured: five times the timeout). So it runs in a thread of its own, which is left behind when the
coordinator says that the generation is over; it ends by itself.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError
from typing import Any

from lgroup._liveness import IN_COLLECTIVE
from lgroup.learner.collective import CollectiveLost, GlooGroup
from lgroup.workers import current_worker

#: Seconds for one connection to come about, on one node or in one data centre.
CONNECT_S = 5.0


class OpenGlooGroup:
    """Rendezvous goes through the coordinator's own channel, under a prefix of the generation's own."""

    def __init__(self, prefix: str, collective_s: float) -> None:
        self._prefix = prefix
        self._collective_s = collective_s

    def __getstate__(self) -> tuple[str, float]:
        return (self._prefix, self._collective_s)

    def __setstate__(self, state: tuple[str, float]) -> None:
        self.__init__(*state)  # type: ignore[misc]
        self._lock = threading.Lock()
        self._over = 0  # generations up to this one are over
        self._generation = 0
        self._opening: Future[GlooGroup] | None = None
        current_worker().on_interrupt(self.interrupt)

    def __call__(self, generation: int, rank: int, world_size: int) -> GlooGroup:
        """Rank `rank`'s end of the group.

        Raises:
            CollectiveLost: if it does not form, or is interrupted meanwhile.
        """
        worker = current_worker()
        worker.forget_store(f"{self._prefix}/{generation - 1}")
        opening: Future[GlooGroup] = Future()
        with self._lock:
            if generation <= self._over:
                raise CollectiveLost(f"rank {rank}: generation {generation} is over before it began")
            self._generation, self._opening = generation, opening
        store = worker.store(f"{self._prefix}/{generation}")
        threading.Thread(
            target=self._open, args=(opening, store, rank, world_size), name=f"lgroup-join-{generation}", daemon=True
        ).start()
        with worker.in_phase(IN_COLLECTIVE):
            return opening.result()

    def _open(self, opening: Future[GlooGroup], store: Any, rank: int, world_size: int) -> None:
        waiting = current_worker().in_phase(IN_COLLECTIVE)
        try:
            group = GlooGroup(
                store, rank, world_size, connect_s=CONNECT_S, collective_s=self._collective_s, waiting=waiting
            )
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):
                opening.set_exception(error)
            return
        try:
            opening.set_result(group)
        except InvalidStateError:  # given up meanwhile
            group.close()

    def interrupt(self, generation: int) -> None:
        """The generation is over: leave its group, or stop waiting for it. On the worker's I/O thread."""
        with self._lock:
            self._over = max(self._over, generation)
            opening = self._opening if self._generation <= generation else None
        if opening is None:
            return
        with contextlib.suppress(InvalidStateError):
            opening.set_exception(CollectiveLost(f"generation {generation} is over: a member is gone"))
            return
        if opening.exception() is None:
            opening.result().interrupt()
