"""Between the pure state machine and the world.

Invariants: events are decided one at a time, under `_lock`; the instructions that follow are carried out outside it, by
one thread at a time and in the order they were decided. Whichever thread brings an event carries out what it finds; if
another one is at it already, that one goes on with it. So the order of sends is the order of decisions, and no thread
waits for another's I/O.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from lgroup._group_events import (
    Close,
    Deliver,
    Entry,
    EntryKind,
    Event,
    Instruction,
    Interrupt,
    Join,
    Kill,
    Refuse,
    Report,
    Send,
    Start,
    Status,
    Stop,
    Submit,
    Verdict,
    Warn,
)
from lgroup._group_phases import Phase
from lgroup._group_state import GroupState
from lgroup._post_mortem import PostMortems
from lgroup.errors import LGroupError
from lgroup.update_result import Lifetime, make_result, state_of
from lgroup.weights import Weights


class Learners(Protocol):
    """Where the learners are: worker processes, or the coordinator itself."""

    def attach(self, post: Callable[[Event], None]) -> None:
        """Report what happens to `post` from now on."""

    def now(self) -> float:
        """Monotonic seconds, without those that the coordinator itself was stopped for."""

    def join(self, join: Join) -> None:
        """Have a learner join a generation; it is answered by `Joined` or `JoinFailed`."""

    def send(self, send: Send) -> None:
        """Send an entry; each learner's answer is a `Replied`."""

    def interrupt(self, interrupt: Interrupt) -> None:
        """Have learners leave a generation's process group at once."""

    def kill(self, kill: Kill) -> None:
        """End a learner's process; its end is a `WorkerLost`."""

    def start(self, start: Start) -> None:
        """Fill a slot with a new process; the outcome is a `WorkerReady` or a `StartFailed`."""

    def stop(self) -> None:
        """End every process, without waiting."""

    def close(self) -> None:
        """End every process and wait until nothing is left. Any number of times."""

    def name(self, slot: int) -> str:
        """Who the learner in a slot is, for messages."""

    def rows(self) -> list[dict[str, Any]]:
        """What `get_stats` says of each slot."""


