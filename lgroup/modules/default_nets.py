"""The network that is used where the user names none: a multilayer perceptron with a policy and a value head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lgroup.columns import Columns
from lgroup.errors import ConfigError
from lgroup.modules._flat_obs import layout_of
from lgroup.modules.distributions import DiagGaussian, distribution_class_for
from lgroup.modules.rl_module import RLModule

_ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "linear": nn.Identity,
}


@dataclass
class DefaultModelConfig:
    """Settings of `DefaultActorCritic`, with RLlib's names and defaults.

    Args:
        fcnet_hiddens, fcnet_activation: sizes and activation (tanh, relu, elu, gelu, silu, swish or linear) of the
            layers that turn an observation into an embedding.
        fcnet_use_layernorm: whether each of these has a LayerNorm before its activation.
        head_fcnet_hiddens, head_fcnet_activation: the same for further layers in each of the two heads.
        free_log_std: whether a Box policy's standard deviations are parameters, instead of outputs of the network.
        log_std_clip_param: bound, in absolute value, of the logarithms of the standard deviations.
        vf_share_layers: whether the value head uses the policy's embedding, instead of layers of its own.
    """

    fcnet_hiddens: Sequence[int] = field(default_factory=lambda: [256, 256])
    fcnet_activation: str = "tanh"
    fcnet_use_layernorm: bool = False
    head_fcnet_hiddens: Sequence[int] = field(default_factory=list)
    head_fcnet_activation: str = "relu"
    free_log_std: bool = False
    log_std_clip_param: float = 20.0
    vf_share_layers: bool = True

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> DefaultModelConfig:
        """The settings in a ``model_config`` dict. ConfigError for an unknown name or activation."""
        known = {f.name for f in fields(cls)}
        for name in settings:
            if name not in known:
                raise ConfigError.unknown("model_config setting of DefaultActorCritic", name, known)
        config = cls(**settings)
        for name in ("fcnet_activation", "head_fcnet_activation"):
            if getattr(config, name) not in _ACTIVATIONS:
                raise ConfigError.refused(name, getattr(config, name), ", ".join(_ACTIVATIONS))
        return config


class DefaultActorCritic(RLModule):
    """A policy and a value function over flattened observations, for Discrete, MultiDiscrete and Box actions.

    Every forward pass gives "action_dist_inputs" ``[..., outputs]``; ``forward_train`` also "embeddings"
    ``[..., features]`` (which ``compute_values`` takes) and "vf_preds" ``[...]``. Time dimensions are fine.
    """

    def setup(self) -> None:
        if self.observation_space is None or self.action_space is None:
            raise ConfigError("DefaultActorCritic needs observation_space and action_space; set both, or the env")
        config = DefaultModelConfig.from_dict(self.model_config)
        distribution = self.get_train_action_dist_cls() or distribution_class_for(self.action_space)
        num_outputs = distribution.required_input_dim(self.action_space)
        self._layout = layout_of(self.observation_space)
        self._log_std_limit = config.log_std_clip_param if issubclass(distribution, DiagGaussian) else None
        self.log_std: nn.Parameter | None = None
        if config.free_log_std and self._log_std_limit is not None:
            num_outputs //= 2
            self.log_std = nn.Parameter(torch.zeros(num_outputs))
        sizes = [self._layout.size, *config.fcnet_hiddens]
        activation, norm = config.fcnet_activation, config.fcnet_use_layernorm
        self.encoder = _mlp(sizes, activation, norm)
        self.vf_encoder = None if config.vf_share_layers else _mlp(sizes, activation, norm)
        # a small last layer starts the policy near uniform (Andrychowicz et al. 2021, arXiv:2006.05990, section 3.2)
        self.pi = _head(sizes[-1], config, num_outputs, gain=0.01)
        self.vf = _head(sizes[-1], config, 1, gain=1.0)

    def get_non_inference_attributes(self) -> list[str]:
        return ["vf", "vf_encoder"]

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self._policy(self.encoder(self._layout.flatten(batch[Columns.OBS])))}

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        obs = self._layout.flatten(batch[Columns.OBS])
        policy_features = self.encoder(obs)
        features = policy_features if self.vf_encoder is None else self.vf_encoder(obs)
        return {
            Columns.ACTION_DIST_INPUTS: self._policy(policy_features),
            Columns.EMBEDDINGS: features,
            Columns.VF_PREDS: self.vf(features).squeeze(-1),
        }

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """State values, ``[B]`` or ``[B, T]``, from "obs", or from the ``embeddings`` that ``forward_train`` gave."""
        if embeddings is None:
            encoder = self.encoder if self.vf_encoder is None else self.vf_encoder
            embeddings = encoder(self._layout.flatten(batch[Columns.OBS]))
        values: Tensor = self.vf(embeddings)
        return values.squeeze(-1)

    def _policy(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.pi(features)
        if self._log_std_limit is None:
            return outputs
        if self.log_std is not None:
            loc, log_std = outputs, self.log_std.expand_as(outputs)
        else:
            loc, log_std = outputs.chunk(2, dim=-1)
        return torch.cat([loc, log_std.clamp(-self._log_std_limit, self._log_std_limit)], dim=-1)


def _head(num_features: int, config: DefaultModelConfig, num_outputs: int, gain: float) -> nn.Sequential:
    body = _mlp([num_features, *config.head_fcnet_hiddens], config.head_fcnet_activation, False)
    last = nn.Linear([num_features, *config.head_fcnet_hiddens][-1], num_outputs)
    return nn.Sequential(*body, _initialised(last, gain))


def _mlp(sizes: Sequence[int], activation: str, use_layernorm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise(sizes):
        layers.append(_initialised(nn.Linear(num_in, num_out), math.sqrt(2.0)))
        if use_layernorm:
            layers.append(nn.LayerNorm(num_out))
        layers.append(_ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


def _initialised(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
