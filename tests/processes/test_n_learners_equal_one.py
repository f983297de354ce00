"""Any split of a batch over learners gives what one learner makes of the whole batch; learners stay bit-identical."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import regression_learners as rl
import torch

import lgroup
from lgroup import LearnerGroup, MultiRLModuleSpec, RLModuleSpec
from lgroup.learner.learner import Learner

torch.set_num_threads(1)  # on these small tensors two threads mostly wait for each other

TOLERANCE = 1e-5
SIZES = (0, 1, 2, 3)

ONE = RLModuleSpec(module_class=rl.TwoLayers)
TWO = MultiRLModuleSpec(rl_module_specs={"a": ONE, "b": ONE})
SHARED = MultiRLModuleSpec(multi_rl_module_class=rl.SharedEncoder, rl_module_specs={"a": ONE, "b": ONE})


@dataclass(frozen=True)
class Kind:
    """A learner class, a network and settings: one group of each size."""

    spec: Any
    learner_class: type[Learner] = rl.Regression
    training: dict[str, Any] = field(default_factory=dict)


SGD = {"learner_config_dict": {"optimizer": "sgd"}, "lr": 0.2}
KINDS = {
    "adam": Kind(ONE),
    "sgd": Kind(ONE, training=SGD),
    "two": Kind(TWO),
    "shared adam": Kind(SHARED, training={"grad_clip": 0.5}),
    "shared sgd": Kind(SHARED, training=SGD),
    "own weights": Kind(SHARED, rl.OwnWeights, SGD),
    "episodes": Kind(ONE, rl.ActionsAsTargets),
    "own batch": Kind(ONE, rl.OwnBatch),
    "sum": Kind(ONE, training={**SGD, "lr": 0.01, "loss_reduction": "sum"}),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[lgroup.Cluster]:
    with lgroup.Cluster() as cluster:
        yield cluster


@pytest.fixture
def groups(cluster: lgroup.Cluster, request: pytest.FixtureRequest) -> Iterator[list[LearnerGroup]]:
    """Groups of each size of one kind; the first is local."""
    kind = KINDS[request.param]
    started: list[LearnerGroup] = []
    try:
        for size in SIZES:
            config = rl.config_of(kind.learner_class, size, kind.spec, **kind.training)
            started.append(LearnerGroup(config=config, cluster=cluster if size else None))
        yield started
    finally:
        for group in started:
            group.shutdown()


def of(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("groups", kinds, indirect=True)


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two sets of weights, relative to numbers above 1."""
    assert one.keys() == other.keys()
    found = 0.0
    for module_id, name in ((m, n) for m in one for n in one[m]):
        ours, theirs = one[module_id][name], other[module_id][name]
        assert ours.dtype == theirs.dtype
        found = max(found, float(((ours - theirs).abs() / ours.abs().clamp(min=1.0)).max()))
    return found


def train_equally(groups: list[LearnerGroup], train: Callable[[LearnerGroup], Any]) -> None:
    """From one state, `train` each group; all must end where the local one does, and report the same."""
    start = groups[0].get_state()
    ends, results = [], []
    for group in groups:
        group.set_state(start)
        results.append(train(group))
        group.check_sync()
        ends.append(group.get_weights())
    assert difference(start["learner"]["rl_module"], ends[0]) > 1e-4, "nothing was trained"
    for group, end, result in zip(groups, ends, results, strict=True):
        assert difference(ends[0], end) < TOLERANCE, f"{len(group)} learners differ from one"
        assert_reports_equal(results[0].reduced, result.reduced)


def assert_reports_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            assert_reports_equal(value, other[key])
        elif "weights_seq_no" not in key and "lifetime" not in key:
            assert other[key] == pytest.approx(value, abs=1e-4), key


def steps_of(batches: list[Any], **options: Any) -> Callable[[LearnerGroup], Any]:
    return lambda group: [group.update(batch=batch, **options) for batch in batches][-1]


@of("adam", "sgd")
def test_any_number_of_rows_trains_alike(groups: list[LearnerGroup]) -> None:
    for count in (1, 2, 3, 5, 6, 12, 31):
        train_equally(groups, steps_of([rl.rows(count, seed) for seed in range(3)]))


@of("adam")
def test_epochs_of_shuffled_minibatches_train_alike(groups: list[LearnerGroup]) -> None:
    for count, minibatch, shuffle in ((12, 4, True), (13, 4, True), (13, 5, False), (7, 2, True), (5, 1, True)):
        batches = [rl.rows(count, seed) for seed in range(2)]
        # The seed of an update's permutation depends on its number in the group, so this must be the same for all.
        assert len({group.get_stats()["updates"]["submitted"] for group in groups}) == 1
        train_equally(
            groups, steps_of(batches, num_epochs=3, minibatch_size=minibatch, shuffle_batch_per_epoch=shuffle)
        )


