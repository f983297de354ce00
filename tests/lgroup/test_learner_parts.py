"""The parts of a learner's step: metrics, the flat buffer, clipping, component paths, seeds."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lgroup.learner.components import select, subcomponents
from lgroup.learner.flat_buffer import FlatBuffer, first_nonfinite, shared_buffers
from lgroup.learner.gradients import clip_gradients, global_norm
from lgroup.learner.metrics import Metrics, merge
from lgroup.learner.seeding import mixed, random_state_kept, seed_everything

CPU = torch.device("cpu")


# Metrics


def taken(metrics: Metrics) -> dict[tuple[str, ...], tuple[str, float, float]]:
    return {path: (reduce, value, weight) for path, reduce, value, weight in metrics.take()}


def test_values_of_one_update_become_one_number_each() -> None:
    metrics = Metrics()
    for value in (1.0, torch.tensor(3.0), np.float32(5.0)):
        for reduce in ("mean", "sum", "min", "max", "lifetime"):
            metrics.log_value(("a", reduce), value, reduce=reduce)
    found = {path[1]: value for path, (_, value, _) in taken(metrics).items()}
    assert found == {"mean": 3.0, "sum": 9.0, "min": 1.0, "max": 5.0, "lifetime": 9.0}
    assert all(type(value) is float for value in found.values())


def test_a_mean_is_weighted_by_the_rows_of_its_module_in_the_step() -> None:
    metrics = Metrics()
    for rows, value in ((3, 1.0), (1, 5.0)):
        metrics.begin_step({"a": rows})
        metrics.log_value(("a", "loss"), value)
        metrics.log_value("free", value)
        metrics.log_value(("a", "own"), value, weight=2.0)
    assert taken(metrics) == {
        ("a", "loss"): ("mean", 2.0, 4.0),
        ("free",): ("mean", 3.0, 2.0),
        ("a", "own"): ("mean", 3.0, 4.0),
    }


def test_what_is_taken_is_forgotten_and_so_is_what_was_logged_before_an_update_begins() -> None:
    metrics = Metrics()
    metrics.log_value("x", 1)
    assert len(metrics.take()) == 1
    assert metrics.take() == []
    metrics.log_value("x", 1)
    metrics.begin()
    assert metrics.take() == []


def test_nested_values_and_times_are_logged_under_their_paths() -> None:
    metrics = Metrics()
    metrics.log_dict({"x": 1, "deeper": {"y": torch.tensor(2.0)}}, key="a", reduce="max")
    with metrics.log_time(("a", "seconds")):
        assert metrics.peek(("a", "x")) == 1
    found = taken(metrics)
    assert found["a", "x"][1] == 1 and found["a", "deeper", "y"][1] == 2.0
    assert 0.0 <= found["a", "seconds"][1] < 60.0


def test_peek_gives_the_value_so_far_or_a_default_and_else_says_what_there_is() -> None:
    metrics = Metrics()
    metrics.log_value(("a", "loss"), torch.tensor(2.0))
    metrics.log_value(("a", "loss"), 4.0)
    assert metrics.peek(("a", "loss")) == 3.0
    assert metrics.peek("nothing", default=7) == 7
    with pytest.raises(KeyError, match=r"no metric .*'nothing'.*'loss'"):
        metrics.peek("nothing")
    assert taken(metrics)["a", "loss"][1] == 3.0


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (torch.zeros(2), ValueError, r"shape \(2,\) is not one number"),
        (np.zeros(3), ValueError, r"shape \(3,\) is not one number"),
        ("high", TypeError, "a str is not a number"),
        (None, TypeError, "a NoneType is not a number"),
    ],
)
def test_what_is_not_one_number_is_no_metric(value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Metrics().log_value("x", value)


def test_an_unknown_reduction_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"reduce='median' is none of \['lifetime', 'max', 'mean', 'min', 'sum'\]"):
        Metrics().log_value("x", 1, reduce="median")  # type: ignore[arg-type]


@given(
    values=st.lists(st.tuples(st.integers(1, 9), st.floats(-100, 100)), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=3),
)
def test_several_learners_deltas_merge_to_what_one_would_have_reported(
    values: list[tuple[int, float]], cuts: list[int]
) -> None:
    def logged(part: list[tuple[int, float]]) -> list[Any]:
        metrics = Metrics()
        for rows, value in part:
            metrics.begin_step({"a": rows})
            for reduce in ("mean", "sum", "min", "max"):
                metrics.log_value(("a", reduce), value, reduce=reduce)
        return metrics.take()

    edges = [0, *sorted(cuts), len(values)]
    parts = [values[lo:hi] for lo, hi in itertools.pairwise(edges)]
    together, alone = merge([logged(part) for part in parts]), merge([logged(values)])
    assert together.keys() == alone.keys()
    for path, (reduce, value) in alone.items():
        assert together[path][0] == reduce
        assert together[path][1] == pytest.approx(value, abs=1e-9)


# The flat buffer


def filled(flat: FlatBuffer, *ranks: tuple[dict[Any, Any], list[bool]]) -> None:
    """Sum the ranks' parts, as the group would."""
    total = torch.zeros_like(flat.tensor)
    for gradients, contributes in ranks:
        flat.fill(gradients, contributes)
        total += flat.tensor
    flat.tensor.copy_(total)


