"""Masks tokens for masked language models; a hash alone chooses which.

As in BERT (arXiv 1810.04805, section 3.1): of ten tokens that the model has to predict, eight are replaced by the mask token, one by
another token (here of the same sequence), and one stays. All sequences have equally many, so that the mean over microbatches is the
mean over tokens.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peerd.config.model_kinds import NOT_ASKED

Tokens = NDArray[np.signedinteger[Any]]
HIDDEN, REPLACED = 8, 9
"""Of draws from 0 to 9, those below the first hide the token, and those below the second replace it."""


@dataclass(frozen=True, slots=True)
class Masking:
    share: float
    """Share of a sequence's tokens that the model has to predict."""
    token: int
    """The mask token."""

    def apply(self, tokens: Tokens, seed: int, step: int, index: int, sample: int) -> tuple[Tokens, Tokens]:
        """Inputs and labels of one sequence. They depend on the arguments alone, so that every peer masks alike."""
        length = len(tokens)
        key = b"peerd masking" + struct.pack("<4Q", seed, step, index, sample)
        order, chance = np.frombuffer(hashlib.shake_128(key).digest(16 * length), dtype="<u8").reshape(2, length)
        asked = np.argsort(order, kind="stable")[: max(1, round(self.share * length))]
        fate, other = chance[asked] % 10, chance[asked] // 10 % length
        inputs, labels = tokens.copy(), np.full_like(tokens, NOT_ASKED)
        labels[asked] = tokens[asked]
        inputs[asked] = np.where(fate < HIDDEN, self.token, np.where(fate < REPLACED, tokens[other.astype(np.int64)], tokens[asked]))
        return inputs, labels
