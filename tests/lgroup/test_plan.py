from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lgroup.data import ModuleShare, Plan, RankPlan, leads_of, local_plan, make_plan, take

few = settings(max_examples=40, deadline=None)
ROWS = st.dictionaries(st.sampled_from(["b", "a", "shared", "default_policy"]), st.integers(0, 40), max_size=3)
PLANS = {
    "rows": ROWS,
    "num_epochs": st.integers(1, 3),
    "minibatch_size": st.one_of(st.none(), st.integers(1, 45)),
    "shuffle": st.booleans(),
    "seed": st.integers(-(2**70), 2**70),
}


def global_rows(rank: RankPlan, module: str, share: ModuleShare, count: int) -> list[int]:
    """The rows of the whole batch that a share names."""
    return np.arange(count)[rank.gather[module]][share.rows].tolist()


def rows_of_step(plan: Plan, step: int, module: str) -> list[int]:
    return [
        row for rank in plan.ranks for row in global_rows(rank, module, rank.steps[step][module], plan.rows[module])
    ]


def described(rank: RankPlan) -> object:
    """A rank's plan with every row spelled out, for comparison."""

    def spelled(rows: object) -> object:
        return (rows.start, rows.stop) if isinstance(rows, slice) else np.asarray(rows).tolist()

    return (
        [(module, spelled(rows)) for module, rows in rank.gather.items()],
        [[(m, spelled(s.rows), s.weight, s.total, s.lead) for m, s in step.items()] for step in rank.steps],
    )


@few
@given(world_size=st.integers(1, 5), **PLANS)
def test_each_row_is_used_exactly_once_per_epoch(rows, world_size, num_epochs, minibatch_size, shuffle, seed):
    plan = make_plan(
        rows, world_size=world_size, num_epochs=num_epochs, minibatch_size=minibatch_size, shuffle=shuffle, seed=seed
    )
    steps_per_epoch = plan.num_steps // num_epochs
    for epoch in range(num_epochs):
        for module in plan.modules:
            used = []
            for step in range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch):
                if module in plan.ranks[0].steps[step]:
                    used += rows_of_step(plan, step, module)
            assert sorted(used) == list(range(rows[module]))


@few
@given(world_size=st.integers(1, 5), **PLANS)
def test_all_ranks_take_the_same_steps_with_the_same_sorted_modules(
    rows, world_size, num_epochs, minibatch_size, shuffle, seed
):
    plan = make_plan(
        rows, world_size=world_size, num_epochs=num_epochs, minibatch_size=minibatch_size, shuffle=shuffle, seed=seed
    )
    assert plan.world_size == world_size
    assert plan.modules == tuple(sorted(module for module, count in rows.items() if count))
    for rank in plan.ranks:
        assert rank.modules == plan.modules
        assert [list(step) for step in rank.steps] == [list(step) for step in plan.ranks[0].steps]
        assert all(list(step) == sorted(step) and step for step in rank.steps)


@few
@given(world_size=st.integers(2, 5), **PLANS)
def test_a_step_holds_the_same_rows_for_any_number_of_ranks(
    rows, world_size, num_epochs, minibatch_size, shuffle, seed
):
    settings_ = {"num_epochs": num_epochs, "minibatch_size": minibatch_size, "shuffle": shuffle, "seed": seed}
    one, many = make_plan(rows, world_size=1, **settings_), make_plan(rows, world_size=world_size, **settings_)
    assert one.num_steps == many.num_steps
    for step in range(one.num_steps):
        for module in one.ranks[0].steps[step]:
            # In order, too: what ranks hold one after the other is what one rank holds.
            assert rows_of_step(many, step, module) == rows_of_step(one, step, module)