def test_gradients_are_summed_and_stay_none_where_no_rank_has_one() -> None:
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    flat = FlatBuffer({"a": a, "b": b, "c": c}, [], CPU)
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    filled(flat, ({"a": one, "b": one, "c": None}, []), ({"a": two, "b": None}, []), ({}, []))
    found = flat.summed_gradients()
    assert found["a"].tolist() == [11.0, 22.0]  # type: ignore[union-attr]
    assert found["b"].tolist() == [1.0, 2.0]  # type: ignore[union-attr]
    assert found["c"] is None


def test_a_rank_leaves_nothing_of_its_last_step_behind() -> None:
    a, b = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    flat = FlatBuffer({"a": a, "b": b}, [], CPU)
    flat.fill({"a": torch.ones(2), "b": torch.ones(2)}, [])
    flat.fill({"a": torch.ones(2)}, [])
    assert flat.summed_gradients()["b"] is None
    assert flat.gradients.tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        ([torch.float32, torch.bfloat16], torch.float32),
        ([torch.float64, torch.float32], torch.float64),
        ([torch.float16], torch.float32),
        ([], torch.float32),
    ],
)
def test_the_sum_is_float32_unless_a_parameter_is_float64_and_gradients_get_their_parameters_dtype(
    dtypes: list[torch.dtype], wanted: torch.dtype
) -> None:
    parameters = {f"p{i}": nn.Parameter(torch.ones(3, dtype=dtype)) for i, dtype in enumerate(dtypes)}
    flat = FlatBuffer(parameters, [], CPU)
    assert flat.tensor.dtype == wanted
    flat.fill({name: torch.full_like(p, 0.5) for name, p in parameters.items()}, [])
    for name, gradient in flat.summed_gradients().items():
        assert gradient is not None
        assert gradient.dtype == parameters[name].dtype  # type: ignore[index]
        assert gradient.tolist() == [0.5] * 3


def test_a_float64_gradient_loses_no_digit() -> None:
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    flat = FlatBuffer({"p": p}, [], CPU)
    exact = torch.tensor([1.0 + 2**-50], dtype=torch.float64)
    flat.fill({"p": exact}, [])
    assert torch.equal(flat.summed_gradients()["p"], exact)  # type: ignore[arg-type]


