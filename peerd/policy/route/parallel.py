"""Over how many TCP connections at once tensors travel to a peer.

One connection carries at most 1.2 segments / (round trip x sqrt(share lost)) (Mathis, Semke, Mahdavi and Ott, 1997): some 0.05 MB/s where
3 % are lost and a round trip takes 0.25 s, whatever the line could carry. Several carry several times as much there. On a line that is
full they carry no more, and lose more: what a line loses by itself does not depend on their number, what its queue loses grows with
the square. So their number follows from the share of segments that had to be sent again. It falls back to one where that share grows with
it. And a path gets no several while segments to all peers wait, which they do in the queue of this peer's own line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

MOST = 32
"""Each costs both ends a socket and some memory."""
LEAST_LOSS, LOSS_OF_EACH = 0.01, 0.001
"""The share of segments lost from which on several pay, and one connection more for each such share."""
GROWTH = 8
"""A look makes at most so many times as many."""
LEAST_SEGMENTS = 100
"""Segments that a share is taken of."""
LOOKS_LOSSY = 3
"""Shares in a row that have to tell of a lossy line before it has several: a queue that is full once loses as much."""
MATHIS, SEVERAL_TIMES = 1.2, 3.0
"""One connection that sends several times as many segments as Mathis' bound is not held back by what is lost: a queue was full, and the
share lost in it is no chance of each segment."""
LEAST_ROUND_TRIP_S = 0.2
"""The bound is taken for a round trip of so long at least: a share is taken of few segments."""
QUEUED_S = 0.3
"""Seconds by which round trips to all peers take longer than the least ones, if the own line's queue is full. What is lost then is lost in
it: 2.5 Mbit/s that four paths shared lost 5 %, and 14 % once one of the paths had 32 connections. Where the way to one peer alone takes
longer, words from there wait in that peer's queue, and segments may be lost on the way all the same."""
GREW = 2
"""A number that grew so many times says whether the share grows with it. One that grew less does not: shares differ by chance."""
TIMES, MORE = 4.0, 0.05
"""A share that is so many times the one before, and so much more, after that, comes from a full line."""
LOOKS_ALONE, MOST_ALONE = 8, 256
"""Shares that are looked at before several are tried again on such a line. Twice as many each time, up to the second number."""


def own_queue_s(round_trips: Iterable[tuple[float, float]]) -> float:
    """How long segments wait before this peer's own line: as long as round trips to all addresses take longer than the least ones.

    `round_trips`: by address, now and the least, in seconds; a least one of 0: nothing was sent there, or it is unknown. 0 where all goes
    to one address: then segments may wait anywhere.
    """
    waits_s = [now_s - least_s for now_s, least_s in round_trips if least_s > 0]
    return min(waits_s) if len(waits_s) > 1 else 0.0


class Parallel:
    """The number for one path, as its segments are counted."""

    def __init__(self) -> None:
        self.number = 1
        self.resent: float | None = None
        """The share of segments that were sent again of the last ones that were looked at; None: too few were sent so far."""
        self._sent = self._again = 0
        """Counted since the last share was taken."""
        self._busy_s = self._round_trip_s = 0.0
        """For how long connections were busy with that, and the longest round trip meanwhile."""
        self._queue_s = 0.0
        """The longest that segments waited in this peer's own queue meanwhile."""
        self._lossy = 0
        """Shares in a row that told of a lossy line."""
        self._before: float | None = None
        """The share before the number last grew much; None: it has not since the last look."""
        self._alone = 0
        """For so many looks there is to be one connection."""
        self._next_alone = LOOKS_ALONE

    def counted(self, sent: int, again: int, busy_s: float, round_trip_s: float = 0.0, queue_s: float = 0.0) -> bool:
        """Take how many segments were sent since the last look, and how many of them again. Returns whether the number changes.

        `busy_s`: for how many seconds a connection had something to send or under way, summed over all, since one that has little to send
        is slow for that; 0: unknown. Then there is one connection. `queue_s`: how long segments to any peer wait in this peer's own queue.
        """
        self._round_trip_s, self._queue_s = max(self._round_trip_s, round_trip_s), max(self._queue_s, queue_s)
        self._sent, self._again, self._busy_s = self._sent + sent, self._again + again, self._busy_s + busy_s
        if self._sent < LEAST_SEGMENTS:
            return False
        self.resent = share = min(1.0, self._again / self._sent)
        held_back_s = self._sent * max(LEAST_ROUND_TRIP_S, self._round_trip_s) * math.sqrt(share) / MATHIS
        is_lossy = share >= LEAST_LOSS and SEVERAL_TIMES * self._busy_s > held_back_s and self._queue_s < QUEUED_S
        self._lossy = self._lossy + 1 if is_lossy else 0
        self._sent, self._again, self._busy_s, self._round_trip_s, self._queue_s = 0, 0, 0.0, 0.0, 0.0
        if self.number == 1 and self._lossy < LOOKS_LOSSY:
            share = 0.0
        number = self._number_at(share)
        self._before = share if number >= GREW * self.number else None
        changed, self.number = number != self.number, number
        return changed

    def _number_at(self, share: float) -> int:
        if self._before is not None and share > TIMES * self._before + MORE:
            self._leave_alone()
        if self._alone:
            self._alone -= 1
            return 1
        wanted = min(MOST, round(share / LOSS_OF_EACH)) if share >= LEAST_LOSS else 1
        return max(min(wanted, GROWTH * self.number), self.number // 2, 1)

    def failed(self) -> None:
        """The other end takes no several connections, or none opens."""
        self.number, self._before = 1, None
        self._leave_alone()

    def _leave_alone(self) -> None:
        self._alone, self._next_alone = self._next_alone, min(MOST_ALONE, 2 * self._next_alone)
