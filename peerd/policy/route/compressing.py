"""How much a link is compressed: until it adds little to the time of a step (the sound form of FusionLLM's AdaTopK).

AdaTopK compresses in proportion to how slow a link is beside the slowest. But a link that keeps up with the computing gains nothing
by compression, and one that does not must be compressed until it does, whatever the others are like. So each link and direction is
judged alone, by what its transfers add to the critical path. They add to it in two ways:

- **The sender's line is busy.** All links of a peer share its line: a peer in the middle sends an activation and a gradient for each
  microbatch. A link counts with all tensors that its sender sends meanwhile. Judged by its own tensors alone, a link at 44 % load was
  left uncompressed where the line was at 180 %.
- **The pipeline fills and drains.** Once a step, the first microbatch crosses each boundary before the last stage can begin, and the last
  gradient crosses each on its way back. Nothing hides these transfers, so all of them together may take `PATH_SHARE` of the step.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from peerd.table.record import PeerId, PeerRecord
from peerd.table.view import LiveView

MOST_LOAD = 0.85
"""A line that is busy for more of the time makes tensors wait for one another, and is about to be the bottleneck."""
TARGET_LOAD = 0.75
RELAXED_LOAD = 0.7
"""A more exact codec is chosen again only if the load stays below this. The gap to `MOST_LOAD` prevents oscillation."""
PATH_SHARE = 0.05
"""Time of the transfers that nothing hides, as a share of the step."""
FEWEST_RATES, MEASURED_RATES = 5, 21
"""A link's rate is the median of the last measurements, and not known before there are a few: then two that are wrong do no harm. A
change that lasts shows after eleven."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The codec chosen, by its index among those allowed, and the reason."""

    rung: int
    load: float | None
    """The load of the sender's line with this codec."""
    reason: str


def choose_rung(num_bytes: Sequence[int], rate: float | None, pace_s: float | None, current: int = 0, most_s: float = math.inf) -> Choice:
    """The most exact of several codecs with which a link keeps up, and a transfer takes at most `most_s` seconds.

    `num_bytes`: what a microbatch takes with each codec, from the most exact to the one that loses most; `rate`: bytes per second that
    the link was measured at; `pace_s`: seconds that each of its transfers may take while nobody waits for the line. None: not known yet.
    A codec that takes no fewer bytes than a more exact one is never chosen.
    """
    if rate is None or pace_s is None or rate <= 0 or pace_s <= 0:
        return Choice(current, None, "not measured yet")
    loads = [size / rate / pace_s for size in num_bytes]
    burdens = [max(load, TARGET_LOAD * size / rate / most_s) for load, size in zip(loads, num_bytes, strict=True)]
    useful = [rung for rung in range(len(loads)) if not rung or num_bytes[rung] < min(num_bytes[:rung])]
    if burdens[current] > MOST_LOAD or current not in useful:
        rung = next((rung for rung in useful if burdens[rung] <= TARGET_LOAD), useful[-1])
    else:
        rung = next((rung for rung in useful if rung < current and burdens[rung] <= RELAXED_LOAD), current)
    return Choice(rung, loads[rung], _reason(loads, burdens, useful, rung))


def _reason(loads: Sequence[float], burdens: Sequence[float], useful: Sequence[int], rung: int) -> str:
    keeps_up = f"the line is busy {min(loads[rung], 9.99):.0%} of the time"
    if loads[rung] > MOST_LOAD:
        return f"{keeps_up} even so: it is the bottleneck"
    if burdens[rung] > MOST_LOAD:
        return f"{keeps_up}; transfers are still a large part of a short step"
    if rung == useful[0]:
        return keeps_up
    before = useful[useful.index(rung) - 1]
    if burdens[before] > loads[before]:
        return f"{keeps_up}; with less compression a transfer would be a large part of a short step"
    return f"{keeps_up}; with less compression it would be {min(loads[before], 99.9):.0%}"


def pace_s(live: LiveView, num_stages: int, sender: PeerId, receiver: PeerId, samples: int, slowness: float = 1.0) -> float | None:
    """Seconds that a transfer of `samples` samples may take while the sender's line still keeps up; None if that is not known.

    The slowest stage sets the run's pace, and each peer of a stage takes microbatches in proportion to its throughput. A peer sends one
    tensor of a microbatch to each side on which there is a stage. `slowness`: this link's rate, as a share of the fastest rate that its
    sender's line has shown. The other tensors take that much less time.
    """
    one, other = live.find(sender), live.find(receiver)
    if one is None or other is None or max(one.stage, other.stage) >= num_stages:
        return None
    own_flow = _flow(live, num_stages) * _share(live, one)
    of_line, of_link = own_flow * ((one.stage > 0) + (one.stage < num_stages - 1)), own_flow * _share(live, other)
    flow = of_link + max(0.0, of_line - of_link) * min(1.0, slowness)
    return samples / flow if of_link > 0 and flow < math.inf else None


def most_s(live: LiveView, num_stages: int, samples_per_step: int) -> float:
    """Longest time of a transfer, in seconds, at which those that nothing hides take `PATH_SHARE` of a step; infinite if not known."""
    flow, crossings = _flow(live, num_stages), 2 * (num_stages - 1)
    return PATH_SHARE * samples_per_step / flow / crossings if 0 < flow < math.inf and crossings > 0 else math.inf


def _flow(live: LiveView, num_stages: int) -> float:
    """Samples per second of the slowest stage that is known; 0 if none is."""
    return min((strength for stage in range(num_stages) if (strength := _strength(live, stage)) > 0), default=0.0)


def _strength(live: LiveView, stage: int) -> float:
    return sum(record.throughput for record in live.serving(stage))


def _share(live: LiveView, record: PeerRecord) -> float:
    """The share of its stage's microbatches that a peer takes."""
    strength = _strength(live, record.stage)
    return record.throughput / strength if strength > 0 else 0.0


@dataclass(slots=True)
class RateMeter:
    """Measures the rate of one link while transfers are under way. It holds numbers only; the caller reports the events.

    Transfers overlap, so each end of one gives a rate: the bytes that arrived since the end before it, or since the line was empty, by the
    time. The median of the last ones counts. A receiver that is busy with other things sees some transfers too late, which makes them
    seem fast, and others too long; a mean would follow the worst of them, the more so the smaller the transfers are.
    """

    _under_way: int = 0
    _since_s: float = 0.0
    _arrived: int = 0
    """Bytes that have arrived since `_since_s`."""
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED_RATES))

    @property
    def rate(self) -> float | None:
        """Bytes per second; None before there are `FEWEST_RATES` measurements."""
        return statistics.median(self._rates) if len(self._rates) >= FEWEST_RATES else None

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
            self._rates.append(self._arrived / took_s)
            self._since_s, self._arrived = now_s, 0