@few
@given(data=st.data(), world_size=st.integers(1, 5), **PLANS)
def test_weights_are_those_of_the_rows_and_add_up(data, rows, world_size, num_epochs, minibatch_size, shuffle, seed):
    weights = {
        module: np.array(data.draw(st.lists(st.sampled_from([0.0, 1.0, 0.3, 7.0]), min_size=count, max_size=count)))
        for module, count in rows.items()
        if data.draw(st.booleans())
    }
    plan = make_plan(
        rows,
        world_size=world_size,
        row_weights=weights,
        num_epochs=num_epochs,
        minibatch_size=minibatch_size,
        shuffle=shuffle,
        seed=seed,
    )
    for step in range(plan.num_steps):
        for module in plan.ranks[0].steps[step]:
            of_row = weights.get(module, np.ones(rows[module]))
            shares = [rank.steps[step][module] for rank in plan.ranks]
            for rank, share in zip(plan.ranks, shares, strict=True):
                expected = of_row[global_rows(rank, module, share, rows[module])].sum()
                assert share.weight == pytest.approx(expected, abs=1e-12)
                assert (share.weight == 0) == (expected == 0)
                assert share.total == shares[0].total
                assert share.lead == shares[0].lead
            assert shares[0].total == sum(share.weight for share in shares)
            heavy = [r for r, share in enumerate(shares) if share.weight > 0]
            assert shares[0].lead == (heavy[0] if heavy else -1)


@few
@given(world_size=st.integers(1, 5), **PLANS)
def test_ranks_are_within_one_row_of_each_other(rows, world_size, num_epochs, minibatch_size, shuffle, seed):
    plan = make_plan(
        rows, world_size=world_size, num_epochs=num_epochs, minibatch_size=minibatch_size, shuffle=shuffle, seed=seed
    )
    for step in range(plan.num_steps):
        for module, share in plan.ranks[0].steps[step].items():
            weights = [rank.steps[step][module].weight for rank in plan.ranks]
            assert max(weights) - min(weights) <= 1
            assert share.total <= (minibatch_size or math.inf)


