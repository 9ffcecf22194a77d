"""What this peer measures of its own line, and of the lines of others, while tensors pass: `policy/round/line_rates.py` says what follows.

Whoever moves bulk over links calls `received_from` and `delivered_to`; `rates_of` is what a round's leader asks.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from peerd.policy.owner.governor import Limits
from peerd.policy.round.line_rates import LineMeter, RateSamples, claims, line_rate
from peerd.policy.round.probing import Probes
from peerd.table.record import PeerId, PeerRecord

MOST_BEYOND = 4.0
"""Where the way is long, a quarter of a megabyte that travels alone comes so many times as slowly as many in a row: TCP begins slowly."""


class LineRates(NamedTuple):
    """Bytes per second of a peer's line; None: unknown."""

    up: float | None
    down: float | None


class OwnLine:
    """The rates of this peer's line, and what it has seen of the lines of others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._up, self._down = LineMeter(), LineMeter(is_up=False)
        self._before = LineRates(None, None)
        """What is known from peers that are gone."""
        self.probes = Probes()
        self._told: defaultdict[PeerId, RateSamples] = defaultdict(partial(RateSamples, follows=True))
        """The rates at which each peer says that this peer's tensors arrive there."""
        self._ups: defaultdict[PeerId, RateSamples] = defaultdict(RateSamples)
        self._downs: defaultdict[PeerId, RateSamples] = defaultdict(RateSamples)

    def received_from(self, peer: PeerId, num_bytes: int, busy_s: float, line_share: float | None = None) -> None:
        """Count bytes of `peer` that have just arrived whole, `busy_s` seconds after the first of them.

        `line_share`: the share of the peer's uplink that they had, as far as it is known: 1 where it sends to nobody else meanwhile; in an
        exchange, what it owes to this peer by what it owes to all. None: unknown, so the transfer tells nothing of the peer's whole uplink.
        """
        self._passed(self._down, self._ups, peer, num_bytes, busy_s, line_share)

    def delivered_to(self, peer: PeerId, num_bytes: int, busy_s: float, line_share: float | None = None) -> None:
        """Count bytes that `peer` has just acknowledged, `busy_s` seconds after the first of them was sent.

        `line_share`: the share of the peer's downlink that they had, as for `received_from`.
        """
        self._passed(self._up, self._downs, peer, num_bytes, busy_s, line_share)

    def told(self, peer: PeerId, rate: float, num_bytes: int) -> None:
        """Take the rate at which a peer says that this peer's tensors arrive there; the last ones had `num_bytes`."""
        self._told[peer].saw(rate, num_bytes / rate)

    @property
    def measured(self) -> LineRates:
        """The rates of this peer's own line, as far as it has seen them.

        What was acknowledged and what others tell are lower bounds, since the other end may be the slower one: where the only mate has a
        slow line, chunks of averages show that line. Of what is told the second highest counts, which one liar among several cannot raise.
        The highest counts up to `MOST_BEYOND` times what else is known: of two honest tellers, one may have got a few tensors alone.
        Probes fill the line, so what they show counts beside all that.
        """
        told = self._told_rates()
        known = max(self._shown(told), self.probes.rate or 0.0)
        up = max(known, min(told[-1], MOST_BEYOND * known or math.inf) if told else 0.0)
        return LineRates(up or None, self._down.rate or self._before.down)

    @property
    def shown(self) -> float | None:
        """The uplink as tensors show it, apart from probes."""
        return self._shown(self._told_rates()) or None

    def _told_rates(self) -> list[float]:
        return sorted(rate for meter in self._told.values() if (rate := meter.rate) is not None)

    def _shown(self, told: Sequence[float]) -> float:
        return max(self._up.rate or self._before.up or 0.0, told[-2] if len(told) > 1 else 0.0)

    @property
    def is_sound(self) -> bool:
        """Whether the uplink was measured with enough under way: a few microbatches may show less than it can do."""
        return self._up.rate is not None or self.probes.rate is not None

    def claims(self, limits: Limits) -> tuple[int, int]:
        """Up and down for this peer's record."""
        return claims(*self.measured, limits.upload, limits.download)

    def seen_of(self, peer: PeerId) -> LineRates:
        """The rates of a peer's line as measured here."""
        return LineRates(*(meters[peer].rate if peer in meters else None for meters in (self._ups, self._downs)))

    def rates_of(self, record: PeerRecord) -> LineRates:
        """The rates of a peer's line as far as they are believed: what its record says, bounded by what was measured here."""
        own, seen = self.measured, self.seen_of(record.peer)
        return LineRates(line_rate(record.up, seen.up, own.down), line_rate(record.down, seen.down, own.up))

    def forget(self, peer: PeerId) -> None:
        """Forget a peer that is gone. What it told of this peer's uplink counts until others tell more."""
        self._before = self.measured
        for meters in (self._ups, self._downs, self._told):
            meters.pop(peer, None)

    def _passed(
        self, own: LineMeter, others: dict[PeerId, RateSamples], peer: PeerId, num_bytes: int, busy_s: float, line_share: float | None
    ) -> None:
        if not (busy_s > 0 and num_bytes > 0):
            return
        now_s = self._clock()
        own.passed(num_bytes, now_s - busy_s, now_s)
        if line_share is not None and line_share > 0:
            others[peer].saw(num_bytes / busy_s / line_share, busy_s)
