"""A link between two mates that loses all packets in one direction: what the run keeps of its speed. Needs root (network namespaces).

Two stages of two peers, or of three with --mates 3, on links of 100 Mbit/s and 10 ms. Packets from the second peer of a stage to its first
are lost for a while (TCP then works in neither direction, once what is under way has stalled), in one stage and then in both. Where a
stage has two peers, one of them trains on alone, so half of the speed is what can be kept; with three, rounds go around the link.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_plan import DemoPlan
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from scripts.benchmarks._namespaces import Network
from scripts.benchmarks._report import progress
from scripts.benchmarks._swarms import looks
from scripts.benchmarks._switch import Links
from scripts.benchmarks._turns import place_in

SOUND = Links(mbit_per_s=100, round_trip_ms=10)
NUM_STAGES, STAND_IN_MS, POLL_S = 2, 40.0, 0.5
LEAST_KEPT = {2: 0.3, 3: 0.6}
"""The least share of the speed before, by the number of mates, that counts as a pass."""


def asymmetric(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench chaos asymmetric", description=__doc__)
    parser.add_argument("--mates", type=int, choices=(2, 3), default=2, help="peers a stage (default 2)")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long a link is dead (default 60)")
    given = parser.parse_args(arguments)
    shares = [kept(given.mates, given.seconds, stages) for stages in (1, NUM_STAGES)]
    return 0 if min(shares) >= LEAST_KEPT[given.mates] else 1


def kept(mates: int, seconds: float, stages: int) -> float:
    """The speed while the links are dead, as a share of that before."""
    manifest = Manifest(
        name="bench",
        model=ModelConfig(num_layers=NUM_STAGES, d_model=64, num_heads=2, d_ff=128),
        train=TrainConfig(num_stages=NUM_STAGES, microbatches_per_step=12, microbatch_size=1, sequence_length=32, steps=1_000_000),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(announce_period_s=1.0, rebalance_period_s=0.0),
    )
    num_peers = mates * NUM_STAGES
    plan = DemoPlan(manifest=manifest, num_peers=num_peers, slow={}, kills=(), chaos=None, stand_in_ms=STAND_IN_MS, observed=False)
    with Network(num_peers, SOUND) as network, DemoSwarm(plan, lambda _text: None, place=place_in(network)) as swarm:
        swarm.start()
        _watch(swarm, seconds / 4)
        before = _watch(swarm, seconds / 2)
        by_stage = [[peer for peer, daemon in enumerate(swarm.daemons) if daemon.stage == stage] for stage in range(stages)]
        network.change(replace(SOUND, dead=[(network.address(peers[1]), network.address(peers[0])) for peers in by_stage]))
        during = _watch(swarm, seconds)
        health = {item["code"] for daemon in swarm.daemons if daemon.status is not None for item in daemon.status["health"]}
        network.change(SOUND)
        after = _watch(swarm, seconds / 2)
        told = [dict(daemon.status["counters"]) for daemon in swarm.daemons if daemon.status is not None]
    wrong = {name: sum(int(each[name]) for each in told) for name in ("duplicate_microbatches", "lost_microbatches", "inexact_steps")}  # type: ignore[call-overload]
    progress(
        f"{mates} mates, dead in {stages} of {NUM_STAGES} stages: steps a second {before:.2f} before, {during:.2f} meanwhile"
        f" ({during / before:.2f}), {after:.2f} afterwards; {', '.join(sorted(health))}; {wrong}"
    )
    return during / before if not any(wrong.values()) else 0.0


def _watch(swarm: DemoSwarm, seconds: float) -> float:
    """Steps a second."""
    began_s, first = time.monotonic(), swarm.num_steps_told
    for _ in looks(swarm, POLL_S):
        if time.monotonic() - began_s >= seconds:
            break
    return (swarm.num_steps_told - first) / (time.monotonic() - began_s)
