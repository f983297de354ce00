"""How observations of a Gymnasium space become one vector of floats each. Nothing here imports Gymnasium."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lgroup.errors import ConfigError


class ObservationLayout(Protocol):
    """One space's way into a vector of ``size`` floats."""

    @property
    def size(self) -> int: ...

    def flatten(self, obs: Any) -> Tensor:
        """Observations ``[..., *shape]`` as float32 ``[..., size]``; leading dimensions are kept."""
        ...


@dataclass(frozen=True)
class _Numbers:
    """Box and MultiBinary: the numbers themselves; bytes (images) are scaled from [0, 255] to [0, 1]."""

    shape: tuple[int, ...]
    is_bytes: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def flatten(self, obs: Any) -> Tensor:
        numbers = torch.as_tensor(obs)
        lead = numbers.shape[: numbers.dim() - len(self.shape)]
        flat = numbers.reshape(*lead, self.size).float()
        return flat / 255.0 if self.is_bytes else flat


@dataclass(frozen=True)
class _OneHot:
    """Discrete and MultiDiscrete: a one in each choice's block of zeros."""

    counts: tuple[int, ...]
    starts: tuple[int, ...]
    is_single: bool

    @property
    def size(self) -> int:
        return sum(self.counts)

    def flatten(self, obs: Any) -> Tensor:
        chosen = torch.as_tensor(obs).long()
        columns = chosen.unsqueeze(-1) if self.is_single else chosen
        hot = [
            torch.nn.functional.one_hot(column - start, count)
            for column, start, count in zip(columns.unbind(-1), self.starts, self.counts, strict=True)
        ]
        return torch.cat(hot, dim=-1).float()


@dataclass(frozen=True)
class _Joined:
    """Dict and Tuple: the parts one after the other."""

    parts: tuple[tuple[Any, ObservationLayout], ...]

    @property
    def size(self) -> int:
        return sum(layout.size for _, layout in self.parts)

    def flatten(self, obs: Any) -> Tensor:
        return torch.cat([layout.flatten(obs[key]) for key, layout in self.parts], dim=-1)


def layout_of(space: Any) -> ObservationLayout:
    """The layout for a Gymnasium space. ConfigError for kinds of space that have none."""
    inner = getattr(space, "spaces", None)
    if isinstance(inner, Mapping):
        return _Joined(tuple((key, layout_of(part)) for key, part in inner.items()))
    if isinstance(inner, Sequence):
        return _Joined(tuple((index, layout_of(part)) for index, part in enumerate(inner)))
    if hasattr(space, "nvec") and len(space.shape) == 1:
        counts = tuple(int(n) for n in space.nvec)
        starts = tuple(int(n) for n in getattr(space, "start", [0] * len(counts)))
        return _OneHot(counts, starts, is_single=False)
    if hasattr(space, "n") and space.shape == ():
        return _OneHot((int(space.n),), (int(getattr(space, "start", 0)),), is_single=True)
    if getattr(space, "shape", None) is not None and getattr(space.dtype, "kind", "") in "fiub":
        return _Numbers(tuple(space.shape), is_bytes=str(space.dtype) == "uint8" and not hasattr(space, "n"))
    raise ConfigError.refused(
        "observation_space",
        space,
        "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of them; for others give an RLModule of your own",
    )