@few
@given(world_size=st.integers(1, 5), **PLANS)
def test_a_plan_survives_the_wire(rows, world_size, num_epochs, minibatch_size, shuffle, seed):
    plan = make_plan(
        rows, world_size=world_size, num_epochs=num_epochs, minibatch_size=minibatch_size, shuffle=shuffle, seed=seed
    )
    for rank in plan.ranks:
        assert described(RankPlan.from_wire(rank.to_wire())) == described(rank)
        gathered = RankPlan.from_wire(rank.to_wire(with_gather=False))
        assert described(gathered)[1] == described(rank)[1]
        for module, count in rows.items():
            if count:
                own = len(np.arange(count)[rank.gather[module]])
                assert gathered.gather[module] == slice(0, own)


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 7, 8, 9, 31, 33])
def test_four_ranks_and_minibatches_of_eight_take_batches_of_any_size(rows):
    plan = make_plan({"m": rows}, world_size=4, minibatch_size=8)
    assert plan.num_steps == -(-rows // 8)
    assert plan.modules == (("m",) if rows else ())
    assert sorted(r for s in range(plan.num_steps) for r in rows_of_step(plan, s, "m")) == list(range(rows))


def test_without_minibatches_every_rank_gets_one_slice():
    plan = make_plan({"m": 10}, world_size=3, shuffle=True)
    assert [rank.gather["m"] for rank in plan.ranks] == [slice(0, 3), slice(3, 6), slice(6, 10)]
    assert [rank.steps[0]["m"].rows for rank in plan.ranks] == [slice(0, 3), slice(0, 3), slice(0, 4)]
    assert plan.num_steps == 1


def test_one_rank_gathers_everything_as_a_slice_even_with_shuffled_epochs():
    plan = make_plan({"m": 10}, world_size=1, minibatch_size=4, num_epochs=3, shuffle=True)
    assert plan.ranks[0].gather["m"] == slice(0, 10)
    assert make_plan({"m": 10}, world_size=1, minibatch_size=4).ranks[0].gather["m"] == slice(0, 10)


def test_a_module_that_ran_out_is_not_in_later_steps_of_the_epoch():
    plan = make_plan({"big": 5, "small": 2}, world_size=2, minibatch_size=2, num_epochs=2)
    assert [list(step) for step in plan.ranks[1].steps] == [["big", "small"], ["big"], ["big"]] * 2


def test_shuffling_depends_on_seed_epoch_and_module_only():
    def order(seed: int, module: str, epoch: int = 0, world_size: int = 1) -> list[int]:
        plan = make_plan(
            {module: 40, "other": 7}, world_size=world_size, minibatch_size=40, num_epochs=2, shuffle=True, seed=seed
        )
        return rows_of_step(plan, epoch, module)

    assert order(1, "a") == order(1, "a", world_size=4)
    assert len({tuple(o) for o in (order(1, "a"), order(2, "a"), order(1, "b"), order(1, "a", epoch=1))}) == 4


def test_a_step_of_masked_rows_only_weighs_exactly_nothing():
    weights = np.array([0.1] * 7 + [0.0] * 5)
    plan = make_plan({"m": 12}, world_size=2, row_weights={"m": weights}, minibatch_size=6)
    assert [rank.steps[1]["m"].weight for rank in plan.ranks] == [pytest.approx(0.1), 0.0]
    masked = make_plan({"m": 5}, world_size=2, row_weights={"m": np.zeros(5)})
    assert (masked.ranks[0].steps[0]["m"].total, masked.ranks[0].steps[0]["m"].lead) == (0.0, -1)


def test_no_rows_are_no_steps():
    plan = make_plan({"m": 0}, world_size=2, num_epochs=3)
    assert (plan.num_steps, plan.modules, plan.rows) == (0, (), {"m": 0})
    assert make_plan({}, world_size=2).num_steps == 0
    assert local_plan([{}, {"m": 0}], 0).steps == ()


def test_small_plans_are_cached_and_equal_to_fresh_ones():
    first = make_plan({"m": 64}, world_size=2)
    assert make_plan({"m": 64}, world_size=2) is first
    assert make_plan({"m": np.int64(64)}, world_size=2, num_epochs=2) is not first


def test_the_rows_of_a_plan_cannot_be_written_to():
    plan = make_plan({"m": 64}, world_size=2, minibatch_size=8, num_epochs=2, shuffle=True)
    with pytest.raises(ValueError, match="read-only"):
        plan.ranks[0].steps[0]["m"].rows[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        make_plan({"m": 64}, world_size=2, minibatch_size=8).ranks[0].gather["m"][0] = 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": {"m": -1}}, "module 'm' has -1 rows"),
        ({"world_size": 0}, "world_size is 0; it must be 1 or more"),
        ({"num_epochs": 0}, "num_epochs is 0"),
        ({"minibatch_size": 0}, "minibatch_size is 0; it must be 1 or more or None"),
        ({"row_weights": {"x": None}}, "row_weights names module 'x'"),
        ({"row_weights": {"m": [1.0]}}, r"module 'm' has shape \(1,\); it needs \(3,\)"),
        ({"row_weights": {"m": [1.0, math.nan, 1.0]}}, "module 'm' is nan at row 1"),
        ({"row_weights": {"m": [1.0, 0.0, -1.0]}}, "module 'm' is -1.0 at row 2"),
    ],
)
def test_an_argument_out_of_range_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_plan(**{"rows": {"m": 3}, "world_size": 2, **arguments})


@few
@given(
    rows_by_rank=st.lists(ROWS, min_size=1, max_size=4),
    num_epochs=st.integers(1, 3),
    minibatch_size=st.one_of(st.none(), st.integers(1, 45)),
    shuffle=st.booleans(),
)
def test_local_plans_use_each_local_row_once_per_epoch_in_the_same_steps(
    rows_by_rank, num_epochs, minibatch_size, shuffle
):
    plans = [
        local_plan(rows_by_rank, rank, num_epochs=num_epochs, minibatch_size=minibatch_size, shuffle=shuffle)
        for rank in range(len(rows_by_rank))
    ]
    for rank, plan in enumerate(plans):
        assert [list(step) for step in plan.steps] == [list(step) for step in plans[0].steps]
        assert all(step and list(step) == sorted(step) for step in plan.steps)
        for module in plan.modules:
            count = rows_by_rank[rank].get(module, 0)
            assert plan.gather[module] == slice(0, count)
            used = [
                row for step in plan.steps if module in step for row in np.arange(count)[step[module].rows].tolist()
            ]
            assert sorted(used) == sorted(list(range(count)) * num_epochs)
    for step in range(len(plans[0].steps)):
        for module, first in plans[0].steps[step].items():
            shares = [plan.steps[step][module] for plan in plans]
            assert first.total == sum(share.weight for share in shares) > 0
            assert {(share.total, share.lead) for share in shares} == {(first.total, first.lead)}
            assert first.total <= (minibatch_size or math.inf) + len(plans)


