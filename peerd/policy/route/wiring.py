"""Stochastic wiring: which peer of a stage gets the next microbatch (SWARM section 3.2, appendix C, algorithm 1).

Interleaved weighted round-robin, as there: shares are in inverse proportion to the moving average of each peer's response time.
There, every caller goes its own round, and the rounds of many callers meet at one peer while another waits. Here all callers go one
round together: a step's microbatches lie on a line at equal distances, the peers of a stage part the line by their shares, and each
microbatch goes to the peer on whose part it lies. Whoever sends it, each peer so gets its share of every step, to within one
microbatch, and neighbours in the order of launching lie far apart. Lanes through the stages follow by themselves; who is in a lane with
whom changes with every step, else a caller would never measure the peers of other lanes.

A response time is forward plus backward at that peer, network included and its queue not. With the queue in it, as many
requests wait at a slow peer as at a fast one, and a step ends when the slow peer's queue does: of two peers, one three times
slower, the fast one then gets only 2.2 times the work. Without, shares follow speed whatever the load.

A single response may take seconds where the next takes a tenth of one: connection set-up and the first use of every kernel ride on a
peer's first, and a home machine is used for other things. So the average is of medians of three, and until its second response a peer
counts as the mean of the others, or as its first where that was less; where nobody has given two, all count as the least.
And estimates of like peers differ by chance, each caller's in its own way, which would part the line unevenly: differences count as
far as noise does not explain them (James-Stein).

A caller measures how long a request took. How much of that was the queue, and how much later stages, the callee tells, and a slow one that
tells a lot would draw all work to itself. Where shares follow speed, queues are equally long, so a wait is the same part of the time at
all peers of a stage, and later stages take the same time for all. So a peer counts as faster than by its stage's median words by a fifth at
most: one whose requests wait more than others' gets too much for what it is, whatever the reason.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from statistics import fmean, median_high, median_low
from typing import NamedTuple

from peerd.policy.hashing import digest
from peerd.table.record import PeerId, PeerRecord

SMOOTHING = 0.1
RECENT = 3
UNKNOWN_RESPONSE_S = 1.0
LEAST_RESPONSE_S = 1e-6
STANDARD_ERRORS = 2.0
"""Estimates that differ by less than this many standard errors count as equal."""
LEAST_NOISE = 0.2
"""The smallest noise assumed, as a share of the response time, even if the few measurements were alike."""
REMEMBERED = 1 << 12
"""Size of the caches of peers."""
BELIEVED_MORE = 1.2
"""How much faster than by its stage's median words a peer may be, because its queue is longer by chance."""
FIRST_PAUSE_S, MOST_PAUSE_S, MOST_PAUSE_SHARE = 0.02, 0.16, 0.02
"""The pause before a peer that has no slot is asked again. It doubles each time, up to the second number or that share of a response."""
GOLDEN = (math.sqrt(5) - 1) / 2


def own_time_s(elapsed_s: float, downstream_s: float, queued_s: float, slots: int, stages_left: int = 1) -> float:
    """A callee's own part of the time that a request took. It tells how long the request waited for later stages and for its turn.

    In its queue the request waited for at most `slots` others, which take about as long each. So at least that share counts, whatever
    was told: otherwise a slow peer that tells long waits would draw all work to itself. And of all `stages_left`, its own included, it had
    at least its share.
    """
    here_s = max(elapsed_s / stages_left / (1 + slots), elapsed_s - max(0.0, downstream_s))
    return max(here_s / (1 + slots), here_s - max(0.0, queued_s))


@dataclass(slots=True)
class MovingMedian:
    """The moving average of medians of a few values in a row, and how far they lie from it."""

    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    count: int = 0
    mean_s: float = 0.0
    variance: float = 0.0
    """Variance of one median, s^2."""

    def add(self, value_s: float, smoothing: float) -> None:
        self.recent_s.append(value_s)
        self.count += 1
        typical_s = median_low(self.recent_s)
        weight = max(smoothing, 1 / max(1, self.count - 1))  # a plain mean while there are few; the first counts for nothing
        off_s = typical_s - self.mean_s
        self.variance = 0.0 if weight == 1 else (1 - weight) * (self.variance + weight * off_s * off_s)
        self.mean_s += weight * off_s

    def error2(self, smoothing: float) -> float:
        """The variance of the average, s^2."""
        return max(self.variance, (LEAST_NOISE * self.mean_s) ** 2) * max(smoothing / (2 - smoothing), 1 / self.count)


