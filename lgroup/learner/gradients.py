"""Clipping of gradients, and their norm. In place, on dicts by parameter; None entries are passed over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def global_norm(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """The L2 norm of all gradients taken as one vector: a scalar tensor, 0 if there are none."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return torch.zeros(())
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(present)))
    return norm


def _scale_down(gradients: list[torch.Tensor], norms: Iterable[torch.Tensor], limit: float) -> None:
    for gradient, norm in zip(gradients, norms, strict=True):
        gradient.mul_((limit / (norm + 1e-6)).clamp(max=1.0).to(gradient.dtype))


def clip_gradients(gradients: Mapping[Any, torch.Tensor | None], limit: float, by: str) -> None:
    """Clip in place.

    Args:
        gradients: Gradient by parameter.
        limit: The largest value or norm allowed.
        by: ``"value"`` (each element into [-limit, limit]), ``"norm"`` (each parameter's L2 norm), ``"global_norm"``
            (the L2 norm of all together; Pascanu et al. 2013, https://arxiv.org/abs/1211.5063).

    Raises:
        ValueError: for another `by`.
    """
    present = [gradient for gradient in gradients.values() if gradient is not None]
    if not present:
        return
    if by == "value":
        torch._foreach_clamp_min_(present, -limit)
        torch._foreach_clamp_max_(present, limit)
    elif by == "norm":
        _scale_down(present, torch._foreach_norm(present), limit)
    elif by == "global_norm":
        norm = global_norm(present)
        _scale_down(present, [norm] * len(present), limit)
    else:
        raise ValueError(f"grad_clip_by={by!r} is none of 'value', 'norm', 'global_norm'")
