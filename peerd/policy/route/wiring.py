"""Stochastic wiring: which peer of a stage gets the next microbatch (SWARM section 3.2, appendix C, algorithm 1).

Interleaved weighted round-robin, as there; but there shares are in inverse proportion to the moving average of each peer's response time.
A response takes as long as the way there and back, too, which keeps nobody busy: a peer 200 ms away that computes as fast as its mates
got 38 percent in place of half. And each caller must call every peer some times before it knows it: in simulated stages of unlike homes
steps took 1.2 to 2.2 times as long as their computing. Here shares follow the rate that each peer's record tells: what it computes, or
less where its line carries less. All callers read the same records, so they part the line alike.

There, every caller goes its own round, and the rounds of many callers meet at one peer while another waits. Here all callers go one round
together: a step's microbatches lie on a line at equal distances, the peers of a stage part the line by their shares, and each microbatch
goes to the peer on whose part it lies. Whoever sends it, each peer so gets its share of every step, to within one microbatch, and
neighbours in the order of launching lie far apart. Lanes through the stages follow by themselves; who is in a lane with whom changes with
every step, else a caller would never measure the peers of other lanes.

A record may claim anything, so the caller measures. Where shares follow rates, requests wait behind equally many others at all peers of a
stage, so the time that a request takes there is the same multiple of a microbatch's work at all of them. At a peer that claims more than
it does, it takes longer. So no peer counts as more than 4.5 times as fast as by its stage's median: honest peers' queues differ by
chance, and a far peer's answers take longer by what the way takes.

How much of the time later stages took, the callee tells. It is the same for all peers of a stage, but within a step their microbatches go
on to the same few later peers. So of that time the median is believed, and two standard deviations.

A single response may take seconds where the next takes a tenth of one: connection set-up and the first use of every kernel ride on a
peer's first, and a home machine is used for other things. So the average is of medians of three, and until its second response a peer
counts as at most 4.5 times as fast as the median claims to be, or as fast as the fastest that was measured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from statistics import median_high, median_low
from typing import NamedTuple

from peerd.policy.hashing import digest
from peerd.table.record import MAX_THROUGHPUT, PeerId, PeerRecord

SMOOTHING = 0.1
RECENT = 3
UNKNOWN_RESPONSE_S = 1.0
LEAST_RESPONSE_S = 1e-6
LEAST_RATE, MOST_RATE = 1e-9, MAX_THROUGHPUT
"""Samples per second that a record's claim counts as."""
LATER_DEVIATIONS = 2.0
"""Standard deviations of what later stages take that are believed beyond the median."""
REMEMBERED = 1 << 12
"""Size of the caches of peers."""
BELIEVED_MORE = 4.5
"""How much faster a peer may be than by what its stage's median makes of a request's time. In `simulate run` with 8 and 24 unlike
homes steps take up to 1.5 times as long with 1.2, 1.1 times with 2, and with 4.5 no longer than without this bound; with 3 one step of 40
took 1.9 times as long, as a caller that had seen a slow peer idle doubted faster ones. A peer that claims 4 or 100 times its rate makes
steps 1.03 to 1.54 times as long, and without the bound 1.3 to 11 times."""
FIRST_PAUSE_S, MOST_PAUSE_S, MOST_PAUSE_SHARE = 0.02, 0.16, 0.02
"""The pause before a peer that has no slot is asked again. It doubles each time, up to the second number or that share of a response."""
GOLDEN = (math.sqrt(5) - 1) / 2


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


@dataclass(slots=True)
class Measured:
    """A peer's requests: what they took there, queue and network included, and by its words in later stages."""

    here: MovingMedian = field(default_factory=MovingMedian)
    later: MovingMedian = field(default_factory=MovingMedian)


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
        return PartedLine(pool, list(accumulate(1 / each_s for each_s in self._believed_s(pool))))

    def observe(self, peer: PeerId, elapsed_s: float, later_s: float = 0.0) -> None:
        """Add a request to `peer` that took `elapsed_s`, of which the peer says that it waited `later_s` for later stages."""
        measured, later_s = self._measured.pop(peer, None) or Measured(), min(max(0.0, later_s), elapsed_s)
        measured.here.add(elapsed_s - later_s, self._smoothing)
        measured.later.add(later_s, self._smoothing)
        self._measured[peer] = measured
        if len(self._measured) > REMEMBERED:
            del self._measured[next(iter(self._measured))]

    def ban(self, record: PeerRecord) -> None:
        """Leave the peer out until it announces itself again, that is until its pair rises."""
        self._banned_at[record.peer] = record.pair

    def response_s(self, peer: PeerId) -> float:
        """Moving average of what a request takes at the peer, s; a guess where nothing was measured."""
        known = self._measured.get(peer)
        return known.here.mean_s if known is not None and known.here.count > 1 else UNKNOWN_RESPONSE_S

    def _believed_s(self, pool: Sequence[PeerRecord]) -> list[float]:
        """What each peer takes for a sample, as far as what was measured bears its claim out, s.

        A request waits for its callee's line in the time of later stages, so what it takes here is compared with what peers compute.
        """
        claimed_s = _claimed_s([record.throughput for record in pool])
        computed_s = _claimed_s([record.computes or record.throughput for record in pool])
        took_s = self._took_s(pool)
        parts = [each_s / max(took, LEAST_RESPONSE_S) for each_s, took in zip(computed_s, took_s, strict=True) if took is not None]
        part = median_high(parts) / BELIEVED_MORE if parts else 0.0
        known_s = [max(each_s, took * part) for each_s, took in zip(computed_s, took_s, strict=True) if took is not None]
        least_s = min([median_high(computed_s) / BELIEVED_MORE, *known_s])
        return [max(each_s, least_s if took is None else took * part) for each_s, took in zip(claimed_s, took_s, strict=True)]

    def _took_s(self, pool: Sequence[PeerRecord]) -> list[float | None]:
        """What a request took at each peer, and what it took in later stages beyond what is believed; None until the second response."""
        found = [known if known is not None and known.here.count > 1 else None for known in (self._measured.get(r.peer) for r in pool)]
        seen = [known.later for known in found if known is not None]
        if not seen:
            return [None] * len(pool)
        most_s = median_low(later.mean_s for later in seen) + LATER_DEVIATIONS * math.sqrt(median_low(later.variance for later in seen))
        return [None if known is None else known.here.mean_s + max(0.0, known.later.mean_s - most_s) for known in found]

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


def _claimed_s(rates: Sequence[float]) -> list[float]:
    """What peers take for a sample at these rates, s. One that has not measured itself counts as the median of the others."""
    known = [1 / min(max(rate, LEAST_RATE), MOST_RATE) for rate in rates if rate > 0]
    usual_s = median_high(known) if known else 1.0
    return [1 / min(max(rate, LEAST_RATE), MOST_RATE) if rate > 0 else usual_s for rate in rates]


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
