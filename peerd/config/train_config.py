"""The manifest's [train]: how a run is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from peerd.config import cut
from peerd.config.bounds import Between, NumSteps, check_bounds
from peerd.table.forms import MAX_MICROBATCHES_PER_STEP as MAX_MICROBATCHES_PER_STEP

MAX_NAME_PATTERNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    num_stages: Annotated[int, Between(1, 4096)] = 2
    """Parts the model is cut into; each needs at least one peer. At most model.num_layers."""
    cut: Literal["even", "cost"] | tuple[int, ...] = "even"
    """Layers of each stage: "even", "cost" (about equal work), or a list such as [3, 2]."""
    microbatches_per_step: Annotated[int, Between(1, MAX_MICROBATCHES_PER_STEP)] = 16
    """The unit of work that travels through the stages. More of them keep more peers busy."""
    microbatch_size: Annotated[int, Between(1, 65536)] = 4
    """Sequences per microbatch."""
    sequence_length: Annotated[int, Between(2, 1 << 20)] = 128
    """Tokens per sequence."""
    first_sequence_length: int = 0
    """Sequences begin so short and grow to sequence_length by step sequence_length_steps; 0: no ramp.

    The length rises linearly.
    """
    # The first step with sequence_length tokens per sequence.
    sequence_length_steps: int = 0
    steps: NumSteps = 0
    """The run ends after so many steps, those before its start included; 0 goes on for ever."""
    learning_rate: Annotated[float, Between(0.0, 100.0)] = 3e-3
    warmup_steps: NumSteps = 0
    """Steps over which the learning rate rises from zero."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: "constant", or "linear" or "cosine" down to final_learning_rate."""
    # The final rate of a linear or cosine schedule.
    final_learning_rate: Annotated[float, Between(0.0, 100.0)] = 0.0
    decay_steps: NumSteps = 0
    """The step at which the falling rate has come down, warm-up included; 0: at the run's last."""
    optimizer: Literal["adamw", "muon", "lamb", "sgd"] = "adamw"
    """ "adamw", "muon" (orthogonal updates of the layers' matrices), "lamb" (large batches), or "sgd" with momentum."""
    optimizer_bits: Literal[32, 8] = 32
    """Bits of each number of the optimizer's state: 8 saves memory and download, with "adamw" and with momentum.

    Peers pack moments blockwise, all alike, and so does the reference.
    """
    beta1: Annotated[float, Between(0.0, 0.999999)] = 0.9
    beta2: Annotated[float, Between(0.0, 0.999999)] = 0.95
    epsilon: Annotated[float, Between(1e-16, 1.0)] = 1e-8
    # Momentum of SGD.
    momentum: Annotated[float, Between(0.0, 0.999999)] = 0.9
    # Momentum of Muon, for the matrices of layers. All other parameters have AdamW, with beta1, beta2 and epsilon.
    muon_momentum: Annotated[float, Between(0.0, 0.999999)] = 0.95
    weight_decay: Annotated[float, Between(0.0, 10.0)] = 0.01
    no_decay: tuple[str, ...] = ()
    """Parameters without weight decay, such as ["embedding.weight", "blocks.*"]. Vectors (norms, biases) never have it.

    `*` stands for any characters.
    """
    max_gradient_norm: Annotated[float, Between(0.0, 1e9)] = 0.0
    """Clip gradients by the norm of the whole model's, over all stages; 0: never."""
    dropout: Annotated[float, Between(0.0, 0.99)] = 0.0
    """Share of hidden states left out while training, after the embedding and of what the layers add to them.

    The masks depend on seed, step, microbatch and module alone.
    """
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    """ "tf32", "bfloat16" or "float16" for the passes; parameters stay float32. All peers' devices should be good at it.

    "tf32" multiplies float32 numbers of 10 binary digits after the point in place of 23, where a device can, and is float32 elsewhere.
    """
    loss_scale: Annotated[float, Between(1.0, 2.0**32)] = 65536.0
    """First scale of float16's gradients, a power of two; it is halved when they overflow.

    An overflow costs the step's update.
    """
    loss_scale_growth_steps: Annotated[int, Between(1, 1_000_000)] = 2000
    """The scale is doubled after so many steps without overflow."""
    delayed_updates: bool = False
    """Make a step's update while the next step is computed without it: every gradient is one update late."""
    local_batch: Annotated[int, Between(0, MAX_MICROBATCHES_PER_STEP)] = 0
    """Local steps: each peer updates its own parameters after so many of its microbatches, and a step averages the changes; 0: none.

    A step's peers make microbatches_per_step / (peers of a stage * local_batch) updates each.
    """
    # The first step with local steps. Those before it are made of averaged gradients, by the optimizer that peers use for their own updates
    # afterwards.
    local_steps_after: NumSteps = 0
    # The rate of the update that a step makes of the averaged changes: SGD with Nesterov momentum. With 1.0 and no momentum it is plain
    # averaging.
    outer_learning_rate: Annotated[float, Between(0.0, 100.0)] = 1.0
    # Its momentum.
    outer_momentum: Annotated[float, Between(0.0, 0.999999)] = 0.0
    average_parameters: Literal["auto", "always", "never"] = "auto"
    """Peers of a stage average their parameters, a few with each step's gradients: unlike devices round differently, and drift apart.

    "auto" does it while devices are unlike, where gradients have no codec, updates are not delayed, and stages share no weight.
    """
    average_parameters_every_steps: Annotated[int, Between(1, 1_000_000)] = 100
    """Each parameter is averaged once in so many steps."""
    accumulate: Literal["float32", "float64"] = "float32"
    """ "float64" makes the sum of gradients independent of its order (exact comparisons); "float32" is faster."""
    evaluate_every_steps: NumSteps = 0
    """The loss on the evaluation text is computed this often, by the swarm itself; 0: never.

    An evaluation also follows the last step.
    """
    evaluation_microbatches: Annotated[int, Between(1, MAX_MICROBATCHES_PER_STEP)] = 16
    """Microbatches of one evaluation.

    They are always the same ones.
    """

    def __post_init__(self) -> None:
        check_bounds("train.", self)
        cut.check_ramp(self)
        if len(self.no_decay) > MAX_NAME_PATTERNS or not all(1 <= len(pattern) <= 256 for pattern in self.no_decay):
            raise ValueError(f"train.no_decay must be at most {MAX_NAME_PATTERNS} names of 1 to 256 characters")
        if self.optimizer_bits == 8 and (self.optimizer in ("lamb", "muon") or (self.optimizer == "sgd" and not self.momentum)):
            raise ValueError(
                'train.optimizer_bits = 8 goes with train.optimizer "adamw", and with "sgd" where it has momentum: '
                '"lamb" and "muon" need whole tensors in float32, and "sgd" without momentum keeps no state'
            )
        self._check_schedule()
        if self.local_batch:
            self._check_local_steps()
        elif self.local_steps_after:
            raise ValueError(f"train.local_steps_after ({self.local_steps_after}) needs train.local_batch")
        if self.delayed_updates and self.average_parameters == "always":
            raise ValueError('train.average_parameters = "always" cannot go with train.delayed_updates: set one of them only')
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

    def _check_local_steps(self) -> None:
        if self.local_batch > self.microbatches_per_step:
            raise ValueError(
                f"train.local_batch ({self.local_batch}) must not exceed train.microbatches_per_step ({self.microbatches_per_step})"
            )
        if self.delayed_updates:
            raise ValueError("train.delayed_updates cannot go with train.local_batch: a step begins with what the one before has averaged")
        if self.precision == "float16":
            raise ValueError('train.precision "float16" cannot go with train.local_batch: no loss scale is agreed on within a step')
        if self.max_gradient_norm:
            raise ValueError("train.max_gradient_norm cannot go with train.local_batch: no peer knows the whole model's gradient in a step")
        if self.average_parameters == "always":
            raise ValueError('train.average_parameters = "always" cannot go with train.local_batch, with which every step averages them')

    @property
    def inner(self) -> TrainConfig:
        """The settings by which a peer updates its own parameters within a step, where steps are local."""
        return replace(self, local_batch=0, local_steps_after=0)

    def is_local_at(self, step: int) -> bool:
        """True if peers update their own parameters within this step."""
        return self.local_batch > 0 and step >= self.local_steps_after

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
