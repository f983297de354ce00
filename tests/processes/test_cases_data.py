"""Cases about data and sharding: what is trained is what was given, each row once, on every learner the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from group_learners import (
    MODULE,
    Imitation,
    Net,
    batch_of,
    config_of,
    episode_of,
    fill_bias,
    same,
    seen_by,
    weights_of,
)

import lgroup


@pytest.fixture(scope="module")
def four() -> Iterator[lgroup.LearnerGroup]:
    with lgroup.LearnerGroup(config=config_of(num_learners=4, minibatch_size=8)) as group:
        yield group


@pytest.fixture(scope="module")
def pair(four: lgroup.LearnerGroup) -> Iterator[lgroup.LearnerGroup]:
    with lgroup.LearnerGroup(config=config_of(num_learners=2), cluster=four.cluster) as group:
        yield group


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 7, 8, 9, 31, 33])
def test_four_learners_train_any_number_of_rows_exactly_once(four: lgroup.LearnerGroup, rows: int) -> None:
    """Case C1 (ray#66030): more learners than rows, and rows that do not divide."""
    before = four.get_stats()["updates"]
    seen = seen_by(four)
    result = four.update(batch=batch_of(rows, id=np.arange(rows)))
    four.check_sync()
    trained = [ids[len(old) :] for ids, old in zip(seen_by(four), seen, strict=True)]
    assert sorted(chain(*trained)) == list(range(rows))
    after = four.get_stats()["updates"]
    if rows:
        assert (result.status, result.rows, result.env_steps) == ("applied", rows, rows)
        assert result.reduced[MODULE]["num_module_steps_trained"] == rows
        assert sum(own.get(MODULE, {}).get("num_module_steps_trained", 0) for own in result) == rows
        assert after["applied"] == before["applied"] + 1
    else:
        assert (result.status, result.reason, result.seq) == ("noop", "no rows", None)
        assert after == before


def test_one_episode_of_five_steps_trains_four_learners(four: lgroup.LearnerGroup) -> None:
    """Case C1 (ray#66030)."""
    seen = seen_by(four)
    result = four.update(episodes=[episode_of(5)])
    four.check_sync()
    trained = [ids[len(old) :] for ids, old in zip(seen_by(four), seen, strict=True)]
    assert (result.status, result.env_steps, sorted(chain(*trained))) == ("applied", 5, [0, 1, 2, 3, 4])


class BuildsItself(Imitation):
    """Makes its own batches, so that its episodes come to it whole."""

    def build_batch(self, episodes: Any) -> Any:
        return super().build_batch([lgroup.SingleAgentEpisode.from_tree(tree) for tree in map(_tree, episodes)])


def _tree(episode: Any) -> Any:
    return episode.to_tree() if isinstance(episode, lgroup.SingleAgentEpisode) else episode


@pytest.mark.parametrize("learner_class", [Imitation, BuildsItself])
def test_uneven_episodes_lose_and_double_no_step(
    pair: lgroup.LearnerGroup, learner_class: type[lgroup.Learner]
) -> None:
    """Case C2 (ray#66097): episodes of 100, 100, 5 and 5 steps on two learners; the gradient is one learner's."""
    lengths = {0: 100, 100: 100, 200: 5, 205: 5}
    episodes = [episode_of(steps, first) for first, steps in lengths.items()]
    config = config_of(learner_class, minibatch_size=10)
    with lgroup.LearnerGroup(config=config, cluster=pair.cluster) as group:
        result = group.update(episodes=episodes)
        group.check_sync()
        assert (result.rows, result.env_steps) == (210, 210)
        assert sorted(chain(*seen_by(group))) == list(range(210))
        both = [r.unwrap() for r in group.foreach_learner(lambda learner: learner.gradients.items)]
    assert len(both[0]) == 21
    for mine, other in zip(*both, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, other, strict=True))
    if learner_class is Imitation:  # the minibatches of a single learner are the same ones
        with lgroup.LearnerGroup(config=config_of(num_learners=0, minibatch_size=10)) as one:
            one.update(episodes=episodes)
            (alone,) = (r.unwrap() for r in one.foreach_learner(lambda learner: learner.gradients.items))
        for mine, single in zip(both[0], alone, strict=True):
            for a, b in zip(mine, single, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-6, rtol=0)


