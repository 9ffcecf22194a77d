"""Cuts by cost are optimal, lie where the model may be cut, and fit the smallest device."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, TrainConfig
from peerd.errors import ManifestError
from peerd.planner.cutting import balanced_cut, fitted, stage_layers
from peerd.planner.decoder import decoder_loads
from peerd.planner.kinds import planned_loads
from peerd.planner.memory import least_on_device, stage_memory
from peerd.planner.workload import Load, ModelLoads, estimate_stage, stage_flops, stage_load

FIRST, LAST = Load(num_parameters=900), Load(num_parameters=900, forward_flops=700)


def manifest_of(num_layers: int, num_stages: int, **model: Any) -> Manifest:
    return Manifest(model=ModelConfig(num_layers=num_layers, **model), train=TrainConfig(num_stages=num_stages, cut="cost"))


def slowest(manifest: Manifest, loads: ModelLoads, bounds: tuple[int, ...]) -> int:
    layers = [range(start, end) for start, end in pairwise(bounds)]
    return max(stage_flops(manifest, stage_load(manifest, loads, each), each.stop == bounds[-1]) for each in layers)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=8), st.data())
def test_no_cut_has_a_faster_slowest_stage(flops: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(flops)))
    manifest = manifest_of(len(flops), num_stages)
    loads = ModelLoads(first=FIRST, last=LAST, groups=tuple(Load(num_parameters=10, forward_flops=each) for each in flops))
    counts = balanced_cut(manifest, loads)
    assert counts is not None
    assert (len(counts), sum(counts)) == (num_stages, len(flops))
    found = (0, *(layers.stop for layers in stage_layers(manifest, loads)))
    every = [(0, *cuts, len(flops)) for cuts in combinations(range(1, len(flops)), num_stages - 1)]
    assert slowest(manifest, loads, found) == min(slowest(manifest, loads, bounds) for bounds in every)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=7), st.integers(0, 400_000), st.data())
def test_a_limit_on_memory_is_kept_whenever_it_can_be(parameters: list[int], most_bytes: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(parameters)))
    manifest = manifest_of(len(parameters), num_stages, d_model=8)
    loads = ModelLoads(first=FIRST, last=LAST, groups=tuple(Load(num_parameters=each, forward_flops=1) for each in parameters))
    limit = 2 * manifest.slots * manifest.boundary_bytes + most_bytes

    def fits(bounds: tuple[int, ...]) -> bool:
        layers = [range(start, end) for start, end in pairwise(bounds)]
        placing = least_on_device(manifest)
        needed = [stage_memory(manifest, stage_load(manifest, loads, each), manifest.slots, placing) for each in layers]
        return all(memory.device <= limit for memory in needed)

    counts = balanced_cut(manifest, loads, limit)
    every = [(0, *cuts, len(parameters)) for cuts in combinations(range(1, len(parameters)), num_stages - 1)]
    assert (counts is not None) == any(fits(bounds) for bounds in every)
    if counts is not None:
        assert fits((0, *(sum(counts[: number + 1]) for number in range(num_stages))))


def test_a_large_head_gets_fewer_layers_beside_it() -> None:
    manifest = Manifest(model=ModelConfig(num_layers=8, vocab_size=20_000), train=TrainConfig(num_stages=2, cut="cost"))
    loads = planned_loads(manifest)
    assert [len(layers) for layers in stage_layers(manifest, loads)] == [8 - 1, 1]


def test_groups_and_prescribed_boundaries_are_never_cut() -> None:
    shared = manifest_of(12, 3, layers_per_group=4)
    assert [len(layers) for layers in stage_layers(shared, planned_loads(shared))] == [4, 4, 4]
    model = ModelConfig(num_layers=8, boundary="maxout", boundary_layers=(1, 6))
    narrow = Manifest(model=model, train=TrainConfig(num_stages=2, cut="cost"))
    assert [len(layers) for layers in stage_layers(narrow, planned_loads(narrow))] == [6, 2]


def test_the_fewest_stages_that_fit_are_taken_and_evenly_where_that_fits() -> None:
    manifest = manifest_of(8, 2)
    loads = planned_loads(manifest)
    assert loads is not None
    whole, half = (estimate_stage(manifest, loads, layers).memory_bytes for layers in (range(8), range(4, 8)))
    assert fitted(manifest, loads, 2 * whole, range(1, 9)).train.num_stages == 1
    cut = fitted(manifest, loads, int(1.05 * half), range(1, 9))
    assert (cut.train.num_stages, cut.train.cut) == (2, "even")
    with pytest.raises(ManifestError, match=r"at most 1e-06 GB each; allow more stages"):
        fitted(manifest, loads, 1000, range(1, 9))


def test_an_uneven_model_is_cut_where_it_fits() -> None:
    """An even cut would overload the stage with the head."""
    manifest = Manifest(model=ModelConfig(num_layers=8, vocab_size=20_000), train=TrainConfig(num_stages=2))
    loads = planned_loads(manifest)
    assert loads is not None
    even = [estimate_stage(manifest, loads, layers).memory_bytes for layers in stage_layers(manifest, loads)]
    cut = fitted(manifest, loads, max(even) - 1, [2])
    assert cut.train.cut not in ("even", "cost")
    assert max(estimate_stage(cut, loads, layers).memory_bytes for layers in stage_layers(cut, loads)) < max(even)


def test_recomputing_costs_all_stages_but_the_last_a_forward_pass() -> None:
    manifest = Manifest(compute=ComputeConfig(recompute="always"))
    load = Load(forward_flops=10)
    assert (stage_flops(manifest, load, False), stage_flops(manifest, load, True)) == (40, 30)
    assert stage_flops(Manifest(), load, False) == 30


def test_the_papers_model_costs_what_the_paper_says() -> None:
    """SWARM appendix F, a layer of "xxlarge" width at 512 tokens: 201 M parameters and 6.2e11 operations, backward included.

    Its feed-forward layer has two matrices where GeGLU has three, so ours of 2/3 the hidden width are compared.
    """
    config = ModelConfig(num_layers=1, d_model=4096, num_heads=32, d_ff=16384 * 2 // 3)
    layer = decoder_loads(config, 1, 512).groups[0]
    assert layer.num_parameters == pytest.approx(201e6, rel=0.01)
    assert 3 * layer.forward_flops == pytest.approx(6.2e11, rel=0.05)
