from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lgroup.columns import ALL_MODULES, DEFAULT_MODULE_ID, Columns
from lgroup.data import (
    MultiAgentBatch,
    SampleBatch,
    concat_columns,
    concat_multi_agent,
    make_plan,
    nbytes,
    normalise,
    row_weights,
    take,
)

few = settings(max_examples=40, deadline=None)


def columns(rows: int = 6) -> dict[str, object]:
    return {
        "obs": np.arange(rows * 2, dtype=np.float32).reshape(rows, 2),
        "actions": torch.arange(rows),
        "nested": {"image": np.arange(rows, dtype=np.uint8).reshape(rows, 1, 1), "pos": {"x": torch.ones(rows, 3)}},
    }


class Grid:
    """A mapping that is none of Python's, as TensorDict is."""

    def __init__(self, **values: object) -> None:
        self._values = values

    def keys(self):
        return self._values.keys()

    def items(self):
        return self._values.items()

    def __getitem__(self, key: str) -> object:
        return self._values[key]


def test_the_length_of_a_batch_is_its_rows():
    batch = SampleBatch(columns())
    assert len(batch) == batch.count == batch.env_steps() == batch.agent_steps() == 6
    assert len(SampleBatch()) == 0
    assert len(SampleBatch(obs=np.zeros((0, 4)))) == 0
    assert not SampleBatch(obs=np.zeros((0, 4)))
    assert list(SampleBatch(SampleBatch(obs=np.zeros((0, 4))))) == ["obs"]
    assert list(SampleBatch(SampleBatch(obs=np.zeros((0, 4))), rewards=[])) == ["obs", "rewards"]


def test_columns_with_different_numbers_of_rows_are_named():
    with pytest.raises(ValueError, match=r"batch column 'actions' has 63 rows, 'obs' has 64"):
        normalise({"obs": np.zeros((64, 4)), "actions": np.zeros(63)})
    with pytest.raises(ValueError, match=r"column 'actions' of module 'p1' has 63 rows, 'obs' has 64"):
        normalise({"p0": {"obs": np.zeros(5)}, "p1": {"obs": torch.zeros(64), "actions": np.zeros(63)}})
    with pytest.raises(ValueError, match=r"'nested\.b' has 2 rows, 'nested\.a' has 3"):
        SampleBatch(nested={"a": np.zeros(3), "b": np.zeros(2)})
    batch = SampleBatch(columns())
    with pytest.raises(ValueError, match=r"column 'rewards' has 5 rows, 'obs' has 6"):
        batch["rewards"] = np.zeros(5)
    with pytest.raises(ValueError, match="'rewards' has 5 rows"):
        batch.update(rewards=np.zeros(5))
    with pytest.raises(ValueError, match="'rewards' has 5 rows"):
        batch |= {"rewards": np.zeros(5)}
    assert sorted(batch) == ["actions", "nested", "obs"]


def test_the_only_column_of_a_batch_may_change_its_rows():
    batch = SampleBatch(obs=np.zeros(3))
    batch["obs"] = np.zeros(4)
    assert len(batch) == 4
    assert len(batch.setdefault("rewards", [1, 2, 3, 4])) == 4


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.array([{}, {}], dtype=object), "an array of dtype object"),
        ([{}, {}], "an array of dtype object"),
        (["a", "b"], "an array of dtype <U1"),
        (np.zeros(2, dtype=[("a", "i4")]), "an array of dtype"),
        (np.float32(1.0), "an array without axes"),
        (3, "an array without axes"),
        (None, "an array of dtype object"),
        (torch.tensor(1.0), "a tensor without axes"),
        ([[1, 2], [3]], "a list that is no array"),
        ({}, "an empty dict"),
    ],
)
def test_a_column_that_holds_no_numbers_is_named(value, found):
    with pytest.raises(TypeError, match=f"batch column 'x' is {found}.*; allowed are numpy arrays and torch tensors"):
        SampleBatch(x=value)


@pytest.mark.parametrize("batch", [3, None, [1, 2], np.zeros(3), torch.zeros(3)])
def test_what_is_no_batch_is_refused(batch):
    with pytest.raises(TypeError, match=r"batch is a .*; allowed are SampleBatch, MultiAgentBatch"):
        normalise(batch)


