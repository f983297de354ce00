"""Distributed learners without Ray.

A coordinator (your own program) makes a `LearnerGroup`; its learners, each a process, average their gradients with
``torch.distributed``. Data, weights and calls travel over sockets of the group's own, every update is accounted for,
and no process outlives the coordinator.
"""

from __future__ import annotations

from lgroup.columns import (
    ALL_MODULES,
    DEFAULT_MODULE_ID,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    Columns,
)
from lgroup.config import LearnerGroupConfig, PolicySpec
from lgroup.data import MultiAgentBatch, SampleBatch, SingleAgentEpisode, TrainingData
from lgroup.errors import (
    ActorError,
    ConfigError,
    ConnectionClosed,
    LGroupError,
    ProtocolError,
    UpdateDropped,
    UpdateFailed,
    WorkerStartError,
)
from lgroup.learner import Learner, TorchLearner
from lgroup.learner_group import LearnerGroup
from lgroup.modules import MultiRLModule, MultiRLModuleSpec, RLModule, RLModuleSpec, TorchRLModule
from lgroup.update_result import UpdateFuture, UpdateResult
from lgroup.weights import Weights
from lgroup.workers import ActorGroup, CallResult, Cluster, RemoteCallResults, ResultOrError

__version__ = "0.1.0"

__all__ = [
    "ALL_MODULES",
    "DEFAULT_MODULE_ID",
    "NUM_ENV_STEPS_SAMPLED_LIFETIME",
    "ActorError",
    "ActorGroup",
    "CallResult",
    "Cluster",
    "Columns",
    "ConfigError",
    "ConnectionClosed",
    "LGroupError",
    "Learner",
    "LearnerGroup",
    "LearnerGroupConfig",
    "MultiAgentBatch",
    "MultiRLModule",
    "MultiRLModuleSpec",
    "PolicySpec",
    "ProtocolError",
    "RLModule",
    "RLModuleSpec",
    "RemoteCallResults",
    "ResultOrError",
    "SampleBatch",
    "SingleAgentEpisode",
    "TorchLearner",
    "TorchRLModule",
    "TrainingData",
    "UpdateDropped",
    "UpdateFailed",
    "UpdateFuture",
    "UpdateResult",
    "Weights",
    "WorkerStartError",
]