@dataclass(slots=True)
class Measured(MovingMedian):
    """One peer's response time by its own words; and by them, what requests took with its queue, and what later stages took."""

    with_queue: MovingMedian = field(default_factory=MovingMedian)
    later: MovingMedian = field(default_factory=MovingMedian)

    @property
    def own_part(self) -> float:
        """What of a request's time at this peer was not its queue, by its own words."""
        return min(1.0, self.mean_s / self.with_queue.mean_s) if self.with_queue.mean_s > 0 else 1.0


class PartedLine(NamedTuple):
    """A line on which each peer of a stage has a part, as long as its share of the work."""

    peers: list[PeerRecord]
    ends: list[float]
    """Where each one's part ends."""

    def at(self, point: float) -> PeerRecord:
        """The peer on whose part a point lies, 0 to 1."""
        return self.peers[min(bisect_right(self.ends, point * self.ends[-1]), len(self.peers) - 1)]


class Router:
    """One caller's opinion of the peers of one stage. Holds numbers only; the caller measures."""

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        self._smoothing = smoothing
        self._measured: dict[PeerId, Measured] = {}
        """Ordered by the last measurement, latest last."""
        self._banned_at: dict[PeerId, tuple[int, int]] = {}
        self._typical: tuple[float, float] | None = None
        """The peers' median own part, and the most that is believed of later stages; None if something was measured since."""

    def choose(self, candidates: Sequence[PeerRecord], point: float, prefer: Collection[PeerId] = (), step: int = 0) -> PeerRecord | None:
        """The peer on whose part of the line the microbatch's `point` lies (`point_of`), or None when all are banned.

        Peers in `prefer` win if any of them may be chosen. The order of the peers on the line depends on the step.
        """
        allowed = [record for record in candidates if not self._is_banned(record)]
        if not allowed:
            return None
        return self.parted([record for record in allowed if record.peer in prefer] or allowed, step).at(point)

    def parted(self, candidates: Sequence[PeerRecord], step: int) -> PartedLine:
        """The line of these peers, of which there is at least one, by what is known now."""
        pool = sorted(candidates, key=lambda record: _place(record.peer, step))
        responses_s = self._responses_s([record.peer for record in pool])
        return PartedLine(pool, list(accumulate(1 / max(each_s, LEAST_RESPONSE_S) for each_s in responses_s)))

    def observe(self, peer: PeerId, response_s: float, elapsed_s: float = 0.0, later_s: float = 0.0) -> None:
        """Add the response time of one request to `peer`: forward, backward and network, without the time in its queue (`own_time_s`).

        The request took `elapsed_s`, of which the peer says that it waited `later_s` for later stages.
        """
        measured, later_s = self._measured.pop(peer, None) or Measured(), min(max(0.0, later_s), elapsed_s)
        measured.add(response_s, self._smoothing)
        measured.with_queue.add(max(response_s, elapsed_s - later_s), self._smoothing)
        measured.later.add(later_s, self._smoothing)
        self._measured[peer] = measured
        self._typical = None
        if len(self._measured) > REMEMBERED:
            del self._measured[next(iter(self._measured))]

    def ban(self, record: PeerRecord) -> None:
        """Leave the peer out until it announces itself again, that is until its pair rises."""
        self._banned_at[record.peer] = record.pair

    def response_s(self, peer: PeerId) -> float:
        """Moving average of the peer's response time, s; a guess until its second response."""
        return self._averages_s([peer])[0]

    def _averages_s(self, peers: Sequence[PeerId]) -> list[float]:
        """Each peer's average or guess, s. The guess is the same for all of them, so it is made once."""
        found = [self._measured.get(peer) for peer in peers]
        guess_s = 0.0
        if not all(known is not None and known.count > 1 for known in found):
            told = [self._mean_s(each) for each in self._measured.values() if each.count > 1]
            guess_s = fmean(told) if told else min((each.mean_s for each in self._measured.values()), default=UNKNOWN_RESPONSE_S)
        return [guess_s if known is None else self._mean_s(known) if known.count > 1 else min(known.mean_s, guess_s) for known in found]

    def _mean_s(self, known: Measured) -> float:
        """A peer's average, as far as the words of its stage's median bear it out."""
        if self._typical is None:
            told = [each for each in self._measured.values() if each.count > 1]
            chance_s = STANDARD_ERRORS * math.sqrt(median_low(each.later.error2(self._smoothing) for each in told))
            self._typical = median_high(each.own_part for each in told), median_low(each.later.mean_s for each in told) + chance_s
        own_part, later_s = self._typical
        here_s = known.with_queue.mean_s + max(0.0, known.later.mean_s - later_s)
        return max(known.mean_s, here_s * own_part / BELIEVED_MORE)

    def _responses_s(self, peers: Sequence[PeerId]) -> list[float]:
        """The response times that shares are computed from: averages, moved towards their mean as far as chance explains them."""
        found = self._averages_s(peers)
        known = [self._measured[peer] for peer in peers if peer in self._measured and self._measured[peer].count > 1]
        if len(known) < 2:
            return found
        means_s = [self._mean_s(each) for each in known]
        about_s = fmean(means_s)
        spread2 = sum((mean_s - about_s) ** 2 for mean_s in means_s) / (len(known) - 1)
        noise2 = STANDARD_ERRORS**2 * fmean(each.error2(self._smoothing) for each in known)
        real = max(0.0, 1 - noise2 / spread2) if spread2 else 0.0
        middle_s = fmean(found)
        return [middle_s + real * (each_s - middle_s) for each_s in found]

    def _is_banned(self, record: PeerRecord) -> bool:
        banned_at = self._banned_at.get(record.peer)
        if banned_at is not None and record.pair > banned_at:
            del self._banned_at[record.peer]
            banned_at = None
        return banned_at is not None


