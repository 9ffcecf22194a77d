"""The rates of peers' lines, in bytes per second: how a peer measures its own in passing, what its record says, and what others believe.

A home line binds at the access: whatever way tensors take to whichever peer, they share one uplink and one downlink. So a peer has two
rates. It measures them while it has something under way, since an idle line tells nothing. What is measured is a lower bound: the other
end, or the path, may have been the slower one. Hence the 90th percentile, and not the mean.

A few kilobytes that travel alone take a round trip or some, as TCP begins slowly, and say nothing of the line: gradients of 90 KB over 100
Mbit/s and 200 ms seemed to show an uplink of 0.6. So of what is sent counts what belongs to a *burst*: transfers without a pause between
them, of a megabyte, or for many round trips.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from peerd.policy.round.leads import OTHER_LINE
from peerd.policy.round.proposing import believed
from peerd.table.record import MAX_RATE

PERCENTILE = 0.9
SLOT_S = 1.0
KEPT_SLOTS = 60
"""Slots of time with traffic that count: a line that got somewhat slower shows after 54 of them, one that got faster after 6."""
KEPT_S = KEPT_SLOTS * SLOT_S
OTHER_LINE_S = 10.0
"""An uplink that carried less than `OTHER_LINE` of its rate so far, for so many busy seconds, is another one now."""
WINDOW = 16
"""Transfers of the largest size in a window of time whose rate counts. One counts evenly from its beginning until it is acknowledged,
and acknowledgements come in bursts where the line is full both ways: over few transfers a line of 0.6 MB/s seemed to carry 0.75 to 0.96."""
MOST_SAMPLES = 256
LEAST_S, LEAST_BYTES = 0.25, 1 << 20
"""One of them has to be reached before a rate is known."""
BURST = 6.0
"""Of the shortest time in which one of its transfers was acknowledged: that takes a round trip at least."""
RATE_STEP = 1.05
"""Rates in records are powers of this, so that noise changes no record."""
ROOM = 0.8
"""What came at less than this share of the receiver's own rate was not slowed down by the receiver's line."""

Sample = tuple[float, float]
"""A rate, and the seconds of being busy that it was measured over."""


@dataclass(slots=True)
class _Slot:
    bytes: float = 0.0
    largest: float = 0.0
    """The bytes of the largest transfer that was under way, whole."""
    busy: list[tuple[float, float]] = field(default_factory=list)
    """When something was under way: spans that do not overlap, in order."""

    def add(self, num_bytes: float, whole: float, began_s: float, ended_s: float) -> None:
        """Add a part of a transfer, which had `whole` bytes."""
        self.bytes += num_bytes
        self.largest = max(self.largest, whole)
        while self.busy and self.busy[-1][1] >= began_s:
            first_s, last_s = self.busy.pop()
            began_s, ended_s = min(began_s, first_s), max(ended_s, last_s)
        self.busy.append((began_s, ended_s))

    @property
    def sample(self) -> Sample:
        busy_s = sum(ended_s - began_s for began_s, ended_s in self.busy)
        return self.bytes / busy_s, busy_s


class LineMeter:
    """Measures one direction of a line. It holds numbers only; the caller reports what passed, in the order of the ends."""

    def __init__(self, is_up: bool = True) -> None:
        """`is_up`: what passes was sent from here, so that no slow sender makes the line look slow."""
        self._is_up = is_up
        self._slots: dict[int, _Slot] = {}
        self._known: float | None = None
        self._is_known = True
        self._burst_began_s = self._burst_ended_s = -math.inf
        self._burst_bytes, self._burst_least_s = 0.0, math.inf

    def passed(self, num_bytes: float, began_s: float, ended_s: float) -> None:
        """Bytes that were under way from `began_s` to `ended_s`.

        Transfers that overlap share the line: their bytes add up, their time does not.
        """
        if not ended_s > began_s or not self._is_of_a_burst(num_bytes, began_s, ended_s):
            return
        self._is_known = False
        rate, last = num_bytes / (ended_s - began_s), math.floor(ended_s / SLOT_S)
        for number in range(max(math.floor(began_s / SLOT_S), last - KEPT_SLOTS), last + 1):
            first_s, until_s = max(began_s, number * SLOT_S), min(ended_s, (number + 1) * SLOT_S)
            if until_s > first_s:
                self._slots.setdefault(number, _Slot()).add(rate * (until_s - first_s), num_bytes, first_s, until_s)
        while len(self._slots) > KEPT_SLOTS:
            del self._slots[min(self._slots)]

    def _is_of_a_burst(self, num_bytes: float, began_s: float, ended_s: float) -> bool:
        if not self._is_up:
            return True  # it was measured from its first byte on
        if began_s > self._burst_ended_s:
            self._burst_began_s, self._burst_bytes, self._burst_least_s = began_s, 0.0, math.inf
        self._burst_ended_s, self._burst_bytes = max(self._burst_ended_s, ended_s), self._burst_bytes + num_bytes
        self._burst_least_s = min(self._burst_least_s, ended_s - began_s)
        return self._burst_bytes >= LEAST_BYTES or self._burst_ended_s - self._burst_began_s >= BURST * self._burst_least_s

    @property
    def rate(self) -> float | None:
        """Bytes per second; None while too little is known."""
        if not self._is_known:
            if self._is_up:
                self._forget_another_line()
            self._known, self._is_known = _percentile(_windows([self._slots[number] for number in sorted(self._slots)])), True
        return self._known

    def _forget_another_line(self) -> None:
        numbers = sorted(self._slots)
        kept = _of_this_line([self._slots[number].sample for number in numbers])
        if kept < len(numbers):
            self._slots = {number: self._slots[number] for number in numbers[len(numbers) - kept :]}


class RateSamples:
    """Rates of one direction of a line that were measured elsewhere, or of a part of it."""

    def __init__(self, follows: bool = False) -> None:
        """`follows`: forget what was measured before the line became another one, as a peer does of its own uplink."""
        self._follows = follows
        self._samples: deque[Sample] = deque()
        self._busy_s = 0.0
        self._known: float | None = None
        self._is_known = True

    def saw(self, rate: float, busy_s: float) -> None:
        """Take a rate that was measured over so many seconds of being busy."""
        if not (math.isfinite(rate) and rate > 0 and math.isfinite(busy_s) and busy_s > 0):
            return
        self._samples.append((rate, busy_s))
        self._busy_s += busy_s
        self._is_known = False
        while len(self._samples) > MOST_SAMPLES or (len(self._samples) > 1 and self._busy_s - self._samples[0][1] >= KEPT_S):
            self._busy_s -= self._samples.popleft()[1]

    @property
    def rate(self) -> float | None:
        """Bytes per second; None while too little is known."""
        if not self._is_known:
            for _ in range(len(self._samples) - _of_this_line(self._samples) if self._follows else 0):
                self._busy_s -= self._samples.popleft()[1]
            self._known, self._is_known = _percentile(self._samples), True
        return self._known


def _windows(slots: Sequence[_Slot]) -> list[Sample]:
    """The samples of windows that are as long as their transfers require, the latest first. The oldest one has the rest."""
    found, num_bytes, busy_s, largest = list[Sample](), 0.0, 0.0, 0.0
    for number, slot in enumerate(reversed(slots), 1):
        rate, slot_s = slot.sample
        num_bytes, busy_s, largest = num_bytes + rate * slot_s, busy_s + slot_s, max(largest, slot.largest)
        if num_bytes >= WINDOW * largest or number == len(slots):
            found.append((num_bytes / busy_s, busy_s))
            num_bytes, busy_s, largest = 0.0, 0.0, 0.0
    return found


def _of_this_line(samples: Sequence[Sample]) -> int:
    """How many of the samples count, the latest of them: those of the last busy seconds alone if they show another line (`OTHER_LINE`)."""
    recent, busy_s = list[Sample](), 0.0
    for sample in reversed(samples):
        recent.append(sample)
        busy_s += sample[1]
        if busy_s >= OTHER_LINE_S:
            break
    now, so_far = _percentile(recent), _percentile(samples)
    is_another = busy_s >= OTHER_LINE_S and now is not None and so_far is not None and now < OTHER_LINE * so_far
    return len(recent) if is_another else len(samples)


def _percentile(samples: Collection[Sample]) -> float | None:
    """The 90th percentile of the rates, each weighted by its time."""
    busy_s = sum(took_s for _, took_s in samples)
    if busy_s < LEAST_S and sum(rate * took_s for rate, took_s in samples) < LEAST_BYTES:
        return None
    ranked = sorted(samples)
    so_far_s = accumulate(took_s for _, took_s in ranked)
    return next((rate for (rate, _), passed_s in zip(ranked, so_far_s, strict=True) if passed_s >= PERCENTILE * busy_s), None)


def claims(up: float | None, down: float | None, upload_limit: float = 0.0, download_limit: float = 0.0) -> tuple[int, int]:
    """What a peer's record says of its up and down, from what it has measured (None: nothing) and its owner's limits (0: none).

    What arrives shows what others sent rather than what the line could take, and a line's download is hardly ever slower than its upload.
    So `down` is at least `up`, within the limit. Otherwise a fast peer among slow ones would get no more to do than they, and never learn
    that it can do more.
    """
    down = down if up is None else max(up, down or 0.0)
    return _claim(up, upload_limit), _claim(down, download_limit)


def _claim(rate: float | None, limit: float) -> int:
    """A rate for a record, rounded down to a step; 0: unknown."""
    if rate is None:
        return 0
    bounded = min(rate, limit or math.inf, MAX_RATE)
    return int(RATE_STEP ** math.floor(math.log(bounded, RATE_STEP))) if bounded >= 1 else 0


def line_rate(claimed: float, measured: float | None, own: float | None) -> float | None:
    """The rate of a peer's line as another one believes it; None: unknown.

    `claimed`: what the peer's record says (0: nothing); `measured`: what the other one measured of it; `own`: the rate of the other one's
    own line in the opposite direction. A measurement near `own` shows the other one's line, and bounds no claim.
    """
    if claimed <= 0:
        return measured
    bounds = measured is not None and (own is None or measured < ROOM * own)
    return believed(claimed, measured if bounds else None)
