"""How the next token of a text is drawn. Pure."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

MAX_TEMPERATURE = 100.0
_BITS = 53
"""As many as float64 holds exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn. Raises ValueError for numbers with which nothing can be drawn."""

    temperature: float = 0.0
    """0: always the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this share of the probability are drawn; above 0, up to 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= MAX_TEMPERATURE or not 0 < self.top_p <= 1:
            raise ValueError(f"a temperature is from 0 to {MAX_TEMPERATURE:g}, and top-p above 0 and up to 1")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on these two alone, alike on every machine."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8, person=b"peerd sampling").digest()
    return math.ldexp(int.from_bytes(digest, "little") >> (64 - _BITS), -_BITS)
