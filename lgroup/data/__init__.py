"""Training data and how it is split: batches, episodes, plans. No sockets, no processes, no clocks."""

from __future__ import annotations

from lgroup.data.batch import (
    ColumnTree,
    MultiAgentBatch,
    SampleBatch,
    concat_columns,
    concat_multi_agent,
    concat_samples,
    map_columns,
    nbytes,
    normalise,
    row_weights,
    take,
)
from lgroup.data.episode import SingleAgentEpisode, episodes_to_batch, shard_episodes
from lgroup.data.plan import ModuleShare, Plan, RankPlan, Rows, Step, leads_of, local_plan, make_plan
from lgroup.data.training_data import TrainingData

__all__ = [
    "ColumnTree",
    "ModuleShare",
    "MultiAgentBatch",
    "Plan",
    "RankPlan",
    "Rows",
    "SampleBatch",
    "SingleAgentEpisode",
    "Step",
    "TrainingData",
    "concat_columns",
    "concat_multi_agent",
    "concat_samples",
    "episodes_to_batch",
    "leads_of",
    "local_plan",
    "make_plan",
    "map_columns",
    "nbytes",
    "normalise",
    "row_weights",
    "shard_episodes",
    "take",
]
