"""A number of actors of one class, each in a process of its own, that may die and come back one by one.

Every call that was sent has exactly one result: a value, what user code raised, or an error that says how the process
died. A result may be given up (a timeout, ``remove_actor``, ``clear``), but is never made up and never given twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal

from lgroup.workers._actor_arguments import (
    Kwargs,
    check_numbers,
    kwargs_per_actor,
    one_per_actor,
    refuse_refs,
    single,
)
from lgroup.workers._actor_slot import ActorSlot, SlotState
from lgroup.workers._async_calls import AsyncCalls
from lgroup.workers._gather import Gather
from lgroup.workers._supervision import Supervision
from lgroup.workers.calls import PreparedCall, Reply, Target, prepare_call
from lgroup.workers.cluster import Cluster
from lgroup.workers.event_thread import OnWorker
from lgroup.workers.results import CallResult, RemoteCallResults, ResultOrError, result_of
from lgroup.workers.spec import WorkerSpec
from lgroup.workers.worker import STOP_GRACE_S


@dataclass(frozen=True, slots=True)
class _Call:
    slot: ActorSlot
    prepared: PreparedCall

    @property
    def actor_id(self) -> int:
        return self.slot.actor_id


class ActorGroup:
    """Runs ``actor_class(*args, **kwargs)`` in ``num_actors`` worker processes and calls them together.

    All methods are thread-safe. A *call* names a method of the actor or is a function that gets the actor first;
    arguments are pickled where they are not plain values, arrays or tensors, and large arrays arrive read-only.

    An exception in user code is that call's result and leaves the actor alive. When a process dies its unfinished calls
    get an ``ActorError``, the actor is unhealthy, and with ``restart_failed_actors`` it is started again: at once, or
    after growing pauses while it keeps dying without having answered a call. Calls with ``healthy_only=False`` wait for
    that. It stays unhealthy until a call with ``mark_healthy=True`` succeeds. An actor is *down* for good, and calls of
    it get an error, if it is not to be restarted, if its constructor fails in a way that would repeat (a class that
    cannot be imported, say), or if the budget of restarts is used up.

    Args:
        kwargs: one mapping for all actors, or a sequence with one per actor.
        cluster: where the processes live; by default a private one, closed with the group.
        max_requests_in_flight_per_actor: the limit of asynchronous calls, per actor and tag.
        num_threads: for torch and BLAS in each process; ``"auto"``: the cluster's cores divided by the actors.
        seed: seeds each actor's random generators, with its id and incarnation.
        name: actors are called ``"<name> 0"``, ``"<name> 1"``, ... in messages.
        start_timeout_s: for one actor to come up, all attempts together (at a restart, which has one attempt at a time:
            for each); the cluster's limit by default.
        max_restarts, restart_window_s: no more restarts of the whole group than this, failed ones included, within any
            window of that many seconds.
        heartbeat_timeout_s: an actor whose process is stopped, or that neither answers nor uses CPU time, for this long
            is killed, after its stacks were written to its output. One that computes is left alone.
        on_worker_died: called once for each process that died unasked, and each restart that failed.
        on_worker_restarted: called once each time an actor is up in a new process. Both get a ``WorkerEvent``, one
            after the other, on a thread of their own; what they raise is logged.

    Raises ``ValueError`` for a setting that is not possible, and ``WorkerStartError`` with the child's traceback if an
    actor does not come up; no process is left then.
    """

    def __init__(
        self,
        actor_class: Callable[..., Any],
        *,
        num_actors: int,
        args: Sequence[Any] = (),
        kwargs: Kwargs | Sequence[Kwargs] | None = None,
        cluster: Cluster | None = None,
        max_requests_in_flight_per_actor: int = 2,
        restart_failed_actors: bool = True,
        num_threads: int | Literal["auto"] = "auto",
        seed: int | None = None,
        name: str = "actor",
        start_timeout_s: float | None = None,
        max_restarts: int = 100,
        restart_window_s: float = 3600.0,
        heartbeat_timeout_s: float = 10.0,
        on_worker_died: OnWorker | None = None,
        on_worker_restarted: OnWorker | None = None,
    ) -> None:
        check_numbers(num_actors, max_requests_in_flight_per_actor, num_threads)
        each = kwargs_per_actor(kwargs, num_actors)
        self._actor_class = actor_class
        self._args = tuple(args)
        self._seed = seed
        self._name = name
        self._supervision = Supervision(
            restart=restart_failed_actors,
            max_restarts=max_restarts,
            restart_window_s=restart_window_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            on_died=on_worker_died,
            on_restarted=on_worker_restarted,
        )
        self._own_cluster = cluster is None
        self._cluster = cluster if cluster is not None else Cluster()
        self._start_timeout_s = start_timeout_s if start_timeout_s is not None else self._cluster.start_timeout_s
        self._num_threads = self._cluster.threads_per_worker(num_actors) if num_threads == "auto" else num_threads
        self._changed = threading.Condition()
        self._slots: dict[int, ActorSlot] = {}
        self._next_id = 0
        self._calls = AsyncCalls(max_requests_in_flight_per_actor)
        try:
            self._start(each)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return (
            f"<ActorGroup {self._name} actors={self.num_actors()} healthy={self.num_healthy_actors()} "
            f"restarts={self.total_num_restarts()} outstanding={self.num_outstanding_async_reqs()}>"
        )

    def __len__(self) -> int:
        return self.num_actors()

    def __bool__(self) -> bool:
        return True

    @property
    def cluster(self) -> Cluster:
        """Where its processes live."""
        return self._cluster

    # --- who there is ---

    def actor_ids(self) -> list[int]:
        """All actors, in the order they were added. An id is never used again."""
        return list(self._slots)

    def healthy_actor_ids(self) -> list[int]:
        """Those that are taken for healthy."""
        return [actor_id for actor_id, slot in list(self._slots.items()) if slot.healthy]

    def num_actors(self) -> int:
        """How many there are."""
        return len(self._slots)

    def num_healthy_actors(self) -> int:
        """How many of them are taken for healthy."""
        return len(self.healthy_actor_ids())

    def total_num_restarts(self) -> int:
        """How often an actor came back in a new process."""
        return sum(slot.num_restarts for slot in list(self._slots.values()))

    def is_actor_healthy(self, actor_id: int) -> bool:
        """Whether the actor is taken for healthy. Raises ``ValueError`` for an unknown id."""
        return self._slot(actor_id).healthy

    def actor_states(self) -> dict[int, str]:
        """``"up"``; ``"starting"``: its process died and the next one is on its way; or ``"down"`` for good.

        An actor may be up and not yet be taken for healthy.
        """
        slots = list(self._slots.values())
        return {slot.actor_id: slot.state.value for slot in slots if slot.state is not SlotState.REMOVED}

    def set_actor_state(self, actor_id: int, healthy: bool) -> None:
        """Take the actor for healthy, or not. Its outstanding calls go on. Raises ``ValueError`` for an unknown id."""
        self._slot(actor_id).healthy = healthy

    def actor_pids(self) -> dict[int, int]:
        """The process of each actor that has one."""
        workers = {actor_id: slot.worker for actor_id, slot in list(self._slots.items())}
        return {actor_id: worker.pid for actor_id, worker in workers.items() if worker is not None and worker.pid}

    # --- calls that wait ---

    def foreach_actor(
        self,
        func: Target | Sequence[Target],
        *,
        kwargs: Kwargs | Sequence[Kwargs] | None = None,
        healthy_only: bool = True,
        remote_actor_ids: Sequence[int] | None = None,
        timeout_seconds: float | None = None,
        return_obj_refs: bool = False,
        mark_healthy: bool = False,
    ) -> RemoteCallResults:
        """Call ``func`` on each actor and wait for the results, which come in the order of the actors.

        Args:
            func: a method's name or a function of the actor, or a list of them, one per actor of ``remote_actor_ids``.
            kwargs: for all calls, or a list, one per actor.
            healthy_only: leave out actors that are not taken for healthy.
            remote_actor_ids: which actors; all by default.
            timeout_seconds: results that are not there by then are given up; 0 does not wait at all. The actors stay as
                they are.
            mark_healthy: take an unhealthy actor for healthy if its call succeeds.
        """
        refuse_refs(return_obj_refs)
        calls = self._plan(func, kwargs, healthy_only, remote_actor_ids)
        gather = Gather(len(calls))
        for index, call in enumerate(calls):
            self._send(call, gather.taker(index), mark_healthy)
        answers = gather.wait(timeout_seconds)
        results = RemoteCallResults()
        for index, call in enumerate(calls):
            if index in answers:
                results.add_result(call.actor_id, answers[index])
        return results

    def probe_unhealthy_actors(self, timeout_seconds: float | None = None, mark_healthy: bool = False) -> list[int]:
        """Call every unhealthy actor, waiting for one that is being restarted; returns the ids of those that answered.

        ``mark_healthy`` takes those for healthy again.
        """
        unhealthy = [actor_id for actor_id, slot in list(self._slots.items()) if not slot.healthy]
        if not unhealthy:
            return []
        results = self.foreach_actor(
            _answer,
            healthy_only=False,
            remote_actor_ids=unhealthy,
            timeout_seconds=timeout_seconds,
            mark_healthy=mark_healthy,
        )
        return [result.actor_id for result in results.ignore_errors()]

    # --- calls that do not wait ---

    def foreach_actor_async(
        self,
        func: Target | Sequence[Target],
        tag: str | None = None,
        *,
        kwargs: Kwargs | Sequence[Kwargs] | None = None,
        healthy_only: bool = True,
        remote_actor_ids: Sequence[int] | None = None,
    ) -> int:
        """Send ``func`` to each actor that has room for another call with ``tag``; returns how many were sent.

        The results are fetched with ``fetch_ready_async_reqs``; until then the calls count against the limit.
        """
        sent = 0
        for call in self._plan(func, kwargs, healthy_only, remote_actor_ids):
            key = (call.actor_id, call.prepared.request_id)
            with self._changed:
                if not self._calls.has_room(call.actor_id, tag):
                    continue
                self._calls.sent(key, tag)
            self._send(call, partial(self._answered, key), mark_healthy=False)
            sent += 1
        return sent

    def fetch_ready_async_reqs(
        self,
        *,
        tags: str | Iterable[str | None] = (),
        timeout_seconds: float | None = 0.0,
        return_obj_refs: bool = False,
        mark_healthy: bool = False,
        min_results: int | None = None,
    ) -> RemoteCallResults:
        """The results that are there of calls with ``tags`` (default: all), in the order they came in.

        Waits up to ``timeout_seconds`` (``None``: without limit) until ``min_results`` of them are there; by default,
        until all are.
        """
        refuse_refs(return_obj_refs)
        wanted: Collection[str | None] = {tags} if isinstance(tags, str) else set(tags)
        with self._changed:
            self._changed.wait_for(lambda: self._enough(wanted, min_results), timeout_seconds)
            results = self._calls.fetch(wanted)
        if mark_healthy:
            for result in results.ignore_errors():
                self._mark_healthy(result)
        return results

    def foreach_actor_async_fetch_ready(
        self,
        func: Target | Sequence[Target],
        tag: str | None = None,
        *,
        kwargs: Kwargs | Sequence[Kwargs] | None = None,
        timeout_seconds: float | None = 0.0,
        return_obj_refs: bool = False,
        mark_healthy: bool = False,
        healthy_only: bool = True,
        remote_actor_ids: Sequence[int] | None = None,
        return_actor_ids: bool = False,
    ) -> list[Any]:
        """Fetch the values of earlier calls with ``tag``, then send ``func``. Errors are left out.

        With ``return_actor_ids`` each value comes as ``(actor id, value)``.
        """
        results = self.fetch_ready_async_reqs(
            tags=(tag,), timeout_seconds=timeout_seconds, return_obj_refs=return_obj_refs, mark_healthy=mark_healthy
        )
        self.foreach_actor_async(func, tag, kwargs=kwargs, healthy_only=healthy_only, remote_actor_ids=remote_actor_ids)
        good = list(results.ignore_errors())
        return [(result.actor_id, result.get()) for result in good] if return_actor_ids else [r.get() for r in good]

    def num_outstanding_async_reqs(self, tag: str | None = None) -> int:
        """Asynchronous calls whose results were not fetched: those with ``tag``, or all."""
        with self._changed:
            return self._calls.num_outstanding(tag)

    # --- who comes and goes ---

    def add_actors(self, num_actors: int = 1, *, kwargs: Kwargs | Sequence[Kwargs] | None = None) -> list[int]:
        """Start more actors and wait for them; returns their ids. Raises ``WorkerStartError``; none is added then."""
        return self._start(kwargs_per_actor(kwargs, num_actors))

    def remove_actor(self, actor_id: int) -> None:
        """Stop an actor after the calls it has; their results are given up. Raises ``ValueError`` for an unknown id."""
        slot = self._slot(actor_id)
        with self._changed:
            self._slots.pop(actor_id, None)
            self._calls.forget(actor_id)
            self._changed.notify_all()
        slot.remove(STOP_GRACE_S)

    def clear(self) -> None:
        """Kill all actors and give up their results."""
        with self._changed:
            slots, self._slots = list(self._slots.values()), {}
            self._calls.clear()
            self._changed.notify_all()
        for slot in slots:
            slot.remove(None)

    def close(self) -> None:
        """End all actors, and the cluster if it is the group's own. May be called again."""
        self.clear()
        self._supervision.callbacks.close()
        if self._own_cluster:
            self._cluster.close()

    shutdown = close

    def __enter__(self) -> ActorGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- how ---

    def _start(self, each: Sequence[Kwargs]) -> list[int]:
        slots = [self._new_slot(kwargs) for kwargs in each]
        try:
            for slot in slots:
                slot.started.result()
        except BaseException:
            for slot in slots:
                slot.remove(None)
            raise
        with self._changed:
            self._slots.update({slot.actor_id: slot for slot in slots})
        return [slot.actor_id for slot in slots]

    def _new_slot(self, kwargs: Kwargs) -> ActorSlot:
        with self._changed:
            actor_id, self._next_id = self._next_id, self._next_id + 1
        spec = WorkerSpec(
            name=f"{self._name} {actor_id}",
            actor_class=self._actor_class,
            args=self._args,
            kwargs=kwargs,
            num_threads=self._num_threads,
            seed=self._seed,
            actor_index=actor_id,
            start_timeout_s=self._start_timeout_s,
        )
        return ActorSlot(self._cluster, actor_id, spec, self._supervision)

    def _slot(self, actor_id: int) -> ActorSlot:
        try:
            return self._slots[actor_id]
        except KeyError:
            raise ValueError(f"unknown actor id {actor_id!r}; there are {self.actor_ids()}") from None

    def _plan(
        self,
        func: Target | Sequence[Target],
        kwargs: Kwargs | Sequence[Kwargs] | None,
        healthy_only: bool,
        remote_actor_ids: Sequence[int] | None,
    ) -> list[_Call]:
        slots = [
            self._slot(actor_id) for actor_id in (self.actor_ids() if remote_actor_ids is None else remote_actor_ids)
        ]
        funcs = one_per_actor("func", func, len(slots))
        each = one_per_actor("kwargs", kwargs if kwargs is not None else {}, len(slots))
        wanted = [triple for triple in zip(slots, funcs, each, strict=True) if triple[0].healthy or not healthy_only]
        if single(func) and single(kwargs) and len({slot.actor_id for slot, _, _ in wanted}) == len(wanted):
            # one message for all: it is encoded once
            shared = [prepare_call(target, (), arguments) for _, target, arguments in wanted[:1]]
            return [_Call(slot, shared[0]) for slot, _, _ in wanted]
        return [_Call(slot, prepare_call(target, (), arguments)) for slot, target, arguments in wanted]

    def _send(self, call: _Call, take: Callable[[ResultOrError], None], mark_healthy: bool) -> None:
        slot = call.slot

        def on_reply(reply: Reply) -> None:
            if reply.error is not None and reply.error.died:
                slot.died()
            elif reply.ok and mark_healthy:
                slot.healthy = True
            take(result_of(reply))

        slot.send(call.prepared, on_reply)

    def _answered(self, key: tuple[int, int], result: ResultOrError) -> None:
        with self._changed:
            self._calls.answered(key, result)
            self._changed.notify_all()

    def _enough(self, wanted: Collection[str | None], min_results: int | None) -> bool:
        awaited = self._calls.num_awaited(wanted)
        return self._calls.num_answered(wanted) >= (awaited if min_results is None else min(min_results, awaited))

    def _mark_healthy(self, result: CallResult) -> None:
        slot = self._slots.get(result.actor_id)
        if slot is not None:
            slot.healthy = True


def _answer(actor: Any) -> bool:
    return True