def test_names_that_are_no_strings_are_refused():
    with pytest.raises(TypeError, match="batch column 3 is named by a int"):
        normalise({3: np.zeros(2)})
    with pytest.raises(TypeError, match="module id 3 is a int"):
        normalise({3: SampleBatch(obs=np.zeros(2))})
    with pytest.raises(TypeError, match="batch of module 'b' is a ndarray"):
        normalise({"a": SampleBatch(obs=np.zeros(2)), "b": np.zeros(2)})


def test_lists_of_numbers_become_arrays_and_tensors_stay_tensors():
    batch = normalise({"a": [1.0, 2.0], "b": torch.zeros(2, dtype=torch.bfloat16), "c": np.ma.array([1, 2])})[
        "default_policy"
    ]
    assert type(batch["a"]) is np.ndarray
    assert batch["b"].dtype == torch.bfloat16
    assert type(batch["c"]) is np.ndarray


def test_normalising_keeps_the_arrays_themselves():
    given = columns()
    batch = normalise(given)[DEFAULT_MODULE_ID]
    assert batch["obs"] is given["obs"]
    assert batch["actions"] is given["actions"]
    assert batch["nested"]["pos"]["x"] is given["nested"]["pos"]["x"]
    again = normalise(normalise(given))
    assert again[DEFAULT_MODULE_ID]["obs"] is given["obs"]


@pytest.mark.parametrize(
    "batch",
    [
        {"obs": np.zeros(3)},
        MappingProxyType({"obs": torch.zeros(3)}),
        SampleBatch(obs=np.zeros(3)),
        {"obs": {"image": np.zeros(3)}},
        {DEFAULT_MODULE_ID: {"obs": np.zeros(3)}},
        {DEFAULT_MODULE_ID: SampleBatch(obs=np.zeros(3))},
        MultiAgentBatch({DEFAULT_MODULE_ID: {"obs": np.zeros(3)}}, 3),
        Grid(obs=torch.zeros(3)),
        {DEFAULT_MODULE_ID: Grid(obs=torch.zeros(3))},
        Grid(obs=Grid(image=torch.zeros(3)), rewards=torch.zeros(3)),
    ],
)
def test_every_accepted_kind_of_batch_is_one_of_modules(batch):
    found = normalise(batch)
    assert found.rows == {DEFAULT_MODULE_ID: 3}
    assert "obs" in found[DEFAULT_MODULE_ID]
    assert found.env_steps() == len(found) == found.count == found.agent_steps() == 3


def test_a_dict_of_dicts_is_one_of_modules_unless_a_key_is_a_column():
    assert normalise({"left": {"a": np.zeros(3)}, "right": {"a": np.zeros(2)}}).rows == {"left": 3, "right": 2}
    assert normalise({"obs": {"a": np.zeros(3)}, "x": {"a": np.zeros(3)}}).rows == {DEFAULT_MODULE_ID: 3}
    assert normalise({"x": {"a": np.zeros(3)}, "y": np.zeros(3)}).rows == {DEFAULT_MODULE_ID: 3}
    assert normalise({"obs": SampleBatch(a=np.zeros(3))}).rows == {"obs": 3}
    assert normalise({"p": {"a": np.zeros(3)}, "q": {}}).rows == {"p": 3, "q": 0}


def test_an_empty_batch_has_no_rows_and_no_steps():
    assert (normalise({}).rows, normalise({}).env_steps()) == ({}, 0)
    empty = normalise({"obs": np.zeros((0, 4)), "rewards": np.zeros((0, 7))})
    assert (empty.rows, empty.env_steps()) == ({DEFAULT_MODULE_ID: 0}, 0)


@pytest.mark.parametrize("array", [np.asarray, torch.as_tensor])
def test_env_steps_are_given_or_counted_by_mask_or_by_the_time_axis(array):
    obs, rewards = array(np.zeros((4, 5, 2))), array(np.zeros((4, 5)))
    mask = array(np.arange(20).reshape(4, 5) < 13)
    assert normalise({"obs": obs}).env_steps() == 4
    assert normalise({"obs": obs, "rewards": rewards}).env_steps() == 20
    assert normalise({"obs": obs, "rewards": array(np.zeros(4))}).env_steps() == 4
    assert normalise({"obs": obs, "action_logp": rewards}).env_steps() == 20
    assert normalise({"obs": obs, "rewards": rewards, "loss_mask": mask}).env_steps() == 13
    assert normalise({"a": {"obs": obs}, "b": {"obs": obs, "loss_mask": mask}}).env_steps() == 17
    given_steps = normalise(MultiAgentBatch({"a": {"obs": obs, "loss_mask": mask}}, 7))
    assert (given_steps.env_steps(), given_steps.agent_steps()) == (7, 13)
    assert type(given_steps.env_steps()) is type(normalise({"loss_mask": mask}).env_steps()) is int


