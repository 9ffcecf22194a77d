"""Which line a peer of a running swarm needs: the planner counts the same bytes, and the table says how long a step takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.config.manifest import Manifest, ModelConfig, SwarmConfig, TrainConfig, WireConfig
from peerd.daemon.link_needs import needs, why_unaveraged
from peerd.models.stages import layers_of, model_loads, stage_traffics
from peerd.planner.link_needs import planned_needs, stage_traffic
from peerd.planner.workload import estimate_stage, stage_load
from tests.strategies import member, view_of

MANIFEST = Manifest(
    model=ModelConfig(num_layers=4, d_model=64, num_heads=2, d_ff=256),
    train=TrainConfig(num_stages=2, microbatch_size=4, sequence_length=32, microbatches_per_step=8),
    swarm=SwarmConfig(announce_period_s=5.0),
)
WIRES = [WireConfig(), WireConfig(activations="auto", weight_gradients="auto:int4"), WireConfig(weight_gradients="powersgd:2")]


@pytest.mark.parametrize("wire", WIRES)
def test_the_planner_and_a_daemon_count_the_same_bytes(wire: WireConfig) -> None:
    manifest = replace(MANIFEST, wire=wire)
    loads = model_loads(manifest)
    layers = [layers_of(manifest, stage) for stage in range(2)]
    assert stage_traffics(manifest) == tuple(stage_traffic(manifest, stage_load(manifest, loads, each), each) for each in layers)


def test_what_a_stage_sends_is_in_the_smallest_codec_that_the_run_allows() -> None:
    exact, smallest = (stage_traffics(replace(MANIFEST, wire=wire))[0].gradient_bytes for wire in WIRES[:2])
    assert smallest < 0.15 * exact


def test_the_first_stage_sends_activations_and_the_last_one_gradients() -> None:
    first, last = stage_traffics(MANIFEST)
    assert first.boundary_up == first.boundary_down == last.boundary_up == MANIFEST.boundary_bytes


def test_a_round_may_take_as_long_as_the_slowest_stage_computes() -> None:
    fast = view_of(member("a", throughput=1e3), member("b", stage=1, throughput=1e3))
    slow = view_of(member("a", throughput=1e3), member("b", stage=1, throughput=0.1))
    gradient_bytes = stage_traffics(MANIFEST)[0].gradient_bytes
    assert needs(MANIFEST, fast)[0].rounds == 0.0
    assert needs(MANIFEST, fast, num_joining=1)[0].rounds == pytest.approx(gradient_bytes / 9.0)
    assert needs(MANIFEST, slow, num_joining=1)[0].rounds == pytest.approx(gradient_bytes / (8 * 4 / 0.1))
    assert needs(MANIFEST, slow)[1].boundary_up == pytest.approx(MANIFEST.boundary_bytes * 0.1 / 4)


def test_nothing_is_needed_for_rounds_as_long_as_a_stage_has_computed_nothing() -> None:
    live = view_of(member("a", throughput=1e3), member("b", stage=1, throughput=0.0))
    assert [need.rounds for need in needs(MANIFEST, live, num_joining=1)] == [0.0, 0.0]


def test_a_peer_whose_record_tells_of_a_slow_line_is_unaveraged_for_that() -> None:
    slow, mate, far = member("a", throughput=1e3, up=1000, down=10**9), member("m", throughput=1e3), member("b", stage=1, throughput=1e3)
    live = view_of(slow, mate, far)
    assert why_unaveraged(MANIFEST, live, slow).startswith("its upload is too slow for this run (needs 0.")
    assert why_unaveraged(MANIFEST, live, mate) == ""


def test_what_is_planned_for_two_devices_a_stage_is_what_two_such_peers_are_told() -> None:
    loads = model_loads(MANIFEST)
    stages = [estimate_stage(MANIFEST, loads, layers_of(MANIFEST, stage)) for stage in range(2)]
    flops = 1e9
    rate = flops / max(stage.flops_per_token for stage in stages) / 32
    names = (("a", 0), ("b", 0), ("c", 1), ("d", 1))
    live = view_of(*(member(name, stage=stage, throughput=rate) for name, stage in names))
    planned, told = planned_needs(MANIFEST, stages, flops), needs(MANIFEST, live)
    for one, other in zip(planned, told, strict=True):
        assert (one.rounds, one.boundary_up, one.boundary_down) == pytest.approx((other.rounds, other.boundary_up, other.boundary_down))
