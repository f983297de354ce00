"""The one buffer that learners sum over at each step.

Layout, in elements of the buffer's dtype::

    [ gradients, parameter after parameter | has-gradient count per parameter | module buffers as 16-bit pieces ]

A rank without a gradient for a parameter contributes zeros and a count of 0; where the summed count is 0 the gradient
is None on every rank, so that optimizers leave that parameter's state alone. Module buffers (running means, counters)
are contributed by one rank and added to zeros; cut into integers below 2**16 they pass through the sum bit for bit,
whatever their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ParamRef = Hashable


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """A module buffer by its place, and the modules it belongs to (several, if they share a submodule).

    Not by the tensor: a forward pass may replace that (``self.mean = 0.9 * self.mean + ...``).
    """

    holder: torch.nn.Module
    name: str
    owners: frozenset[str]

    @property
    def tensor(self) -> torch.Tensor:
        """The buffer as it is now."""
        tensor = self.holder._buffers[self.name]
        assert tensor is not None
        return tensor


def _piece_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.uint8 if tensor.element_size() == 1 else torch.int16


def _num_pieces(tensor: torch.Tensor) -> int:
    return tensor.numel() * max(1, tensor.element_size() // 2)


def _to_pieces(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(_piece_dtype(tensor))


def _from_pieces(pieces: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return pieces.to(_piece_dtype(like)).view(like.dtype).view(like.shape)


class FlatBuffer:
    """Gradients of `parameters` and the contents of `buffers` in one tensor, to be summed over the group in place.

    float32, or float64 if any parameter is. All parameters must be dense and on `device`.
    """

    def __init__(
        self, parameters: Mapping[ParamRef, torch.Tensor], buffers: Sequence[SharedBuffer], device: torch.device
    ) -> None:
        self._parameters = dict(parameters)
        self._buffers = list(buffers)
        tensors = list(self._parameters.values())
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in tensors) else torch.float32
        self._num_gradients = sum(p.numel() for p in tensors)
        sizes = [self._num_gradients, len(tensors), sum(_num_pieces(b.tensor) for b in self._buffers)]
        self.tensor = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.gradients, self._counts, self._pieces = self.tensor.split(sizes)
        self._views = [
            part.view(p.shape)
            for part, p in zip(self.gradients.split([p.numel() for p in tensors]), tensors, strict=True)
        ]
        self._results = self._views if all(p.dtype == dtype for p in tensors) else None
        self._buffer_views = self._pieces.split([_num_pieces(b.tensor) for b in self._buffers]) if self._buffers else ()

    def fill(self, gradients: Mapping[ParamRef, torch.Tensor | None], contributes: Iterable[bool]) -> None:
        """Write this rank's part.

        Args:
            gradients: One gradient (or None) for each parameter; a missing one counts as None.
            contributes: For each module buffer, whether this rank is the one that contributes it.
        """
        own = [gradients.get(ref) for ref in self._parameters]
        present = [gradient for gradient in own if gradient is not None]
        if len(present) == len(own):
            if own:
                torch._foreach_copy_(self._views, present)
                self._counts.fill_(1.0)
        else:
            self._counts.copy_(torch.tensor([0.0 if gradient is None else 1.0 for gradient in own]))
            for view, gradient in zip(self._views, own, strict=True):
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient)
        for view, shared, mine in zip(self._buffer_views, self._buffers, contributes, strict=True):
            if mine:
                pieces = _to_pieces(shared.tensor)
                if pieces.shape != view.shape:
                    raise ValueError(
                        f"buffer {shared.name!r} of {type(shared.holder).__name__} is {tuple(shared.tensor.shape)} "
                        f"{shared.tensor.dtype} now; shape and dtype must stay what they were at the first update"
                    )
                view.copy_(pieces)
            else:
                view.zero_()

    def is_finite(self) -> bool:
        """Whether every gradient in the buffer is finite."""
        # A sum meets every element and any NaN or infinity makes it nonfinite; it may overflow by itself, hence the
        # second look. Half the time of isfinite().all() at 67 k elements.
        if math.isfinite(self.gradients.sum().item()):
            return True
        return bool(torch.isfinite(self.gradients).all())

    def summed_gradients(self) -> dict[ParamRef, torch.Tensor | None]:
        """The group's gradients in the parameters' dtypes; None where no rank had one."""
        results = self._results
        if results is None:
            tensors = self._parameters.values()
            results = [view.to(p.dtype) for view, p in zip(self._views, tensors, strict=True)]
        if not results or bool(self._counts.all()):
            return dict(zip(self._parameters, results, strict=True))
        counts = self._counts.tolist()
        return {
            ref: gradient if count else None
            for ref, gradient, count in zip(self._parameters, results, counts, strict=True)
        }

    def buffer_owners(self) -> list[frozenset[str]]:
        """The modules that each module buffer belongs to, in the order of `fill`'s `contributes`."""
        return [shared.owners for shared in self._buffers]

    @torch.no_grad()
    def adopt_buffers(self, contributed: Iterable[bool]) -> None:
        """Take over the module buffers that some rank contributed."""
        for view, shared, any_rank in zip(self._buffer_views, self._buffers, contributed, strict=True):
            if any_rank:
                shared.tensor.copy_(_from_pieces(view, shared.tensor))


def shared_buffers(modules: Mapping[str, torch.nn.Module], whole: torch.nn.Module) -> list[SharedBuffer]:
    """The buffers of `modules` and of `whole`, which holds them: each once, with all the modules that hold it.

    A buffer that is in `whole` and in none of its modules belongs to all of them.
    """
    places: dict[int, tuple[torch.nn.Module, str]] = {}
    owners: dict[int, set[str]] = {}
    for module_id, module in (*modules.items(), (None, whole)):
        for holder in module.modules():
            for name, tensor in holder._buffers.items():
                if tensor is not None and tensor.numel():
                    places.setdefault(id(tensor), (holder, name))
                    owners.setdefault(id(tensor), set()).update(() if module_id is None else (module_id,))
    return [SharedBuffer(*place, frozenset(owners[key] or modules)) for key, place in places.items()]


def first_nonfinite(gradients: Mapping[ParamRef, Any], names: Mapping[ParamRef, str]) -> str | None:
    """The name of the first parameter whose gradient on this rank is not finite, or None."""
    for ref, gradient in gradients.items():
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            return names.get(ref, str(ref))
    return None
