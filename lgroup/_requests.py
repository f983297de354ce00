"""What the group asks of its learners: the payloads of entries, and how each becomes a call for one rank.

A request owns its data: callers may reuse their buffers as soon as it is made. It is kept until the group's verdict, so
that it can be planned and sent again for another membership.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle

from lgroup._group_events import Entry, EntryKind, Verdict
from lgroup.columns import DEFAULT_MODULE_ID, WEIGHTS_SEQ_NO
from lgroup.data.batch import MultiAgentBatch, take
from lgroup.data.episode import SingleAgentEpisode, shard_episodes
from lgroup.data.plan import Plan, make_plan
from lgroup.data.training_data import TrainingData
from lgroup.learner.seeding import mixed
from lgroup.learner.state_tree import copy_tree
from lgroup.transport import Kind, Message, decode, encode
from lgroup.update_result import UpdateFuture


@dataclass(frozen=True, slots=True)
class Ask:
    """One call of a `LearnerHost` method: its name and what follows the generation among its arguments."""

    method: str
    args: tuple[Any, ...]
    data_only: bool


class Request(Protocol):
    """The payload of an entry."""

    def asks(self, entry: Entry, world_size: int) -> Sequence[Ask]:
        """The call for each rank of a group of `world_size`."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How rows are cut into steps; the fields are `make_plan`'s."""

    num_epochs: int
    minibatch_size: int | None
    shuffle: bool


@dataclass(eq=False, slots=True)
class TrainRequest:
    """One update: a batch, or episodes that the learners turn into one, and what goes with it."""

    cut: Cut
    seed: int
    timesteps: Mapping[str, Any]
    kwargs: Mapping[str, Any]
    return_state: bool
    raises: bool  # whether a failed or dropped update raises where its future is asked
    raises_nonfinite: bool = True  # whether that holds for a nonfinite gradient, too
    publishes: bool = False  # set at admission: whether the reply brings the weights along although nobody asked
    batch: MultiAgentBatch | None = None
    episodes: Sequence[Any] | None = None
    future: UpdateFuture = field(default_factory=UpdateFuture)

    def asks(self, entry: Entry, world_size: int) -> Sequence[Ask]:
        """One ``update`` call for each rank, with its rows or its episodes."""
        seed = mixed(self.seed, entry.seq)
        parts = self._episode_parts(world_size, seed) if self.batch is None else self._row_parts(world_size, seed)
        return [
            Ask("update", ({**part, **self._options(entry, rank)},), data_only=True) for rank, part in enumerate(parts)
        ]

    def _options(self, entry: Entry, rank: int) -> dict[str, Any]:
        return {
            "seq": entry.seq,
            "timesteps": self.timesteps,
            "kwargs": self.kwargs,
            "return_state": (self.return_state or self.publishes) and rank == 0,
        }

    def _row_parts(self, world_size: int, seed: int) -> list[dict[str, Any]]:
        batch = self.batch
        assert batch is not None
        plan: Plan = make_plan(
            batch.rows,
            world_size=world_size,
            row_weights=batch.row_weights(),
            num_epochs=self.cut.num_epochs,
            minibatch_size=self.cut.minibatch_size,
            shuffle=self.cut.shuffle,
            seed=seed,
        )
        return [
            {
                "plan": own.to_wire(with_gather=False),
                "columns": {m: take(batch.policy_batches[m], rows) for m, rows in own.gather.items()},
            }
            for own in plan.ranks
        ]

    def _episode_parts(self, world_size: int, seed: int) -> list[dict[str, Any]]:
        assert self.episodes is not None
        cut = {
            "num_epochs": self.cut.num_epochs,
            "minibatch_size": self.cut.minibatch_size,
            "shuffle": self.cut.shuffle,
            "seed": seed,
        }
        shards = shard_episodes(self.episodes, world_size)
        return [{"episodes": [episode.to_tree() for episode in shard], "cut": cut} for shard in shards]


