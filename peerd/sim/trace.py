"""Churn traces: when how many peers come or go. Generated, or read from a user's CSV."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

HOUR_S = 3600.0
HOURS = 32.0
PEERS_PER_STAGE = 100
SHRINK = 0.5
"""Share of the peers that are there at the start and gone for good at the end."""
TURNOVER = 2.6
"""Peers that come during the trace, for each one there at the start."""
MEAN_BURST = 14.0
"""Peers of one preemption burst, for each 400 there at the start."""
BURST_S = 120.0
GROWTH = 0.85
"""Burst times are duration x chance^GROWTH: their rate grows as time^(1 / GROWTH - 1)."""
REFILL_S = 7200.0
"""A lost peer that is replaced comes back within this time."""
MAX_PEERS = 1_000_000
MAX_CHANGES = 1_000_000


@dataclass(frozen=True, slots=True)
class Change:
    """At `time_s`, `peers` come (or go, where negative)."""

    time_s: float
    peers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """`num_peers` serve from the start; the changes follow in order of time."""

    num_peers: int
    changes: tuple[Change, ...]
    duration_s: float


def generate(num_peers: int, seed: int, hours: float = HOURS) -> Trace:
    """A swarm of preemptible machines that shrinks to half in bursts and grows more restless (after SWARM, figure 5).

    Each burst takes some peers within two minutes, and most of them come back one by one.
    """
    chance = random.Random(f"trace/{seed}/{num_peers}")
    duration_s = hours * HOUR_S
    num_gone, num_come = round(num_peers * (TURNOVER + SHRINK)), round(num_peers * TURNOVER)
    mean_size = max(1.0, MEAN_BURST * num_peers / 400)
    changes: list[Change] = []
    while num_gone > 0:
        burst_at_s = duration_s * chance.random() ** GROWTH
        size = min(num_gone, 1 + int(chance.expovariate(1.0) * (mean_size - 1)))
        come_back = round(size * num_come / num_gone)
        num_gone, num_come = num_gone - size, num_come - come_back
        changes += [Change(burst_at_s + chance.uniform(0, BURST_S), -1) for _ in range(size)]
        changes += [Change(burst_at_s + chance.uniform(0, REFILL_S), 1) for _ in range(come_back)]
    within = sorted((change for change in changes if change.time_s < duration_s), key=lambda change: change.time_s)
    return Trace(num_peers=num_peers, changes=tuple(within), duration_s=duration_s)
