"""What every kind of stage promises to those that compute with it."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn


class StageModule(nn.Module):
    """One pipeline stage of a model.

    Contract:
    - parameter names are those of the whole model, so the stages' parameters together are the whole model;
    - `forward` depends on its inputs and the parameters only: no dropout, no clock, no hidden state;
    - it can be built on the meta device; `fill_buffers` and `initial_value` then make it real.
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

    @abstractmethod
    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """One microbatch through this stage.

        inputs: int64 tokens [microbatch, sequence] for the first stage, else float32 hidden [microbatch, sequence, boundary_width].
        labels: int64 [microbatch, sequence], for the last stage only.
        Returns hidden [microbatch, sequence, boundary_width]; from the last stage the scalar mean cross-entropy over the microbatch's
        tokens, in nats, or without labels the logits [microbatch, sequence, vocabulary].
        """

    @abstractmethod
    def fill_buffers(self) -> None:
        """Compute every buffer in place; called once after the module got its memory."""

    @abstractmethod
    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """The float32 CPU value that parameter `name` starts from; the same on every machine."""

    @abstractmethod
    def graph_bytes(self, num_tokens: int) -> int:
        """Bytes that autograd keeps between forward and backward of a microbatch of `num_tokens` tokens (an estimate)."""

    @abstractmethod
    def forward_flops(self, microbatch: int, sequence: int) -> int:
        """Floating-point operations of a forward pass over [microbatch, sequence] tokens, matrix products only."""
