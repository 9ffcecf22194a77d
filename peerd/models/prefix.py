"""What a stage keeps of one text, so that inference computes a new token without computing the earlier ones again.

Shapes: S new tokens, W the width of the stage's input, R that of its output (the vocabulary at the last stage).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor | None], Tensor]
"""A stage's forward pass without a loss: its inputs, and the tokens where it computes with them -> its output."""


class Prefix(ABC):
    """The text so far, in one stage. It belongs to the parameters with which it was computed: where these change, a new one begins."""

    def __init__(self) -> None:
        self.length = 0
        """The number of tokens so far."""

    def extend(self, inputs: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Compute the next tokens. After an error the prefix is of no more use.

        inputs: int64 tokens [1, S] for the first stage, else float32 [1, S, W]. tokens: int64 [1, S], for models that tell tokens to all
        stages. Returns what `forward` of the whole text gives for these tokens, to rounding: float32 [1, S, R].
        """
        with torch.no_grad():
            output = self._extend(inputs, tokens)
        self.length += inputs.shape[1]
        return output

    def cut(self, length: int) -> bool:
        """Forget the tokens from position `length` on; it is above 0. False: this text cannot, and is as it was."""
        if length < self.length:
            if not self._cut(length):
                return False
            self.length = length
        return True

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The bytes that are kept, on the device that computes."""

    @abstractmethod
    def _extend(self, inputs: Tensor, tokens: Tensor | None) -> Tensor: ...

    @abstractmethod
    def _cut(self, length: int) -> bool: ...


class RecomputedPrefix(Prefix):
    """For models without a key-value cache of their own: keeps the inputs, and computes the whole text each time."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self._forward = forward
        self._inputs: Tensor | None = None
        self._tokens: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self._inputs, self._tokens) if each is not None)

    def _extend(self, inputs: Tensor, tokens: Tensor | None) -> Tensor:
        self._inputs = inputs if self._inputs is None else torch.cat([self._inputs, inputs], dim=1)
        if tokens is not None:
            self._tokens = tokens if self._tokens is None else torch.cat([self._tokens, tokens], dim=1)
        return self._forward(self._inputs, self._tokens)[:, self.length :]

    def _cut(self, length: int) -> bool:
        self._inputs, self._tokens = (None if each is None else each[:, :length] for each in (self._inputs, self._tokens))
        return True
