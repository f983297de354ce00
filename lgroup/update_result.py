"""What a caller gets back from an update."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from lgroup._group_events import Entry, EntryKind, Outcome, Status, Verdict
from lgroup.columns import (
    ALL_MODULES,
    NUM_ENV_STEPS_TRAINED,
    NUM_ENV_STEPS_TRAINED_LIFETIME,
    NUM_MODULE_STEPS_TRAINED,
    NUM_MODULE_STEPS_TRAINED_LIFETIME,
    WEIGHTS_SEQ_NO,
)
from lgroup.errors import UpdateDropped, UpdateFailed
from lgroup.learner.metrics import Delta, merge

StatusName = Literal["applied", "dropped", "failed", "noop"]
STATE_AFTER_UPDATE = "_rl_module_state_after_update"


class UpdateResult(list[dict[str, Any]]):
    """One dict of metrics per learner, ``{module_id: {...}, "__all_modules__": {...}}``, with RLlib's key names.

    A learner that died after the others had decided the update, and before it could report, has no dict in it.

    Attributes:
        seq: The update's number among the group's submissions, from 1; None if it was none (nothing to train).
        status: ``applied``, ``dropped``, ``failed`` or ``noop``.
        reason: Why it was dropped or failed, as in the ledger; None otherwise.
        error: The exception that says what went wrong. Also set on an applied update if a learner raised after the
            others had finished: it holds the others' state now.
        rows: Rows given, over all modules.
        env_steps: Env steps given.
        weights_version: Number of updates that the weights hold, after this one.
        generation: The membership that decided it.
        reduced: One dict of the same form: what a single learner would have reported.
    """

    def __init__(
        self,
        learners: Sequence[dict[str, Any]] = (),
        *,
        seq: int | None = None,
        status: StatusName = "noop",
        reason: str | None = None,
        error: Exception | None = None,
        rows: int = 0,
        env_steps: int = 0,
        weights_version: int = 0,
        generation: int = 0,
        reduced: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(learners)
        self.seq = seq
        self.status: StatusName = status
        self.reason = reason
        self.error = error
        self.rows = rows
        self.env_steps = env_steps
        self.weights_version = weights_version
        self.generation = generation
        self.reduced: dict[str, Any] = reduced if reduced is not None else {}

    def __repr__(self) -> str:
        why = f", reason={self.reason!r}" if self.reason else ""
        return f"<UpdateResult seq={self.seq} {self.status}{why} weights_version={self.weights_version}>"

    def raise_for_status(self) -> None:
        """Raise the `UpdateFailed` or `UpdateDropped` of an update that is not applied; else do nothing."""
        if self.status in ("failed", "dropped") and self.error is not None:
            raise self.error


class UpdateFuture(Future[UpdateResult]):
    """An update's result to come: a concurrent future that can be awaited, too.

    It cannot be cancelled, for an admitted update runs; cancelling an ``await`` of it ends the waiting only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()

    def __await__(self) -> Generator[Any, None, UpdateResult]:
        # Not `asyncio.wrap_future`: after a cancelled await that one complains of an error which nobody has retrieved.
        loop = asyncio.get_running_loop()
        told: asyncio.Future[None] = loop.create_future()
        self.add_done_callback(lambda _: _call_soon(loop, _tell, told))
        yield from told.__await__()
        return self.result()


def _tell(told: asyncio.Future[None]) -> None:
    if not told.done():
        told.set_result(None)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(callback, *args)


class Lifetime:
    """Sums over all applied updates. Learners report deltas; these are added up in the order of the updates."""

    def __init__(self) -> None:
        self._metrics: Counter[tuple[str, ...]] = Counter()
        self.env_steps = 0
        self._module_steps: Counter[str] = Counter()

    def add(self, reduced: dict[tuple[str, ...], tuple[str, float]], env_steps: int) -> None:
        """Add one applied update's metrics and env steps."""
        self.env_steps += env_steps
        for path, (reduce, value) in reduced.items():
            if reduce == "lifetime":
                self._metrics[path] += value  # type: ignore[assignment]
            elif path[-1] == NUM_MODULE_STEPS_TRAINED:
                self._module_steps[path[0]] += int(value)

    def fill(self, tree: dict[str, Any]) -> None:
        """Write the sums into one result dict."""
        for path, value in self._metrics.items():
            _put(tree, path, value)
        for module_id, steps in self._module_steps.items():
            if module_id in tree:
                tree[module_id][NUM_MODULE_STEPS_TRAINED_LIFETIME] = steps
        tree[ALL_MODULES][NUM_ENV_STEPS_TRAINED_LIFETIME] = self.env_steps


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _metrics_tree(reduced: dict[tuple[str, ...], tuple[str, float]], env_steps: int, version: int) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    module_steps = 0
    for path, (_, value) in reduced.items():
        _put(tree, path, value)
        if path[-1] == NUM_MODULE_STEPS_TRAINED:
            module_steps += int(value)
            tree[path[0]][WEIGHTS_SEQ_NO] = version
    everything = tree.setdefault(ALL_MODULES, {})
    everything.update({NUM_ENV_STEPS_TRAINED: env_steps, NUM_MODULE_STEPS_TRAINED: module_steps})
    return tree


