"""From a config to running learners."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import torch

from lgroup._driver import Learners
from lgroup._gloo_opener import OpenGlooGroup
from lgroup._group_slots import RecoveryPolicy
from lgroup._liveness import Limits
from lgroup._local_learners import LocalLearners
from lgroup._remote_learners import RemoteLearners
from lgroup.errors import ConfigError
from lgroup.learner.host import LearnerHost
from lgroup.workers import Cluster, WorkerCallbacks, WorkerSpec

if TYPE_CHECKING:
    from lgroup.config import LearnerGroupConfig

#: Updates between two snapshots, unless the config says so.
SNAPSHOT_EVERY = 100

_group_numbers = itertools.count(1)


def check_devices(config: LearnerGroupConfig) -> None:
    """Refuse what this version has no place for.

    Raises:
        ConfigError: naming the setting.
    """
    gpus = config.num_gpus_per_learner
    if not gpus:
        return
    if config.num_learners > 0:
        raise ConfigError.refused("num_gpus_per_learner", gpus, "0 with learner processes: this version places no GPUs")
    if not torch.cuda.is_available():
        raise ConfigError.refused("num_gpus_per_learner", gpus, "0 on this machine: torch finds no GPU")


def threads_per_learner(config: LearnerGroupConfig, cluster: Cluster) -> int:
    """Torch threads of one learner: what the config says, else the node's cores shared evenly."""
    wanted = config.num_cpus_per_learner
    if wanted == "auto":
        return cluster.threads_per_worker(config.num_learners)
    return max(1, int(float(wanted)))


def recovery_policy(config: LearnerGroupConfig, seed: int) -> RecoveryPolicy:
    """What the group does about losses, as the config says; a learner in this process has none to recover from."""
    if config.num_learners == 0:
        return RecoveryPolicy(restart=False, max_staleness=config.max_staleness)
    return RecoveryPolicy(
        restart=config.restart_failed_learners,
        min_learners=config.min_learners,
        max_restarts=config.max_restarts,
        restart_window_s=config.restart_window_s,
        update_retries=config.update_retries,
        snapshot_every=config.snapshot_every or SNAPSHOT_EVERY,
        max_staleness=config.max_staleness,
        limits=_limits(config),
        seed=seed,
    )


def _limits(config: LearnerGroupConfig) -> Limits:
    return Limits.nested(heartbeat_s=config.heartbeat_timeout_s, update_s=config.update_timeout_s)


def build_learners(config: LearnerGroupConfig, module_spec: Any, cluster: Cluster | None, seed: int) -> Learners:
    """The learners that `config` asks for, built and ready to form their first generation.

    Raises:
        WorkerStartError: if a process does not come up, with its traceback.
    """
    learner_class = config.learner_class
    if cluster is None:
        return LocalLearners(learner_class, config, module_spec, seed)
    prefix = f"group-{os.getpid()}-{next(_group_numbers)}"
    limits = _limits(config)
    args = (learner_class, _for_learners(config), module_spec, seed, OpenGlooGroup(prefix, limits.collective_s))
    num_threads = threads_per_learner(config, cluster)

    def spec_of(slot: int) -> WorkerSpec:
        return WorkerSpec(
            name=f"learner {slot}",
            actor_class=LearnerHost,
            args=args,
            num_threads=num_threads,
            seed=seed,
            actor_index=slot,
            start_timeout_s=cluster.start_timeout_s,
        )

    callbacks = WorkerCallbacks(config.on_worker_died, config.on_worker_restarted)
    return RemoteLearners(cluster, spec_of, config.num_learners, prefix, limits, callbacks)


def _for_learners(config: LearnerGroupConfig) -> LearnerGroupConfig:
    """The config without what belongs to this process, and may not travel."""
    return config.copy(copy_frozen=False).callbacks(on_worker_died=None, on_worker_restarted=None).freeze()
