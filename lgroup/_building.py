"""From a config to running learners."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import torch

from lgroup._driver import Learners
from lgroup._local_learners import LocalLearners
from lgroup._remote_learners import OpenGlooGroup, RemoteLearners
from lgroup.errors import ConfigError
from lgroup.learner.host import LearnerHost
from lgroup.workers import Cluster, WorkerSpec

if TYPE_CHECKING:
    from lgroup.config import LearnerGroupConfig

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


def build_learners(config: LearnerGroupConfig, module_spec: Any, cluster: Cluster | None, seed: int) -> Learners:
    """The learners that `config` asks for, built and ready to form their first generation.

    Raises:
        WorkerStartError: if a process does not come up, with its traceback.
    """
    learner_class = config.learner_class
    if cluster is None:
        return LocalLearners(learner_class, config, module_spec, seed)
    prefix = f"group-{os.getpid()}-{next(_group_numbers)}"
    open_group = OpenGlooGroup(prefix)
    num_threads = threads_per_learner(config, cluster)

    def spec_of(rank: int) -> WorkerSpec:
        return WorkerSpec(
            name=f"learner {rank}",
            actor_class=LearnerHost,
            args=(learner_class, config, module_spec, seed, open_group),
            num_threads=num_threads,
            seed=seed,
            actor_index=rank,
            start_timeout_s=cluster.start_timeout_s,
        )

    return RemoteLearners(cluster, spec_of, config.num_learners, prefix)
