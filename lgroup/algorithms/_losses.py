"""Pieces that the losses of several algorithms share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lgroup.columns import Columns
from lgroup.errors import ConfigError
from lgroup.modules import distribution_class_for

if TYPE_CHECKING:
    from lgroup.config import LearnerGroupConfig
    from lgroup.modules import Distribution


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of `values` where `mask` is True; without any such entry 0, with a gradient of 0."""
    if mask is None:
        return values.mean()
    valid = mask.to(torch.bool)
    return torch.where(valid, values, 0.0).sum() / valid.sum().clamp(min=1)


def train_distribution_class(module: nn.Module, config: LearnerGroupConfig) -> type[Distribution]:
    """The class of the module's action distribution in training; of a plain module, what fits the action space.

    Raises:
        ConfigError: neither module nor config say what actions there are.
    """
    chosen = getattr(module, "get_train_action_dist_cls", lambda: None)()
    if chosen is not None:
        kind: type[Distribution] = chosen
        return kind
    if config.action_space is None:
        raise ConfigError(f"action_space is not set, and {type(module).__name__} does not say what its actions are")
    return distribution_class_for(config.action_space)


def distribution_inputs(fwd_out: Any) -> Tensor:
    """What the action distribution is made from: the column of that name, or the module's only output."""
    inputs: Tensor = fwd_out[Columns.ACTION_DIST_INPUTS] if isinstance(fwd_out, Mapping) else fwd_out
    return inputs


def state_values(module: Any, batch: dict[str, Any], fwd_out: Mapping[str, Any]) -> Tensor:
    """State values with gradients: those of the forward pass, else those of the module's ``compute_values``."""
    if Columns.VF_PREDS in fwd_out:
        values: Tensor = fwd_out[Columns.VF_PREDS]
        return values
    computed: Tensor = module.compute_values(batch, embeddings=fwd_out.get(Columns.EMBEDDINGS))
    return computed
