"""Which token comes next. It is a pure function of the logits, the request and the position: a peer that takes over chooses the same."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = 53
"""As many as float64 holds exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.0
    """0: always the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this share of the probability are drawn; above 0, up to 1."""
    seed: int = 0


GREEDY = Sampling()


def choose(logits: Tensor, sampling: Sampling, position: int) -> int:
    """The token at `position` of the text, whose first token has position 0. logits: [vocabulary], in the machine's memory."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    chances, tokens = (logits.double() / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
    summed = chances.cumsum(-1)
    if sampling.top_p < 1:
        num_kept = int(torch.searchsorted(summed, sampling.top_p)) + 1  # that which reaches the share is kept, too
        summed = summed[:num_kept]
    drawn = torch.searchsorted(summed, uniform(sampling.seed, position) * summed[-1], right=True)
    return int(tokens[min(int(drawn), len(summed) - 1)])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on these two alone, alike on every machine."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8, person=b"peerd sampling").digest()
    return math.ldexp(int.from_bytes(digest, "little") >> (64 - _BITS), -_BITS)
