"""What a masked language model gets and is asked: some tokens of each sequence are hidden, which ones by a hash alone.

As in BERT (arXiv 1810.04805, section 3.1): of the tokens asked for, eight of ten are hidden behind the mask token, one is another token
(here of the same sequence), and one stays. Each sequence asks for equally many, so that the mean over microbatches is that over tokens.
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
"""Of ten asked for, those below the first are hidden, and the one below the second is replaced."""


@dataclass(frozen=True, slots=True)
class Masking:
    share: float
    """Of each sequence's tokens."""
    token: int
    """Stands for a hidden one."""

    def apply(self, tokens: Tokens, seed: int, step: int, index: int, sample: int) -> tuple[Tokens, Tokens]:
        """One sequence's inputs and labels. What microbatch (step, index) hides depends on the arguments alone, as its tokens do."""
        length = len(tokens)
        key = b"peerd masking" + struct.pack("<4Q", seed, step, index, sample)
        order, chance = np.frombuffer(hashlib.shake_128(key).digest(16 * length), dtype="<u8").reshape(2, length)
        asked = np.argsort(order, kind="stable")[: max(1, round(self.share * length))]
        fate, other = chance[asked] % 10, chance[asked] // 10 % length
        inputs, labels = tokens.copy(), np.full_like(tokens, NOT_ASKED)
        labels[asked] = tokens[asked]
        inputs[asked] = np.where(fate < HIDDEN, self.token, np.where(fate < REPLACED, tokens[other.astype(np.int64)], tokens[asked]))
        return inputs, labels
