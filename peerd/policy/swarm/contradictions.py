"""Remembers what was heard of each peer lately, so that two texts under one pair are noticed: T7 (contradiction). Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from peerd.table.record import PeerId

Pair = tuple[int, int]
Text = TypeVar("Text")
KEPT_OF_PEER = 8
"""Versions of one peer that are remembered: what its changes of one or two seconds take."""
KEPT_BYTES = 4 << 20


class Heard(Generic[Text]):
    """The last texts of each peer, each for the life of its record. The oldest make room. Times are seconds on the caller's clock."""

    def __init__(self, are_same: Callable[[Text, Text], bool], size_of: Callable[[Text], int]) -> None:
        """`size_of` tells the bytes that a text takes."""
        self._are_same, self._size_of = are_same, size_of
        self._texts: OrderedDict[tuple[PeerId, Pair], tuple[Text, float]] = OrderedDict()
        """With the time until which each is remembered."""
        self._pairs: dict[PeerId, deque[Pair]] = {}
        self._bytes = 0

    def note(self, peer: PeerId, pair: Pair, text: Text, until_s: float) -> None:
        """Remember the text under a pair."""
        if (peer, pair) in self._texts:
            self._drop(peer, pair)
        self._texts[peer, pair] = text, until_s
        self._bytes += self._size_of(text)
        pairs = self._pairs.setdefault(peer, deque())
        pairs.append(pair)
        if len(pairs) > KEPT_OF_PEER:
            self._drop(peer, pairs[0])
        while self._bytes > KEPT_BYTES:
            self._drop(*next(iter(self._texts)))

    def other(self, peer: PeerId, pair: Pair, text: Text, now_s: float) -> Text | None:
        """What the peer said under the same pair, if that was something else."""
        known, until_s = self._texts.get((peer, pair), (None, 0.0))
        return None if known is None or now_s >= until_s or self._are_same(known, text) else known

    def forget(self, peer: PeerId) -> None:
        for pair in tuple(self._pairs.get(peer, ())):
            self._drop(peer, pair)

    def _drop(self, peer: PeerId, pair: Pair) -> None:
        text, _until_s = self._texts.pop((peer, pair))
        self._bytes -= self._size_of(text)
        pairs = self._pairs[peer]
        pairs.remove(pair)
        if not pairs:
            del self._pairs[peer]
