"""A learner's state: what belongs to it, and that undoing, taking out and putting back are exact."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lgroup.columns import DEFAULT_MODULE_ID
from lgroup.config import LearnerGroupConfig
from lgroup.learner.host import LearnerHost
from lgroup.learner.learner import Learner
from lgroup.learner.state_tree import TreeCopy, copy_tree, live_tree, restore
from lgroup.learner.undo import Undo
from lgroup.modules import RLModuleSpec
from lgroup.transport import Kind, Message, decode, encode

torch.set_num_threads(1)  # on these small tensors two threads mostly wait for each other


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Pair(NamedTuple):
    left: Any
    right: Any


class Counter:
    """Something with a state of its own, and in it what only a deep copy copies."""

    def __init__(self) -> None:
        self.seen: deque[int] = deque([0])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = deque(state["seen"])


class Plain:
    """No state."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.norm(self.linear(batch["obs"]))  # type: ignore[no-any-return]


class Squares(Learner):
    def compute_loss_for_module(
        self, *, module_id: str, config: LearnerGroupConfig, batch: dict[str, Any], fwd_out: Any
    ) -> torch.Tensor:
        return (fwd_out - 1.0).square().mean()


def made(learner_class: type[Learner] = Squares, **training: Any) -> Learner:
    config = (
        LearnerGroupConfig()
        .training(learner_class=learner_class, **training)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=Net))
    )
    torch.manual_seed(0)
    learner: Learner = config.build_learner()
    return learner


def step(learner: Learner) -> None:
    """One optimizer step, so that there is Adam state."""
    batch = {DEFAULT_MODULE_ID: {"obs": torch.randn(4, 3)}}
    losses = learner.compute_losses(fwd_out=learner.module.forward_train(batch), batch=batch)
    learner.apply_gradients(learner.compute_gradients(losses))


def fingerprint(learner: Learner) -> dict[str, str]:
    host = LearnerHost.__new__(LearnerHost)
    host.learner = learner
    return host.digests()


def attempted(learner: Learner, change: Callable[[], None], *, everything: bool = True) -> None:
    """Change the learner, and take it back."""
    undo = Undo(learner)
    undo.begin(everything=everything)
    change()
    undo.copy_parameters()
    undo.roll_back()


# Undo


def test_a_step_is_undone_bit_for_bit_in_the_same_tensors() -> None:
    learner = made()
    step(learner)
    before, tensors = fingerprint(learner), dict(learner.module.named_parameters())
    attempted(learner, lambda: step(learner))
    assert fingerprint(learner) == before
    assert all(p is tensors[name] for name, p in learner.module.named_parameters())


def test_optimizer_state_that_the_failed_update_made_is_gone_again() -> None:
    learner = made()
    assert not learner.get_optimizer().state
    attempted(learner, lambda: step(learner))
    assert not learner.get_optimizer().state
    step(learner)
    assert all(float(state["step"]) == 1.0 for state in learner.get_optimizer().state.values())


def test_nothing_is_cast_when_it_comes_back() -> None:
    learner = made()
    learner.single = torch.ones(2, dtype=torch.bfloat16)  # type: ignore[attr-defined]
    learner.array = np.ones(3, dtype=">i2")  # type: ignore[attr-defined]
    learner.number = np.float32(0.1)  # type: ignore[attr-defined]

    def change() -> None:
        learner.single = learner.single.double() * 2  # type: ignore[attr-defined]
        learner.array = learner.array.astype(float)  # type: ignore[attr-defined]
        learner.number = 5  # type: ignore[attr-defined]

    attempted(learner, change)
    assert learner.single.dtype == torch.bfloat16 and learner.single.tolist() == [1.0, 1.0]  # type: ignore[attr-defined]
    assert learner.array.dtype == np.dtype(">i2")  # type: ignore[attr-defined]
    assert type(learner.number) is np.float32 and learner.number == np.float32(0.1)  # type: ignore[attr-defined]


