"""What can be told of a group from its state alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lgroup._group_state import GroupState


def group_stats(state: GroupState) -> dict[str, Any]:
    """The group's counters, see `LearnerGroup.get_stats`."""
    return {
        "learner_group_ts_dropped_lifetime": state.entries.ledger.dropped_env_steps(),
        "actor_manager_num_outstanding_async_reqs": state.entries.num_outstanding,
        "updates": state.entries.ledger.updates.as_dict(state.entries.in_flight),
        "env_steps": state.entries.ledger.env_steps.as_dict(state.entries.in_flight_env_steps),
        "weights_version": state.entries.weights_version,
        "generation": state.generation,
        "phase": state.phase.value,
        "num_healthy_learners": 0 if state.is_over else len(state.slots.up),
        "num_restarts": state.slots.num_restarts,
        "num_incidents": state.incidents.count,
        "staleness": {
            "histogram": dict(sorted(state.entries.staleness.items())),
            "max": max(state.entries.staleness, default=0),
        },
    }


def first_difference(digests: Sequence[Mapping[str, str]]) -> str | None:
    """What to say of the first part of the state that is not the same on all ranks; None if all is."""
    paths = {path: None for own in digests for path in own}
    for path in paths:
        by_rank = [own.get(path, "missing") for own in digests]
        if len(set(by_rank)) > 1:
            lead = by_rank[0]
            different = [rank for rank, digest in enumerate(by_rank) if digest != lead]
            return f"learners differ in {path.lstrip('/')}: ranks {different} hold something else than rank 0"
    return None