def test_local_plans_of_one_row_each_spread_over_the_steps():
    plans = [local_plan([{"m": 1}] * 3, rank, minibatch_size=1) for rank in range(3)]
    assert sorted(tuple(step["m"].weight for step in plan.steps) for plan in plans) == [
        (0.0, 0.0, 1.0),
        (0.0, 1.0, 0.0),
        (1.0, 0.0, 0.0),
    ]


def test_a_local_plan_takes_its_totals_from_the_other_ranks():
    rows = [{"a": 4, "b": 1}, {"a": 4}]
    masks = [{"a": np.array([1.0, 0.0, 0.0, 0.0])}, {"a": np.array([0.0, 0.0, 2.0, 1.0])}]
    plans = [local_plan(rows, rank, minibatch_size=4) for rank in range(2)]
    tables = np.stack([plan.weight_table(mask) for plan, mask in zip(plans, masks, strict=True)])
    assert tables.tolist() == [[[1.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [3.0, 0.0]]]
    leads = leads_of(tables)
    assert leads.tolist() == [[0, 0], [1, -1]]
    filled = [
        plan.with_totals(tables.sum(axis=0), leads, weights=table) for plan, table in zip(plans, tables, strict=True)
    ]
    assert [share.weight for step in filled[1].steps for share in step.values()] == [0.0, 0.0, 3.0]
    assert [share.total for step in filled[0].steps for share in step.values()] == [1.0, 1.0, 3.0]
    assert [share.lead for step in filled[0].steps for share in step.values()] == [0, 0, 1]
    assert plans[0].with_totals(tables.sum(axis=0), leads).steps[0]["a"].weight == 2.0


def test_totals_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\[steps, modules\] = \(1, 1\), not \(2, 1\)"):
        local_plan([{"m": 2}], 0).with_totals(np.ones((2, 1)), np.zeros((2, 1)))
    with pytest.raises(ValueError, match="rank is 1; with 1 ranks"):
        local_plan([{"m": 2}], 1)


def test_a_damaged_table_is_refused():
    good = make_plan({"m": 9}, world_size=2, minibatch_size=4, num_epochs=2, shuffle=True).ranks[0].to_wire()
    for damage in (
        {"shares": good["shares"][:-1]},
        {"num_steps": 1},
        {"modules": []},
        {"indices": good["indices"][:-1]},
        {"gather": []},
    ):
        with pytest.raises(ValueError, match=r"plan|zip|argument"):
            RankPlan.from_wire({**good, **damage})


@few
@given(world_size=st.integers(1, 4), seed=st.integers(0, 9), num_epochs=st.integers(1, 2))
def test_what_ranks_take_from_a_batch_adds_up_to_the_batch(world_size, seed, num_epochs):
    batch = {"obs": np.arange(26).reshape(13, 2), "nested": {"id": np.arange(13)}}
    plan = make_plan({"m": 13}, world_size=world_size, minibatch_size=5, shuffle=True, seed=seed, num_epochs=num_epochs)
    parts = []
    for rank in plan.ranks:
        shard = take(batch, rank.gather["m"])
        for step in rank.steps:
            rows = take(shard, step["m"].rows)
            assert (rows["obs"][:, 0] == 2 * rows["nested"]["id"]).all()
            parts += rows["nested"]["id"].tolist()
    assert sorted(parts) == sorted(list(range(13)) * num_epochs)
