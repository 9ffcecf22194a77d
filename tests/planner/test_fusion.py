"""OP-Fence: communities, exact cuts, and what they gain over equal numbers of layers on FusionLLM's first testbed."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.planner.fusion import LayerCosts, best_cut, communities, equal_numbers, fenced_order, measured, op_fence
from peerd.planner.network import PeerSpec, Topology
from tests.planner.networks import irregular

GPT2_XL_LAYERS, WIDTH, TOKENS = 48, 1600, 3 * 1024
LAYER_PARAMETERS = 12 * WIDTH**2


def gpt2_xl(parameter_bytes: float) -> LayerCosts:
    """Batches of 3 x 1024 tokens in 2 microbatches, float32 boundaries of 20 MB, as the paper has them."""
    boundary = 4.0 * TOKENS * WIDTH
    return LayerCosts(
        num_layers=GPT2_XL_LAYERS,
        flops=lambda start, end: (end - start) * 6.0 * LAYER_PARAMETERS * TOKENS,
        memory_bytes=lambda start, end: (end - start) * LAYER_PARAMETERS * parameter_bytes,
        boundary_bytes=lambda layer: (boundary, boundary),
        num_microbatches=2,
    )


def first_testbed(order_seed: int | None = None) -> Topology:
    """One machine with 8 RTX 4090 and four with 4 RTX 2080 each. The paper shows its links as a picture, "8 Mbit/s to 10 Gbit/s": here
    10 Gbit/s and 0.1 ms within a machine, 1 Gbit/s and 1 ms within a cluster, 8 Mbit/s and 30 ms between the two."""
    machine_of = [("A", 0)] * 8 + [("B", number) for number in range(4) for _ in range(4)]
    if order_seed is not None:
        Random(order_seed).shuffle(machine_of)

    def link(a: tuple[str, int], b: tuple[str, int]) -> tuple[float, float]:
        if a == b:
            return 1e-4, 1.25e9
        return (1e-3, 125e6) if a[0] == b[0] else (0.03, 1e6)

    peers = [
        PeerSpec(name=f"{cluster}{machine}/{number}", flops=33e12 if cluster == "A" else 4e12, memory_bytes=24e9 if cluster == "A" else 8e9)
        for number, (cluster, machine) in enumerate(machine_of)
    ]
    links = [[link(a, b) for b in machine_of] for a in machine_of]
    return Topology(
        tuple(peers), tuple(tuple(each[0] for each in row) for row in links), tuple(tuple(each[1] for each in row) for row in links)
    )


@pytest.mark.parametrize("order_seed", [None, 1, 2])
def test_op_fence_beats_equal_numbers_on_the_first_testbed(order_seed: int | None) -> None:
    testbed = first_testbed(order_seed)
    found, equal = op_fence(testbed, gpt2_xl(24)), equal_numbers(testbed, gpt2_xl(24), range(24))
    assert found is not None
    assert found.iteration_s * 1.5 <= equal.iteration_s
    assert {testbed.peers[each].name[0] for each in found.devices} == {"A"}  # it leaves the slow link out altogether


@pytest.mark.parametrize("order_seed", [1, 2])
def test_with_all_devices_the_fenced_order_alone_beats_the_order_of_the_list(order_seed: int) -> None:
    testbed, costs = first_testbed(order_seed), gpt2_xl(24)
    fenced = equal_numbers(testbed, costs, fenced_order(testbed, 2e7))
    assert fenced.iteration_s * 1.5 <= equal_numbers(testbed, costs, range(24)).iteration_s


def test_communities_are_the_clusters_of_fast_links() -> None:
    place = [0, 1, 2, 0, 1, 2, 0, 1, 2]
    weights = [[0.0 if a == b else 10.0 if place[a] == place[b] else 1.0 for b in range(9)] for a in range(9)]
    assert sorted(map(sorted, communities(weights))) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert communities([[0.0]]) == [[0]]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 5), st.integers(1, 8))
def test_no_cut_along_an_order_is_faster(seed: int, num_devices: int, num_layers: int, num_microbatches: int) -> None:
    random = Random(seed)
    network = irregular(num_devices, seed)
    peers = tuple(
        PeerSpec(name=peer.name, flops=random.uniform(1, 9), memory_bytes=random.choice([2.0, 3.0, 9.0])) for peer in network.peers
    )
    network = Topology(peers, network.delay_s, network.rate)
    work = [random.uniform(0.1, 3) for _ in range(num_layers)]
    costs = LayerCosts(
        num_layers=num_layers,
        flops=lambda start, end: sum(work[start:end]),
        memory_bytes=lambda start, end: float(end - start),
        boundary_bytes=lambda layer: (1e7 * layer, 2e7),
        num_microbatches=num_microbatches,
    )
    every = []
    for count in range(1, min(num_devices, num_layers) + 1):
        for devices in combinations(range(num_devices), count):
            for inner in combinations(range(1, num_layers), count - 1):
                starts = (0, *inner)
                ends = (*inner, num_layers)
                if all(end - start <= peers[each].memory_bytes for each, start, end in zip(devices, starts, ends, strict=True)):
                    every.append(measured(network, costs, devices, starts).iteration_s)
    found = best_cut(network, costs, range(num_devices))
    assert (found is None) == (not every)
    if found is not None:
        assert found.iteration_s == pytest.approx(min(every))


def test_the_fenced_order_visits_each_device_once() -> None:
    network = first_testbed(3)
    order = fenced_order(network, 2e7)
    assert sorted(order) == list(range(24))
    clusters = [network.peers[each].name[0] for each in order]
    assert clusters in (["A"] * 8 + ["B"] * 16, ["B"] * 16 + ["A"] * 8)