@dataclass(eq=False, slots=True)
class ChangeRequest:
    """A call that may change the learners' state: the same for every rank."""

    ask: Ask
    nbytes: int = 0  # of what it carries
    future: Future[Verdict] = field(default_factory=Future)

    def asks(self, entry: Entry, world_size: int) -> Sequence[Ask]:
        """The same call for every rank."""
        return [self.ask] * world_size

    @classmethod
    def calling(cls, function: Any, kwargs: Mapping[str, Any]) -> ChangeRequest:
        """Have every learner call ``function(learner, **kwargs)``. Raises whatever pickling them raises."""
        call = cloudpickle.dumps((function, dict(kwargs)))
        return cls(Ask("change", (call,), data_only=False), nbytes=len(call))

    @classmethod
    def setting_state(cls, state: Mapping[str, Any]) -> ChangeRequest:
        """Have every learner take over `state` or the parts that are in it. Raises TypeError if it cannot be sent."""
        state = copy_tree(dict(state))  # it may be sent again, long after this call
        encode(Message(Kind.CALL, 0, state))  # raises here what would fail when it is sent
        return cls(Ask("set_state", (state,), data_only=False), nbytes=tree_nbytes(state))


@dataclass(eq=False, slots=True)
class ReadRequest:
    """A question that changes nothing, for one rank or all."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    publishes: bool = False  # whether the answer is weights to be kept as the last committed ones
    future: Future[Verdict] = field(default_factory=Future)

    def asks(self, entry: Entry, world_size: int) -> Sequence[Ask]:
        """The same question for every rank."""
        return [Ask("read", (self.name, dict(self.kwargs)), data_only=False)] * world_size


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """What goes with the data of one update."""

    cut: Cut
    seed: int
    timesteps: Mapping[str, Any]
    kwargs: Mapping[str, Any]
    return_state: bool
    raises: bool
    raises_nonfinite: bool
    sampled_version: int | None


def training_entry(data: TrainingData, options: UpdateOptions, *, learners_build: bool) -> Entry:
    """The entry of an update, with a private copy of its data.

    Args:
        data: Validated training data.
        options: What goes with it.
        learners_build: Whether episodes go to the learners as they are, for their own ``build_batch``.

    Raises:
        ValueError, TypeError: if the data are no batch, or hold what no message can carry.
    """
    timesteps, kwargs = {}, {}
    if options.timesteps or options.kwargs:
        timesteps, kwargs = over_the_wire([dict(options.timesteps), dict(options.kwargs)])
    batch, episodes, rows = None, None, 0
    if data.episodes is not None and learners_build:
        episodes = [SingleAgentEpisode.from_tree(episode.to_tree()) for episode in data.episodes]
        rows, env_steps = sum(map(len, episodes)), data.env_steps()
        nbytes = sum(tree_nbytes(episode.to_tree()) for episode in episodes)
    else:
        given = data.normalise()
        batch = given.copy()
        rows, env_steps, nbytes = sum(batch.rows.values()), given.env_steps(), batch.size_bytes()
    request = TrainRequest(
        cut=options.cut,
        seed=options.seed,
        timesteps=timesteps,
        kwargs=kwargs,
        return_state=options.return_state,
        raises=options.raises,
        raises_nonfinite=options.raises_nonfinite,
        batch=batch,
        episodes=episodes,
    )
    return Entry(
        EntryKind.UPDATE,
        request,
        nbytes=nbytes,
        rows=rows,
        env_steps=env_steps,
        sampled_version=options.sampled_version if batch is None else _sampled_version(batch, options.sampled_version),
    )


def _sampled_version(batch: MultiAgentBatch, given: int | None) -> int | None:
    """The weights version the data were sampled under: as given, else the oldest in a ``weights_seq_no`` column."""
    if given is not None:
        return given
    columns = [own[WEIGHTS_SEQ_NO] for own in batch.policy_batches.values() if WEIGHTS_SEQ_NO in own]
    return min((int(column.min()) for column in columns if len(column)), default=None)


def over_the_wire(tree: Any) -> Any:
    """A data tree as the other end of a wire would see it: private and writable. Raises TypeError for what is none."""
    frames = [bytearray(frame) for frame in encode(Message(Kind.DATA, 0, tree))]
    return decode(frames).body


def tree_nbytes(tree: Any) -> int:
    """Bytes of the arrays in a tree."""
    if isinstance(tree, Mapping):
        return sum(map(tree_nbytes, tree.values()))
    if isinstance(tree, (list, tuple)):
        return sum(map(tree_nbytes, tree))
    return int(getattr(tree, "nbytes", 0))


def modules_of(entry: Entry) -> set[str]:
    """The modules that an update has rows for."""
    request: TrainRequest = entry.payload
    if request.batch is not None:
        return {module_id for module_id, rows in request.batch.rows.items() if rows}
    assert request.episodes is not None
    return {episode.module_id or DEFAULT_MODULE_ID for episode in request.episodes}
