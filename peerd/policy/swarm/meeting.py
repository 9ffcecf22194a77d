"""Which strangers a peer calls, to find out whether a daemon has their keys: T8 (proof).

Most prove themselves: they call, or two others pass their records on. So a peer waits for that first. Where many do not answer, somebody
makes up keys, and it calls few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from peerd.table.record import PeerId

AT_ONCE = 8
WARY_AFTER, WARY_LIVES = 16, 20
"""A peer is wary while so many strangers have not answered within so many lives of a record."""
LONGEST_PAUSE_LIVES = 64
READ_AT_FIRST, READ_PER_PERIOD = 2048, 64
"""Records of strangers that are read of one teller: at first, and afterwards in an announce period."""
MOST_TELLERS = 1024


@dataclass(slots=True)
class Meetings:
    """The calls to strangers. Times are seconds on the caller's clock."""

    period_s: float
    life_s: float
    _heard_of_s: dict[PeerId, float] = field(default_factory=dict)
    _next_s: dict[PeerId, tuple[float, float]] = field(default_factory=dict)
    """Of those that did not answer: when to call again, and the pause after that."""
    _failed_s: deque[float] = field(default_factory=lambda: deque(maxlen=WARY_AFTER))
    _called_s: float = float("-inf")

    def is_wary(self, now_s: float) -> bool:
        return len(self._failed_s) == WARY_AFTER and now_s - self._failed_s[0] < WARY_LIVES * self.life_s

    def whom(self, strangers: Collection[PeerId], now_s: float, draw: float) -> list[PeerId]:
        """The strangers to call now, a number in [0, 1) drawing which. The next ones are to be asked for when these calls have ended."""
        self._heard_of_s = {peer: self._heard_of_s.get(peer, now_s) for peer in strangers}
        self._next_s = {peer: due for peer, due in self._next_s.items() if peer in self._heard_of_s}
        is_wary = self.is_wary(now_s)
        if is_wary and now_s - self._called_s < self.period_s:
            return []
        waiting = [peer for peer, since_s in self._heard_of_s.items() if now_s - since_s >= self.period_s]
        able = [peer for peer in waiting if peer not in self._next_s] or [peer for peer in waiting if now_s >= self._next_s[peer][0]]
        first = int(draw * len(able))
        chosen = (able[first:] + able[:first])[: 1 if is_wary else AT_ONCE]
        self._called_s = now_s if chosen else self._called_s
        return chosen

    def failed(self, peer: PeerId, now_s: float) -> None:
        """Note that a stranger did not answer."""
        if peer not in self._next_s:
            self._failed_s.append(now_s)
        pause_s = self._next_s.get(peer, (0.0, self.life_s))[1]
        self._next_s[peer] = now_s + pause_s, min(2 * pause_s, LONGEST_PAUSE_LIVES * self.life_s)


@dataclass(slots=True)
class Reading:
    """How many records of strangers are read of each teller: checking a signature takes a quarter of a millisecond, and signing as much."""

    period_s: float
    _left: dict[PeerId, tuple[float, float]] = field(default_factory=dict)
    """How many are left of each teller, and when that was so. The one that told last comes last."""

    def may_read(self, teller: PeerId, now_s: float) -> bool:
        """Whether to read one more, which then counts."""
        left, at_s = self._left.pop(teller, (float(READ_AT_FIRST), now_s))
        left = min(READ_AT_FIRST, left + (now_s - at_s) / self.period_s * READ_PER_PERIOD)
        self._left[teller] = (left - 1 if left >= 1 else left, now_s)
        if len(self._left) > MOST_TELLERS:
            del self._left[next(iter(self._left))]
        return left >= 1