class GroupDriver:
    """Feeds the state machine and carries out what it says."""

    def __init__(self, state: GroupState, learners: Learners, post_mortems: PostMortems) -> None:
        self.state = state
        self.learners = learners
        self.post_mortems = post_mortems
        self.lifetime = Lifetime()
        self._lock = threading.Condition(threading.Lock())
        self._outbox: deque[Instruction] = deque()
        self._carrying = threading.Lock()
        self._idle_waiters = 0
        self._watchers: list[Callable[[], None]] = []
        self.publishes = False
        self.published: Weights | None = None
        learners.attach(self.post)

    # Events

    def post(self, event: Event) -> None:
        """Take an event from anywhere, and carry out what follows."""
        with self._lock:
            self._decided(self.state.handle(event, self.learners.now()))
        self._carry_out()

    def start(self) -> None:
        """Form the first generation and wait until it runs.

        Raises:
            LGroupError: if it cannot be formed.
        """
        with self._lock:
            self._decided(self.state.start(self.learners.now()))
        self._carry_out()
        with self._lock:
            self._lock.wait_for(lambda: self.state.is_over or self.state.phase is Phase.RUNNING)
            if self.state.phase is not Phase.RUNNING:
                raise self.state.cause or LGroupError("the group was shut down while it started")

    def submit(self, entry: Entry, *, wait: bool = False, on_admission: Callable[[], None] | None = None) -> bool:
        """Bring a request to the door.

        Args:
            entry: The request.
            wait: If there is no room, return False and leave no trace, instead of dropping an update.
            on_admission: Called under the lock when the entry was taken (or dropped), in the order of decisions.

        Returns:
            Whether the entry was taken, or dropped for good.
        """
        with self._lock:
            instructions = self.state.handle(Submit(entry, may_wait=wait), self.learners.now())
            if instructions and isinstance(instructions[0], Refuse):
                return False
            if entry.kind is EntryKind.UPDATE:
                entry.payload.publishes = self.publishes
            if on_admission is not None:
                on_admission()
            self._decided(instructions)
        self._carry_out()
        return True

    def submit_blocking(self, entry: Entry, on_admission: Callable[[], None] | None = None) -> None:
        """Bring an update to the door and wait until there is room for it."""
        while not self.submit(entry, wait=True, on_admission=on_admission):
            with self._lock:
                self._lock.wait_for(lambda: self._is_open_for(entry))

    def _is_open_for(self, entry: Entry) -> bool:
        return self.state.is_over or self.state.entries.has_room(entry.nbytes)

    def watch_room(self, entry: Entry, callback: Callable[[], None]) -> None:
        """Call `callback` once, from any thread, when there may be room for `entry` (at once if there is)."""
        with self._lock:
            if not self._is_open_for(entry):
                self._watchers.append(callback)
                return
        callback()

    def drop(
        self, entry: Entry, reason: str, on_admission: Callable[[], None] | None = None, error: Any = None
    ) -> None:
        """Account for an update that is dropped at the door."""
        with self._lock:
            self._require_open()
            if on_admission is not None:
                on_admission()
            self._decided(self.state.drop_at_the_door(entry, reason, error, self.learners.now()))
        self._carry_out()

    def require_open(self) -> None:
        """Raise LGroupError if the group is shut down."""
        with self._lock:
            self._require_open()

    def _require_open(self) -> None:
        if self.state.phase is Phase.CLOSED:
            raise LGroupError("the learner group is shut down: it takes no more requests")

    def wait_idle(self, timeout: float | None) -> bool:
        """Wait until every request has its verdict and it is delivered. False if `timeout` seconds were not enough."""
        with self._lock:
            self._idle_waiters += 1
            try:
                return self._lock.wait_for(self._is_idle, timeout)
            finally:
                self._idle_waiters -= 1

    def _is_idle(self) -> bool:
        return self.state.entries.num_outstanding == 0 and not self._outbox and not self._carrying.locked()

    def read(self, what: Callable[[GroupState], Any]) -> Any:
        """Look at the state machine between two events."""
        with self._lock:
            return what(self.state)

    def close(self) -> None:
        """Give up what is in flight and end the learners. Any number of times, from any thread."""
        self.post(Close())
        self.learners.close()

    # Instructions

    def _decided(self, instructions: list[Instruction]) -> None:
        self._outbox.extend(instructions)
        self._lock.notify_all()

    def _carry_out(self) -> None:
        raised: BaseException | None = None
        while self._outbox:
            if not self._carrying.acquire(blocking=False):
                break  # whoever is at it looks into the outbox again before it leaves
            try:
                while self._outbox:
                    raised = self._tried(self._outbox.popleft()) or raised
            finally:
                self._carrying.release()
        if self._idle_waiters:
            with self._lock:
                self._lock.notify_all()
        if self._watchers:
            self._call_watchers()
        if raised is not None:
            raise raised

    def _tried(self, instruction: Instruction) -> BaseException | None:
        """Carry out one instruction. What it raises, Ctrl-C in a local learner's hook say, must not cost the others."""
        try:
            self._execute(instruction)
        except BaseException as error:
            return error
        return None

    def _execute(self, instruction: Instruction) -> None:
        if isinstance(instruction, Send):
            self.learners.send(instruction)
        elif isinstance(instruction, Deliver):
            self._deliver(instruction)
        elif isinstance(instruction, Refuse):
            raise AssertionError("a refusal is the submitter's to see")
        elif isinstance(instruction, Report):
            self.post_mortems.write(instruction.incident)
        elif isinstance(instruction, Warn):
            self.post_mortems.warn(instruction.text)
        else:
            self._command(instruction)

    def _command(self, instruction: Join | Interrupt | Kill | Start | Stop) -> None:
        if isinstance(instruction, Join):
            self.learners.join(instruction)
        elif isinstance(instruction, Interrupt):
            self.learners.interrupt(instruction)
        elif isinstance(instruction, Kill):
            self.learners.kill(instruction)
        elif isinstance(instruction, Start):
            self.learners.start(instruction)
        else:
            self.learners.stop()

    def _deliver(self, deliver: Deliver) -> None:
        entry, verdict = deliver.entry, deliver.verdict
        request = entry.payload
        if verdict.status is Status.APPLIED:
            self._publish(entry, verdict)
        if entry.kind is not EntryKind.UPDATE:
            request.future.set_result(verdict)
            return
        result = make_result(entry, verdict, self.lifetime, self.learners.name)
        quiet = not request.raises or (result.reason == "nonfinite" and not request.raises_nonfinite)
        if not quiet and result.status in ("failed", "dropped") and result.error is not None:
            request.future.set_exception(result.error)
        else:
            request.future.set_result(result)

    # The last committed weights

    def begin_publishing(self) -> None:
        """Have every update that is admitted from now on bring its weights along."""
        with self._lock:
            self.publishes = True

    def _publish(self, entry: Entry, verdict: Verdict) -> None:
        """Keep the weights that an applied entry brought along. Entries come here in the order of commits."""
        if entry.kind is EntryKind.READ and not entry.payload.publishes:
            return
        # A change brings none, nor does an update whose first learner raised at its end: whoever asks next must wait.
        state = state_of(entry, verdict) if self.publishes else None
        self.published = None if state is None else Weights(state, verdict.weights_version)

    def _call_watchers(self) -> None:
        with self._lock:
            if self.state.phase is Phase.RUNNING and not self.state.entries.has_room(0):
                return
            watchers, self._watchers = self._watchers, []
        for callback in watchers:
            callback()
