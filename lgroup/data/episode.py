"""Episodes of one agent, as an env loop records them, and the batches made of them.

Invariant of a `SingleAgentEpisode` that has been reset: with ``n`` steps there are ``n + 1`` observations and infos,
and ``n`` actions, rewards and of each extra model output; every kind has the same lookback in front.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from lgroup.columns import DEFAULT_MODULE_ID, Columns
from lgroup.data._lookback import Index, LookbackBuffer, stack_or_same
from lgroup.data.batch import ColumnTree, ModuleID, concat_columns

# In the class body below, the name ``slice`` is that of its method.
StepSlice: TypeAlias = slice


class SingleAgentEpisode:
    """A (chunk of an) episode of one agent, with RLlib's names.

    ``len()`` is the number of env steps in this chunk; ``t_started`` and ``t`` are the env's time at its start and end.
    Observations and actions are arrays, numbers, or nested dicts of them; infos may hold anything.
    """

    __slots__ = (
        "action_space",
        "actions",
        "agent_id",
        "custom_data",
        "extra_model_outputs",
        "id_",
        "infos",
        "is_terminated",
        "is_truncated",
        "module_id",
        "multi_agent_episode_id",
        "observation_space",
        "observations",
        "rewards",
        "t_started",
    )

    def __init__(
        self,
        id_: str | None = None,
        *,
        observations: Any = None,
        observation_space: Any = None,
        infos: Sequence[Any] | None = None,
        actions: Any = None,
        action_space: Any = None,
        rewards: Any = None,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Any] | None = None,
        t_started: int | None = None,
        len_lookback_buffer: int | str = "auto",
        agent_id: Any = None,
        module_id: ModuleID | None = None,
        multi_agent_episode_id: str | None = None,
    ) -> None:
        """Data given are lists of items, or arrays stacked along axis 0; the first ``len_lookback_buffer`` steps of
        them are history. As in RLlib, "auto" takes all that is given for history: say 0 to make an episode of it.

        Raises ValueError if their numbers do not fit together.
        """
        steps = 0 if rewards is None else len(rewards)
        lookback = steps if len_lookback_buffer == "auto" else min(int(len_lookback_buffer), steps)
        self.id_: str = uuid.uuid4().hex if id_ is None else id_
        self.agent_id = agent_id
        self.module_id = module_id
        self.multi_agent_episode_id = multi_agent_episode_id
        self.observation_space = observation_space
        self.action_space = action_space
        self.observations = _buffer(observations, lookback)
        self.infos = _buffer([{}] * self.observations.total if infos is None else infos, lookback)
        self.actions = _buffer(actions, lookback)
        self.rewards = _buffer(rewards, lookback)
        self.extra_model_outputs: dict[str, LookbackBuffer] = {
            key: _buffer(values, lookback) for key, values in (extra_model_outputs or {}).items()
        }
        self.is_terminated = terminated
        self.is_truncated = truncated
        self.t_started: int = 0 if t_started is None else t_started
        self.custom_data: dict[str, Any] = {}
        self.validate()

    @property
    def t(self) -> int:
        """The env's time after the last step."""
        return self.t_started + len(self)

    @property
    def is_done(self) -> bool:
        return self.is_terminated or self.is_truncated

    @property
    def is_reset(self) -> bool:
        """Whether there is a first observation."""
        return len(self.observations) > 0

    @property
    def is_numpy(self) -> bool:
        """Whether the data are stacked arrays rather than lists."""
        return self.observations.is_numpy

    @property
    def len_lookback_buffer(self) -> int:
        """Steps of history in front of the episode."""
        return self.rewards.lookback

    def __len__(self) -> int:
        return len(self.rewards)

    def __bool__(self) -> bool:
        return True

    def env_steps(self) -> int:
        return len(self)

    def agent_steps(self) -> int:
        return len(self)

    def add_env_reset(self, observation: Any, infos: Mapping[str, Any] | None = None) -> None:
        """Record what ``env.reset()`` returned. Raises ValueError if the episode has begun or is done."""
        if self.is_reset or self.is_done:
            raise ValueError(f"episode {self.id_} was reset already; make a new one")
        self.observations.append(observation)
        self.infos.append({} if infos is None else infos)

    def add_env_step(
        self,
        observation: Any,
        action: Any,
        reward: Any,
        infos: Mapping[str, Any] | None = None,
        *,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Record an action and what ``env.step(action)`` returned.

        Raises ValueError before the reset, after the end, or if the extra outputs are not those of the other steps.
        """
        if not self.is_reset or self.is_done:
            raise ValueError(f"episode {self.id_} takes no step: it is {'done' if self.is_done else 'not reset'}")
        extra = extra_model_outputs or {}
        if self.rewards.total == 0:
            self.extra_model_outputs = {key: LookbackBuffer() for key in extra}
        elif extra.keys() != self.extra_model_outputs.keys():
            raise ValueError(
                f"episode {self.id_} has the extra model outputs {sorted(self.extra_model_outputs)}; "
                f"this step has {sorted(extra)}"
            )
        self.observations.append(observation)
        self.infos.append({} if infos is None else infos)
        self.actions.append(action)
        self.rewards.append(reward)
        for key, value in extra.items():
            self.extra_model_outputs[key].append(value)
        self.is_terminated = bool(terminated)
        self.is_truncated = bool(truncated)

    def validate(self) -> None:
        """Raises ValueError if the numbers of observations, actions, ... do not fit together."""
        steps = self.rewards.total
        if steps or self.observations.total:
            expected = {"observations": steps + 1, "infos": steps + 1, "actions": steps}
            for kind, count in expected.items():
                found = getattr(self, kind).total
                if found != count:
                    raise ValueError(f"episode {self.id_} has {found} {kind}; with {steps} rewards it needs {count}")
        for key, buffer in self.extra_model_outputs.items():
            if buffer.total != steps:
                raise ValueError(
                    f"episode {self.id_} has {buffer.total} of extra model output {key!r}, {steps} rewards"
                )

    def get_observations(self, indices: Index = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """Observations: all ``n + 1`` for None, one for an int, several for a slice or list of ints.

        A negative index counts from the end (into the history if it is large enough); with ``neg_index_as_lookback``
        -1 is the last item of the history. ``fill`` stands for what is out of range, where IndexError is raised else.
        """
        return self.observations.get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def get_infos(self, indices: Index = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """Infos, ``n + 1``; indices as in `get_observations`."""
        return self.infos.get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def get_actions(self, indices: Index = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """Actions, ``n``; indices as in `get_observations`."""
        return self.actions.get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def get_rewards(self, indices: Index = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """Rewards, ``n``; indices as in `get_observations`."""
        return self.rewards.get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def get_extra_model_outputs(
        self,
        key: str | None = None,
        indices: Index = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
    ) -> Any:
        """One extra model output, ``n`` values, or a dict of all; indices as in `get_observations`."""
        if key is not None:
            return self.extra_model_outputs[key].get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)
        return {
            name: buffer.get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)
            for name, buffer in self.extra_model_outputs.items()
        }

    def get_return(self) -> float:
        """Sum of the rewards of this chunk, in float64."""
        return float(np.sum(np.asarray(self.get_rewards(), dtype=np.float64)))

    def to_numpy(self) -> SingleAgentEpisode:
        """Stack all lists but the infos into arrays, in place. Python floats become float32. Returns the episode."""
        for buffer in self._stackable():
            buffer.to_numpy()
        return self

    finalize = to_numpy

    def _stackable(self) -> tuple[LookbackBuffer, ...]:
        return (self.observations, self.actions, self.rewards, *self.extra_model_outputs.values())

    def cut(self, len_lookback_buffer: int = 0) -> SingleAgentEpisode:
        """The chunk that follows this one: it starts with the last observation, has this one's last
        ``len_lookback_buffer`` steps (or what there is) as history, and the same id. It grows in lists.

        Raises ValueError if the episode is done or not reset.
        """
        if self.is_done or not self.is_reset:
            raise ValueError(f"episode {self.id_} cannot be cut: it is {'done' if self.is_done else 'not reset'}")
        chunk = self._chunk(self.rewards.total, self.rewards.total, len_lookback_buffer)
        for buffer in chunk._stackable():
            buffer.unstack()
        return chunk

    def slice(self, slice_: StepSlice, *, len_lookback_buffer: int | None = None) -> SingleAgentEpisode:
        """The steps of ``slice_`` (step 1, negative from the end) as an episode with the same id.

        It has as much history as this one, or ``len_lookback_buffer`` steps, as far as there are any before.
        """
        start, stop, step = slice_.indices(len(self))
        if step != 1:
            raise ValueError(f"an episode is sliced with step 1, not {step}")
        history = self.len_lookback_buffer
        kept = history if len_lookback_buffer is None else len_lookback_buffer
        return self._chunk(history + start, history + max(start, stop), kept)

    def __getitem__(self, item: StepSlice) -> SingleAgentEpisode:
        if not isinstance(item, slice):
            raise TypeError(f"an episode is indexed by a slice, not by {item!r}")
        return self.slice(item)

    def _chunk(self, start: int, stop: int, lookback: int) -> SingleAgentEpisode:
        """Steps ``start`` to ``stop``, both counted with the history."""
        kept = min(lookback, start)
        steps = slice(start - kept, stop)
        with_last = slice(start - kept, stop + 1)
        at_end = stop == self.rewards.total and stop > start
        chunk = SingleAgentEpisode(
            self.id_,
            observations=self.observations.part(with_last),
            observation_space=self.observation_space,
            infos=self.infos.part(with_last),
            actions=self.actions.part(steps),
            action_space=self.action_space,
            rewards=self.rewards.part(steps),
            terminated=self.is_terminated and at_end,
            truncated=self.is_truncated and at_end,
            extra_model_outputs={key: buffer.part(steps) for key, buffer in self.extra_model_outputs.items()},
            t_started=self.t_started + start - self.len_lookback_buffer,
            len_lookback_buffer=kept,
            agent_id=self.agent_id,
            module_id=self.module_id,
            multi_agent_episode_id=self.multi_agent_episode_id,
        )
        chunk.custom_data = dict(self.custom_data)
        return chunk

    def concat_episode(self, other: SingleAgentEpisode) -> None:
        """Append the chunk that follows this one, without its history.

        Raises ValueError if ``other`` is of another episode or does not start where this one ends.
        """
        if other.id_ != self.id_ or other.t_started != self.t or self.is_done:
            raise ValueError(
                f"episode {other.id_} from t={other.t_started} does not continue episode {self.id_}, "
                f"which is {'done' if self.is_done else 'open'} at t={self.t}"
            )
        if other.extra_model_outputs.keys() != self.extra_model_outputs.keys() and len(self) and len(other):
            raise ValueError(
                f"episode {self.id_} has the extra model outputs {sorted(self.extra_model_outputs)}; "
                f"the chunk from t={other.t_started} has {sorted(other.extra_model_outputs)}"
            )
        as_numpy = self.is_numpy or other.is_numpy
        self.observations.drop_last()
        self.infos.drop_last()
        for kind in ("observations", "infos", "actions", "rewards"):
            getattr(self, kind).extend(getattr(other, kind))
        for key, buffer in other.extra_model_outputs.items():
            self.extra_model_outputs.setdefault(key, LookbackBuffer()).extend(buffer)
        self.is_terminated, self.is_truncated = other.is_terminated, other.is_truncated
        self.custom_data.update(other.custom_data)
        if as_numpy:
            self.to_numpy()

    def to_tree(self, *, with_infos: bool = False) -> dict[str, Any]:
        """The episode as a plain tree of arrays, strings and numbers. Infos and custom data may hold anything, which a
        data message may not: they are left out unless asked for. Spaces are left out."""
        return self._tree(stack_or_same, with_infos)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> SingleAgentEpisode:
        """The episode that `to_tree` or `get_state` wrote; its data are the tree's own arrays."""
        episode = cls.__new__(cls)
        episode.observation_space = episode.action_space = None
        episode.set_state(tree)
        return episode

    from_state = from_tree

    def get_state(self) -> dict[str, Any]:
        """Everything but the spaces, lists as (new) lists, as a tree for `set_state` and `from_state`."""
        return self._tree(lambda data: list(data) if isinstance(data, list) else data, True)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Become the episode that `get_state` or `to_tree` of another wrote; the spaces stay."""
        lookback = state["lookback"]
        self.id_ = state["id_"]
        self.agent_id = state["agent_id"]
        self.module_id = state["module_id"]
        self.multi_agent_episode_id = state["multi_agent_episode_id"]
        self.t_started = state["t_started"]
        self.is_terminated = state["is_terminated"]
        self.is_truncated = state["is_truncated"]
        self.observations = LookbackBuffer(state["observations"], lookback)
        infos = state["infos"]
        self.infos = LookbackBuffer([{}] * self.observations.total if infos is None else infos, lookback)
        self.actions = LookbackBuffer(state["actions"], lookback)
        self.rewards = LookbackBuffer(state["rewards"], lookback)
        self.extra_model_outputs = {
            key: LookbackBuffer(data, lookback) for key, data in state["extra_model_outputs"].items()
        }
        self.custom_data = dict(state["custom_data"] or {})
        self.validate()

    def _tree(self, data_of: Any, with_infos: bool) -> dict[str, Any]:
        return {
            "id_": self.id_,
            "agent_id": self.agent_id,
            "module_id": self.module_id,
            "multi_agent_episode_id": self.multi_agent_episode_id,
            "t_started": self.t_started,
            "lookback": self.len_lookback_buffer,
            "is_terminated": self.is_terminated,
            "is_truncated": self.is_truncated,
            "observations": data_of(self.observations.data),
            "infos": list(self.infos.data) if with_infos else None,
            "actions": data_of(self.actions.data),
            "rewards": data_of(self.rewards.data),
            "extra_model_outputs": {key: data_of(buffer.data) for key, buffer in self.extra_model_outputs.items()},
            "custom_data": dict(self.custom_data) if with_infos else None,
        }

    def __repr__(self) -> str:
        end = "terminated" if self.is_terminated else "truncated" if self.is_truncated else "open"
        return f"SingleAgentEpisode({self.id_}, t={self.t_started} to {self.t}, {end}, return={self.get_return():g})"


def episodes_to_batch(episodes: Sequence[SingleAgentEpisode], *, next_obs: bool = False) -> dict[ModuleID, ColumnTree]:
    """Columns with one row per env step, by module, in the order of the episodes and of time.

    ``obs``, ``actions``, ``rewards`` (float32), ``terminateds`` and ``truncateds`` (bool, true at most at the last
    step), ``eps_id`` (int64; the same number for chunks of the same episode), ``t`` (int64), every extra model output,
    and with ``next_obs=True`` ``new_obs``. Episodes without a step give nothing.

    Raises ValueError if the episodes of a module differ in their columns or in the shape of a row.
    """
    numbers: dict[str, int] = {}
    parts: dict[ModuleID, list[ColumnTree]] = {}
    for episode in episodes:
        number = numbers.setdefault(episode.id_, len(numbers))
        if len(episode):
            module = DEFAULT_MODULE_ID if episode.module_id is None else episode.module_id
            parts.setdefault(module, []).append(_columns_of(episode, number, next_obs))
    return {module: concat_columns(parts[module]) for module in sorted(parts)}


def _columns_of(episode: SingleAgentEpisode, number: int, next_obs: bool) -> ColumnTree:
    steps = len(episode)
    flags = np.zeros((2, steps), dtype=np.bool_)
    flags[:, -1] = episode.is_terminated, episode.is_truncated
    columns: ColumnTree = {
        Columns.OBS: stack_or_same(episode.get_observations(slice(0, steps))),
        Columns.ACTIONS: stack_or_same(episode.get_actions()),
        Columns.REWARDS: np.asarray(episode.get_rewards(), dtype=np.float32),
        Columns.TERMINATEDS: flags[0],
        Columns.TRUNCATEDS: flags[1],
        Columns.EPS_ID: np.full(steps, number, dtype=np.int64),
        Columns.T: np.arange(episode.t_started, episode.t, dtype=np.int64),
    }
    if next_obs:
        columns[Columns.NEXT_OBS] = stack_or_same(episode.get_observations(slice(1, steps + 1)))
    for key, buffer in episode.extra_model_outputs.items():
        if key in columns:
            raise ValueError(f"episode {episode.id_}: extra model output {key!r} has the name of a column of its own")
        columns[key] = stack_or_same(buffer.get())
    return columns


def shard_episodes(episodes: Sequence[SingleAgentEpisode], num_shards: int) -> list[list[SingleAgentEpisode]]:
    """Whole episodes dealt to shards so that their steps are about even: the longest first, each to the shard with the
    fewest steps. Deterministic; inside a shard the given order is kept."""
    if num_shards < 1:
        raise ValueError(f"num_shards is {num_shards}; it must be 1 or more")
    steps = [0] * num_shards
    chosen: list[list[int]] = [[] for _ in range(num_shards)]
    for place in sorted(range(len(episodes)), key=lambda i: -len(episodes[i])):
        shard = steps.index(min(steps))
        steps[shard] += len(episodes[place])
        chosen[shard].append(place)
    return [[episodes[place] for place in sorted(places)] for places in chosen]


def _buffer(data: Any, lookback: int) -> LookbackBuffer:
    buffer = LookbackBuffer([] if data is None else data)
    # A kind that was not given at all has no history; `validate` then says what is missing.
    buffer.lookback = min(lookback, buffer.total)
    return buffer
