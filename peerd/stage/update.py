"""The update of a stage's parameters from averaged gradients; peers of the swarm and the reference use the same."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from peerd.config.manifest import TrainConfig
from peerd.policy.step.norms import clip_factor
from peerd.stage.optimizer import Optimizer


def apply_means(train: TrainConfig, optimizer: Optimizer, step: int, means: Mapping[str, Tensor], norm: float | None) -> None:
    """Apply one update from mean gradients, which are scaled where they are if the run clips.

    `norm` is the whole model's, in runs that share it; if it is not finite, nothing is updated.
    """
    if norm is not None and not math.isfinite(norm):
        return
    factor = 1.0 if norm is None else clip_factor(norm, train.max_gradient_norm)
    if factor != 1:
        for mean in means.values():
            mean.mul_(factor)
    optimizer.update(step, means)