def test_attributes_of_every_kind_come_back_with_their_types() -> None:
    learner: Any = made()
    learner.kl = 0.2
    learner.color, learner.level = Color.RED, Level.LOW
    learner.pair = Pair(1, torch.zeros(2))
    learner.window = deque([1, 2, 3], maxlen=3)
    learner.ordered, learner.counts = OrderedDict(a=1), defaultdict(int, a=1)
    learner.names, learner.frozen = {"a"}, frozenset({"b"})
    learner.counter = Counter()
    learner.target = copy.deepcopy(learner.module[DEFAULT_MODULE_ID])
    learner.scheduler = torch.optim.lr_scheduler.StepLR(learner.get_optimizer(), step_size=1)
    learner.nothing = None
    step(learner)
    before, objects = fingerprint(learner), dict(vars(learner))

    def change() -> None:
        step(learner)
        learner.scheduler.step()
        learner.counter.seen.append(1)
        learner.window.append(4)
        learner.counts["b"] += 1
        learner.ordered.clear()
        learner.names.add("c")
        learner.pair.right.add_(1)
        with torch.no_grad():
            learner.target.linear.weight.add_(1)
        learner.kl, learner.color, learner.level = 99.0, Color.BLUE, Level.HIGH
        learner.pair, learner.frozen = Pair(5, 5), frozenset()

    attempted(learner, change)
    assert fingerprint(learner) == before
    assert (learner.kl, learner.color, learner.level) == (0.2, Color.RED, Level.LOW)
    assert type(learner.level) is Level and type(learner.pair) is Pair
    assert learner.window == deque([1, 2, 3]) and learner.window.maxlen == 3
    assert learner.counts == {"a": 1} and learner.counts["new"] == 0
    assert learner.frozen == frozenset({"b"}) and type(learner.frozen) is frozenset
    assert list(learner.counter.seen) == [0]
    assert learner.scheduler.last_epoch == 0
    for name in ("window", "ordered", "counts", "names", "counter", "target", "scheduler"):
        assert getattr(learner, name) is objects[name], name


def test_objects_that_a_failed_update_replaced_come_back_themselves() -> None:
    learner: Any = made()
    learner.coeff = torch.tensor([0.2])
    learner.alias = {"coeff": learner.coeff}
    learner.target, learner.counter, learner.window = None, Counter(), deque([1], maxlen=2)
    objects = dict(vars(learner))

    def change() -> None:
        learner.coeff = learner.coeff * 2
        learner.target = copy.deepcopy(learner.module)  # made when first needed
        learner.counter, learner.window = None, [9, 9]

    attempted(learner, change)
    for name in ("coeff", "alias", "target", "counter", "window"):
        assert getattr(learner, name) is objects[name], name
    assert learner.alias["coeff"] is learner.coeff and float(learner.coeff) == pytest.approx(0.2)
    assert learner.window == deque([1])


def test_attributes_that_came_with_a_failed_update_are_deleted_and_lost_ones_return() -> None:
    learner: Any = made()
    learner.kept, learner.plain = [1, 2], Plain()

    def change() -> None:
        learner.extra = 1
        del learner.kept
        learner.plain = Plain()

    attempted(learner, change)
    assert not hasattr(learner, "extra")
    assert learner.kept == [1, 2]


def test_what_is_no_state_is_left_alone() -> None:
    learner: Any = made()
    plain, function = Plain(), len
    learner.plain, learner.mixture, learner.row = plain, {"f": function, "n": 1}, [plain]

    def change() -> None:
        learner.mixture["n"] = 2

    attempted(learner, change)
    assert learner.plain is plain and learner.row == [plain]
    assert learner.mixture == {"f": function, "n": 1}
    assert "plain" not in live_tree(learner)["attributes"]


def test_buffers_that_are_replaced_or_reshaped_come_back() -> None:
    learner = made()
    net = learner.module[DEFAULT_MODULE_ID]
    net.hidden.fill_(7.0)

    def change() -> None:
        net.hidden = torch.ones(5)
        net.norm.running_mean = net.norm.running_mean + 1

    attempted(learner, change)
    assert net.hidden.tolist() == [7.0, 7.0]
    assert net.norm.running_mean.tolist() == [0.0, 0.0]


