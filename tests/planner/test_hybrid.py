"""The hybrid parameter server's planner: anchors, helpers, layers, and what its equations say of the paper's 12 devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.planner.hybrid import HybridJob, best_plan, papers_number, plans
from peerd.planner.network import PeerSpec, Topology
from tests.planner.networks import irregular

KINDS = st.tuples(st.floats(1e8, 1e11), st.sampled_from([2e9, 6e9, 2e10]), st.booleans())
JOB = HybridJob(num_layers=12, layer_flops=1e9, layer_bytes=1e9, boundary_bytes=1e6, num_minibatches=10)


def twelve_devices() -> Topology:
    """Three RTX 4090 in the cloud, three on a campus, and six RTX 3080 behind a local provider, of which four are unreliable.

    The paper shows its links as a picture: here 10 Gbit/s within a machine room, 1 Gbit/s and 5 ms among the RTX 3080, 400 Mbit/s and
    25 ms between them and the rooms, 480 Mbit/s and 30 ms between the rooms.
    """
    place = ["cloud"] * 3 + ["campus"] * 3 + ["provider"] * 6

    def link(a: str, b: str) -> tuple[float, float]:
        if a == b:
            return (5e-3, 125e6) if a == "provider" else (1e-4, 1.25e9)
        return (0.025, 50e6) if "provider" in (a, b) else (0.03, 60e6)

    peers = [
        PeerSpec(name=f"{at}-{number}", flops=12e12 if at == "provider" else 33e12, memory_bytes=60.0, is_reliable=number < 8)
        for number, at in enumerate(place)
    ]
    links = [[link(a, b) for b in place] for a in place]
    return Topology(
        tuple(peers), tuple(tuple(each[0] for each in row) for row in links), tuple(tuple(each[1] for each in row) for row in links)
    )


LLAMA_33B = HybridJob(num_layers=60, layer_flops=6 * 540e6 * 8192, layer_bytes=1.0, boundary_bytes=8192 * 6656 * 2.0, num_minibatches=128)
"""Minibatches of 4 x 2048 tokens; memory in layers."""


def test_of_the_papers_devices_one_stage_is_fastest_while_it_fits() -> None:
    """Why the paper's three stages do not follow from its equation 2: work in proportion to compute takes as long however it is cut, and
    each cut adds a boundary."""
    found = [plan.iteration_s / 128 if plan else 0.0 for plan in plans(twelve_devices(), LLAMA_33B)]
    assert found[0] == min(found)
    assert found[:4] == pytest.approx([6.15, 8.48, 8.21, 7.94], abs=0.01)


def test_where_three_stages_are_the_fewest_that_fit_they_are_the_papers() -> None:
    job = replace(LLAMA_33B, layer_bytes=60 / 25)
    one, two, three = plans(twelve_devices(), job)[:3]
    assert one is two is None
    assert three is not None
    assert sorted(stage.servers for stage in three.stages) == [(0, 1, 2), (3, 4, 5), (6, 7)]


def test_the_papers_own_estimate_goes_on_splitting_where_the_exact_time_rises() -> None:
    assert papers_number(twelve_devices(), LLAMA_33B) > 1


def test_a_network_without_reliable_devices_is_refused() -> None:
    network = irregular(3, 0)
    shaky = replace(network, peers=tuple(replace(peer, is_reliable=False) for peer in network.peers))
    with pytest.raises(ValueError, match="no device is reliable"):
        plans(shaky, JOB)


@settings(deadline=None, max_examples=20)
@given(
    st.integers(0, 10_000),
    st.lists(st.tuples(st.floats(1e8, 1e11), st.sampled_from([2e9, 6e9, 2e10]), st.booleans()), min_size=1, max_size=7),
)
def test_every_plan_places_all_layers_and_no_device_twice(seed: int, kinds: list[tuple[float, float, bool]]) -> None:
    network = irregular(len(kinds), seed)
    peers = [
        PeerSpec(name=str(number), flops=flops, memory_bytes=memory, is_reliable=number == 0 or reliable)
        for number, (flops, memory, reliable) in enumerate(kinds)
    ]
    network = replace(network, peers=tuple(peers))
    found = plans(network, JOB)
    for number, plan in enumerate(found, 1):
        if plan is None:
            continue
        used = [device for stage in plan.stages for device in (*stage.servers, *stage.helpers)]
        assert len(plan.stages) == number
        assert sum(stage.num_layers for stage in plan.stages) == JOB.num_layers
        assert len(used) == len(set(used))
        assert all(peers[each].is_reliable for stage in plan.stages for each in stage.servers)
        assert all(not peers[each].is_reliable for stage in plan.stages for each in stage.helpers)
        assert all(stage.front and stage.back for stage in plan.stages)
        assert all(peers[each].memory_bytes >= stage.num_layers * 1e9 for stage in plan.stages for each in (*stage.servers, *stage.helpers))
        assert plan.iteration_s == pytest.approx(10 * max(stage.comm_s + stage.stage_s for stage in plan.stages))
    best = best_plan(network, JOB)
    assert best == min((plan for plan in found if plan), key=lambda plan: plan.iteration_s, default=None)
