"""Strangers: keys of which nothing proves that a daemon stands behind them. T8 (proof) of docs/protocol.md.

Whoever has a key can sign records with it, and a key costs nothing. So a peer counts once it has called this one, or answered it, or two
others that have done so pass its record on: then it is proven, for good.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from peerd.table.record import PeerId

WORDS_FOR_PROOF = 2
"""So many proven peers that pass on a stranger's record prove it: one of them may have made the key up."""


class Strangers:
    """The strangers that this peer has heard of, the one that rose last at the end, each with the proven peers that told of it."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._told_by: OrderedDict[PeerId, set[PeerId]] = OrderedDict()
        self._proofs_s: list[float] = []
        """When this peer proved the first others."""

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._told_by)

    def __len__(self) -> int:
        return len(self._told_by)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._told_by

    def rose(self, peer: PeerId) -> None:
        self._told_by.setdefault(peer, set())
        self._told_by.move_to_end(peer)

    def told(self, peer: PeerId, teller: PeerId) -> bool:
        """Note that a peer has passed on a stranger's record in a call or an answer of its own. Returns whether that proves it."""
        self._told_by[peer].add(teller)
        return len(self._told_by[peer]) >= WORDS_FOR_PROOF

    def leave(self, peer: PeerId, now_s: float) -> None:
        """Note that one is proven."""
        del self._told_by[peer]
        if len(self._proofs_s) < WORDS_FOR_PROOF:
            self._proofs_s.append(now_s)

    def forget(self, peer: PeerId) -> None:
        self._told_by.pop(peer, None)

    def words_of(self, peer: PeerId) -> int:
        return len(self._told_by[peer])

    def words_needed(self, num_live: int, now_s: float) -> int:
        """How many proven peers have to tell of a stranger that counts: fewer where this peer knows no more, or has only begun to.

        A newcomer has one address, and its first table from there. It gets one life of a record to prove more. `num_live` proven peers
        are live.
        """
        return min(WORDS_FOR_PROOF, num_live, sum(now_s >= at_s + self._ttl_s for at_s in self._proofs_s))

    def needs_more_from_s(self, now_s: float) -> float:
        """When more words may be needed than now; infinity if that depends on what is heard alone."""
        return min((at_s + self._ttl_s for at_s in self._proofs_s if at_s + self._ttl_s > now_s), default=float("inf"))
