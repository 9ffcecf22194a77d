"""Senders of broken messages: their calls are refused for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

from peerd.table.record import PeerId


class Bans:
    """Whom this peer refuses, and until when. Nobody else's word bans a peer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.until_s: dict[PeerId, float] = {}
        """On the clock, the earliest first."""

    def add(self, peer: PeerId, for_s: float) -> None:
        now_s = self._clock()
        self.until_s.pop(peer, None)
        self.until_s[peer] = now_s + for_s
        while (first := next(iter(self.until_s))) != peer and self.until_s[first] <= now_s:
            del self.until_s[first]

    def left_s(self, peer: PeerId) -> float:
        """Return the seconds until the peer may call again; 0 if it may now."""
        return max(0.0, self.until_s.get(peer, 0.0) - self._clock())

    def left(self) -> dict[PeerId, float]:
        """Return those that are banned now, each with its `left_s`."""
        now_s = self._clock()
        return {peer: until_s - now_s for peer, until_s in self.until_s.items() if until_s > now_s}
