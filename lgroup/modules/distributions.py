"""Action distributions, made from a network's outputs, with RLlib's methods.

They are written out rather than wrapped around ``torch.distributions``: its constructor alone costs more than the
arithmetic on a small batch. Leading dimensions are free: ``[B, ...]`` and ``[B, T, ...]`` both work.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lgroup.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

_HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)


class Distribution(abc.ABC):
    """A batch of distributions over actions. ``...`` below are the leading dimensions of what it was made from."""

    @abc.abstractmethod
    def sample(self, *, sample_shape: Sequence[int] = ()) -> Tensor:
        """Random actions ``[*sample_shape, ..., *action]`` from torch's default generator, without gradient."""

    @abc.abstractmethod
    def rsample(self, *, sample_shape: Sequence[int] = ()) -> Tensor:
        """Random actions through which gradients flow. TypeError where the distribution has none (discrete ones)."""

    @abc.abstractmethod
    def logp(self, value: Tensor) -> Tensor:
        """The log-probability (density) ``[...]`` of the actions ``value`` ``[..., *action]``."""

    @abc.abstractmethod
    def entropy(self) -> Tensor:
        """The entropy ``[...]`` in nats, differentiable."""

    @abc.abstractmethod
    def kl(self, other: Any) -> Tensor:
        """The divergence ``[...]`` KL(self || other) in nats, ``other`` being of the same class and shape."""

    @staticmethod
    @abc.abstractmethod
    def required_input_dim(space: Any, **kwargs: Any) -> int:
        """How many network outputs ``from_logits`` needs for actions of the Gymnasium ``space``."""

    @classmethod
    @abc.abstractmethod
    def from_logits(cls, logits: Tensor, **kwargs: Any) -> Self:
        """The distribution whose parameters are the network outputs ``logits``, ``[..., required_input_dim]``."""

    @abc.abstractmethod
    def to_deterministic(self) -> Deterministic:
        """The distribution that always gives the most likely action."""

    @classmethod
    def get_partial_dist_cls(cls, **partial_kwargs: Any) -> type[Self]:
        """A subclass whose ``from_logits`` already has ``partial_kwargs`` (such as ``input_lens``)."""

        class Partial(cls):  # type: ignore[valid-type,misc]
            @classmethod
            def from_logits(_, logits: Tensor, **kwargs: Any) -> Self:
                return cls.from_logits(logits, **{**partial_kwargs, **kwargs})

            @staticmethod
            def required_input_dim(space: Any, **kwargs: Any) -> int:
                return cls.required_input_dim(space, **{**partial_kwargs, **kwargs})

        Partial.__name__ = Partial.__qualname__ = f"{cls.__name__}With{''.join(k.title() for k in partial_kwargs)}"
        return cast("type[Self]", Partial)


class Deterministic(Distribution):
    """Always the action ``loc``, ``[..., *action]``."""

    def __init__(self, loc: Tensor) -> None:
        self.loc = loc

    def sample(self, *, sample_shape: Sequence[int] = ()) -> Tensor:
        return self.rsample(sample_shape=sample_shape).detach()

    def rsample(self, *, sample_shape: Sequence[int] = ()) -> Tensor:
        return self.loc.expand(*sample_shape, *self.loc.shape) if sample_shape else self.loc

    def logp(self, value: Tensor) -> Tensor:
        raise TypeError("a deterministic distribution has no log-probability; use the one it was made from")

    def entropy(self) -> Tensor:
        raise TypeError("a deterministic distribution has no entropy; use the one it was made from")

    def kl(self, other: Any) -> Tensor:
        raise TypeError("a deterministic distribution has no divergence; use the one it was made from")

    @staticmethod
    def required_input_dim(space: Any, **kwargs: Any) -> int:
        return int(math.prod(space.shape))

    @classmethod
    def from_logits(cls, logits: Tensor, **kwargs: Any) -> Self:
        return cls(logits)

    def to_deterministic(self) -> Deterministic:
        return self


class Categorical(Distribution):
    """One of ``n`` actions, as an int64 in ``[0, n)``; made from unnormalised log-probabilities ``[..., n]``.

    A logit of -inf forbids an action: its probability is 0, and entropy, divergence and gradients stay finite.
    """

    def __init__(self, logits: Tensor | None = None, probs: Tensor | None = None) -> None:
        if (logits is None) == (probs is None):
            raise ValueError("give either logits or probs")
        raw = logits if logits is not None else cast(Tensor, probs).log()
        self.log_probs = torch.log_softmax(raw, dim=-1)

    @property
    def logits(self) -> Tensor:
        """Normalised log-probabilities ``[..., n]``."""
        return self.log_probs

    @property
    def probs(self) -> Tensor:
        """Probabilities ``[..., n]``."""
        return self.log_probs.exp()

    def sample(self, *, sample_shape: Sequence[int] = ()) -> Tensor:
        with torch.no_grad():
            flat = self.probs.reshape(-1, self.log_probs.shape[-1])
            drawn = torch.multinomial(flat, max(1, math.prod(sample_shape)), replacement=True)
            return drawn.T.reshape((*sample_shape, *self.log_probs.shape[:-1]))

    def rsample(self, *, sample_shape: Sequence[int] = ()) -> Tensor:
        raise TypeError("discrete actions have no reparametrised sample; use sample()")

    def logp(self, value: Tensor) -> Tensor:
        return self.log_probs.gather(-1, value.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.probs * self._finite_log_probs()).sum(-1)

    def kl(self, other: Categorical) -> Tensor:
        return (self.probs * (self._finite_log_probs() - other._finite_log_probs())).sum(-1)

    def _finite_log_probs(self) -> Tensor:
        # 0 * -inf would be NaN for a forbidden action
        return self.log_probs.clamp(min=torch.finfo(self.log_probs.dtype).min)

    @staticmethod
    def required_input_dim(space: Any, **kwargs: Any) -> int:
        return int(space.n)

    @classmethod
    def from_logits(cls, logits: Tensor, **kwargs: Any) -> Self:
        return cls(logits=logits)

    def to_deterministic(self) -> Deterministic:
        return Deterministic(self.log_probs.argmax(-1))


