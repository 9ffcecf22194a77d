"""Hashes that decisions share: who goes first, who owns what. BLAKE2 over length-prefixed parts."""

from __future__ import annotations

import hashlib
from functools import lru_cache

REMEMBERED_RANKS = 1 << 12


def digest(*parts: bytes | str | int, size: int = 16) -> bytes:
    """A hash of the parts in order; parts cannot run into one another."""
    state = hashlib.blake2b(digest_size=size)
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode()
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.digest()


@lru_cache(maxsize=REMEMBERED_RANKS)
def peer_rank(peer: str, stage: int, step: int) -> bytes:
    """The order of a stage's members at one step; the lowest proposes the roster. Remembered: each look at the table asks for it."""
    return digest("rank", peer, stage, step, size=8)


def turn_of(joiner: str, donor: str) -> bytes:
    """Orders the donors of equal worth for one joiner: it asks the lowest first."""
    return digest("donor", joiner, donor, size=8)
