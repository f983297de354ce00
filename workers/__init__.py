"""Processes and actors: the zygote, its workers, their supervision and calls to the actors that live in them.

Imports nothing of ours but ``lgroup.transport``.
"""

from __future__ import annotations

from lgroup.workers.actor_group import ActorGroup
from lgroup.workers.calls import PreparedCall, RemoteError, Reply, prepare_call
from lgroup.workers.cluster import Cluster
from lgroup.workers.context import WorkerContext, current_worker, in_worker
from lgroup.workers.errors import ActorError, WorkerStartError
from lgroup.workers.event_thread import WorkerCallbacks, WorkerEvent
from lgroup.workers.health import AwakeClock, Health
from lgroup.workers.results import CallResult, RemoteCallResults, ResultOrError
from lgroup.workers.spec import WorkerExit, WorkerSpec, WorkerState
from lgroup.workers.start_policy import StartPolicy
from lgroup.workers.worker import Worker

__all__ = [
    "ActorError",
    "ActorGroup",
    "AwakeClock",
    "CallResult",
    "Cluster",
    "Health",
    "PreparedCall",
    "RemoteCallResults",
    "RemoteError",
    "Reply",
    "ResultOrError",
    "StartPolicy",
    "Worker",
    "WorkerCallbacks",
    "WorkerContext",
    "WorkerEvent",
    "WorkerExit",
    "WorkerSpec",
    "WorkerStartError",
    "WorkerState",
    "current_worker",
    "in_worker",
    "prepare_call",
]
