"""The learning rate as a function of the step alone, so that every peer can compute it at any time."""

from __future__ import annotations

import math

from peerd.config.manifest import TrainConfig


def learning_rate_at(train: TrainConfig, step: int) -> float:
    """The rate of the update that ends step `step` (from 0).

    The rate rises linearly and reaches train.learning_rate at the last step of the warm-up. Then it is constant, or falls to
    train.final_learning_rate, which it reaches at update number `last_decay_step` and keeps.
    """
    peak, final = train.learning_rate, train.final_learning_rate
    if step + 1 < train.warmup_steps or train.schedule == "constant":
        rising = min(step + 1, train.warmup_steps)
        return peak * (rising / train.warmup_steps if train.warmup_steps else 1.0)
    passed = min(1.0, (step + 1 - train.warmup_steps) / (train.last_decay_step - train.warmup_steps))
    left = 1.0 - passed if train.schedule == "linear" else (1.0 + math.cos(math.pi * passed)) / 2.0
    return final + (peak - final) * left
