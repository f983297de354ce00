from __future__ import annotations

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lgroup.errors import ConfigError
from lgroup.modules import DefaultActorCritic, DefaultModelConfig, RLModuleSpec, ValueFunctionAPI
from lgroup.modules._flat_obs import layout_of

BOX = spaces.Box(-1, 1, (4,), np.float32)
SMALL = {"fcnet_hiddens": [8]}


def build(obs: spaces.Space = BOX, actions: spaces.Space | None = None, **settings: object) -> DefaultActorCritic:
    module = RLModuleSpec(
        DefaultActorCritic, obs, actions or spaces.Discrete(2), model_config={**SMALL, **settings}
    ).build()
    assert isinstance(module, DefaultActorCritic)
    return module


@pytest.mark.parametrize("lead", [(), (5,), (5, 3)])
@pytest.mark.parametrize(
    ("actions", "num_inputs"),
    [(spaces.Discrete(3), 3), (spaces.MultiDiscrete([2, 3]), 5), (spaces.Box(-1, 1, (2,)), 4)],
)
def test_outputs_fit_every_action_space_with_any_leading_dimensions(
    lead: tuple[int, ...], actions: spaces.Space, num_inputs: int
) -> None:
    module = build(actions=actions)
    out = module.forward_train({"obs": torch.rand(*lead, 4)})
    assert out["action_dist_inputs"].shape == (*lead, num_inputs)
    assert out["vf_preds"].shape == lead
    assert out["embeddings"].shape == (*lead, 8)
    dist_cls = module.get_train_action_dist_cls()
    assert dist_cls is not None
    assert dist_cls.from_logits(out["action_dist_inputs"]).sample().shape == (*lead, *actions.shape)


@pytest.mark.parametrize("shared", [True, False])
def test_values_from_embeddings_equal_values_from_observations(shared: bool) -> None:
    module = build(vf_share_layers=shared)
    batch = {"obs": torch.rand(5, 4)}
    out = module.forward_train(batch)
    assert isinstance(module, ValueFunctionAPI)
    torch.testing.assert_close(module.compute_values(batch), out["vf_preds"])
    torch.testing.assert_close(module.compute_values(batch, embeddings=out["embeddings"]), out["vf_preds"])
    out["vf_preds"].sum().backward()
    assert (module.encoder[0].weight.grad is not None) == shared


def test_all_phases_choose_the_same_actions() -> None:
    module, batch = build(), {"obs": torch.rand(5, 4)}
    expected = module.forward_train(batch)["action_dist_inputs"]
    for out in (module.forward_exploration(batch), module.forward_inference(batch)):
        torch.testing.assert_close(out["action_dist_inputs"], expected)


@pytest.mark.parametrize("shared", [True, False])
def test_the_inference_only_network_acts_without_the_value_layers(shared: bool) -> None:
    full = build(vf_share_layers=shared)
    config = {**SMALL, "vf_share_layers": shared}
    light = RLModuleSpec(DefaultActorCritic, BOX, spaces.Discrete(2), inference_only=True, model_config=config).build()
    light.set_state(full.get_state())
    batch = {"obs": torch.rand(5, 4)}
    torch.testing.assert_close(light.forward_inference(batch), full.forward_inference(batch))
    assert not any(name.startswith("vf") for name in light.get_state())


def test_standard_deviations_can_be_free_parameters_and_are_bounded() -> None:
    module = build(actions=spaces.Box(-1, 1, (2,)), free_log_std=True, log_std_clip_param=1.5)
    with torch.no_grad():
        module.log_std.fill_(9.0)
    out = module.forward_train({"obs": torch.rand(5, 4)})["action_dist_inputs"]
    assert out.shape == (5, 4) and (out[:, 2:] == 1.5).all()
    assert "log_std" in module.get_state()
    assert build(free_log_std=True).log_std is None, "a Discrete policy has none"


def test_a_new_policy_is_nearly_uniform() -> None:
    logits = build(fcnet_hiddens=[64, 64]).forward_inference({"obs": torch.randn(100, 4)})["action_dist_inputs"]
    assert logits.softmax(-1).sub(0.5).abs().max() < 0.05


@pytest.mark.parametrize(
    ("space", "size"),
    [
        (spaces.Box(0, 1, (2, 3), np.float64), 6),
        (spaces.Box(0, 255, (2, 2, 3), np.uint8), 12),
        (spaces.Discrete(5, start=2), 5),
        (spaces.MultiDiscrete([2, 3]), 5),
        (spaces.MultiBinary(3), 3),
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.Box(0, 1, ()), spaces.MultiBinary(2)])}), 5),
    ],
)
def test_observations_become_vectors_of_one_size(space: spaces.Space, size: int) -> None:
    space.seed(0)
    samples = [space.sample() for _ in range(4)]
    layout = layout_of(space)
    assert layout.size == size == spaces.flatdim(space)
    batch = gym.vector.utils.concatenate(space, samples, gym.vector.utils.create_empty_array(space, 4))
    flat = layout.flatten(batch)
    expected = np.stack([spaces.flatten(space, sample) for sample in samples]).astype(np.float32)
    if space.dtype == np.uint8:
        expected /= 255
    assert flat.dtype == torch.float32
    np.testing.assert_allclose(flat.numpy(), expected, rtol=1e-6)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="observation_space"):
        build(obs=spaces.Text(3))
    with pytest.raises(ConfigError, match="action_space"):
        build(actions=spaces.Text(3))
    with pytest.raises(ConfigError, match="did you mean 'fcnet_hiddens'"):
        build(fcnet_hidden=[3])
    with pytest.raises(ConfigError, match="fcnet_activation='tan'"):
        build(fcnet_activation="tan")
    with pytest.raises(ConfigError, match="needs observation_space"):
        RLModuleSpec(DefaultActorCritic).build()


def test_settings_shape_the_network() -> None:
    module = build(fcnet_hiddens=[8, 6], fcnet_use_layernorm=True, head_fcnet_hiddens=[5], fcnet_activation="linear")
    kinds = [type(layer).__name__ for layer in module.encoder]
    assert kinds == ["Linear", "LayerNorm", "Identity", "Linear", "LayerNorm", "Identity"]
    assert [layer.out_features for layer in module.pi if isinstance(layer, torch.nn.Linear)] == [5, 2]
    spec = RLModuleSpec(DefaultActorCritic, BOX, spaces.Discrete(2), model_config=DefaultModelConfig(fcnet_hiddens=[3]))
    assert cloudpickle.loads(cloudpickle.dumps(spec)).build().encoder[0].out_features == 3