def test_negative_env_steps_are_refused():
    with pytest.raises(ValueError, match="env_steps is -1; it must be 0 or more"):
        MultiAgentBatch({}, -1)


@pytest.mark.parametrize("array", [np.asarray, torch.as_tensor])
def test_row_weights_are_the_valid_steps_of_each_row(array):
    mask = array(np.array([[True, True, False], [False, False, False]]))
    batch = normalise({"a": {"loss_mask": mask}, "b": {"obs": np.zeros(3)}, "c": {"loss_mask": array(np.ones(0))}})
    weights = batch.row_weights()
    assert sorted(weights) == ["a", "c"]
    assert weights["a"].tolist() == [2.0, 0.0]
    assert weights["a"].dtype == np.float64
    assert weights["c"].shape == (0,)
    assert row_weights(batch["b"]) is None
    plan = make_plan(batch.rows, world_size=2, row_weights=weights)
    assert [rank.steps[0]["a"].weight for rank in plan.ranks] == [2.0, 0.0]


def test_a_mask_of_bfloat16_counts_and_a_nested_one_is_refused():
    assert row_weights({"loss_mask": torch.ones(2, 3, dtype=torch.bfloat16)}).tolist() == [3.0, 3.0]
    with pytest.raises(TypeError, match="batch column 'loss_mask' is a dict"):
        normalise({"obs": np.zeros(2), "loss_mask": {"a": np.zeros(2)}})


@few
@given(
    start=st.integers(-8, 8) | st.none(), stop=st.integers(-8, 8) | st.none(), step=st.sampled_from([None, 1, 2, -1])
)
def test_a_batch_is_sliced_as_an_array_is(start, stop, step):
    rows = slice(start, stop, step)
    part = SampleBatch(columns())[rows]
    expected = np.arange(6)[rows].tolist()
    assert part["actions"].tolist() == expected
    assert part["nested"]["image"].ravel().tolist() == expected
    assert (part["obs"][:, 0] / 2).tolist() == expected
    assert len(part) == len(expected)


@few
@given(rows=st.lists(st.integers(-6, 5), max_size=9))
def test_a_batch_is_indexed_by_ints_and_masks_as_an_array_is(rows):
    batch = SampleBatch(columns())
    part = batch[np.array(rows, dtype=np.int32)]
    expected = np.arange(6)[np.array(rows, dtype=int)].tolist()
    assert part["actions"].tolist() == part["nested"]["image"].ravel().tolist() == expected
    mask = np.isin(np.arange(6), rows)
    assert batch[mask]["actions"].tolist() == np.arange(6)[mask].tolist()
    assert take(batch, mask)["actions"].tolist() == np.arange(6)[mask].tolist()


@pytest.mark.parametrize("rows", [np.array([6]), np.array([-7]), np.array([True]), np.array([[1]]), np.array([1.0])])
def test_rows_out_of_range_are_refused(rows):
    with pytest.raises(IndexError, match=r"batch has 6|needs \(6,\)|one axis"):
        SampleBatch(columns())[rows]


@pytest.mark.parametrize("rows", [slice(0, 6), slice(2, 5), slice(None), slice(3, 99)])
def test_taking_a_slice_copies_nothing(rows):
    batch = columns()
    taken = take(batch, rows)
    assert np.shares_memory(taken["obs"], batch["obs"])
    assert taken["actions"].data_ptr() == batch["actions"][rows].data_ptr()
    assert taken["nested"] is not batch["nested"]
    assert len(taken["nested"]["pos"]["x"]) == len(range(6)[rows])


def test_taking_nothing_keeps_the_shape_of_a_row():
    for rows in (slice(0, 0), slice(4, 4), np.array([], dtype=np.int64)):
        taken = take(columns(), rows)
        assert taken["obs"].shape == (0, 2)
        assert taken["nested"]["pos"]["x"].shape == (0, 3)
    assert take({}, slice(0, 3)) == {}


