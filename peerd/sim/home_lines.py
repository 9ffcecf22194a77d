"""Steps of a run whose peers all have the same line and the same device. Rates are bytes per second."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from peerd.planner.network import PeerSpec, Topology
from peerd.planner.steady import RunCost
from peerd.sim.network import Pairs
from peerd.sim.run import simulate_run
from peerd.sim.step_run import RunSettings

SIMULATED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HomePeers:
    """All peers of a run."""

    bytes_per_s: float
    """Of each peer's line, each way."""
    round_trip_s: float
    flops: float
    """Of each device, floating-point operations per second."""
    num_replicas: int = 2
    """Peers of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HomePace:
    """What comes of it."""

    step_s: float
    tokens_per_s: float
    compute_share: float
    """Of its time that a peer of the busiest stage computes."""
    sent_bytes_per_s: float
    """By the peer that sends most."""


def pace_of(cost: RunCost, peers: HomePeers) -> HomePace:
    """Simulate a few steps; the first one, in which routers know nothing, does not count."""
    number = len(cost.stages) * peers.num_replicas
    rate, delay_s = peers.bytes_per_s, peers.round_trip_s / 2
    specs = tuple(PeerSpec(name=f"p{each}", flops=peers.flops, up=rate, down=rate) for each in range(number))
    delays = tuple(tuple(0.0 if one == other else delay_s for other in range(number)) for one in range(number))
    links = Pairs(Topology(specs, delays, ((rate,) * number,) * number))
    members = tuple(tuple(range(stage * peers.num_replicas, (stage + 1) * peers.num_replicas)) for stage in range(len(cost.stages)))
    found = simulate_run(cost, links, members, RunSettings(num_steps=SIMULATED_STEPS, slots=cost.slots, microbatch_size=1, noise=0.0))
    step_s = statistics.median(found.step_s[1:])
    busiest_s = max(stage.flops for stage in cost.stages) / peers.flops * cost.microbatches_per_step / peers.num_replicas
    return HomePace(
        step_s=step_s,
        tokens_per_s=found.tokens_per_s,
        compute_share=busiest_s / step_s,
        sent_bytes_per_s=max(found.sent_bytes) / sum(found.step_s),
    )
