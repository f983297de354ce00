from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lgroup.errors import ConfigError
from lgroup.modules import SHARED_STATE, MultiRLModule, MultiRLModuleSpec, RLModule, RLModuleSpec, validate_module_id

BATCH = {"p0": {"obs": torch.ones(3, 4)}, "p1": {"obs": torch.ones(2, 4)}}


class Net(RLModule):
    def setup(self) -> None:
        self.pi = nn.Linear(4, 2)
        self.vf = nn.Linear(4, 1)

    def get_non_inference_attributes(self) -> list[str]:
        return ["vf"]

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"out": self.pi(batch["obs"])}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.layer(batch["obs"])


class SharedEncoder(MultiRLModule):
    """An encoder that both modules hold, and a scale that neither does."""

    def setup(self) -> None:
        super().setup()
        self.encoder = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(1))
        for module in self.values():
            module.encoder = self.encoder

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        encoded = {k: {"obs": self.scale * self.encoder(columns["obs"])} for k, columns in batch.items()}
        return super()._forward_train(encoded, **kwargs)


def two(**kwargs: Any) -> MultiRLModuleSpec:
    return MultiRLModuleSpec(rl_module_specs={"p0": RLModuleSpec(Net), "p1": RLModuleSpec(Net)}, **kwargs)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return torch.equal(a, b)


def test_it_is_like_a_dict_of_modules() -> None:
    multi = two().build()
    assert len(multi) == 2 and list(multi) == ["p0", "p1"] == list(multi.keys())
    assert "p0" in multi and "p2" not in multi and 3 not in multi
    assert [*multi.values()] == [multi["p0"], multi["p1"]] and dict(multi.items())["p1"] is multi["p1"]
    assert multi.get("p0") is multi["p0"] and multi.get("p2", 7) == 7
    with pytest.raises(KeyError, match="'p2'; there are: 'p0', 'p1'"):
        multi["p2"]
    assert multi.as_multi_rl_module() is multi


@settings(deadline=None)
@given(st.text(min_size=1, max_size=8))
def test_any_valid_id_can_name_a_module(module_id: str) -> None:
    try:
        validate_module_id(module_id)
    except ConfigError:
        return
    multi = MultiRLModule()
    module = nn.Linear(1, 1)
    multi.add_module(module_id, module)
    assert list(multi) == [module_id] and multi[module_id] is module
    multi.load_state_dict(multi.state_dict())
    multi.set_state(multi.get_state())
    multi.remove_module(module_id)
    assert not multi.state_dict()


@pytest.mark.parametrize("module_id", ["", "a/b", "a.", "a ", "a\nb", "x*", "__all_modules__", SHARED_STATE, 3, None])
def test_ids_that_cannot_name_a_module_are_refused(module_id: Any) -> None:
    with pytest.raises(ConfigError, match="module_id"):
        validate_module_id(module_id)


@pytest.mark.parametrize("module_id", ["default_policy", "agent.0", "items", "50%2E", "modul é"])
def test_unusual_ids_are_fine(module_id: str) -> None:
    multi = MultiRLModuleSpec(rl_module_specs={module_id: RLModuleSpec(Net)}).build()
    assert list(multi.get_state()) == [module_id] == list(multi.keys())


def test_modules_are_added_replaced_and_removed() -> None:
    multi = two().build()
    with pytest.raises(ValueError, match="already"):
        multi.add_module("p0", Plain())
    multi.add_module("p0", Plain(), override=True)
    assert isinstance(multi["p0"], Plain)
    multi.remove_module("p1")
    assert list(multi) == ["p0"] and list(multi.get_state()) == ["p0"]
    multi.remove_module("p1", raise_err_if_not_found=False)
    with pytest.raises(ValueError, match="no module 'p1'"):
        multi.remove_module("p1")


def test_each_module_gets_its_own_columns_and_may_be_missing() -> None:
    multi = MultiRLModuleSpec(rl_module_specs={"p0": RLModuleSpec(Net), "p1": RLModuleSpec(Plain)}).build()
    out = multi.forward_train(BATCH)
    assert out["p0"]["out"].shape == (3, 2) and out["p1"].shape == (2, 1)
    assert list(multi.forward_train({"p1": BATCH["p1"]})) == ["p1"]
    assert out["p1"].requires_grad and not multi.forward_exploration(BATCH)["p1"].requires_grad
    assert not multi.forward_inference(BATCH)["p0"]["out"].requires_grad
    assert equal(multi(BATCH), out)


def test_foreach_module_calls_with_id_and_module() -> None:
    multi = two().build()
    assert multi.foreach_module(lambda module_id, module, suffix: module_id + suffix, suffix="!") == ["p0!", "p1!"]
    assert multi.foreach_module(lambda module_id, module: 1, return_dict=True) == {"p0": 1, "p1": 1}


def test_states_are_by_module_and_any_subset_can_be_set() -> None:
    multi, other = two().build(), two().build()
    assert list(multi.get_state(components="p0")) == ["p0"]
    assert list(multi.get_state(not_components=["p0"])) == ["p1"]
    other.set_state({"p1": multi.get_state()["p1"]})
    assert equal(other["p1"].get_state(), multi["p1"].get_state())
    assert not equal(other["p0"].get_state(), multi["p0"].get_state())
    with pytest.raises(ValueError, match="'p9'"):
        multi.set_state({"p9": {}})


