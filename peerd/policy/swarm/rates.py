"""How many samples a second a peer does in a stage: what it computes, or less where its line carries less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peerd.table.record import PeerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDemand:
    """What a sample asks of a peer of a stage."""

    work: float = 1.0
    """Of computing, in any unit that is the same for all stages."""
    sends: float = 0.0
    """Bytes: activations to the next stage, and gradients to the one before."""
    receives: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.work < math.inf and 0 <= self.sends < math.inf and 0 <= self.receives < math.inf):
            raise ValueError("a stage's work must be positive, its bytes not negative, and all of them finite")


Demands = Sequence[SampleDemand]
"""By stage; empty: all stages take the same work, and no line binds."""
NO_DEMAND = SampleDemand()


def demand_of(demands: Demands, stage: int) -> SampleDemand:
    return demands[stage] if demands else NO_DEMAND


def carried(up: float | None, down: float | None, demand: SampleDemand) -> float:
    """Samples per second that a line carries in a stage; infinite where nothing is known of it (None, or 0), or nothing is sent."""
    ways = ((up, demand.sends), (down, demand.receives))
    return min((rate / num_bytes for rate, num_bytes in ways if rate and num_bytes > 0), default=math.inf)


def speed_of(record: PeerRecord, demands: Demands) -> float:
    """Work per second that a peer computes, as its record says; 0: not known yet."""
    return (record.computes or record.throughput) * demand_of(demands, record.stage).work


def computed_elsewhere(throughput: float, demands: Demands, stage: int, elsewhere: int) -> float:
    """Samples per second that a peer which computes so many in one stage would compute in another."""
    return throughput * demand_of(demands, stage).work / demand_of(demands, elsewhere).work


def rate_at(record: PeerRecord, speed: float, demand: SampleDemand) -> float:
    """Samples per second that a peer of this speed would do in a stage. Its line counts where its record says that it is known well."""
    computed = speed / demand.work
    return min(computed, carried(record.up, record.down, demand)) if record.computes > 0 else computed
