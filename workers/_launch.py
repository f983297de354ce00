"""Starting a worker until it is ready: attempts one after the other, as the start policy says.

At most one incarnation of a launch lives at a time, and its future ends once, when the last one is ready or has exited.
Cancelling the future ends the launch: the incarnation that is starting is killed, and none follows.
"""

from __future__ import annotations

import contextlib
import random
import time
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace

from lgroup.workers._hub import Hub
from lgroup.workers.errors import WorkerStartError
from lgroup.workers.spec import WorkerSpec
from lgroup.workers.start_policy import StartFailure, StartPolicy
from lgroup.workers.worker import Worker


class Launch:
    """One actor's way to a ready worker. Its methods run on the I/O thread."""

    def __init__(self, hub: Hub, spec: WorkerSpec, policy: StartPolicy, incarnation: int) -> None:
        self.future: Future[Worker] = Future()
        self._hub = hub
        self._spec = spec
        self._policy = policy
        self._incarnation = incarnation
        self._attempt = 0
        self._deadline = time.monotonic() + spec.start_timeout_s
        self._random = random.Random()
        self._worker: Worker | None = None
        self.future.add_done_callback(self._ended)

    def begin(self) -> None:
        """Make the next attempt. The first from any thread, which gets the exception of a closed cluster."""
        self._attempt += 1
        spec = self._spec
        if self._attempt > 1:  # all attempts share the limit
            spec = replace(spec, start_timeout_s=max(self._deadline - time.monotonic(), 0.001))
        worker = self._hub.start_worker(spec, self._incarnation)
        self._incarnation += 1
        self._worker = worker
        worker.ready.add_done_callback(lambda ready: self._decided(worker, ready))

    def _ended(self, future: Future[Worker]) -> None:
        if future.cancelled() and self._worker is not None:
            self._worker.kill()

    def _decided(self, worker: Worker, ready: Future[Worker]) -> None:
        if ready.exception() is None:
            if not self._settle(worker, None):
                worker.kill()
        else:
            worker.on_exit(lambda _: self._failed(worker))

    def _failed(self, worker: Worker) -> None:
        error = worker.ready.exception()
        failure = worker.failure or StartFailure.STOPPED
        left_s = self._deadline - time.monotonic()
        pause_s = self._policy.pause_s(failure, attempt=self._attempt, left_s=left_s, random_source=self._random)
        if pause_s is None or self._hub.closed or self.future.cancelled():
            self._settle(None, self._final(error))
        else:
            self._hub.later(pause_s, self._again)

    def _again(self) -> None:
        if self.future.cancelled():
            return
        try:
            self.begin()
        except Exception as error:
            self._settle(None, error)

    def _settle(self, worker: Worker | None, error: BaseException | None) -> bool:
        """End the future; ``False`` if it was cancelled."""
        with contextlib.suppress(InvalidStateError):
            if worker is not None:
                self.future.set_result(worker)
            else:
                self.future.set_exception(error)
            return True
        return False

    def _final(self, error: BaseException | None) -> BaseException:
        if not isinstance(error, WorkerStartError) or self._attempt == 1:
            return error or WorkerStartError(f"{self._spec.name} did not start")
        text = f"{error.args[0]}\n(attempt {self._attempt} of {self._policy.max_attempts})"
        return WorkerStartError(
            text, cause_type=error.cause_type, remote_traceback=error.remote_traceback, permanent=error.permanent
        )
