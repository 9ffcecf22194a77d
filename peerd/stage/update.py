"""The update of a stage's parameters from summed gradients; peers of the swarm and the reference use the same."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from peerd.config.manifest import TrainConfig
from peerd.policy.step.norms import clip_factor
from peerd.stage.optimizer import Optimizer


def apply_sums(
    train: TrainConfig, optimizer: Optimizer, step: int, sums: Mapping[str, Tensor], num_microbatches: int, norm: float | None
) -> None:
    """Apply one update from gradients that are summed over so many microbatches; the sums stay as they are.

    `norm` is that of the whole model's mean gradient, in runs that share it; if it is not finite, nothing is updated.
    """
    if norm is not None and not math.isfinite(norm):
        return
    factor = 1.0 if norm is None else clip_factor(norm, train.max_gradient_norm)

    def gradient_of(total: Tensor) -> Tensor:
        mean = total if num_microbatches == 1 else total / num_microbatches
        return mean if factor == 1 else mean * factor

    optimizer.update(step, sums, gradient_of)
