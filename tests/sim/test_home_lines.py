"""Steps over equal lines, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.config.manifest import Manifest, ModelConfig, TrainConfig
from peerd.planner.cutting import stage_layers
from peerd.planner.decoder import decoder_loads
from peerd.planner.run_costs import run_cost
from peerd.planner.steady import RunCost
from peerd.sim.home_lines import HomePeers, pace_of

RUN = Manifest(
    model=ModelConfig(d_model=256, num_layers=4, num_heads=4), train=TrainConfig(num_stages=2, microbatches_per_step=16, microbatch_size=1)
)
PEERS = HomePeers(bytes_per_s=2.5e6, round_trip_s=0.06, flops=1e11)


def _cost() -> RunCost:
    loads = decoder_loads(RUN.decoder, 1, RUN.train.sequence_length, "float32")
    return run_cost(RUN, loads, stage_layers(RUN, loads))


def test_a_fast_line_leaves_the_time_to_computing() -> None:
    cost = _cost()
    fast = pace_of(cost, replace(PEERS, bytes_per_s=1e12, round_trip_s=0.0))
    assert 0.5 < fast.compute_share <= 1
    assert fast.tokens_per_s == pytest.approx(16 * RUN.tokens_per_microbatch / fast.step_s, rel=0.05)


def test_a_slow_line_takes_its_time_and_carries_no_more_than_it_can() -> None:
    cost = _cost()
    slow, slower = pace_of(cost, PEERS), pace_of(cost, replace(PEERS, bytes_per_s=2.5e5))
    assert slow.compute_share < 0.5
    assert 5 < slower.step_s / slow.step_s < 10.1
    for pace, rate in ((slow, 2.5e6), (slower, 2.5e5)):
        assert 0.5 * rate < pace.sent_bytes_per_s <= rate
