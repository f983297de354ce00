from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from lgroup.errors import ConfigError
from lgroup.modules import (
    Categorical,
    MultiRLModule,
    RLModule,
    RLModuleSpec,
    TorchRLModule,
    ValueFunctionAPI,
    run_forward,
)
from lgroup.modules.rl_module import model_config_dict

OBS = {"obs": torch.ones(3, 4)}


class Net(RLModule):
    def setup(self) -> None:
        self.pi = nn.Linear(4, self.model_config.get("outputs", 2))
        self.vf = nn.Linear(4, 1)

    def get_non_inference_attributes(self) -> list[str]:
        return ["vf"]

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"action_dist_inputs": self.pi(batch["obs"])}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        return self.vf(batch["obs"]).squeeze(-1)


class Plain(nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.layer(batch["obs"])


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_all_three_phases_use_forward_unless_they_have_their_own() -> None:
    class Exploring(Net):
        def _forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> str:
            return "explored"

    module = Exploring()
    expected = module.pi(OBS["obs"])
    for out in (module.forward_train(OBS), module.forward_inference(OBS), module(OBS)):
        assert torch.equal(out["action_dist_inputs"], expected)
    assert module.forward_exploration(OBS) == "explored"


def test_only_training_computes_gradients() -> None:
    module = Net()
    assert module.forward_train(OBS)["action_dist_inputs"].requires_grad
    assert not module.forward_inference(OBS)["action_dist_inputs"].requires_grad
    assert not module.forward_exploration(OBS)["action_dist_inputs"].requires_grad


def test_a_module_may_define_torchs_forward_instead() -> None:
    class Torch(RLModule):
        def forward(self, batch: dict[str, Any], **kwargs: Any) -> str:
            return "torch's"

    assert Torch().forward_train({}) == "torch's" == Torch().forward_inference({})


def test_without_any_forward_pass_the_output_is_empty() -> None:
    assert RLModule().forward_train(OBS) == {}


def test_arguments_reach_setup_as_attributes() -> None:
    @dataclasses.dataclass
    class Settings:
        outputs: int = 5

    module = Net(observation_space="o", action_space="a", learner_only=True, model_config=Settings())
    assert (module.observation_space, module.action_space, module.learner_only) == ("o", "a", True)
    assert module.model_config == {"outputs": 5}
    assert module.pi.out_features == 5
    assert TorchRLModule is RLModule


def test_a_module_cannot_be_for_inference_and_for_learners_only() -> None:
    with pytest.raises(ValueError, match="both"):
        Net(inference_only=True, learner_only=True)


def test_states_of_full_and_inference_only_modules_fit_each_other() -> None:
    full, light = Net(), Net(inference_only=True)
    assert not hasattr(light, "vf")
    light.set_state(full.get_state())
    assert same(light.get_state(), full.get_state(inference_only=True))
    full.set_state(light.get_state())
    with pytest.raises(ValueError, match="missing"):
        full.set_state({"vf.weight": torch.zeros(1, 4)})


def test_the_state_is_a_copy_that_fits_load_state_dict_and_takes_numpy() -> None:
    module, other = Net(), Net()
    state = module.get_state()
    with torch.no_grad():
        module.pi.weight.zero_()
    assert state["pi.weight"].abs().sum() > 0
    other.load_state_dict(state)
    arrays = {name: value.numpy() for name, value in state.items()}
    for array in arrays.values():
        array.flags.writeable = False
    module.set_state(arrays)
    assert same(module.get_state(), other.get_state())
    assert all(not value.requires_grad for value in state.values())


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"pi.weight": torch.zeros(2, 4), "pi.bias": torch.zeros(2), "nope": torch.zeros(1)}, "unexpected"),
        ({"pi.weight": torch.zeros(3, 4), "pi.bias": np.zeros(2)}, "size mismatch"),
        ({"pi.bias": torch.zeros(2)}, "missing"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Net().set_state(state)


def test_the_action_distribution_follows_from_the_space_or_is_chosen() -> None:
    class Own(Net):
        action_dist_cls = Categorical

    assert Net().get_train_action_dist_cls() is None
    assert Own().get_inference_action_dist_cls() is Categorical
    assert Net(action_space=spaces.Discrete(2)).get_exploration_action_dist_cls() is Categorical


def test_a_module_is_stateful_if_it_has_an_initial_state() -> None:
    class Recurrent(RLModule):
        def get_initial_state(self) -> dict[str, Any]:
            return {"h": np.zeros(3)}

    assert Recurrent().is_stateful()
    assert not RLModule().is_stateful()


def test_any_module_with_compute_values_has_a_value_function() -> None:
    assert isinstance(Net(), ValueFunctionAPI)
    assert not isinstance(Plain(), ValueFunctionAPI)


def test_as_multi_rl_module_wraps_the_module_itself() -> None:
    module = Net()
    multi = module.as_multi_rl_module()
    assert isinstance(multi, MultiRLModule) and multi["default_policy"] is module
    assert module.unwrapped() is module


def test_any_torch_module_runs_in_each_phase() -> None:
    module = Plain()
    assert run_forward(module, "forward_train", OBS).requires_grad
    assert not run_forward(module, "forward_exploration", OBS).requires_grad
    with torch.no_grad():
        assert not run_forward(module, "forward_train", OBS).requires_grad


def test_a_spec_builds_modules_of_both_kinds() -> None:
    spec = RLModuleSpec(Net, "o", "a", learner_only=True, model_config={"outputs": 3})
    net = spec.build()
    assert isinstance(net, Net)
    assert (net.observation_space, net.action_space, net.learner_only, net.pi.out_features) == ("o", "a", True, 3)
    plain = RLModuleSpec(Plain, model_config={"width": 6}).build()
    assert isinstance(plain, Plain) and plain.layer.out_features == 6
    assert isinstance(RLModuleSpec(lambda: nn.Sequential(nn.Linear(1, 1))).build(), nn.Sequential)


def test_a_spec_that_cannot_be_built_says_why() -> None:
    with pytest.raises(ConfigError, match="module_class is not set"):
        RLModuleSpec().build()
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module"):
        RLModuleSpec(dict).build()
    with pytest.raises(ConfigError, match="model_config=3"):
        RLModuleSpec(Plain, model_config=3).build()
    with pytest.raises(TypeError, match="wdth"):
        RLModuleSpec(Plain, model_config={"wdth": 3}).build()


@pytest.mark.parametrize("original", [Plain(3), Net(model_config={"outputs": 3})])
def test_from_module_ships_the_weights_of_that_moment(original: nn.Module) -> None:
    before = {name: value.clone() for name, value in original.state_dict().items()}
    spec = cloudpickle.loads(cloudpickle.dumps(RLModuleSpec.from_module(original)))
    with torch.no_grad():
        next(original.parameters()).zero_()
    first, second = spec.build(), spec.build()
    assert type(first).__name__ == type(original).__name__ and same(first.state_dict(), before)
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert same(second.state_dict(), before)
    assert RLModuleSpec.from_module(original).module_class is type(original)


def test_an_instance_loses_its_value_head_for_inference() -> None:
    spec = RLModuleSpec.from_module(Net())
    assert not hasattr(dataclasses.replace(spec, inference_only=True).build(), "vf")
    assert hasattr(spec.build(), "vf")


def test_a_module_that_cannot_be_copied_is_refused_by_from_module() -> None:
    module = Plain()
    module.cache = torch.zeros(1, requires_grad=True) * 2  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="Plain cannot be copied"):
        RLModuleSpec.from_module(module)
    with pytest.raises(ValueError, match="MultiRLModuleSpec"):
        RLModuleSpec.from_module(MultiRLModule())


