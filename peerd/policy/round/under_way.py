"""The chunks of a round that a member has sent on one line and of which it has no word yet.

On a link that is as fast as the proposal believes, the windows of the round alone bound them (`chunks.WINDOW`). On a slower one, chunks
are too large, and what waits in the link delays the words about what the other end sends, small calls, and the connection's own
acknowledgements. So a line begins with few chunks under way, has one more for each word that comes in time, and half as many for each that
is late: additive increase, multiplicative decrease (Chiu and Jain, 1989). What the quickest word so far took is the path's own delay.
"""

from __future__ import annotations

import math
from collections import deque

from peerd.policy.round.chunks import ROW_S, WINDOW

LEAST = 2
"""Chunks that may always be under way: while the word about one comes back, the other one is sent."""
LATE_S = 3 * WINDOW * ROW_S
"""A word that is later than this, beside the path's delay, says that too much is under way, at this end or at the other. On links that are
as fast as believed it comes in the time of one window of each end, and that delay."""


class UnderWay:
    """When chunks were sent, and their bytes. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._sent: deque[tuple[float, int]] = deque()
        self._most = float(LEAST)
        self._quickest_s = math.inf

    @property
    def late_s(self) -> float:
        """A word that takes longer is late."""
        return LATE_S + (0.0 if self._quickest_s == math.inf else self._quickest_s)

    @property
    def may_grow(self) -> bool:
        """Whether one more chunk may be sent."""
        return len(self._sent) < int(self._most)

    def sent(self, num_bytes: int, now_s: float) -> None:
        self._sent.append((now_s, num_bytes))

    def verified(self, num_chunks: int, now_s: float) -> tuple[int, float]:
        """The first of them have been verified. Returns their bytes, and the seconds since the first of them was sent."""
        taken = [self._sent.popleft() for _ in range(min(num_chunks, len(self._sent)))]
        if not taken:
            return 0, 0.0
        self._quickest_s = min(self._quickest_s, now_s - taken[-1][0])
        if now_s - taken[-1][0] <= self.late_s:
            self._most = min(self._most + len(taken), self._most_of_use(len(taken)))
        else:
            self._most = max(float(LEAST), self._most / 2)
        return sum(num_bytes for _, num_bytes in taken), now_s - taken[0][0]

    def _most_of_use(self, num_taken: int) -> float:
        """More than twice of what was under way was not tried yet."""
        return max(self._most, 2.0 * (len(self._sent) + num_taken))

    def broke(self) -> None:
        """The stream is over; what was under way on it is sent again."""
        self._sent.clear()
