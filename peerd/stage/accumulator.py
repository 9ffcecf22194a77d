"""The gradient accumulator of one stage: one flat vector, seen per parameter, with the loss sum as its last element.

The all-reduce exchanges this one vector; the loss is part of it so that every peer of the last stage knows
the step's exact mean loss. In float16 runs two numbers come before it: of the microbatches whose loss is not finite, and of all
that overflowed.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.models.module import StageModule
from peerd.stage.blocks import vector
from peerd.stage.malloc import make_room
from peerd.transfers import fetch_into, to_host

LARGEST = 2.0**60
"""A value of larger magnitude has overflowed: a step's sum of such could be too large for the optimizers, which square it in float32."""


class Accumulator:
    """Sum of gradients, [num_parameters + num_exact] in the run's accumulate precision, on the stage's device."""

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        overflows: bool = False,
        tied: Sequence[str] = (),
        counts_tied: bool = True,
    ) -> None:
        """With `overflows`, gradients that have overflowed are counted and not added.

        `tied` parameters belong to another stage as well; only one of the two stages counts them in its norm.
        """
        self._shapes = dict(shapes)
        self._made_of = dtype, device, overflows, tied, counts_tied
        self._tied = {name: self._shapes[name] for name in tied}
        self._counts_tied = counts_tied
        self._overflows = overflows
        self.num_exact = 3 if overflows else 1
        """The number of elements at the end that are no gradients, and that lose no digit when they are sent."""
        length = sum(shape.numel() for shape in shapes.values()) + self.num_exact
        self.flat = torch.zeros(length, dtype=dtype, device=device)
        self.is_void = False
        """True if what is in here does not count, because a change of it failed half way or is to come. `zero` ends that."""
        self._views = views_of(self.flat, self._shapes)

    def another(self) -> Accumulator:
        """An empty one of the same kind."""
        return Accumulator(self._shapes, *self._made_of)

    def around(self, start: int, end: int) -> tuple[Accumulator, slice, int]:
        """An empty one of those parameters alone that have elements from `start` to `end` of the gradients.

        Also returns their places among the parameters, and the place of their first element in this one.
        """
        ends = list(accumulate(shape.numel() for shape in self._shapes.values()))
        places = slice(bisect_right(ends, start), bisect_left(ends, end) + 1)
        first = ends[places.start - 1] if places.start else 0
        return Accumulator(dict([*self._shapes.items()][places]), *self._made_of[:2]), places, first

    def add(self, gradients: Sequence[Tensor], loss: float | None, overflowed: bool = False) -> None:
        """Add one microbatch's gradients, in the parameters' order, and at the last stage its loss.

        `overflowed`: in float16 runs, whether these gradients are not `usable`; the caller has looked, as a look makes it wait for a GPU.
        Memory is allocated and shapes are checked first: an error up to there changes nothing. A later one leaves a void sum.
        """
        overflowed = self.checked(gradients, overflowed)
        if gradients[0].device != self.flat.device:
            gradients = to_host(*gradients)
        odd = [gradient.numel() for gradient in gradients if gradient.dtype != self.flat.dtype]
        buffer = torch.empty(0 if overflowed else max(odd, default=0), dtype=self.flat.dtype, device=self.flat.device)
        with self.changing():
            if overflowed:
                self.flat[-2] += 1
            elif odd:
                for view, gradient in zip(self._views.values(), gradients, strict=True):
                    view.add_(buffer[: view.numel()].view(view.shape).copy_(gradient))
            else:
                torch._foreach_add_([*self._views.values()], [*gradients])
            if loss is not None and math.isfinite(loss):
                self.flat[-1] += loss
            elif loss is not None:
                self.flat[-3] += 1

    def checked(self, gradients: Sequence[Tensor], overflowed: bool) -> bool:
        """Whether these gradients only count as overflowed. Raises ValueError if they are not of the parameters' shapes."""
        if [gradient.shape for gradient in gradients] != [view.shape for view in self._views.values()]:
            raise ValueError("the gradients are not of the parameters' shapes")
        return self._overflows and overflowed

    def add_to(self, main: Accumulator) -> None:
        """Add all of it to another sum."""
        with main.changing():
            main.flat += self.flat

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """The sum is void if the block raises an error."""
        self.is_void = True
        yield
        self.is_void = False

    def copied(self, bounds: tuple[int, int], spare: int) -> Tensor:
        """A copy in the machine's memory, with room for `spare` elements after it.

        The heap may still keep that of the last microbatch's gradients: it goes back first. Nothing outside of `bounds`, from and to, is
        copied, and the pages of the rest take no memory until they are written to.
        """
        start, end = bounds
        make_room((end - start + spare) * self.flat.itemsize)
        found = vector(self.flat.numel() + spare, self.flat.dtype)
        fetch_into(found[start:end], self.flat.detach()[start:end])
        return found

    def zero(self) -> None:
        self.flat.zero_()
        self.is_void = False

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The parameters' shapes, in memory order."""
        return tuple(self._shapes.values())

    @property
    def num_tied(self) -> int:
        return sum(shape.numel() for shape in self._tied.values())

    @property
    def norm_needs_tied(self) -> bool:
        """Whether the norm needs the gradients that another stage adds."""
        return bool(self._tied) and self._counts_tied

    def tied_of(self, flat_sum: Tensor) -> Tensor:
        """This stage's share of the tied parameters' gradients, [num_tied]."""
        views = views_of(flat_sum, self._shapes)
        return torch.cat([views[name].flatten() for name in self._tied])

    def sums(self, flat_sum: Tensor, tied: Tensor | None = None) -> dict[str, Tensor]:
        """A summed vector by parameter, in its own memory; `tied` is both stages' sum for the tied parameters."""
        views = views_of(flat_sum, self._shapes)
        return views if tied is None else views | views_of(tied, self._tied)

    def norm(self, flat_sum: Tensor, num_microbatches: int, tied: Tensor | None = None) -> float:
        """The norm of the mean gradient of a summed vector; infinite if a microbatch overflowed."""
        if self._overflows and bool(flat_sum[-2] > 0):
            return math.inf
        sums = self.sums(flat_sum, tied)
        counted = [view for name, view in sums.items() if self._counts_tied or name not in self._tied]
        return gradient_norm(counted) / num_microbatches

    def mean_loss(self, flat_sum: Tensor, num_microbatches: int) -> float:
        """The mean over the microbatches whose loss is finite; NaN if there are none."""
        with_loss = num_microbatches - int(flat_sum[-3]) if self._overflows else num_microbatches
        return float(flat_sum[-1]) / with_loss if with_loss > 0 else math.nan