def test_a_shared_encoder_is_one_parameter_and_gets_gradients_from_both_modules() -> None:
    multi = two(multi_rl_module_class=SharedEncoder).build()
    assert len([p for p in multi.parameters() if p is multi.encoder.weight]) == 1
    out = multi.forward_train(BATCH)
    out["p0"]["out"].sum().backward()
    from_first = multi.encoder.weight.grad.clone()
    multi.forward_train(BATCH)["p1"]["out"].sum().backward()
    assert not torch.equal(multi.encoder.weight.grad, from_first)


def test_each_parameter_has_one_owner() -> None:
    multi = two(multi_rl_module_class=SharedEncoder).build()
    owned = multi.owned_parameters()
    assert {k: sorted(v) for k, v in owned.items()} == {
        "p0": ["encoder.bias", "encoder.weight", "pi.bias", "pi.weight", "vf.bias", "vf.weight"],
        "p1": ["pi.bias", "pi.weight", "vf.bias", "vf.weight"],
        SHARED_STATE: ["scale"],
    }
    assert {id(p) for part in owned.values() for p in part.values()} == {id(p) for p in multi.parameters()}
    assert list(two().build().owned_parameters()) == ["p0", "p1"]


def test_the_state_includes_what_belongs_to_no_module() -> None:
    multi, other = (two(multi_rl_module_class=SharedEncoder).build() for _ in range(2))
    with torch.no_grad():
        multi.scale.fill_(7)
    state = multi.get_state()
    assert list(state[SHARED_STATE]) == ["scale"]
    other.set_state(state)
    assert equal(other.get_state(), state) and other.scale.item() == 7
    assert other["p0"].encoder is other.encoder
    assert SHARED_STATE not in multi.get_state(components=["p0"])
    with pytest.raises(ValueError, match="scale"):
        multi.set_state({SHARED_STATE: {"other": torch.ones(1)}})


def test_an_inference_only_module_leaves_out_what_only_learners_need() -> None:
    spec = two()
    spec.rl_module_specs["critic"] = RLModuleSpec(Net, learner_only=True)
    full = spec.build()
    spec.inference_only = True
    shipped = MultiRLModuleSpec.from_module(full)
    shipped.inference_only = True
    for light in (spec.build(), shipped.build()):
        assert list(light) == ["p0", "p1"]
        assert not hasattr(light["p0"], "vf")
        light.set_state(full.get_state())
        assert equal(light.get_state(), full.get_state(inference_only=True))


def test_from_module_ships_modules_with_weights_and_their_sharing() -> None:
    multi = two(multi_rl_module_class=SharedEncoder).build()
    built = cloudpickle.loads(cloudpickle.dumps(MultiRLModuleSpec.from_module(multi))).build()
    assert equal(built.get_state(), multi.get_state())
    assert built["p1"].encoder is built.encoder
    assert equal(MultiRLModuleSpec.from_module(multi).build("p0").get_state(), multi["p0"].get_state())


def test_a_spec_is_edited_like_a_dict() -> None:
    spec = two()
    assert "p0" in spec and spec["p0"].module_class is Net
    spec.add_modules({"p2": RLModuleSpec(Plain), "p0": RLModuleSpec(Plain)}, override=False)
    assert (spec["p0"].module_class, spec["p2"].module_class) == (Net, Plain)
    spec.add_modules({"p0": RLModuleSpec(Plain)})
    assert spec["p0"].module_class is Plain
    spec.remove_modules(["p0", "p1", "p7"])
    assert list(spec.rl_module_specs) == ["p2"]
    with pytest.raises(KeyError, match="p0"):
        spec["p0"]
    spec.update(RLModuleSpec(observation_space="o"))
    assert spec["p2"].observation_space == "o"
    spec.update(two())
    assert sorted(spec.rl_module_specs) == ["p0", "p1", "p2"]
    assert spec.as_multi_rl_module_spec() is spec


def test_a_copied_spec_is_independent() -> None:
    spec = two()
    twin = spec.copy()
    twin.remove_modules("p0")
    twin["p1"].module_class = Plain
    assert list(spec.rl_module_specs) == ["p0", "p1"] and spec["p1"].module_class is Net


def test_one_module_of_a_spec_can_be_built_alone() -> None:
    assert isinstance(two().build("p1"), Net)
    assert not hasattr(two(inference_only=True).build("p1"), "vf")


def test_a_spec_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        MultiRLModuleSpec().build()
    with pytest.raises(ConfigError, match="modules_to_load"):
        MultiRLModuleSpec(modules_to_load={"p0"})
    with pytest.raises(ConfigError, match="rl_module_specs"):
        MultiRLModuleSpec(rl_module_specs=RLModuleSpec(Net))  # type: ignore[arg-type]


def test_a_spec_can_start_from_saved_weights_of_some_modules(tmp_path: Path) -> None:
    multi, path = two().build(), tmp_path / "weights.pt"
    torch.save(multi.get_state(), path)
    assert equal(two(load_state_path=path).build().get_state(), multi.get_state())
    partly = two(load_state_path=path, modules_to_load={"p1"}).build()
    assert equal(partly["p1"].get_state(), multi["p1"].get_state())
    assert not equal(partly["p0"].get_state(), multi["p0"].get_state())
