"""An upload cap as the owner's provider sees it: on the wire of a network namespace, headers and all."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_plan import DemoPlan
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from scripts.benchmarks._namespaces import Network
from scripts.benchmarks._switch import Links
from scripts.benchmarks._turns import place_in

CAP_MBIT, MOST_ON_THE_WIRE_MBIT = 10.0, 11.0
WINDOW_S, WATCHED_S = 10.0, 35.0
LOOK_S = 0.5
MANIFEST = Manifest(
    name="cap",
    model=ModelConfig(num_layers=2, d_model=64, num_heads=2, d_ff=64),
    train=TrainConfig(num_stages=2, microbatch_size=16, sequence_length=64, steps=1_000_000),
    compute=ComputeConfig(threads=1),
    swarm=SwarmConfig(announce_period_s=1.0, checkpoint_every_steps=0, rebalance_period_s=0.0),
)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="makes network namespaces, which needs root")
def test_no_ten_seconds_hold_more_than_the_cap_on_the_wire_and_the_cap_is_used() -> None:
    """The first peer sends 256 KiB a microbatch, far more than the cap allows."""
    plan = DemoPlan(manifest=MANIFEST, num_peers=2, slow={}, kills=(), chaos=None, stand_in_ms=0.0, observed=False)
    with (
        Network(2, Links(mbit_per_s=100, round_trip_ms=10), offload=False) as network,
        DemoSwarm(plan, lambda _text: None, place=place_in(network)) as swarm,
    ):
        swarm.start()
        first = swarm.daemons[0].client
        first.request("wait", step=1, timeout_s=120.0, silence_s=125.0)
        first.request("limits", change={"upload": CAP_MBIT * 1e6 / 8})
        time.sleep(2.0)  # what had passed the cap already
        seen = [(time.monotonic(), network.sent_bytes(0))]
        while seen[-1][0] - seen[0][0] < WATCHED_S:
            time.sleep(LOOK_S)
            seen.append((time.monotonic(), network.sent_bytes(0)))
        status = first.request("status")
    windows = []
    for at_s, sent in seen:
        later = [(then_s, total) for then_s, total in seen if then_s - at_s >= WINDOW_S]
        windows += [8e-6 * (total - sent) / (then_s - at_s) for then_s, total in later[:1]]
    assert max(windows) <= MOST_ON_THE_WIRE_MBIT
    assert max(windows) >= 0.8 * CAP_MBIT, "the cap is what it can have, not less"
    counters, cap = status["counters"], CAP_MBIT * 1e6 / 8
    assert 0.7 * cap <= status["peer"]["up"] <= cap, "its record tells others what it can send"
    assert (counters["duplicate_microbatches"], counters["lost_microbatches"]) == (0, 0)