def state_of(entry: Entry, verdict: Verdict) -> dict[str, Any] | None:
    """The modules' state that the first learner's reply to an update, or to a read of it, brought along, if any."""
    reply = next(iter(verdict.replies.values()), None)
    if reply is None or not isinstance(reply.body, dict):
        return None
    if entry.kind is EntryKind.READ:
        state: dict[str, Any] | None = reply.body["value"].get("rl_module")
        return state
    return reply.body.get("state")


def make_result(entry: Entry, verdict: Verdict, lifetime: Lifetime, name: Callable[[int], str]) -> UpdateResult:
    """The result of an update that has its verdict. `name` tells who the learner in a slot is, for messages."""
    result = UpdateResult(
        seq=entry.seq,
        status=verdict.status.value,
        reason=verdict.reason,
        rows=entry.rows,
        env_steps=entry.env_steps,
        weights_version=verdict.weights_version,
        generation=verdict.generation,
    )
    if verdict.error is not None or verdict.status not in (Status.APPLIED, Status.NOOP):
        result.error = _error(entry, verdict, name, result)
    if verdict.status in (Status.APPLIED, Status.NOOP):
        _fill(result, entry, verdict, lifetime)
    return result


def _fill(result: UpdateResult, entry: Entry, verdict: Verdict, lifetime: Lifetime) -> None:
    bodies = [
        reply.body if reply.outcome in (Outcome.APPLIED, Outcome.NOOP) else {} for reply in verdict.replies.values()
    ]
    deltas: list[list[Delta]] = [body.get("metrics", []) for body in bodies]
    version = result.weights_version
    together = merge(deltas)
    lifetime.add(together, result.env_steps)
    result.reduced = _metrics_tree(together, result.env_steps, version)
    result.extend(_metrics_tree(merge([own]), result.env_steps, version) for own in deltas)
    for tree in (result.reduced, *result):
        lifetime.fill(tree)
    state = state_of(entry, verdict)
    if state is not None and entry.payload.return_state:
        result[0][STATE_AFTER_UPDATE] = state


def _error(entry: Entry, verdict: Verdict, who: Callable[[int], str], result: UpdateResult) -> Exception | None:
    if verdict.status is Status.DROPPED:
        return UpdateDropped(_dropped_text(entry, verdict), reason=str(verdict.reason), result=result)
    if verdict.reason == "nonfinite":
        return UpdateFailed(_nonfinite_text(entry, verdict, who), reason="nonfinite", result=result)
    error = verdict.error
    if error is None:
        return None
    reason = verdict.reason or "user_error"
    if isinstance(error, Exception):
        failure = UpdateFailed(
            f"update {entry.seq}: {error}", reason=reason, cause_type=type(error).__name__, result=result
        )
        failure.__cause__ = error
        return failure
    raised = [slot for slot, reply in verdict.replies.items() if reply.outcome is Outcome.RAISED]
    names = ", ".join(map(who, raised)) or "a learner"
    kept = "; the others had finished, and it holds their state now" if verdict.status is Status.APPLIED else ""
    return UpdateFailed(
        f"update {entry.seq}: {names} raised {error['type']}: {error['message']}{kept}",
        reason=reason,
        cause_type=error["type"],
        remote_traceback=error["traceback"],
        result=result,
    )


def _dropped_text(entry: Entry, verdict: Verdict) -> str:
    why = {
        "queue_full": "no room: wait with on_full='block', or raise max_requests_in_flight_per_learner",
        "no_such_module": f"{verdict.error}",
        "stale": "its data were sampled under weights that are more than max_staleness commits old",
        "shutdown": "the group was shut down before it was decided",
    }
    return f"update {entry.seq} was dropped ({verdict.reason}): {why.get(str(verdict.reason), '')}".rstrip(": ")


def _nonfinite_text(entry: Entry, verdict: Verdict, who: Callable[[int], str]) -> str:
    culprits = [
        f"{who(slot)} in {reply.body['parameter']}"
        for slot, reply in verdict.replies.items()
        if isinstance(reply.body, dict) and reply.body.get("parameter")
    ]
    where = ", ".join(culprits) if culprits else "only in the sum over learners (an overflow)"
    return f"update {entry.seq}: the gradient was not finite ({where}); no learner applied it"