def accumulators_of(manifest: Manifest, module: StageModule, device: torch.device) -> list[Accumulator]:
    """An accumulator for this step and, where steps overlap, another for the next."""
    dtype = torch.float64 if manifest.train.accumulate == "float64" else torch.float32
    holds_doubles = dtype is torch.float32 or device.type != "mps"  # Apple's GPUs have no double precision
    place = device if holds_doubles else torch.device("cpu")
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    of_module = manifest.train.precision == "float16", module.tied_names, module.is_first
    return [Accumulator(shapes, dtype, place, *of_module) for _ in range(1 + manifest.train.overlaps_steps)]


def gradient_norm(gradients: Iterable[Tensor]) -> float:
    """The Euclidean norm of all gradients together, summed in double precision; infinite if it is not finite."""
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


def all_finite(tensors: Iterable[Tensor]) -> bool:
    return float(peak_of([tensor for tensor in tensors if tensor.is_floating_point()])) < math.inf


def usable(tensors: Iterable[Tensor]) -> bool:
    """Whether no value has overflowed."""
    return float(peak_of([*tensors])) <= LARGEST


def peak_of(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude, on the tensors' device; NaN if a value is not a number."""
    found = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not found:
        return torch.zeros(())
    if found[0].device.type == "cpu":  # a norm takes nine times as long there
        return torch.stack([end for tensor in found for end in tensor.aminmax()]).abs().amax()
    return torch.stack(torch._foreach_norm(found, math.inf)).amax()