def test_one_step_over_uneven_episodes_has_one_learners_gradient(pair: lgroup.LearnerGroup) -> None:
    """Case C2 (ray#66097), where the learners build their batches and hold different numbers of rows."""
    episodes = [episode_of(steps, first) for first, steps in {0: 100, 100: 3}.items()]
    gradients = []
    for num_learners in (2, 0):
        config = config_of(BuildsItself, num_learners=num_learners)
        with lgroup.LearnerGroup(config=config, cluster=pair.cluster if num_learners else None) as group:
            group.update(episodes=episodes)
            gradients.append(next(iter(group.foreach_learner(lambda learner: learner.gradients.items))).unwrap())
    for two, one in zip(gradients[0][0], gradients[1][0], strict=True):
        np.testing.assert_allclose(two, one, atol=1e-6, rtol=0)


def test_a_caller_may_reuse_its_buffers_as_soon_as_the_call_returns(pair: lgroup.LearnerGroup) -> None:
    ids = np.arange(64)
    batch = batch_of(64, id=ids) | {"obs": torch.zeros(64, 4)}
    seen = seen_by(pair)
    futures = []
    for n in range(6):
        ids[:] = np.arange(64) + 1000 * n
        futures.append(pair.submit(batch=batch))
        ids[:] = -1
        batch["obs"].fill_(float("nan"))
        batch["actions"][:] = 99
        batch["obs"] = torch.zeros(64, 4)
        batch["actions"][:] = 1
    assert [future.result().status for future in futures] == ["applied"] * 6
    trained = [ids[len(old) :] for ids, old in zip(seen_by(pair), seen, strict=True)]
    assert sorted(chain(*trained)) == sorted(1000 * n + i for n in range(6) for i in range(64))


def test_several_batches_train_as_one_and_exactly_one_kind_of_data_is_taken(pair: lgroup.LearnerGroup) -> None:
    result = pair.update(batches=[batch_of(3), batch_of(4)])
    assert (result.rows, result.reduced[MODULE]["num_module_steps_trained"]) == (7, 7)
    data = lgroup.TrainingData(batch=batch_of(5))
    assert pair.update(training_data=data).rows == 5
    with pytest.raises(ValueError, match="on both"):
        pair.update(training_data=data, batch=batch_of(5))
    with pytest.raises(ValueError, match="exactly one of"):
        pair.update()
    with pytest.raises(ValueError, match="batch and episodes were given"):
        pair.update(batch=batch_of(5), episodes=[episode_of(5)])
    with pytest.raises(TypeError, match="'infos' is an array of dtype object"):
        pair.update(batch=batch_of(2, infos=np.array([{}, {}])))
    assert pair.update(batch=batch_of(5)).status == "applied"


def test_an_argument_that_no_hook_takes_is_refused_before_anything_is_sent(pair: lgroup.LearnerGroup) -> None:
    before = pair.get_stats()["updates"]
    for asynchronous in (False, True):
        with pytest.raises(TypeError, match="'minibatchsize', which is neither an argument of its own nor one of Imit"):
            pair.update(batch=batch_of(4), minibatchsize=2, async_update=asynchronous)
    assert pair.get_stats()["updates"] == before


def test_weights_fit_the_network_and_carry_the_number_of_updates_in_them(pair: lgroup.LearnerGroup) -> None:
    first = pair.get_weights()
    futures = [pair.submit(batch=batch_of(8, seed)) for seed in range(3)]
    second = pair.get_weights()
    assert second.version == first.version + 3 == futures[-1].result().weights_version
    assert not same(_arrays(first), _arrays(second))
    Net().load_state_dict(second[MODULE])
    kept = _arrays(second)
    pair.update(batch=batch_of(8))
    assert same(kept, _arrays(second))


