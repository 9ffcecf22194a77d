"""How much a link is compressed: only until it is no longer the bottleneck (the sound form of FusionLLM's AdaTopK).

AdaTopK compresses in proportion to how slow a link is beside the slowest. But a link that keeps up with the computing gains nothing
by compression, and one that does not must be compressed until it does, whatever the others are like. So each link and
direction is judged alone, by its load: the time that a microbatch's bytes take over it, by the time between two microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peerd.table.record import PeerId
from peerd.table.view import LiveView

MOST_LOAD = 0.95
"""A link with more is the bottleneck, or about to be."""
TARGET_LOAD = 0.85
RELAXED_LOAD = 0.8
"""A more exact codec is chosen again only if the load stays below this. The gap to `MOST_LOAD` prevents oscillation."""
MEMORY_S = 5.0
"""Time of being busy after which a measurement counts 1/e."""
LEAST_FORGOTTEN = 0.1
"""Each new measurement, however short, reduces the old ones by at least this share, so that a faster link is noticed soon."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The codec chosen, by its index among those allowed, and the reason."""

    rung: int
    load: float | None
    """The link's load with this codec."""
    reason: str


def choose_rung(num_bytes: Sequence[int], rate: float | None, pace_s: float | None, current: int = 0) -> Choice:
    """The most exact of several codecs with which a link keeps up.

    `num_bytes`: what a microbatch takes with each codec, from the most exact to the one that loses most; `rate`: bytes per second that
    the link was measured at; `pace_s`: seconds between two microbatches while nobody waits for the link. None: not known yet.
    A codec that takes no fewer bytes than a more exact one is never chosen.
    """
    if rate is None or pace_s is None or rate <= 0 or pace_s <= 0:
        return Choice(current, None, "not measured yet")
    loads = [size / rate / pace_s for size in num_bytes]
    useful = [rung for rung in range(len(loads)) if not rung or num_bytes[rung] < min(num_bytes[:rung])]
    if loads[current] > MOST_LOAD or current not in useful:
        rung = next((rung for rung in useful if loads[rung] <= TARGET_LOAD), useful[-1])
    else:
        rung = next((rung for rung in useful if rung < current and loads[rung] <= RELAXED_LOAD), current)
    return Choice(rung, loads[rung], _reason(loads, useful, rung))


def _reason(loads: Sequence[float], useful: Sequence[int], rung: int) -> str:
    keeps_up = f"the link is busy {min(loads[rung], 9.99):.0%} of the time"
    if loads[rung] > MOST_LOAD:
        return f"{keeps_up} even so: it is the bottleneck"
    if rung == useful[0]:
        return keeps_up
    return f"{keeps_up}; with less compression it would be {min(loads[useful[useful.index(rung) - 1]], 99.9):.0%}"


def pace_s(live: LiveView, num_stages: int, caller: PeerId, callee: PeerId, samples: int) -> float | None:
    """Seconds between two microbatches of `samples` samples over one link if the network were free; None if that is not known.

    The slowest stage sets the run's pace, and each peer of a stage takes microbatches in proportion to its throughput.
    """
    one, other = live.find(caller), live.find(callee)
    if one is None or other is None or max(one.stage, other.stage) >= num_stages:
        return None
    strengths = [sum(record.throughput for record in live.serving(stage)) for stage in range(num_stages)]
    measured = [strength for strength in strengths if strength > 0]
    shares = [end.throughput / strengths[end.stage] if strengths[end.stage] > 0 else 0.0 for end in (one, other)]
    flow = min(measured, default=0.0) * shares[0] * shares[1]
    return samples / flow if flow > 0 else None


@dataclass(slots=True)
class RateMeter:
    """Measures the rate of one link while transfers are under way. It holds numbers only; the caller reports the events.

    Transfers overlap, so the rate is all bytes divided by all time in which any transfer was under way.
    """

    _under_way: int = 0
    _since_s: float = 0.0
    _arrived: int = 0
    """Bytes that have arrived since `_since_s`."""
    _bytes: float = 0.0
    _busy_s: float = 0.0

    @property
    def rate(self) -> float | None:
        """Bytes per second; None before anything was measured."""
        return self._bytes / self._busy_s if self._busy_s > 0 else None

    def begin(self, now_s: float) -> None:
        """A transfer has begun to arrive."""
        if not self._under_way:
            self._since_s, self._arrived = now_s, 0
        self._under_way += 1

    def end(self, num_bytes: int, now_s: float) -> None:
        """A transfer of `num_bytes` is over."""
        self._under_way -= 1
        self._arrived += num_bytes
        took_s = now_s - self._since_s
        if took_s > 0 and self._arrived:
            kept = min(math.exp(-took_s / MEMORY_S), 1 - LEAST_FORGOTTEN)
            self._bytes = kept * self._bytes + self._arrived
            self._busy_s = kept * self._busy_s + took_s
            self._since_s, self._arrived = now_s, 0