def test_parameters_are_copied_late_unless_told_otherwise() -> None:
    learner = made()
    weight = learner.module[DEFAULT_MODULE_ID].linear.weight
    undo = Undo(learner)
    undo.begin(everything=False)
    undo.copy_parameters()
    with torch.no_grad():
        weight.zero_()
    undo.roll_back()
    assert bool(weight.any())
    undo.roll_back()  # there is nothing to take back any more
    assert bool(weight.any())


def test_registered_state_is_undone_in_place() -> None:
    learner = made()
    table, tensor, counter = {"a": [1]}, torch.zeros(2), Counter()
    for name, value in (("table", table), ("tensor", tensor), ("counter", counter)):
        learner.register_state(name, value)

    def change() -> None:
        table["a"].append(2)
        table["b"] = []
        tensor.add_(1)
        counter.seen.append(3)

    attempted(learner, change)
    assert (table, tensor.tolist(), list(counter.seen)) == ({"a": [1]}, [0.0, 0.0], [0])
    with pytest.raises(ValueError, match="state 'table' is already registered"):
        learner.register_state("table", {})
    with pytest.raises(TypeError, match="state 'number': a int cannot be restored in place"):
        learner.register_state("number", 3)


TENSORS = st.builds(
    lambda values, dtype: torch.tensor(values, dtype=dtype),
    st.lists(st.integers(0, 100), max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
)
ARRAYS = st.builds(lambda values: np.array(values, dtype=np.int32), st.lists(st.integers(0, 100), max_size=4))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), TENSORS, ARRAYS)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=12,
)
NAMES = st.sampled_from(["a", "b", "c", "d"])


def spelled(tree: Any) -> str:
    """A tree as text, with types, so that NaN equals NaN."""
    if isinstance(tree, torch.Tensor):
        return f"{tree.dtype}{tuple(tree.shape)}{tree.tolist()}"
    if isinstance(tree, np.ndarray):
        return f"{tree.dtype}{tree.shape}{tree.tolist()}"
    if isinstance(tree, dict):
        return f"{ {key: spelled(value) for key, value in tree.items()} }"
    if isinstance(tree, (list, tuple)):
        return f"{type(tree).__name__}{[spelled(value) for value in tree]}"
    return repr(tree)


def disturb(tree: Any) -> None:
    """Change a tree everywhere in place."""
    if isinstance(tree, torch.Tensor):
        tree.zero_()
    elif isinstance(tree, np.ndarray):
        tree.fill(-1)
    elif isinstance(tree, dict):
        for value in tree.values():
            disturb(value)
        tree["disturbed"] = 1
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            disturb(value)
        if isinstance(tree, list):
            tree.reverse()
            tree.append("disturbed")


LEARNER = made()


@settings(max_examples=120, deadline=None)
@given(
    first=st.dictionaries(NAMES, TREES),
    second=st.dictionaries(NAMES, TREES),
    dropped=st.sets(NAMES),
    early=st.booleans(),
)
def test_any_change_of_any_attributes_is_undone(
    first: dict[str, Any], second: dict[str, Any], dropped: set[str], early: bool
) -> None:
    learner: Any = copy.copy(LEARNER)
    vars(learner).update(first)
    wanted = {name: spelled(value) for name, value in first.items()}

    def change() -> None:
        for value in first.values():
            disturb(value)
        for name in dropped & set(first):
            delattr(learner, name)
        vars(learner).update(second)

    attempted(learner, change, everything=early)
    assert {name: spelled(value) for name, value in vars(learner).items() if name in "abcd"} == wanted


@settings(max_examples=80, deadline=None)
@given(TREES)
def test_a_copy_is_equal_independent_and_keeps_what_is_the_same_tensor_the_same(tree: Any) -> None:
    memory = TreeCopy()
    memory.take({"another": torch.zeros(3)})  # memory that does not fit
    shared = torch.ones(2)
    whole = {"tree": tree, "x": shared, "y": [shared]}
    wanted = spelled(whole)
    for found in (copy_tree(whole), memory.take(whole)):
        assert spelled(found) == wanted
        assert found["x"] is found["y"][0] and found["x"] is not shared
    found = copy_tree(whole)
    disturb(whole)
    assert spelled(found) == wanted