BUFFERS = {
    "int64": torch.tensor([2**62 + 1, -(2**63), -1]),
    "int32": torch.tensor([[2**31 - 1], [-5]], dtype=torch.int32),
    "int16": torch.tensor([-(2**15), 2**15 - 1], dtype=torch.int16),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "float64": torch.tensor([float("nan"), float("-inf"), -0.0, 5e-324], dtype=torch.float64),
    "float32": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    "float16": torch.tensor([float("nan"), 65504.0], dtype=torch.float16),
    "bfloat16": torch.tensor([float("nan"), 3e38, -0.0], dtype=torch.bfloat16),
    "complex64": torch.tensor([complex(1.5, float("nan"))], dtype=torch.complex64),
    "scalar": torch.tensor(2**40 + 3),
    "transposed": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def module_with(buffers: dict[str, torch.Tensor]) -> nn.Module:
    module = nn.Module()
    for name, tensor in buffers.items():
        module.register_buffer(f"the_{name}", tensor)
    return module


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_buffers_of_every_dtype_pass_through_the_sum_bit_for_bit(wide: bool) -> None:
    source = module_with({name: tensor.clone() for name, tensor in BUFFERS.items()})
    target = module_with({name: torch.zeros_like(tensor) for name, tensor in BUFFERS.items()})
    p = {"p": nn.Parameter(torch.zeros(1, dtype=torch.float64 if wide else torch.float32))}
    ours, theirs = (FlatBuffer(p, shared_buffers({"m": m}, m), CPU) for m in (source, target))
    count = len(BUFFERS)
    ours.fill({}, [True] * count)
    theirs.fill({}, [False] * count)
    theirs.tensor.add_(ours.tensor)
    assert theirs.is_finite(), "buffers are no gradients"
    theirs.adopt_buffers([True] * count)
    for name, tensor in BUFFERS.items():
        found = dict(target.named_buffers())[f"the_{name}"]
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert bits(found) == bits(tensor), name


def test_a_buffer_that_no_rank_contributed_keeps_its_value() -> None:
    module = module_with({"x": torch.tensor([3.0])})
    flat = FlatBuffer({}, shared_buffers({"m": module}, module), CPU)
    flat.fill({}, [False])
    flat.adopt_buffers([False])
    assert module.the_x.tolist() == [3.0]


def test_a_buffer_is_found_in_its_place_after_a_forward_pass_replaced_it() -> None:
    module = module_with({"x": torch.tensor([3.0])})
    flat = FlatBuffer({}, shared_buffers({"m": module}, module), CPU)
    module.the_x = module.the_x * 2
    flat.fill({}, [True])
    module.the_x = torch.zeros(1)
    flat.adopt_buffers([True])
    assert module.the_x.tolist() == [6.0]


def test_a_buffer_of_another_shape_is_refused_before_the_sum() -> None:
    module = module_with({"x": torch.zeros(3)})
    flat = FlatBuffer({}, shared_buffers({"m": module}, module), CPU)
    module.the_x = torch.zeros(4)
    with pytest.raises(ValueError, match=r"buffer 'the_x' of Module is \(4,\)"):
        flat.fill({}, [True])


def test_a_shared_buffer_is_contributed_once_and_belongs_to_all_that_hold_it() -> None:
    norm = nn.BatchNorm1d(2)
    whole = nn.Module()
    whole.a, whole.b, whole.own = nn.Sequential(norm), nn.Sequential(norm, nn.BatchNorm1d(2)), nn.BatchNorm1d(2)
    owners = [shared.owners for shared in shared_buffers({"a": whole.a, "b": whole.b}, whole)]
    assert owners == [frozenset("ab")] * 3 + [frozenset("b")] * 3 + [frozenset("ab")] * 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_nonfinite_element_makes_the_sum_nonfinite_and_is_found(value: float) -> None:
    a, b = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))
    flat = FlatBuffer({"a": a, "b": b}, [], CPU)
    gradients: dict[Any, Any] = {"a": torch.ones(5), "b": torch.tensor([0.0, 0.0, value, 0.0, 0.0])}
    flat.fill(gradients, [])
    assert not flat.is_finite()
    assert first_nonfinite(gradients, {"b": "net.bias"}) == "net.bias"
    assert first_nonfinite({"a": torch.ones(5), "c": None}, {}) is None


def test_gradients_whose_sum_overflows_are_finite_all_the_same() -> None:
    flat = FlatBuffer({"a": nn.Parameter(torch.zeros(4))}, [], CPU)
    flat.fill({"a": torch.full((4,), 3e38)}, [])
    assert flat.is_finite()


# Clipping