def test_a_spec_can_start_from_a_saved_state(tmp_path: Path) -> None:
    module, path = Net(), tmp_path / "weights.pt"
    torch.save(module.get_state(), path)
    built = RLModuleSpec(Net, load_state_path=path).build()
    assert same(built.state_dict(), module.state_dict())
    path.write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="load_state_path"):
        RLModuleSpec(Net, load_state_path=path).build()
    torch.save([1], path)
    with pytest.raises(ConfigError, match="not list"):
        RLModuleSpec(Net, load_state_path=path).build()


def test_update_takes_over_what_the_other_spec_has() -> None:
    ours = RLModuleSpec(Net, observation_space="o")
    ours.update(RLModuleSpec(Plain, action_space="a", learner_only=True), override=False)
    assert (ours.module_class, ours.observation_space, ours.action_space, ours.learner_only) == (Net, "o", "a", False)
    ours.update(RLModuleSpec(Plain, learner_only=True))
    assert (ours.module_class, ours.observation_space, ours.learner_only) == (Plain, "o", True)
    with pytest.raises(ValueError, match="dict"):
        ours.update({})  # type: ignore[arg-type]


def test_a_copied_spec_has_its_own_model_config() -> None:
    spec = RLModuleSpec(Net, model_config={"layers": [1]})
    spec.copy().model_config["layers"].append(2)
    assert spec.model_config == {"layers": [1]}
    assert list(spec.as_multi_rl_module_spec().rl_module_specs) == ["default_policy"]


def test_a_model_config_class_instead_of_an_instance_is_refused() -> None:
    with pytest.raises(ConfigError, match="dataclass instance"):
        model_config_dict(dataclasses.make_dataclass("Settings", []))