def masked(count: int, seed: int, valid: list[int]) -> dict[str, Any]:
    """Rows of which only those in `valid` count; the targets of the others are far off."""
    batch = rl.rows(count, seed)
    mask = np.zeros(count, dtype=bool)
    mask[valid] = True
    batch["y"][~mask] = 1e3
    return {**batch, "loss_mask": mask}


@of("adam", "sgd")
def test_masked_rows_do_not_count_wherever_they_lie(groups: list[LearnerGroup]) -> None:
    for valid in ([0], [11], [0, 1, 2, 3, 4, 5, 6], [1, 7, 8, 9, 10, 11], [3, 5]):
        train_equally(groups, steps_of([masked(12, seed, valid) for seed in range(2)]))
    batches = [masked(12, seed, [0, 1, 2, 3, 9]) for seed in range(2)]  # the second minibatch is masked altogether
    train_equally(groups, steps_of(batches, num_epochs=2, minibatch_size=4))


@of("two", "shared adam", "shared sgd")
def test_modules_with_different_numbers_of_rows_train_alike(groups: list[LearnerGroup]) -> None:
    for rows_of_a, rows_of_b in ((6, 6), (7, 2), (1, 11), (12, 1), (5, 0), (0, 4)):
        batches = [
            {m: rl.rows(n, seed + (m == "b")) for m, n in (("a", rows_of_a), ("b", rows_of_b)) if n}
            for seed in range(2)
        ]
        train_equally(groups, steps_of(batches))
        if rows_of_a != rows_of_b and rows_of_a and rows_of_b < 11:
            train_equally(groups, steps_of(batches, num_epochs=2, minibatch_size=3))


@of("shared sgd")
def test_a_shared_encoder_gets_the_gradient_of_both_modules_under_masks(groups: list[LearnerGroup]) -> None:
    batches = [{"a": masked(9, seed, [0, 1, 8]), "b": rl.rows(4, seed + 10)} for seed in range(2)]
    train_equally(groups, steps_of(batches))
    for group in groups:
        weights = group.get_weights()
        assert torch.equal(weights["a"]["encoder.0.weight"], weights["b"]["encoder.0.weight"])


@of("own weights")
def test_weights_of_the_learners_own_replace_the_numbers_of_rows(groups: list[LearnerGroup]) -> None:
    def weighted(count: int, seed: int) -> dict[str, Any]:
        importance = np.random.default_rng(seed).uniform(0.1, 5.0, size=count).astype(np.float32)
        return {**rl.rows(count, seed), "importance": importance}

    for rows_of_a, rows_of_b in ((6, 6), (7, 2), (1, 5)):
        batches = [{"a": weighted(rows_of_a, seed), "b": weighted(rows_of_b, seed + 1)} for seed in range(2)]
        train_equally(groups, steps_of(batches))
        train_equally(groups, steps_of(batches, minibatch_size=3))


@of("episodes")
def test_episodes_train_alike_in_minibatches_of_all_their_steps(groups: list[LearnerGroup]) -> None:
    episodes = [rl.episode(length, length) for length in (10, 3, 1, 6)]
    options = {"num_epochs": 2, "minibatch_size": 4, "shuffle_batch_per_epoch": True}
    train_equally(groups, lambda group: group.update(episodes=episodes))
    train_equally(groups, lambda group: group.update(episodes=episodes, **options))


@of("own batch")
def test_learners_that_build_their_batches_train_alike(groups: list[LearnerGroup]) -> None:
    for lengths in ((10, 3, 1, 6), (5,), (4, 4)):  # a single episode leaves all but one learner without rows
        episodes = [rl.episode(length, length) for length in lengths]
        train_equally(groups, lambda group, episodes=episodes: group.update(episodes=episodes, num_epochs=2))


@of("sum")
def test_a_loss_that_is_a_sum_is_not_divided_by_the_rows(groups: list[LearnerGroup]) -> None:
    def summed(learner: Any) -> None:
        learner.compute_loss_for_module = lambda *, module_id, config, batch, fwd_out: (
            rl.squared_error(fwd_out, batch) * len(batch["obs"])
        )

    for group in groups:
        group.foreach_learner(summed)
    for count in (1, 5, 12):
        train_equally(groups, steps_of([rl.rows(count, seed) for seed in range(2)]))


@of("adam")
def test_the_order_in_which_updates_wait_does_not_change_what_they_make(groups: list[LearnerGroup]) -> None:
    def queued(group: LearnerGroup) -> Any:
        futures = [group.submit(batch=rl.rows(7, seed)) for seed in range(6)]
        return [future.result(20) for future in futures][-1]

    ends = []
    for group, train in itertools.product(groups[1:], (queued, steps_of([rl.rows(7, seed) for seed in range(6)]))):
        group.set_state(groups[0].get_state())
        train(group)
        ends.append(group.check_sync())
    assert ends[0] == ends[1] and ends[2] == ends[3] and ends[4] == ends[5]
