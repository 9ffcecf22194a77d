"""Reproducible dropout: the mask is a function of the run's seed, the step, the microbatch and the module's name.

A microbatch may be computed again: in its backward pass, or after a failure on another peer with another device. Its mask must be
the same each time. So the mask comes from integer arithmetic on each element's index, which has the same result on every processor,
and not from a generator with state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from peerd.config.manifest import Manifest

WORD = 0xFFFFFFFF
_MULTIPLIERS = (0x21F0AAAD, 0x735A2D97)
"""Below 2**31, so that a product with a 32-bit word fits a signed 64-bit integer. From github.com/skeeto/hash-prospector."""


class Dropout(nn.Module):
    """Inverted dropout (Srivastava et al. 2014). It does nothing outside `dropout_of`."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self._microbatch: str | None = None
        self._calls = 0

    @property
    def is_drawing(self) -> bool:
        return self._microbatch is not None and self.probability > 0

    def begin(self, microbatch: str) -> None:
        """Draw masks for this microbatch. A module that is applied several times draws a new mask each time."""
        self._microbatch, self._calls = microbatch, 0

    def end(self) -> None:
        self._microbatch = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Any shape; returns the same shape and type."""
        if not self.is_drawing:
            return hidden
        self._calls += 1
        keep = keep_mask(hidden.shape, f"{self._microbatch}/{self._calls}", self.probability, hidden.device)
        return hidden * keep.to(hidden.dtype).mul_(1 / (1 - self.probability))


@contextmanager
def dropout_of(module: nn.Module, manifest: Manifest, step: int, index: int) -> Iterator[None]:
    """Within this context a forward pass draws the masks of microbatch `index` of `step`; outside there is no dropout."""
    may_draw = manifest.train.dropout > 0 or manifest.model.has_own_dropout
    layers = [(name, child) for name, child in module.named_modules() if isinstance(child, Dropout)] if may_draw else []
    for name, layer in layers:
        layer.begin(f"{manifest.seed}/{step}/{index}/{name}")
    try:
        yield
    finally:
        for _, layer in layers:
            layer.end()


def keep_mask(shape: torch.Size, name: str, probability: float, device: torch.device) -> Tensor:
    """True with 1 - probability, decided by `name` and the element's index alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"peerd dropout").digest()
    first, second = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    word = torch.arange(shape.numel(), dtype=torch.int64, device=device).add_(first).bitwise_and_(WORD)
    word = mix(mix(word).bitwise_xor_(second))
    return (word >= int(probability * (WORD + 1))).view(shape)


def mix(word: Tensor) -> Tensor:
    """Apply in place a bijection of 32-bit words in which every bit depends on every bit."""
    word.bitwise_xor_(word >> 16)
    for multiplier in _MULTIPLIERS:
        word.mul_(multiplier).bitwise_and_(WORD)
        word.bitwise_xor_(word >> 15)
    return word
