"""Mixed precision: the precision of a stage's passes, and the loss scale that keeps small float16 gradients from vanishing.

Parameters, their gradients and the tensors between stages stay float32; only the passes use lower precision (Micikevicius et al.
2018, arXiv 1710.03740). Each stage scales the gradient it receives and unscales the gradients it computes, so stages need not
agree on the scale. It is a power of two: without overflow or underflow it changes no bit.

In TF32 a matrix product reads float32 numbers with 10 binary digits after the point in place of 23, on NVIDIA's GPUs from Ampere on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peerd.config.manifest import TrainConfig
from peerd.models.measure import LOWERED
from peerd.models.module import StageModule
from peerd.models.prefix import Prefix
from peerd.policy.step.norms import TOLD_STEPS
from peerd.table.record import StepNorm

SMALLEST_LOSS_SCALE, MAX_LOSS_SCALE = 1.0, 2.0**32


def set_products(train: TrainConfig) -> None:
    """Set whether this process multiplies float32 matrices in TF32. Torch's default allows it for convolutions alone."""
    is_fast = train.precision == "tf32"
    torch.set_float32_matmul_precision("high" if is_fast else "highest")
    torch.backends.cudnn.allow_tf32 = is_fast


def run_module(train: TrainConfig, module: StageModule, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
    """The module's forward pass in the run's precision; its result is float32."""
    if train.precision not in LOWERED:
        output: Tensor = module(inputs, labels) if labels is not None else module(inputs)
        return output
    with torch.autocast(inputs.device.type, dtype=LOWERED[train.precision]):
        lowered: Tensor = module(inputs, labels) if labels is not None else module(inputs)
    return lowered.float()


def extend_prefix(train: TrainConfig, prefix: Prefix, inputs: Tensor, tokens: Tensor | None = None) -> Tensor:
    """The next tokens of a text in the run's precision; the result is float32."""
    if train.precision not in LOWERED:
        return prefix.extend(inputs, tokens)
    with torch.autocast(inputs.device.type, dtype=LOWERED[train.precision]):
        return prefix.extend(inputs, tokens).float()


@dataclass(frozen=True, slots=True)
class LossScale:
    """The loss scale of a stage. It depends only on the steps that overflowed, so all peers of the stage have the same."""

    value: float
    previous: float
    """The scale of the step before, whose microbatches may still come."""
    good_steps: int = 0
    """The number of steps without overflow since the last change."""

    @classmethod
    def first(cls, train: TrainConfig) -> LossScale:
        return cls(train.loss_scale, train.loss_scale)

    def after(self, norm: float, train: TrainConfig) -> LossScale:
        """The scale after a step: half if its norm is not finite (an overflow), double after enough steps without overflow."""
        if not math.isfinite(norm):
            return LossScale(max(SMALLEST_LOSS_SCALE, self.value / 2), self.value)
        if self.good_steps + 1 >= train.loss_scale_growth_steps:
            return LossScale(min(MAX_LOSS_SCALE, self.value * 2), self.value)
        return LossScale(self.value, self.value, self.good_steps + 1)

    def tensors(self) -> dict[str, Tensor]:
        values = {"value": self.value, "previous": self.previous, "good_steps": float(self.good_steps)}
        return {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}


def norm_tensors(norms: Sequence[StepNorm]) -> dict[str, Tensor]:
    """The norms as float32 numbers, each named by its step."""
    return {str(known.step): torch.tensor(known.norm, dtype=torch.float32) for known in norms}


def norms_from(tensors: Mapping[str, Tensor]) -> tuple[StepNorm, ...]:
    """The norms from `norm_tensors`. Raises ValueError if the tensors cannot be norms of finished steps."""
    if len(tensors) > TOLD_STEPS or not all(name.isascii() and name.isdigit() and len(name) <= 18 for name in tensors):
        raise ValueError("the norms are too many, or not named by steps")
    if not all(tuple(norm.shape) == () and norm.dtype is torch.float32 and float(norm) >= 0 for norm in tensors.values()):
        raise ValueError("a norm is not one float32 number of at least 0")
    return tuple(sorted((StepNorm(int(name), float(norm)) for name, norm in tensors.items()), key=lambda known: known.step))


def loss_scale_from(tensors: Mapping[str, Tensor], train: TrainConfig) -> LossScale:
    """The scale from `LossScale.tensors`; the run's first scale if there are no tensors. Raises ValueError if they cannot be a scale."""
    if not tensors:
        return LossScale.first(train)
    if {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} != dict.fromkeys(
        ("value", "previous", "good_steps"), ((), torch.float32)
    ):
        raise ValueError("the loss scale is not three float32 numbers")
    value, previous, good_steps = (float(tensors[name]) for name in ("value", "previous", "good_steps"))
    if not (_is_scale(value) and _is_scale(previous) and 0 <= good_steps <= train.loss_scale_growth_steps):
        raise ValueError("the loss scale is out of range")
    return LossScale(value, previous, int(good_steps))


def _is_scale(value: float) -> bool:
    return SMALLEST_LOSS_SCALE <= value <= MAX_LOSS_SCALE and math.log2(value).is_integer()
