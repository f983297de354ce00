"""The processes of a run: a learner group and the env runners beside it, on one cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lgroup.algorithms import EnvRunner, Rollout, concatenated
from lgroup.columns import DEFAULT_MODULE_ID, Columns
from lgroup.config import LearnerGroupConfig
from lgroup.errors import ActorError
from lgroup.learner_group import LearnerGroup
from lgroup.train.progress import Progress
from lgroup.update_result import UpdateResult
from lgroup.workers import ActorGroup, Cluster, RemoteCallResults

if TYPE_CHECKING:
    from typing_extensions import Self

SAMPLE, WEIGHTS = "sample", "weights"  # tags of asynchronous calls
_SECONDS_PER_SAMPLE = 300.0


class Session:
    """Starts everything when made, ends everything when left; counts into `progress` what comes back.

    Args:
        with_values: whether rollouts need state values.
        counts_samples: whether sampled env steps are the run's env steps (else `progress` gets them from the caller).

    Raises:
        ConfigError, WorkerStartError: a setting is wrong, or a process does not come up. Nothing is left running then.
    """

    def __init__(
        self, config: LearnerGroupConfig, progress: Progress, *, with_values: bool, counts_samples: bool = True
    ) -> None:
        self.config = config
        self.progress = progress
        self._counts_samples = counts_samples
        self._versions: dict[int, int] = {}  # of the weights last sent to each env runner
        self.cluster = Cluster()
        try:
            self.group = LearnerGroup(config=config, cluster=self.cluster)
            self.runners = ActorGroup(
                EnvRunner,
                num_actors=config.num_env_runners,
                kwargs=[
                    {"config": config.copy(copy_frozen=True), "with_values": with_values, "seed": _seed(config, index)}
                    for index in range(config.num_env_runners)
                ],
                cluster=self.cluster,
                max_requests_in_flight_per_actor=config.max_requests_in_flight_per_env_runner,
                num_threads=1,  # an env runner's networks and batches are small
                seed=config.seed,
                name="env runner",
            )
            self.send_weights()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes. May be called again."""
        for part in ("runners", "group"):
            if hasattr(self, part):
                getattr(self, part).shutdown()
        self.cluster.close()

    def send_weights(self, actor_ids: Sequence[int] | None = None, *, at_least_newer: int = 1) -> None:
        """Sends the last committed weights to those env runners whose own are older by that many versions.

        An actor does what it is asked in order, so the next sample is taken with them.
        """
        weights = self.group.get_weights(wait=not self._versions)
        self.runners.fetch_ready_async_reqs(tags=WEIGHTS)
        arguments = {"weights": plain(weights), "version": weights.version}
        for actor_id in self.runners.actor_ids() if actor_ids is None else actor_ids:
            age = weights.version - self._versions.get(actor_id, weights.version - at_least_newer)
            if age >= at_least_newer and self.runners.foreach_actor_async(
                "set_weights", WEIGHTS, kwargs=arguments, remote_actor_ids=[actor_id]
            ):
                self._versions[actor_id] = weights.version

    def sample(self, **arguments: Any) -> list[Rollout]:
        """One rollout of every env runner, waiting for them."""
        results = self.runners.foreach_actor("sample", kwargs=arguments, timeout_seconds=_SECONDS_PER_SAMPLE)
        return self.received(results)

    def received(self, results: RemoteCallResults) -> list[Rollout]:
        """The rollouts among `results`, counted. A dead env runner is replaced; what user code raised is raised."""
        rollouts: list[Rollout] = []
        for result in results:
            if result.ok:
                rollouts.append(self._counted(result.get()))
            elif not isinstance(result.get(), ActorError) or not result.get().actor_died:
                result.unwrap()
        if self.runners.num_healthy_actors() < self.runners.num_actors():
            self._revive()
        return rollouts

    def _counted(self, rollout: Rollout) -> Rollout:
        steps = rollout["env_steps"] if self._counts_samples else 0
        self.progress.sampled(steps, rollout["episode_returns"], rollout["episode_lengths"])
        return rollout

    def _revive(self) -> None:
        """Takes replaced env runners into service; the weights that were sent to their predecessors are not theirs."""
        for actor_id in self.runners.probe_unhealthy_actors(timeout_seconds=0.0, mark_healthy=True):
            self._versions.pop(actor_id, None)

    def trained(self, result: UpdateResult, sampled_version: int | None = None) -> None:
        """Counts one update's result."""
        if result.status != "applied":
            return
        staleness = None if sampled_version is None else result.weights_version - 1 - sampled_version
        self.progress.trained(result.reduced.get(DEFAULT_MODULE_ID, {}), staleness)

    def collect(self, env_steps: int) -> dict[str, NDArray[Any]]:
        """`obs` and ``actions`` of at least `env_steps` steps with the current policy, one row per step."""
        self.send_weights()
        parts: list[Rollout] = []
        while sum(rollout["env_steps"] for rollout in parts) < env_steps:
            parts += self.sample(num_steps=self.config.get_rollout_fragment_length())
        columns = concatenated(parts)
        mask = columns[Columns.LOSS_MASK]
        return {name: columns[name][mask][:env_steps] for name in (Columns.OBS, Columns.ACTIONS)}


def plain(weights: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Weights as plain dicts of tensors, as ``torch.load(weights_only=True)`` accepts them."""
    return {module_id: dict(state) for module_id, state in weights.items()}


def _seed(config: LearnerGroupConfig, index: int) -> int | None:
    return None if config.seed is None else config.seed * 1000 + index


def oldest_version(rollouts: Iterable[Rollout]) -> int:
    """The lowest weights version that any of the rollouts was sampled with."""
    return min(rollout["weights_version"] for rollout in rollouts)


def num_time_steps(rollouts: Iterable[Rollout]) -> int:
    """Time steps of the rollouts, those of all environments together."""
    return sum(int(np.prod(rollout["batch"][Columns.LOSS_MASK][:, 1:].shape)) for rollout in rollouts)