class DiagGaussian(Distribution):
    """Independent normal distributions over the last dimension: ``loc`` and ``scale`` are ``[..., d]``.

    ``from_logits`` takes ``[..., 2 d]``: the means, then the logarithms of the standard deviations.
    """

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc = loc
        self.scale = scale

    def sample(self, *, sample_shape: Sequence[int] = ()) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape=sample_shape)

    def rsample(self, *, sample_shape: Sequence[int] = ()) -> Tensor:
        noise = torch.randn((*sample_shape, *self.loc.shape), dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + self.scale * noise

    def logp(self, value: Tensor) -> Tensor:
        z = (value - self.loc) / self.scale
        return (-0.5 * z * z - self.scale.log() - _HALF_LOG_2_PI).sum(-1)

    def entropy(self) -> Tensor:
        return (self.scale.log() + (0.5 + _HALF_LOG_2_PI)).sum(-1)

    def kl(self, other: DiagGaussian) -> Tensor:
        ratio = (self.scale / other.scale).pow(2)
        shift = ((self.loc - other.loc) / other.scale).pow(2)
        return 0.5 * (ratio + shift - 1.0 - ratio.log()).sum(-1)

    @staticmethod
    def required_input_dim(space: Any, **kwargs: Any) -> int:
        return 2 * int(math.prod(space.shape))

    @classmethod
    def from_logits(cls, logits: Tensor, **kwargs: Any) -> Self:
        loc, log_std = logits.chunk(2, dim=-1)
        return cls(loc, log_std.exp())

    def to_deterministic(self) -> Deterministic:
        return Deterministic(self.loc)


class MultiCategorical(Distribution):
    """Several independent `Categorical` choices; an action is ``[..., k]`` int64, one column per choice.

    ``from_logits`` takes their logits side by side, ``[..., sum(input_lens)]``.
    """

    def __init__(self, categoricals: Sequence[Categorical]) -> None:
        self.categoricals = tuple(categoricals)

    def sample(self, *, sample_shape: Sequence[int] = ()) -> Tensor:
        return torch.stack([one.sample(sample_shape=sample_shape) for one in self.categoricals], dim=-1)

    def rsample(self, *, sample_shape: Sequence[int] = ()) -> Tensor:
        raise TypeError("discrete actions have no reparametrised sample; use sample()")

    def logp(self, value: Tensor) -> Tensor:
        return self._total([one.logp(column) for one, column in zip(self.categoricals, value.unbind(-1), strict=True)])

    def entropy(self) -> Tensor:
        return self._total([one.entropy() for one in self.categoricals])

    def kl(self, other: MultiCategorical) -> Tensor:
        return self._total([a.kl(b) for a, b in zip(self.categoricals, other.categoricals, strict=True)])

    @staticmethod
    def _total(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts, dim=-1).sum(-1)

    @staticmethod
    def required_input_dim(space: Any, **kwargs: Any) -> int:
        return int(space.nvec.sum())

    @classmethod
    def from_logits(cls, logits: Tensor, *, input_lens: Sequence[int] = (), **kwargs: Any) -> Self:
        if sum(input_lens) != logits.shape[-1]:
            raise ValueError(f"input_lens={list(input_lens)} sum to {sum(input_lens)}, but logits have {logits.shape}")
        return cls([Categorical(part) for part in torch.split_with_sizes(logits, list(input_lens), dim=-1)])

    def to_deterministic(self) -> Deterministic:
        return Deterministic(torch.stack([one.log_probs.argmax(-1) for one in self.categoricals], dim=-1))


TorchCategorical = Categorical
TorchDeterministic = Deterministic
TorchDiagGaussian = DiagGaussian
TorchMultiCategorical = MultiCategorical


@lru_cache(maxsize=256)
def _multi_categorical(input_lens: tuple[int, ...]) -> type[MultiCategorical]:
    return MultiCategorical.get_partial_dist_cls(input_lens=input_lens)


def distribution_class_for(action_space: Any) -> type[Distribution]:
    """The class whose ``from_logits`` fits actions of the Gymnasium space ``action_space``.

    Raises ConfigError for other spaces than Discrete, MultiDiscrete (one-dimensional) and Box (floats).
    """
    # told by their attributes, so that nothing here imports gymnasium, which is an extra
    if hasattr(action_space, "nvec") and len(action_space.shape) == 1:
        return _multi_categorical(tuple(int(n) for n in action_space.nvec))
    if hasattr(action_space, "n") and action_space.shape == ():
        return Categorical
    if hasattr(action_space, "low") and getattr(action_space.dtype, "kind", "") == "f":
        return DiagGaussian
    raise ConfigError.refused(
        "action_space",
        action_space,
        "Discrete, one-dimensional MultiDiscrete or a Box of floats; for others return a "
        "Distribution of your own from the module's get_train_action_dist_cls() and the two like it",
    )
