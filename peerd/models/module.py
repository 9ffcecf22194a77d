"""The contract of every kind of stage."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from peerd.models.prefix import Prefix, RecomputedPrefix


class StageModule(nn.Module):
    """One pipeline stage of a model.

    Contract:
    - parameter names are those of the whole model, so the stages' parameters together are the whole model; a tied weight has the
      same name in the first and in the last stage (`tied_names`);
    - `forward` depends on its inputs and the parameters only: no clock, no generator, no hidden state. Dropout is that of
      models/dropout.py, which depends on the microbatch that it was told of;
    - it can be built on the meta device; `initialise` then makes it real.
    """

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.stage = stage
        self.num_stages = num_stages

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def tied_names(self) -> tuple[str, ...]:
        """Parameters of which another stage holds a copy. Their gradients are summed over both stages."""
        return ()

    @property
    def needs_labels(self) -> bool:
        """True if `forward` takes labels while the run trains: at the last stage, and wherever a stage computes with the tokens."""
        return self.is_last

    @abstractmethod
    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute one microbatch.

        inputs: int64 tokens [microbatch, sequence] for a language model's first stage, else float32 in the boundary's shape.
        labels: int64 [microbatch, sequence], for images [microbatch]; for stages with `needs_labels` only. Where the model
        `tells_tokens` they are the whole windows, [microbatch, sequence + 1].
        Returns the activations for the next stage, for a language model [microbatch, sequence, boundary_width]. The last stage returns the
        scalar mean loss over the microbatch's tokens, in nats; without labels it returns the logits [microbatch, sequence, vocabulary].
        """

    def prefix(self) -> Prefix:
        """An empty text, for inference with a causal language model. Kinds of models that have a key-value cache give one that uses it."""
        return RecomputedPrefix(self.without_loss)

    def without_loss(self, inputs: Tensor, tokens: Tensor | None) -> Tensor:
        """`forward` without a loss: activations, or the logits. `tokens` [1, sequence] where the model tells them to all stages."""
        if tokens is None:
            output: Tensor = self(inputs)
            return output
        raise ValueError(f"{type(self).__name__} computes with no tokens but its inputs")

    @abstractmethod
    def initialise(self, seed: int, device: torch.device) -> None:
        """Give a module that was built on the meta device its memory, its buffers and its first float32 weights.

        Each parameter's value depends on the seed and its name alone: it is the same for every split and on every machine.
        """

    @abstractmethod
    def graph_bytes(self, num_tokens: int) -> int:
        """Estimate of the bytes that autograd keeps between forward and backward of a microbatch of `num_tokens` tokens."""

    @abstractmethod
    def forward_flops(self, microbatch: int, sequence: int) -> int:
        """Floating-point operations of a forward pass over [microbatch, sequence] tokens, matrix products only."""
