from __future__ import annotations

import numpy as np
import pytest

from lgroup.data import MultiAgentBatch, SingleAgentEpisode, TrainingData, make_plan


def episode(steps: int, first_id: int) -> SingleAgentEpisode:
    ids = list(range(first_id, first_id + steps))
    return SingleAgentEpisode(
        observations=np.zeros((steps + 1, 4), np.float32),
        actions=[0] * steps,
        rewards=[1.0] * steps,
        extra_model_outputs={"id": ids},
        len_lookback_buffer=0,
    )


def test_exactly_one_kind_of_data_is_given():
    with pytest.raises(ValueError, match=r"exactly one of batch, batches, batch_refs, .*; none was given"):
        TrainingData().validate()
    with pytest.raises(ValueError, match="; batch and episodes were given"):
        TrainingData(batch={}, episodes=[]).validate()
    TrainingData(batch={}).validate()
    TrainingData(batches=[]).validate()
    TrainingData(episodes=[]).validate()


@pytest.mark.parametrize("kind", ["batch_refs", "episodes_refs", "data_iterators"])
def test_kinds_that_cannot_be_trained_on_are_named(kind):
    with pytest.raises(
        ValueError, match=f"{kind} cannot be trained on by this version; give batch, batches or episodes"
    ):
        TrainingData(**{kind: []}).env_steps()


def test_a_batch_keeps_its_arrays():
    obs = np.zeros((5, 4))
    data = TrainingData(batch={"obs": obs})
    assert data.env_steps() == 5
    assert data.normalise()["default_policy"]["obs"] is obs


def test_batches_are_trained_on_as_one():
    data = TrainingData(
        batches=[{"obs": np.zeros((2, 3))}, MultiAgentBatch({"p": {"x": [1]}}, 9), {"obs": np.ones((1, 3))}]
    )
    assert data.normalise().rows == {"default_policy": 3, "p": 1}
    assert data.env_steps() == 12
    assert TrainingData(batches=[]).normalise().rows == {}


def test_episodes_are_trained_on_row_by_row_exactly_once():
    lengths = [100, 100, 5, 5]
    episodes = [episode(steps, sum(lengths[:i])) for i, steps in enumerate(lengths)]
    data = TrainingData(episodes=episodes)
    batch = data.normalise()
    assert data.env_steps() == batch.env_steps() == 210
    plan = make_plan(batch.rows, world_size=2, minibatch_size=10)
    assert plan.num_steps == 21
    used = []
    for step in range(plan.num_steps):
        for rank in plan.ranks:
            gathered = batch["default_policy"]["id"][rank.gather["default_policy"]]
            used += gathered[rank.steps[step]["default_policy"].rows].tolist()
    assert sorted(used) == list(range(210))
