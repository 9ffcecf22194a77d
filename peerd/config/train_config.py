"""The manifest's [train]: how a run is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from peerd.config import cut
from peerd.config.bounds import Bounds, NumSteps, check_bounds
from peerd.table.forms import MAX_MICROBATCHES_PER_STEP as MAX_MICROBATCHES_PER_STEP

MAX_NAME_PATTERNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    num_stages: Annotated[int, Bounds(1, 4096)] = 2
    cut: Literal["even", "cost"] | tuple[int, ...] = "even"
    """Cut into stages: equal numbers of layers, about equal work (filled in when the run is started), or a number for each."""
    microbatches_per_step: Annotated[int, Bounds(1, MAX_MICROBATCHES_PER_STEP)] = 16
    microbatch_size: Annotated[int, Bounds(1, 65536)] = 4
    """Sequences per microbatch."""
    sequence_length: Annotated[int, Bounds(2, 1 << 20)] = 128
    """Tokens per sequence."""
    first_sequence_length: int = 0
    """Tokens per sequence at the first step; the length then rises linearly. 0: sequence_length from the start."""
    sequence_length_steps: int = 0
    """The first step with sequence_length tokens per sequence."""
    steps: NumSteps = 0
    """The run ends after this many steps; 0: never."""
    learning_rate: Annotated[float, Bounds(0.0, 100.0)] = 3e-3
    warmup_steps: NumSteps = 0
    """Steps over which the learning rate rises linearly from zero."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; see schedule.py."""
    final_learning_rate: Annotated[float, Bounds(0.0, 100.0)] = 0.0
    """The final rate of a linear or cosine schedule."""
    decay_steps: NumSteps = 0
    """The step that reaches the final rate, warm-up included; 0: the last step of the run."""
    optimizer: Literal["adamw", "lamb", "sgd"] = "adamw"
    beta1: Annotated[float, Bounds(0.0, 0.999999)] = 0.9
    beta2: Annotated[float, Bounds(0.0, 0.999999)] = 0.95
    epsilon: Annotated[float, Bounds(1e-16, 1.0)] = 1e-8
    momentum: Annotated[float, Bounds(0.0, 0.999999)] = 0.9
    """Momentum of SGD."""
    weight_decay: Annotated[float, Bounds(0.0, 10.0)] = 0.01
    no_decay: tuple[str, ...] = ()
    """Names of parameters without weight decay, `*` for any characters; vectors (norms and biases) never have it."""
    max_gradient_norm: Annotated[float, Bounds(0.0, 1e9)] = 0.0
    """Gradients are scaled down if the norm of the whole model, all stages together, exceeds this; 0: never."""
    dropout: Annotated[float, Bounds(0.0, 0.99)] = 0.0
    """Share of activations set to zero, by masks that depend on seed, step, microbatch and module alone."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the forward and backward passes; parameters and gradient sums keep theirs."""
    loss_scale: Annotated[float, Bounds(1.0, 2.0**32)] = 65536.0
    """Initial scale of float16's gradients, a power of two; halved when they overflow, which costs the step's update."""
    loss_scale_growth_steps: Annotated[int, Bounds(1, 1_000_000)] = 2000
    """The scale is doubled after this many steps without overflow."""
    delayed_updates: bool = False
    """The update of a step is made while the next step is computed without it, so every gradient is one update late."""
    average_parameters_every_steps: NumSteps = 0
    """Interval in steps at which peers of a stage also average parameters, against rounding differences of unlike devices; 0: never."""
    accumulate: Literal["float32", "float64"] = "float32"
    """Precision of gradient accumulators and their all-reduce; float64 makes the sum independent of its order."""
    evaluate_every_steps: NumSteps = 0
    """Interval in steps at which the swarm computes the loss on the evaluation tokens, also after the last step; 0: never."""
    evaluation_microbatches: Annotated[int, Bounds(1, MAX_MICROBATCHES_PER_STEP)] = 16
    """Number of microbatches of an evaluation, always the same ones."""

    def __post_init__(self) -> None:
        check_bounds("train.", self)
        cut.check_ramp(self)
        if len(self.no_decay) > MAX_NAME_PATTERNS or not all(1 <= len(pattern) <= 256 for pattern in self.no_decay):
            raise ValueError(f"train.no_decay must be at most {MAX_NAME_PATTERNS} names of 1 to 256 characters")
        self._check_schedule()
        if self.delayed_updates and self.average_parameters_every_steps:
            raise ValueError("train.average_parameters_every_steps cannot go with train.delayed_updates: set one of them only")
        if not math.log2(self.loss_scale).is_integer():
            raise ValueError(f"train.loss_scale is {self.loss_scale}; it must be a power of two")

    def evaluates_at(self, step: int) -> bool:
        """True if the parameters after `step` updates are evaluated."""
        every = self.evaluate_every_steps
        return every > 0 and (step % every == 0 or step == self.steps)

    def _check_schedule(self) -> None:
        if self.schedule == "constant":
            if self.final_learning_rate or self.decay_steps:
                raise ValueError('train.final_learning_rate and train.decay_steps need train.schedule "linear" or "cosine"')
        elif self.last_decay_step <= self.warmup_steps:
            raise ValueError(
                f'train.schedule "{self.schedule}" comes down between train.warmup_steps ({self.warmup_steps}) and train.decay_steps, '
                f"or train.steps where that is 0 ({self.last_decay_step}): raise one of these"
            )

    @property
    def shares_norms(self) -> bool:
        """True if applying an average needs the gradient norm of the whole model, for clipping or to detect an overflow."""
        return self.max_gradient_norm > 0 or self.precision == "float16"

    @property
    def overlaps_steps(self) -> bool:
        """True if a step is computed while the previous one is averaged. Not with float16: the loss scale is known only afterwards."""
        return self.delayed_updates and self.precision != "float16"

    @property
    def last_decay_step(self) -> int:
        """Number of updates after which a falling learning rate is final; 0: unknown."""
        return self.decay_steps or self.steps
