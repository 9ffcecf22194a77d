"""When a peer measures its uplink with bytes that nobody needs, and what it believes of it then. Pure.

What tensors carry is a lower bound of a line: a member of a round that waits for slower ones sends no more than they take. With uplinks
of 5, 20, 20 and 100 Mbit/s such members claimed 3 of their 20. So the slowest one got a fifth of the average to reduce, and the round took
1.6 times as long as it had to. So now and then a peer fills its uplink for a moment, by choice while nothing else leaves.
"""

from __future__ import annotations

import math
from collections import deque

KEPT = 3
"""Probes that count. Of some the second highest is believed: one may meet other traffic, and one may be told by a liar."""
FIRST_BYTES = 256 * 1024
PROBE_S = 0.15
"""A probe that is to be exact takes so long. Microbatches that leave meanwhile come later by as much."""
SLOW_BEGINNING = 8
"""Round trips after which TCP fills a home line."""
LEAST_PAUSE_S, LINE_SHARE = 60.0, 0.01
"""Between two probes: at least so long, and so long that they take this share of the line's time."""
MOST_PAUSES = 16
"""The pause doubles up to so many times while probes agree, and what tensors show does not contradict them."""
AGREES, CONTRADICTS = 1.25, 2.0
"""Two probes agree if the larger is at most so many times the smaller. Tensors contradict a rate that is more than so many times theirs:
who sends them waits for others, or the line is slower now. If the next probe agrees all the same, it was the former, and they contradict
again only by showing so many times less."""
CONTRADICTED = 0.25
"""The least pause before a rate is probed that tensors contradict, as a share of the usual one."""
SOON_S, MOST_SOON = 5.0, 2
"""A probe that shows another rate is repeated after so long, up to so many times in a row."""
MOST_BEYOND = 4.0
"""What the other end tells counts up to so many times what the sender's own clock shows: that has the connection's begin, too."""


class Probes:
    """Rates are bytes per second; times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=KEPT)
        self._ended_s = self._due_s = -math.inf
        self._pause_s = LEAST_PAUSE_S
        """The least one after the last probe."""
        self._pauses = 1.0
        self._num_soon = 0
        self._now: float | None = None
        """What tensors show; None: none did."""
        self._shown: float | None = None
        """The most that they have shown since the last probe."""

    @property
    def rate(self) -> float | None:
        """The uplink as the last probes have shown it; None before the first one."""
        ranked = sorted(self._rates)
        return ranked[-2] if len(ranked) > 1 else next(iter(ranked), None)

    def show(self, shown: float) -> None:
        """Take the rate that tensors show now."""
        rate, self._now = self.rate, shown
        self._shown = max(self._shown, shown) if self._shown is not None else shown if rate is None else max(rate, shown)
        if self._is_contradicted:
            self._due_s = min(self._due_s, self._ended_s + self._pause_s * CONTRADICTED)

    def is_due(self, now_s: float, is_idle: bool) -> bool:
        """Whether to probe now. `is_idle`: nothing else leaves the uplink. One that is always busy is probed all the same, but later."""
        patience_s = SOON_S if self._is_contradicted or self._num_soon else self._pause_s
        return now_s >= self._due_s + (0.0 if is_idle else patience_s)

    @property
    def _is_contradicted(self) -> bool:
        rate = self.rate
        return rate is not None and self._now is not None and CONTRADICTS * self._now < min(rate, self._shown or rate)

    def saw(self, rate: float, took_s: float, now_s: float) -> None:
        """Take the result of a probe that took so long in all."""
        if not (0 < rate < math.inf and 0 <= took_s < math.inf):
            self.failed(now_s)
            return
        known, self._shown = self.rate, self._now
        agrees = known is not None and max(rate, known) <= AGREES * min(rate, known)
        self._rates.append(rate)
        self._ended_s, self._pause_s = now_s, max(LEAST_PAUSE_S, took_s / LINE_SHARE)
        if known is not None and not agrees and self._num_soon < MOST_SOON:
            self._num_soon, self._pauses = self._num_soon + 1, 1.0
            self._due_s = now_s + SOON_S
            return
        self._num_soon = 0
        self._pauses = min(2 * self._pauses, MOST_PAUSES) if agrees else 1.0
        self._due_s = now_s + self._pauses * self._pause_s

    def failed(self, now_s: float) -> None:
        """Nobody took the bytes."""
        self._shown = self._now
        self._ended_s, self._due_s = now_s, now_s + self._pause_s


def told_rate(num_bytes: int, told_s: float, own_s: float) -> float:
    """The rate that a probe has shown: by the other end's clock, which leaves the way there out, as far as the own clock allows it.

    `own_s`: from the first byte until the answer. 0 if nothing can be said.
    """
    if not (num_bytes > 0 and 0 < told_s < math.inf and 0 < own_s < math.inf):
        return 0.0
    return min(num_bytes / told_s, MOST_BEYOND * num_bytes / own_s)


def more_bytes(rate: float, took_s: float, own_s: float, most_bytes: int) -> int:
    """The size of a second probe, where the first one showed this rate; 0: it needs none.

    One is needed if the first has not filled the line for long enough, or lasted for a few round trips, in which TCP begins slowly.
    `took_s`: by the other end's clock; `own_s`: from the first byte until the answer.
    """
    num_bytes = min(most_bytes, int(PROBE_S * rate))
    if num_bytes > FIRST_BYTES:
        return num_bytes
    return FIRST_BYTES if took_s < SLOW_BEGINNING * (own_s - took_s) else 0