def next_pause_s(pause_s: float, response_s: float) -> float:
    """The pause after one of `pause_s`, where requests to the peer take `response_s`: a slot of minutes is not free within moments."""
    return min(2 * pause_s, max(MOST_PAUSE_S, MOST_PAUSE_SHARE * response_s))


def point_of(index: int, num_microbatches: int, attempt: int = 0) -> float:
    """Where microbatch `index` of a step lies on the line from 0 to 1, the same for all callers.

    The points of a step are at equal distances, and those of indices in a row spread evenly, too. Another `attempt` moves the point far
    away, since the peer that got the last one could not take it.
    """
    place = (index * _stride(num_microbatches) % num_microbatches + 0.5) / num_microbatches
    return (place + _halvings(attempt)) % 1.0


@lru_cache(maxsize=REMEMBERED)
def _place(peer: PeerId, step: int) -> bytes:
    """The sort key of a peer on the line at one step."""
    return digest("lane", peer, step, size=8)


@lru_cache
def _stride(num_microbatches: int) -> int:
    """The stride that spreads places in a row most evenly, of those that visit every place before any twice.

    A large quotient in the continued fraction of stride / number means that many places in a row lie close together.
    """
    coprime = (stride for stride in range(1, num_microbatches + 1) if math.gcd(stride, num_microbatches) == 1)
    return min(coprime, key=lambda stride: (_largest_quotient(stride, num_microbatches), abs(stride - GOLDEN * num_microbatches)))


def _largest_quotient(numerator: int, denominator: int) -> int:
    """The largest number in the continued fraction of a proper fraction in lowest terms."""
    largest = 0
    while numerator:
        largest = max(largest, denominator // numerator)
        numerator, denominator = denominator % numerator, numerator
    return largest


def _halvings(number: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8 ...: each as far from those before as can be (van der Corput)."""
    place, step = 0.0, 0.5
    while number:
        place += step * (number & 1)
        number, step = number >> 1, step / 2
    return place
