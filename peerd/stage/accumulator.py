"""The gradient accumulator of one stage: one flat vector, seen per parameter, with the loss sum as its last element.

Being one vector, it is what the all-reduce exchanges; the loss rides along so that every peer of the last stage knows
the step's exact mean loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


class Accumulator:
    """Sum of gradients, [num_parameters + 1] in the run's accumulate precision, on the stage's device."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = dict(shapes)
        self.flat = torch.zeros(sum(shape.numel() for shape in shapes.values()) + 1, dtype=dtype, device=device)
        self._views = list(views_of(self.flat, self._shapes).values())

    def add(self, gradients: Sequence[Tensor], loss: float | None) -> None:
        """Add one microbatch's gradients, in the parameters' order, and its loss where this is the last stage."""
        for view, gradient in zip(self._views, gradients, strict=True):
            view.add_(gradient.to(view.device))
        if loss is not None:
            self.flat[-1] += loss

    def zero(self) -> None:
        self.flat.zero_()

    def means(self, flat_sum: Tensor, num_microbatches: int) -> dict[str, Tensor]:
        """The mean gradient per parameter of a summed vector."""
        return {name: view / num_microbatches for name, view in views_of(flat_sum, self._shapes).items()}


def views_of(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """A flat vector as named tensors that share its memory."""
    views: dict[str, Tensor] = {}
    start = 0
    for name, shape in shapes.items():
        views[name] = flat[start : start + shape.numel()].view(shape)
        start += shape.numel()
    return views


def split_evenly(length: int, parts: int) -> list[tuple[int, int]]:
    """Bounds of `parts` consecutive slices that cover `length` elements, sizes differing by at most one."""
    return [(length * k // parts, length * (k + 1) // parts) for k in range(parts)]


def all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
