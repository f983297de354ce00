"""`LearnerGroup`: the coordinator's view of n learners that train as one."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from lgroup._building import build_learners, check_devices, recovery_policy
from lgroup._driver import GroupDriver
from lgroup._group_entries import Room
from lgroup._group_events import Entry, EntryKind
from lgroup._group_state import GroupState
from lgroup._post_mortem import PostMortems
from lgroup._requests import ChangeRequest, ReadRequest
from lgroup._stats import first_difference, group_stats
from lgroup._submissions import OnFull, Submissions
from lgroup._verdicts import call_results, raise_unless_applied
from lgroup.data.training_data import TrainingData
from lgroup.errors import ConfigError, LGroupError
from lgroup.learner.components import subcomponents
from lgroup.learner.learner_state import COMPONENT_RL_MODULE
from lgroup.update_result import UpdateFuture, UpdateResult
from lgroup.weights import Weights
from lgroup.workers import Cluster, RemoteCallResults

if TYPE_CHECKING:
    from lgroup.config import LearnerGroupConfig
    from lgroup.modules import MultiRLModuleSpec, RLModuleSpec

T = TypeVar("T")
COMPONENT_LEARNER = "learner"


class LearnerGroup:
    """n identical learners that average their gradients, behind one object.

    With ``num_learners=0`` the one learner lives in this process, else each has a process of its own. All methods may
    be called from any thread. Use it as a context manager: leaving it normally finishes what was submitted, leaving it
    with an exception drops that.

    Args:
        config: The settings; the group takes a frozen copy.
        module_spec: The network's recipe, if the config does not say it.
        cluster: Where learner processes run. None: a cluster of the group's own, on this machine.

    Raises:
        ConfigError: if a setting is impossible; no process has been started then.
        WorkerStartError: if a learner does not come up, with its own traceback; none is left running.
    """

    def __init__(
        self,
        *,
        config: LearnerGroupConfig,
        module_spec: RLModuleSpec | MultiRLModuleSpec | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        own = config.copy(copy_frozen=False)
        if module_spec is not None:
            own.rl_module(rl_module_spec=module_spec)
        own.validate()
        check_devices(own)
        spec = own.get_multi_rl_module_spec()
        self.config = own.freeze()
        seed = self.config.seed if self.config.seed is not None else secrets.randbits(62)
        log_dir = self.config.log_dir or (None if cluster is None else cluster.log_dir)
        self._own_cluster = Cluster(log_dir=log_dir) if self.is_remote and cluster is None else None
        self._cluster = cluster or self._own_cluster
        self._async: deque[UpdateFuture] = deque()
        self._polling = threading.Lock()
        try:
            learners = build_learners(self.config, spec, self._cluster if self.is_remote else None, seed)
            self._driver = GroupDriver(self._new_state(seed), learners, PostMortems(log_dir))
            # Ends the processes of a group that is forgotten rather than shut down.
            self._finalizer = weakref.finalize(self, _end_forgotten, self._driver, self._own_cluster)
            self._driver.start()
            module_ids = self._read("module_ids", one_learner=True)[0][0]
            self._submissions = Submissions(self._driver, self.config, seed, module_ids)
        except BaseException:
            self._abandon()
            raise

    def _new_state(self, seed: int) -> GroupState:
        config = self.config
        room = Room(config.max_requests_in_flight_per_learner, config.max_bytes_in_flight)
        snapshots = ReadRequest("snapshot") if self.is_remote else None
        return GroupState(max(1, config.num_learners), room, recovery_policy(config, seed), snapshots)

    def _abandon(self) -> None:
        """The constructor failed: leave nothing behind."""
        if hasattr(self, "_finalizer"):
            self.shutdown()
        elif self._own_cluster is not None:
            self._own_cluster.close(grace_s=0.0)

    # Training

    def update(
        self,
        *,
        batch: Any = None,
        batches: Sequence[Any] | None = None,
        batch_refs: Sequence[Any] | None = None,
        episodes: Sequence[Any] | None = None,
        episodes_refs: Sequence[Any] | None = None,
        data_iterators: Sequence[Any] | None = None,
        training_data: TrainingData | None = None,
        timesteps: Mapping[str, Any] | None = None,
        async_update: bool = False,
        return_state: bool = False,
        num_epochs: int | None = None,
        minibatch_size: int | None = None,
        shuffle_batch_per_epoch: bool | None = None,
        weights_version: int | None = None,
        on_full: OnFull = "drop",
        **kwargs: Any,
    ) -> Any:
        """Train all learners on the data, each on its part.

        Args:
            batch: A `SampleBatch`, `MultiAgentBatch`, dict of columns, or dict of module id to columns.
            batches: Several of these, trained on as one.
            batch_refs, episodes_refs, data_iterators: Not in this version.
            episodes: `SingleAgentEpisode` objects.
            training_data: All of the above in one object, instead of them.
            timesteps: Counters for the learners' hooks, such as ``{"num_env_steps_sampled_lifetime": 10_000}``.
            async_update: Do not wait. See below.
            return_state: Put the modules' state after the update into the first learner's result.
            num_epochs, minibatch_size, shuffle_batch_per_epoch: Instead of the config's. ``minibatch_size`` counts rows
                of one optimizer step over the whole group.
            weights_version: The version of the weights that the data were sampled under, for the staleness statistics.
            on_full: For asynchronous updates, what to do when there is no room: ``"drop"`` or ``"block"``.
            **kwargs: Handed to the learners' ``before_gradient_based_update`` and ``after_gradient_based_update``.

        Returns:
            Synchronously, this update's `UpdateResult`. With ``async_update=True``, a list of the `UpdateResult` of
            every earlier asynchronous update that has finished since, in order, each once, failed and dropped ones too.

        Raises:
            UpdateFailed, UpdateDropped: synchronously, if the update was not applied.
            ConfigError: for ``async_update`` without learner processes.
            ValueError, TypeError: if the data are no batch.
        """
        if async_update and self.is_local:
            raise ConfigError("async_update=True needs learner processes: set num_learners to 1 or more")
        entry = self._submissions.prepare(
            raises=not async_update,
            training_data=training_data,
            batch=batch,
            batches=batches,
            batch_refs=batch_refs,
            episodes=episodes,
            episodes_refs=episodes_refs,
            data_iterators=data_iterators,
            timesteps=timesteps,
            return_state=return_state,
            num_epochs=num_epochs,
            minibatch_size=minibatch_size,
            shuffle_batch_per_epoch=shuffle_batch_per_epoch,
            weights_version=weights_version,
            **kwargs,
        )
        if async_update:
            self._submissions.enter(entry, on_full, stream=self._async)
            return self.poll()
        return self._submissions.enter(entry, "block").result()

    def submit(self, *, on_full: OnFull = "block", **update_arguments: Any) -> UpdateFuture:
        """Train as `update` does, and return a future of the `UpdateResult` as soon as there is room.

        The result reaches only this future, which raises `UpdateFailed` or `UpdateDropped` if the update was not
        applied. The arguments are those of `update`, without ``async_update``.
        """
        return self._submissions.enter(self._submissions.prepare(raises=True, **update_arguments), on_full)

    async def submit_async(self, **update_arguments: Any) -> UpdateFuture:
        """The same as `submit`, waiting for room without blocking the event loop. The future can be awaited."""
        entry = self._submissions.prepare(raises=True, **update_arguments)
        if self._submissions.is_decided_at_the_door(entry):
            return self._submissions.enter(entry, "block")
        loop = asyncio.get_running_loop()
        while not self._driver.submit(entry, wait=True):
            there_is_room = asyncio.Event()
            self._driver.watch_room(entry, partial(_set_soon, loop, there_is_room))
            await there_is_room.wait()
        future: UpdateFuture = entry.payload.future
        return future

    def poll(self) -> list[UpdateResult]:
        """Every asynchronous update that has finished since the last call, in order, each once."""
        finished: list[UpdateResult] = []
        with self._polling:
            while self._async and self._async[0].done():
                finished.append(self._async.popleft().result())
        return finished

    def drain(self, timeout: float | None = None) -> list[UpdateResult]:
        """Wait until nothing is in flight, then `poll`. After `timeout` seconds, what has finished by then."""
        self._driver.wait_idle(timeout)
        return self.poll()

    # Weights and state

    def get_weights(
        self, module_ids: Collection[str] | None = None, *, inference_only: bool = False, wait: bool = True
    ) -> Weights:
        """The modules' weights, with the number of updates they hold in ``.version``.

        Args:
            module_ids: Which modules; None means all.
            inference_only: Leave out what is not needed to choose actions.
            wait: Take them after everything admitted before this call. Otherwise the last committed weights at once;
                the first such call waits, and so does the first one after anything but an update changed them. From the
                first on, every update's reply brings its weights along.
        """
        published = self._driver.published
        if not wait and published is not None and not inference_only:
            return published.copied(module_ids)
        publishes = not wait and module_ids is None and not inference_only
        if publishes:
            self._driver.begin_publishing()
        paths = [COMPONENT_RL_MODULE] if module_ids is None else [f"{COMPONENT_RL_MODULE}/{m}" for m in module_ids]
        (state,), version = self._read(
            "get_state", one_learner=True, publishes=publishes, components=paths, inference_only=inference_only
        )
        weights = Weights(state.get(COMPONENT_RL_MODULE, {}), version)
        return weights.copied() if publishes else weights

    def set_weights(self, weights: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy weights, tensors or numpy arrays, into all learners: any subset of the modules, behind all updates.

        Raises:
            ActorError: if they do not fit; no learner has changed then.
        """
        self.set_state({COMPONENT_LEARNER: {COMPONENT_RL_MODULE: weights}})

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
    ) -> dict[str, Any]:
        """A copy of one learner's state after everything admitted before this call; all learners' are identical.

        Args:
            components: Paths to include, such as ``"learner/rl_module"``; None means all.
            not_components: Paths to leave out.
            inference_only: Leave out of the modules what is not needed to choose actions.

        Returns:
            ``{"learner": {"rl_module": ..., "optimizer": ..., ...}}``, see `Learner.get_state`.
        """
        wanted = subcomponents(COMPONENT_LEARNER, components)
        unwanted = False if not_components is None else subcomponents(COMPONENT_LEARNER, not_components)
        if wanted is False or unwanted is None:
            return {}
        (state,), _ = self._read(
            "get_state",
            one_learner=True,
            components=wanted,
            not_components=unwanted or None,
            inference_only=inference_only,
        )
        return {COMPONENT_LEARNER: state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Copy a state as of `get_state`, or any parts of one, into all learners, behind all updates.

        Raises:
            ValueError: if there is anything but ``"learner"`` in it.
            ActorError: if a part does not fit; no learner has changed then.
        """
        unknown = sorted(set(state) - {COMPONENT_LEARNER})
        if unknown:
            raise ValueError(f"a learner group's state has no component {unknown[0]!r}; it has {COMPONENT_LEARNER!r}")
        if COMPONENT_LEARNER in state:
            self._change(ChangeRequest.setting_state(state[COMPONENT_LEARNER]))

    def foreach_learner(
        self,
        func: Callable[..., T],
        *,
        healthy_only: bool = True,
        remote_actor_ids: Sequence[int] | None = None,
        timeout_seconds: float | None = None,
        return_obj_refs: bool = False,
        mark_healthy: bool = False,
        **kwargs: Any,
    ) -> RemoteCallResults:
        """Call ``func(learner, **kwargs)`` on every learner, behind everything admitted before.

        The call may change the learners. Where it raises, that learner takes back what it did there and adopts the
        state of those that finished; if none did, nothing has changed.

        Args:
            func: Any function of a `Learner` that can be pickled, lambdas included.
            healthy_only, mark_healthy: As in RLlib. All learners of a running group are healthy in this version.
            remote_actor_ids: Not in this version.
            timeout_seconds: How long to wait; without an answer by then the results are empty, and the call goes on.
            return_obj_refs: Not in this version.
            **kwargs: Handed to `func`.

        Returns:
            One `CallResult` per rank, in order.
        """
        for name, value in (("remote_actor_ids", remote_actor_ids), ("return_obj_refs", return_obj_refs)):
            if value:
                raise ConfigError.refused(name, value, "its default, in this version")
        request = ChangeRequest.calling(func, kwargs)
        self._driver.submit(Entry(EntryKind.CHANGE, request, nbytes=request.nbytes))
        try:
            return call_results(request.future.result(timeout_seconds))
        except FutureTimeoutError:
            return RemoteCallResults()

    def check_sync(self) -> dict[str, str]:
        """Compare all learners' states, bit for bit, behind everything admitted before.

        Returns:
            The digest of every part of the state, by its path.

        Raises:
            LGroupError: naming the first part that differs, and the ranks.
        """
        digests, _ = self._read("digests")
        different = first_difference(digests)
        if different is not None:
            raise LGroupError(different)
        return dict(digests[0])

    def _read(
        self, name: str, *, one_learner: bool = False, publishes: bool = False, **kwargs: Any
    ) -> tuple[list[Any], int]:
        """The answers of the learners asked, in order, and the weights version they were given at."""
        request = ReadRequest(name, kwargs, publishes)
        self._driver.submit(Entry(EntryKind.READ, request, one_learner=one_learner))
        verdict = request.future.result()
        raise_unless_applied(verdict, f"{name}()")
        return [reply.body["value"] for reply in verdict.replies.values()], verdict.weights_version

    def _change(self, request: ChangeRequest) -> None:
        self._driver.submit(Entry(EntryKind.CHANGE, request, nbytes=request.nbytes))
        raise_unless_applied(request.future.result(), f"{request.ask.method}()")

    # Looking in

    def get_stats(self) -> dict[str, Any]:
        """Counters and the learners' state, without asking the learners.

        Returns:
            RLlib's ``learner_group_ts_dropped_lifetime`` (env steps, an int) and
            ``actor_manager_num_outstanding_async_reqs``; the ledger in ``updates`` and ``env_steps`` (each
            ``submitted``, ``in_flight``, ``applied``, ``dropped`` and ``failed`` by reason); ``weights_version``,
            ``generation``, ``phase``, ``num_healthy_learners``, ``num_restarts``, ``staleness`` (``histogram`` of
            commits, ``max``) and ``learners``, one dict each.
        """
        return {**self._driver.read(group_stats), "learners": self._driver.learners.rows()}

    def post_mortems(self) -> list[dict[str, Any]]:
        """The last incidents, up to 100, oldest first, as plain values.

        Each has ``incident`` (its number), ``generation``, ``first`` and ``others`` (the learners that died: ``rank``,
        ``node``, ``pid``, ``exit_code``, ``signal``, ``memory_hint``, ``last_lines``, ``stacks``, ...), ``in_flight``
        and ``consequences``.
        """
        return [incident.as_dict() for incident in list(self._driver.post_mortems.kept)]

    @property
    def is_remote(self) -> bool:
        """Whether the learners have processes of their own."""
        return self.config.num_learners > 0

    @property
    def is_local(self) -> bool:
        """Whether the one learner lives in this process."""
        return not self.is_remote

    @property
    def cluster(self) -> Cluster | None:
        """Where the learner processes run; None for a local learner."""
        return self._cluster

    def __len__(self) -> int:
        return self.config.num_learners

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        phase, in_flight = self._driver.read(lambda state: (state.phase.value, state.entries.in_flight))
        return f"<LearnerGroup {phase} num_learners={len(self)} in_flight={in_flight}>"

    # The end

    def shutdown(self) -> None:
        """End the learners at once; what is in flight is dropped, and counted so.

        May be called any number of times, from any thread, and again after it was interrupted.
        """
        _end(self._driver, self._own_cluster)
        self._finalizer.detach()

    def __enter__(self) -> LearnerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._driver.wait_idle(None)
        finally:
            self.shutdown()

    async def __aenter__(self) -> LearnerGroup:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(event.set)


def _end_forgotten(driver: GroupDriver, own_cluster: Cluster | None) -> None:
    """The garbage collector may run this in any thread, also inside one of the driver's own methods."""
    if threading.main_thread().is_alive():
        threading.Thread(target=_end, args=(driver, own_cluster), name="lgroup-end").start()
    else:  # the program ends; no thread can be started any more
        _end(driver, own_cluster)


def _end(driver: GroupDriver, own_cluster: Cluster | None) -> None:
    driver.close()
    if own_cluster is not None:
        own_cluster.close(grace_s=0.0)