def _arrays(weights: Any) -> dict[str, Any]:
    return {name: tensor.numpy().copy() for name, tensor in weights[MODULE].items()}


def test_weights_asked_for_without_waiting_never_go_back(pair: lgroup.LearnerGroup) -> None:
    pair.get_weights(wait=False)
    versions, committed = [], []
    futures = [pair.submit(batch=batch_of(8, seed)) for seed in range(30) for _ in [versions.append(_now(pair))]]
    for future in futures:
        committed.append(future.result().weights_version)
        versions.append(_now(pair))
        assert versions[-1] >= committed[-1]
    assert versions == sorted(versions)
    latest = pair.get_weights(wait=False)
    assert same(_arrays(latest), weights_of(pair))
    latest[MODULE]["layer.bias"].fill_(77.0)
    assert same(_arrays(pair.get_weights(wait=False)), weights_of(pair))


def _now(group: lgroup.LearnerGroup) -> int:
    return group.get_weights(wait=False).version


def test_weights_asked_for_without_waiting_hold_what_others_than_updates_changed(pair: lgroup.LearnerGroup) -> None:
    pair.get_weights(wait=False)
    zeros = {MODULE: {name: np.zeros_like(array) for name, array in weights_of(pair).items()}}
    pair.set_weights(zeros)
    assert same(_arrays(pair.get_weights(wait=False)), zeros[MODULE])
    with_ones = pair.foreach_learner(fill_bias, value=1.0)
    assert all(result.ok for result in with_ones)
    assert pair.get_weights(wait=False)[MODULE]["layer.bias"].tolist() == [1.0, 1.0]


def test_weights_that_do_not_fit_change_no_learner(pair: lgroup.LearnerGroup) -> None:
    before = weights_of(pair)
    wrong = {MODULE: {**before, "layer.bias": np.zeros(3, np.float32)}}
    with pytest.raises(lgroup.ActorError, match=r"layer\.bias"):
        pair.set_weights(wrong)
    with pytest.raises(lgroup.ActorError, match="nobody"):
        pair.set_weights({"nobody": before})
    assert same(weights_of(pair), before)
    pair.check_sync()
    assert pair.update(batch=batch_of(8)).status == "applied"


def test_the_state_after_an_update_comes_with_it_on_request(pair: lgroup.LearnerGroup) -> None:
    result = pair.update(batch=batch_of(8), return_state=True)
    state = {name: tensor.numpy() for name, tensor in result[0]["_rl_module_state_after_update"][MODULE].items()}
    assert same(state, weights_of(pair))
    assert all("_rl_module_state_after_update" not in own for own in result[1:])
    assert "_rl_module_state_after_update" not in pair.update(batch=batch_of(8))[0]


def test_any_subset_of_the_modules_can_be_set(pair: lgroup.LearnerGroup) -> None:
    spec = lgroup.MultiRLModuleSpec(
        rl_module_specs={name: lgroup.RLModuleSpec(module_class=Net) for name in ("left", "right")}
    )
    config = config_of().rl_module(rl_module_spec=spec).multi_agent(policies={"left", "right"})
    with lgroup.LearnerGroup(config=config, cluster=pair.cluster) as group:
        before = group.get_weights()
        group.set_weights({"left": {n: t.numpy() + 1.0 for n, t in before["left"].items()}})
        after = group.get_weights()
        for name, tensor in before["left"].items():
            assert torch.equal(after["left"][name], tensor + 1.0)
            assert torch.equal(after["right"][name], before["right"][name])
        assert list(group.get_weights(["right"])) == ["right"]
        group.check_sync()
        with pytest.raises(lgroup.UpdateDropped, match="no module 'middle'"):
            group.update(batch={"middle": batch_of(4)})
        assert group.update(batch={"middle": batch_of(4)}, async_update=True) != []
        assert group.get_stats()["updates"]["dropped"] == {"no_such_module": 2}
