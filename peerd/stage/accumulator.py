"""The gradient accumulator of one stage: one flat vector, seen per parameter, with the loss sum as its last element.

Being one vector, it is what the all-reduce exchanges; the loss rides along so that every peer of the last stage knows
the step's exact mean loss. So does, before it and in runs in float16, the number of microbatches that overflowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


class Accumulator:
    """Sum of gradients, [num_parameters + 1] in the run's accumulate precision, on the stage's device; one more with overflows."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device, overflows: bool = False) -> None:
        """With `overflows` gradients that are not finite are counted in place of being added."""
        self._shapes = dict(shapes)
        self._overflows = overflows
        length = sum(shape.numel() for shape in shapes.values()) + 1 + overflows
        self.flat = torch.zeros(length, dtype=dtype, device=device)
        self._views = list(views_of(self.flat, self._shapes).values())

    def add(self, gradients: Sequence[Tensor], loss: float | None) -> None:
        """Add one microbatch's gradients, in the parameters' order, and its loss where this is the last stage."""
        if self._overflows and not all_finite(gradients):
            self.flat[-2] += 1
        else:
            for view, gradient in zip(self._views, gradients, strict=True):
                view.add_(gradient.to(view.device))
        if loss is not None:
            self.flat[-1] += loss

    def zero(self) -> None:
        self.flat.zero_()

    def means(self, flat_sum: Tensor, num_microbatches: int) -> dict[str, Tensor]:
        """The mean gradient per parameter of a summed vector."""
        return {name: view / num_microbatches for name, view in views_of(flat_sum, self._shapes).items()}

    def norm(self, flat_sum: Tensor, num_microbatches: int) -> float:
        """Of the mean gradient of a summed vector; infinite where a microbatch overflowed."""
        if self._overflows and bool(flat_sum[-2] > 0):
            return math.inf
        return gradient_norm(views_of(flat_sum, self._shapes).values()) / num_microbatches


def gradient_norm(gradients: Iterable[Tensor]) -> float:
    """The Euclidean norm of all together, summed in double precision; infinite where it is not finite."""
    precision = torch.float64
    total = sum(float(torch.linalg.vector_norm(gradient, dtype=precision)) ** 2 for gradient in gradients)
    return math.sqrt(total) if math.isfinite(total) else math.inf


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
    return all(_is_finite(tensor) for tensor in tensors)


def _is_finite(tensor: Tensor) -> bool:
    """A sum is finite only where all its terms are, and takes one pass without a copy; where it overflows, each is looked at."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())
