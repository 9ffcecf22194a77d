"""Limits how often a peer does work for others that brings the run nothing: dialling back, measuring a connection. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from peerd.table.record import PeerId

WINDOW_S = 60.0


@dataclass(slots=True)
class Ration:
    """At most `each` favours a minute to one caller, `total` to all together."""

    each: int
    total: int
    _granted: deque[tuple[float, PeerId]] = field(default_factory=deque)
    """Time and caller of each favour, oldest first; never more than `total`."""

    def take(self, caller: PeerId, now_s: float) -> str:
        """The reason to refuse; empty if the favour is granted and counted. `now_s` never goes back."""
        while self._granted and self._granted[0][0] <= now_s - WINDOW_S:
            self._granted.popleft()
        if sum(peer == caller for _, peer in self._granted) >= self.each:
            return f"you have asked {self.each} times within a minute"
        if len(self._granted) >= self.total:
            return "others have asked too often within a minute"
        self._granted.append((now_s, caller))
        return ""
