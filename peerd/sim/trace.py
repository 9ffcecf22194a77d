"""Churn traces: when how many peers come or go. Generated, or read from a user's CSV."""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass
from pathlib import Path

from peerd.errors import UsageError

HOUR_S = 3600.0
HOURS = 32.0
PEERS_PER_STAGE = 100
SHRINK = 0.5
"""Share of the peers that are there at the start and gone for good at the end."""
TURNOVER = 3.4
"""Peers that come during the trace, for each one there at the start."""
MEAN_BURST = 7.0
"""Peers of one preemption burst, for each 400 there at the start."""
BURST_S = 120.0
REFILL_S = 5400.0
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
    """A swarm of preemptible machines that shrinks to half in bursts, restlessness growing from nothing (SWARM figure 5).

    The rate of bursts grows linearly; each burst takes some peers within two minutes, and most come back one by one.
    """
    chance = random.Random(f"trace/{seed}/{num_peers}")
    duration_s = hours * HOUR_S
    num_gone, num_come = round(num_peers * (TURNOVER + SHRINK)), round(num_peers * TURNOVER)
    changes: list[Change] = []
    while num_gone > 0:
        burst_at_s = duration_s * math.sqrt(chance.random())
        size = min(num_gone, 1 + int(chance.expovariate(1 / max(MEAN_BURST * num_peers / 400 - 1, 1e-9))))
        come_back = min(num_come, round(size * num_come / num_gone))
        num_gone, num_come = num_gone - size, num_come - come_back
        changes += [Change(min(duration_s, burst_at_s + chance.uniform(0, BURST_S)), -1) for _ in range(size)]
        changes += [Change(min(duration_s, burst_at_s + chance.uniform(0, REFILL_S)), 1) for _ in range(come_back)]
    return Trace(num_peers=num_peers, changes=tuple(sorted(changes, key=lambda c: c.time_s)), duration_s=duration_s)
