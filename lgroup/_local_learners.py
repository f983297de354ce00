"""The one learner that lives in the coordinator's own process: requests are carried out where they are sent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import psutil

from lgroup._group_events import (
    Event,
    Interrupt,
    Join,
    Joined,
    JoinFailed,
    Kill,
    Outcome,
    RankReply,
    Replied,
    Send,
    Start,
)
from lgroup._replies import read_answer
from lgroup._requests import over_the_wire
from lgroup.learner.host import LearnerHost, describe
from lgroup.learner.seeding import random_state_kept


class LocalLearners:
    """A group of one, without a process of its own.

    The caller's random generators are put back after each request. What a learner gets has been through the same wire
    format as a remote one's, so that it may write to its batch and what cannot travel is refused here, too.
    """

    def __init__(self, learner_class: Any, config: Any, module_spec: Any, seed: int) -> None:
        with random_state_kept():
            self.host = LearnerHost(learner_class, config, module_spec, seed)
        self._post: Callable[[Event], None] = lambda event: None

    def attach(self, post: Callable[[Event], None]) -> None:
        """Report answers to `post`."""
        self._post = post

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def join(self, join: Join) -> None:
        """Enter the group of one."""
        try:
            self.host.join(join.generation, join.rank, 1, join.lead, join.behind, join.snapshot)
        except Exception as error:
            self._post(JoinFailed(join.slot, join.generation, describe(error)))
            return
        self._post(Joined(join.slot, join.generation))

    def send(self, send: Send) -> None:
        """Carry the entry out."""
        ask = send.entry.payload.asks(send.entry, 1)[0]
        try:
            args = over_the_wire(list(ask.args)) if ask.data_only else ask.args
            with random_state_kept():
                answer = getattr(self.host, ask.method)(send.generation, *args)
            reply = read_answer(answer)
        except BaseException as error:
            # The host has taken the entry back. Ctrl-C goes on to the caller, once the group knows of it.
            self._post(Replied(0, send.generation, send.entry.number, RankReply(Outcome.RAISED, describe(error))))
            if not isinstance(error, Exception):
                raise
            return
        self._post(Replied(0, send.generation, send.entry.number, reply))

    def interrupt(self, interrupt: Interrupt) -> None:
        """There are no peers to wait for."""

    def kill(self, kill: Kill) -> None:
        """The learner is the coordinator: it cannot be ended without it."""
        raise AssertionError("the local learner was judged, and it has no process of its own")

    def start(self, start: Start) -> None:
        """It cannot be started again either."""
        raise AssertionError("the local learner was lost, and it has no process of its own")

    def stop(self) -> None:
        """Nothing runs here."""

    def close(self) -> None:
        """Nothing is open here."""

    def name(self, slot: int) -> str:
        """Who the learner is."""
        return f"the local learner (pid {os.getpid()})"

    def rows(self) -> list[dict[str, Any]]:
        """One row for `get_stats`."""
        memory = psutil.Process().memory_info().rss
        return [{"rank": 0, "pid": os.getpid(), "node": "local", "phase": "ready", "rss_bytes": memory}]