def test_clipping_by_value_norm_and_global_norm() -> None:
    def gradients() -> dict[str, Any]:
        return {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([-12.0]), "c": None}

    by_value, by_norm, by_all = gradients(), gradients(), gradients()
    clip_gradients(by_value, 3.5, "value")
    assert by_value["a"].tolist() == [3.0, 3.5] and by_value["b"].tolist() == [-3.5]
    clip_gradients(by_norm, 5.0, "norm")
    assert by_norm["a"].tolist() == pytest.approx([3.0, 4.0]) and by_norm["b"].tolist() == pytest.approx([-5.0])
    assert float(global_norm(by_all.values())) == 13.0
    clip_gradients(by_all, 6.5, "global_norm")
    assert by_all["a"].tolist() == pytest.approx([1.5, 2.0]) and by_all["b"].tolist() == pytest.approx([-6.0])
    assert by_all["c"] is None


def test_small_gradients_and_none_at_all_are_left_alone() -> None:
    small: dict[str, Any] = {"a": torch.tensor([0.1, 0.2])}
    for by in ("value", "norm", "global_norm"):
        clip_gradients(small, 1.0, by)
        clip_gradients({"a": None}, 1.0, by)
    assert torch.equal(small["a"], torch.tensor([0.1, 0.2]))
    assert float(global_norm([None])) == 0.0


def test_gradients_of_different_dtypes_have_one_norm() -> None:
    mixture = [torch.tensor([3.0], dtype=torch.float64), torch.tensor([4.0], dtype=torch.bfloat16)]
    assert float(global_norm(mixture)) == pytest.approx(5.0)
    gradients: dict[str, Any] = dict(enumerate(mixture))  # type: ignore[arg-type]
    clip_gradients(gradients, 2.5, "global_norm")
    assert [float(g) for g in gradients.values()] == pytest.approx([1.5, 2.0])
    assert [g.dtype for g in gradients.values()] == [torch.float64, torch.bfloat16]


def test_an_unknown_way_of_clipping_is_refused() -> None:
    with pytest.raises(ValueError, match="grad_clip_by='sum' is none of 'value', 'norm', 'global_norm'"):
        clip_gradients({"a": torch.ones(1)}, 1.0, "sum")


# Component paths

STATE = {"learner": {"rl_module": {"a": 1, "b": 2}, "optimizer": {"a": 3}}, "other": 4}


@pytest.mark.parametrize(
    ("components", "not_components", "wanted"),
    [
        (None, None, STATE),
        ("other", None, {"other": 4}),
        ("learner/rl_module/b", None, {"learner": {"rl_module": {"b": 2}}}),
        (["learner/rl_module/a/", "other"], None, {"learner": {"rl_module": {"a": 1}}, "other": 4}),
        (["learner", "learner/rl_module/a"], None, {"learner": STATE["learner"]}),
        (None, "learner", {"other": 4}),
        (None, ["learner/rl_module/a", "other"], {"learner": {"rl_module": {"b": 2}, "optimizer": {"a": 3}}}),
        ("learner/rl_module", "learner/rl_module/a", {"learner": {"rl_module": {"b": 2}}}),
        ([], None, {}),
        ("nothing", None, {}),
    ],
)
def test_paths_choose_parts_of_a_state(components: Any, not_components: Any, wanted: dict[str, Any]) -> None:
    assert select(STATE, components, not_components) == wanted


def test_what_lies_below_a_name() -> None:
    assert subcomponents("a", None) is None
    assert subcomponents("a", "a") is None
    assert subcomponents("a", ["a/x/y", "b", "a/z"]) == ["x/y", "z"]
    assert subcomponents("a", "b/a") is False


# Seeds


@settings(max_examples=50)
@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_a_mixed_seed_is_a_function_of_all_its_numbers_in_order(numbers: list[int]) -> None:
    seed = mixed(*numbers)
    assert seed == mixed(*numbers)
    assert 0 <= seed < 2**63
    assert seed != mixed(*numbers, 0)
    assert seed != mixed(numbers[0] + 1, *numbers[1:])


def draws() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


def test_one_seed_fixes_all_generators_and_the_callers_come_back() -> None:
    seed_everything(1)
    before = draws()
    seed_everything(1)
    with random_state_kept():
        seed_everything(2)
        assert draws() != before
    assert draws() == before