# Taking out and putting back


def test_a_whole_state_makes_another_learner_the_same() -> None:
    one, other = made(), made()
    step(one)
    one.kl = 0.7  # type: ignore[attr-defined]
    one.module[DEFAULT_MODULE_ID].hidden.fill_(3.0)
    other.set_state(one.get_state())
    assert fingerprint(one) == fingerprint(other)
    step(other)
    assert fingerprint(one) != fingerprint(other), "the state must be a copy"


def test_a_state_that_went_over_the_wire_restores_enums_and_named_tuples() -> None:
    one, other = made(), made()
    for learner, color, level, pair in (
        (one, Color.BLUE, Level.HIGH, Pair(1, 2)),
        (other, Color.RED, Level.LOW, Pair(0, 0)),
    ):
        learner.color, learner.level, learner.pair = color, level, pair  # type: ignore[attr-defined]
    frames = [bytearray(frame) for frame in encode(Message(Kind.DATA, 0, live_tree(one)))]
    restore(other, decode(frames).body)
    assert (other.color, other.level, other.pair) == (Color.BLUE, Level.HIGH, Pair(1, 2))  # type: ignore[attr-defined]
    assert type(other.level) is Level and type(other.pair) is Pair  # type: ignore[attr-defined]
    assert fingerprint(one) == fingerprint(other)


def test_parts_of_a_state_change_only_those_parts() -> None:
    one, other = made(lr=0.5), made(lr=0.1)
    for learner, kl in ((one, 0.7), (other, 0.1)):
        step(learner)
        learner.kl, learner.beta = kl, kl  # type: ignore[attr-defined]
    before = fingerprint(other)
    other.set_state(one.get_state("optimizer"))
    assert other.get_optimizer().param_groups[0]["lr"] == 0.5
    changed = {path.split("/")[1] for path, digest in fingerprint(other).items() if before[path] != digest}
    assert changed <= {"optimizer_state", "optimizer_settings"}
    other.set_state(one.get_state("attributes/kl"))
    assert (other.kl, other.beta) == (0.7, 0.1)  # type: ignore[attr-defined]
    state = one.get_state(["rl_module", "tensors"], not_components="tensors")
    assert list(state) == ["rl_module"]
    other.set_state(
        {"rl_module": {DEFAULT_MODULE_ID: {n: t.numpy() for n, t in state["rl_module"][DEFAULT_MODULE_ID].items()}}}
    )
    assert torch.equal(other.module[DEFAULT_MODULE_ID].linear.weight, one.module[DEFAULT_MODULE_ID].linear.weight)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"rl_modul": {}}, r"no component 'rl_modul'; it has \['rl_module', 'optimizer'"),
        ({"rl_module": {"nobody": {}}}, "there is no module 'nobody'; there are: 'default_policy'"),
        ({"rl_module": {DEFAULT_MODULE_ID: {}}}, "missing .*linear.weight"),
        ({"optimizer": {"x": {}}}, r"no optimizer 'x'; it has \['default_policy_default_optimizer'\]"),
        (
            {"optimizer": {"default_policy_default_optimizer": {"state": {}, "settings": []}}},
            "has 1 parameter groups, not 0",
        ),
        ({"registered": {"x": 1}}, "no registered state 'x'"),
        ({"tensors": {"buffer x": torch.zeros(1)}}, "no tensor 'buffer x'"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_with_what_there_is(state: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made().set_state(state)


def test_digests_tell_any_two_states_apart_and_name_where() -> None:
    learner: Any = made()
    learner.names, learner.odd = {"b", "a", 3}, "\ud800"
    before = fingerprint(learner)
    learner.names = {3, "a", "b"}
    assert fingerprint(learner) == before
    learner.kl = 0.1
    assert set(fingerprint(learner)) - set(before) == {"/attributes/kl"}
