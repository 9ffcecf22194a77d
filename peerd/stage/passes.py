"""A stage's forward and backward passes in the run's precision, with its dropout and, if needed, a loss scale."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.models.dropout import dropout_of
from peerd.models.module import StageModule
from peerd.stage.breathing import let_breathe
from peerd.stage.precision import SMALLEST_LOSS_SCALE, LossScale, loss_scale_from, run_module

warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
"""Torch says so of its own thread for backward passes, once, and then gives it the context."""


class Passes:
    """Two passes of one microbatch are equal, whenever they run. The loss scale, which this class remembers, travels with the state."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._scale = LossScale.first(manifest.train) if manifest.train.precision == "float16" else None

    @property
    def is_scaled(self) -> bool:
        """Whether the state holds a loss scale."""
        return self._scale is not None

    def may_overflow(self, late: bool) -> bool:
        """Whether a microbatch whose values overflow counts as done: the step is left out and the scale falls, which may help.

        At the smallest scale, as without one, nothing would become better: the microbatch is refused. `late`: of the step before this one.
        """
        return self._scale is not None and (self._scale.previous if late else self._scale.value) > SMALLEST_LOSS_SCALE

    @property
    def loss_scale(self) -> float | None:
        """The scale of this step's gradients; None where they need none."""
        return self._scale.value if self._scale else None

    def forward(self, module: StageModule, step: int, index: int, inputs: Tensor, labels: Tensor | None) -> Tensor:
        """The forward pass of microbatch (step, index). Only stages that need labels take them."""
        let_breathe(module)
        with dropout_of(module, self._manifest, step, index):
            return run_module(self._manifest.train, module, inputs, labels if module.needs_labels else None)

    def backward(self, output: Tensor, wanted: Sequence[Tensor], gradient: Tensor | None, late: bool) -> list[Tensor]:
        """Gradients of the `wanted` tensors from the output's `gradient` (None: 1). `late`: of the step before this one."""
        if self._scale is None:
            return gradients_of(output, wanted, gradient)
        scale = self._scale.previous if late else self._scale.value
        scaled = (torch.ones_like(output) if gradient is None else gradient) * scale
        found = gradients_of(output, wanted, scaled)
        for place, gradient_found in enumerate(found):  # one after another: not all are there twice
            found[place] = gradient_found / scale
        return found

    def finish_step(self, norm: float | None) -> None:
        """Adapt the loss scale to a step's `norm` as it was applied; None for a step that was given up."""
        if self._scale is not None:
            self._scale = (
                replace(self._scale, previous=self._scale.value) if norm is None else self._scale.after(norm, self._manifest.train)
            )

    def tensors(self) -> dict[str, Tensor]:
        return self._scale.tensors() if self._scale else {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the loss scale of a state. Raises ValueError, with nothing changed, if it is impossible."""
        if self._scale is not None:
            self._scale = loss_scale_from(tensors, self._manifest.train)


def gradients_of(output: Tensor, wanted: Sequence[Tensor], gradient: Tensor | None) -> list[Tensor]:
    """Gradients of the `wanted` tensors from the output's `gradient` (None: 1).

    Where torch is given a gradient it imports its shape solver for the check of one shape: 0.3 s of the first pass, and 36 MB for good.
    """
    if gradient is None:
        return list(torch.autograd.grad(output, wanted))
    if gradient.shape != output.shape:
        raise ValueError(f"a gradient of shape {list(gradient.shape)} for an output of shape {list(output.shape)}")
    return list(torch.autograd.grad(_Seed.apply(output, gradient), wanted))  # type: ignore[no-untyped-call]


class _Seed(torch.autograd.Function):
    """A number whose derivative by the output is the gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_ones: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None