def test_taking_rows_of_read_only_arrays_warns_of_nothing(recwarn):
    rows = np.array([1, 0])
    rows.flags.writeable = False
    assert take(columns(), rows)["actions"].tolist() == [1, 0]
    assert not list(recwarn)


@few
@given(cuts=st.lists(st.integers(0, 6), max_size=4))
def test_pieces_joined_are_the_whole(cuts):
    edges = [0, *sorted(cuts), 6]
    batch = SampleBatch(columns())
    pieces = [batch[lo:hi] for lo, hi in pairwise(edges)]
    whole = SampleBatch(concat_columns(pieces))
    assert whole["actions"].tolist() == list(range(6))
    assert isinstance(whole["actions"], torch.Tensor)
    assert (whole["obs"] == batch["obs"]).all()
    assert whole["nested"]["pos"]["x"].shape == (6, 3)


def test_batches_that_differ_cannot_be_joined():
    with pytest.raises(ValueError, match=r"only some have 'b', 'c'"):
        SampleBatch(a=[1], b=[1]).concat(SampleBatch(a=[1], c=[1]))
    with pytest.raises(ValueError, match=r"column 'n\.a': the shapes of a row differ: \[\(2,\), \(3,\)\]"):
        concat_columns([{"n": {"a": np.zeros((1, 2))}}, {"n": {"a": np.zeros((1, 3))}}])
    with pytest.raises(ValueError, match="column 'a': some are Tensor and some ndarray"):
        concat_columns([{"a": np.zeros(1)}, {"a": torch.zeros(1)}])


def test_batches_of_modules_are_joined_module_by_module():
    first = MultiAgentBatch({"a": {"x": [1, 2]}, "b": {"x": [3]}}, 2)
    second = MultiAgentBatch({"a": {"x": [4]}, "c": {"x": [5]}}, 1)
    joined = concat_multi_agent([first, second])
    assert {module: joined[module]["x"].tolist() for module in joined} == {"a": [1, 2, 4], "b": [3], "c": [5]}
    assert joined.env_steps() == 3
    assert concat_multi_agent([]).rows == {}


def test_a_copy_is_independent_and_a_shallow_one_is_not():
    batch = SampleBatch(columns())
    deep, shallow = batch.copy(), batch.copy(shallow=True)
    batch["obs"][:] = -1
    batch["nested"]["pos"]["x"][:] = -1
    assert deep["obs"][0, 0] == 0
    assert deep["nested"]["pos"]["x"][0, 0] == 1
    assert shallow["obs"] is batch["obs"]
    assert "obs" in normalise(batch).copy()[DEFAULT_MODULE_ID]
    assert normalise(batch).copy()[DEFAULT_MODULE_ID]["obs"] is not batch["obs"]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_batches_can_be_copied_and_pickled(duplicate):
    batch = duplicate(SampleBatch(columns()))
    assert type(batch) is SampleBatch
    assert len(batch) == 6
    modules = duplicate(normalise(columns()))
    assert modules.rows == {DEFAULT_MODULE_ID: 6}
    assert modules.env_steps() == 6


def test_nan_goes_through_unchanged():
    values = np.array([np.nan, 1.0, np.nan])
    batch = normalise({"rewards": values, "obs": torch.tensor(values)})
    assert batch.env_steps() == 3
    assert np.isnan(take(batch[DEFAULT_MODULE_ID], np.array([2, 0]))["rewards"]).all()


def test_bytes_are_those_of_all_columns():
    assert SampleBatch(columns()).size_bytes() == 6 * (2 * 4 + 8 + 1 + 3 * 4)
    assert normalise(columns()).size_bytes() == nbytes(columns()) == 174
    assert SampleBatch(columns()).as_multi_agent("p").as_multi_agent().rows == {"p": 6}


def test_reprs_show_counts():
    assert repr(SampleBatch(columns())) == "SampleBatch(6: ['actions', 'nested', 'obs'])"
    assert "env_steps=6" in repr(normalise(columns()))


def test_the_names_are_rllibs():
    assert (Columns.NEXT_OBS, Columns.ACTION_LOGP, Columns.VF_PREDS) == ("new_obs", "action_logp", "vf_preds")
    assert (DEFAULT_MODULE_ID, ALL_MODULES) == ("default_policy", "__all_modules__")
