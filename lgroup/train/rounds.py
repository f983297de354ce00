"""What one round of each algorithm does: sample and train, in turns or at the same time."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lgroup.algorithms import PPOConfig, Rollout, concatenated, ppo_rows, standardise
from lgroup.columns import NUM_ENV_STEPS_SAMPLED_LIFETIME, Columns
from lgroup.errors import ConfigError, UpdateFailed
from lgroup.train.session import SAMPLE, Session, num_time_steps, oldest_version
from lgroup.update_result import UpdateFuture

_WAIT_S = 0.5  # at most so long a round waits for env runners, so that a signal is soon noticed
_LONGEST_UPDATE_S = 600.0


class Rounds(Protocol):
    """An algorithm's way to use a `Session`."""

    def round(self) -> None:
        """Sample and train a little. Raises what ends the run."""

    def finish(self) -> None:
        """Wait for the updates under way and count them."""


class _InFlight:
    """Updates that were submitted, in order, each with the version that its data was sampled with."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._updates: deque[tuple[UpdateFuture, int | None]] = deque()

    def submit(self, batch: Any, version: int | None = None) -> None:
        """Waits until the learners have room, which is what keeps the data from growing old."""
        timesteps = {NUM_ENV_STEPS_SAMPLED_LIFETIME: self._session.progress.env_steps}
        future = self._session.group.submit(batch=batch, weights_version=version, timesteps=timesteps)
        self._updates.append((future, version))

    def collect(self, timeout_s: float = 0.0) -> int:
        """Counts those that are done, waiting up to `timeout_s` for each; returns how many."""
        count = 0
        while self._updates and (timeout_s or self._updates[0][0].done()):
            future, version = self._updates.popleft()
            try:
                self._session.trained(future.result(timeout_s or None), version)
            except UpdateFailed as error:
                if error.reason != "nonfinite":  # nobody applied it; the ledger and the display have it
                    raise
            count += 1
        return count


class PPORounds:
    """Sample with all env runners, then train on it, in turns."""

    def __init__(self, session: Session) -> None:
        if not isinstance(session.config, PPOConfig):
            raise TypeError(f"PPO needs a PPOConfig, not a {type(session.config).__name__}")
        self._session, self._config = session, session.config
        self._in_flight = _InFlight(session)

    def round(self) -> None:
        session, config = self._session, self._config
        rollouts = session.sample()
        if not rollouts:
            return
        rows = ppo_rows(concatenated(rollouts), gamma=config.gamma, lambda_=config.lambda_)
        # over the whole batch, before it is split: so that N learners take the step that one would take
        rows[Columns.ADVANTAGES] = standardise(rows[Columns.ADVANTAGES])
        version = oldest_version(rollouts)
        self._in_flight.submit(rows, version)
        self._in_flight.collect(_LONGEST_UPDATE_S)
        session.send_weights()

    def finish(self) -> None:
        """Nothing is under way between rounds."""


class IMPALARounds:
    """Env runners sample and learners train at the same time; a round handles what has come in meanwhile.

    An env runner gets new weights with its next request, not when they come into being: those would wait behind the
    rollout under way. And it gets that request after its rollout was submitted, which may mean waiting for room: so
    that where learners are the slower part, data are sampled late rather than kept. Both halve the staleness.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._in_flight = _InFlight(session)
        self._batch_size = session.config.total_train_batch_size
        self._broadcast_interval = int(getattr(session.config, "broadcast_interval", 1))
        self._rollouts: list[Rollout] = []
        for _ in range(session.config.max_requests_in_flight_per_env_runner):
            session.runners.foreach_actor_async("sample", SAMPLE)

    def round(self) -> None:
        session = self._session
        results = session.runners.fetch_ready_async_reqs(tags=SAMPLE, timeout_seconds=_WAIT_S, min_results=1)
        for rollout in session.received(results):
            self._rollouts.append(rollout)
            if num_time_steps(self._rollouts) >= self._batch_size:
                self._submit()
        self._in_flight.collect()
        idle = [result.actor_id for result in results] if len(results) else None
        session.send_weights(idle, at_least_newer=self._broadcast_interval)
        session.runners.foreach_actor_async("sample", SAMPLE)

    def finish(self) -> None:
        self._in_flight.collect(_LONGEST_UPDATE_S)

    def _submit(self) -> None:
        rollouts, self._rollouts = self._rollouts, []
        batch = concatenated(rollouts)
        # the losses use log-probabilities only
        batch = {name: column for name, column in batch.items() if name != Columns.ACTION_DIST_INPUTS}
        self._in_flight.submit(batch, oldest_version(rollouts))


class BCRounds:
    """Learners train on minibatches of a data set, while env runners measure how good the imitation is."""

    updates_per_round = 20

    def __init__(self, session: Session, data: dict[str, NDArray[Any]]) -> None:
        self._session, self._data = session, data
        self._in_flight = _InFlight(session)
        self._size = min(len(data[Columns.OBS]), session.config.total_train_batch_size)
        self._random = np.random.default_rng(session.config.seed)
        self._order = np.empty(0, np.int64)
        session.runners.foreach_actor_async("sample", SAMPLE)

    def round(self) -> None:
        session = self._session
        for _ in range(self.updates_per_round):
            rows = self._next_rows()
            self._in_flight.submit({name: column[rows] for name, column in self._data.items()})
            session.progress.sampled(len(rows), (), ())
        self._in_flight.collect()
        session.received(session.runners.fetch_ready_async_reqs(tags=SAMPLE))
        session.send_weights()
        session.runners.foreach_actor_async("sample", SAMPLE)

    def finish(self) -> None:
        self._in_flight.collect(_LONGEST_UPDATE_S)

    def _next_rows(self) -> NDArray[np.int64]:
        """Every row once per pass, in a new order each time."""
        if len(self._order) < self._size:
            self._order = np.concatenate([self._order, self._random.permutation(len(self._data[Columns.OBS]))])
        rows, self._order = self._order[: self._size], self._order[self._size :]
        return rows


def load_data(path: Path, spaces: tuple[Any, Any]) -> dict[str, NDArray[Any]]:
    """The arrays ``obs`` and ``actions`` of an .npz file, one row per step.

    Raises:
        ConfigError: the file cannot be read, lacks one of them, or they do not fit the environment's spaces.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise ConfigError(f"--data {path} cannot be read as an .npz file: {error}") from error
    data = {}
    for name, space in zip((Columns.OBS, Columns.ACTIONS), spaces, strict=True):
        if name not in found:
            raise ConfigError(f"--data {path} has no array {name!r}, only {', '.join(sorted(found)) or 'nothing'}")
        column = found[name]
        if column.shape[1:] != space.shape or not len(column):
            expected = ", ".join(map(str, ("rows", *space.shape)))
            raise ConfigError(f"--data {path}: {name} has shape {column.shape}; the environment needs ({expected})")
        data[name] = column.astype(np.float32) if column.dtype == np.float64 else column
    if len({len(column) for column in data.values()}) != 1:
        lengths = " and ".join(f"{len(column)} {name}" for name, column in data.items())
        raise ConfigError(f"--data {path} has {lengths}; there must be as many of both")
    return data
