"""Placements by DT-FM's cost: the best known ones are found, however devices are listed, and tiny networks are placed as well as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.planner import search
from peerd.planner.clustering import average_linkage, clusters_at
from peerd.planner.dtfm import PairCosts, PlacedStages, StudySizes, averaging_s, hop, pair_costs, placed
from peerd.planner.genetic import genetic
from peerd.planner.network import Topology
from peerd.planner.search import at_random, dealt, improved, ranked_deals, searched
from tests.planner.networks import BEST_KNOWN, irregular, shuffled, study, volunteers


def costs_of(network: Topology, num_stages: int = 8) -> PairCosts:
    network = network.part(network.canonical_order())
    return pair_costs(network, StudySizes(num_stages=num_stages, num_replicas=len(network.peers) // num_stages))


@pytest.mark.parametrize("case", BEST_KNOWN)
def test_a_deal_costs_what_the_best_known_placement_of_the_study_does(case: int) -> None:
    assert dealt(costs_of(shuffled(study(case), seed=11 + case))).comm_cost_s == pytest.approx(BEST_KNOWN[case], rel=1e-3)


def test_the_costs_of_the_listed_stripe_are_those_of_the_study() -> None:
    stripe = [tuple(range(stage, 64, 8)) for stage in range(8)]
    found = {case: placed(pair_costs(study(case), StudySizes()), stripe).comm_cost_s for case in BEST_KNOWN}
    assert found == pytest.approx({0: 3.440, 1: 49.504, 2: 16.087, 3: 34.802, 4: 49.218}, rel=1e-4)


def test_the_genetic_search_ends_at_the_papers_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerd.planner.genetic.CHILDREN_A_STAGE", 6)
    assert genetic(costs_of(study(0)), seed=0).comm_cost_s == pytest.approx(3.440, rel=1e-3)


@pytest.mark.parametrize("make", [irregular, volunteers])
def test_swaps_improve_irregular_networks(monkeypatch: pytest.MonkeyPatch, make: Callable[[int, int], Topology]) -> None:
    monkeypatch.setattr(search, "SWAPS_A_PAIR", 3)
    costs = costs_of(make(32, 5), 4)
    starts = ranked_deals(costs)[:3]
    assert improved(costs, starts, seed=0).comm_cost_s < 0.95 * starts[0].comm_cost_s < at_random(costs, 0).comm_cost_s


def is_consistent(costs: PairCosts, found: PlacedStages) -> bool:
    """Its parts add up, and its lanes are the matchings that it counts."""
    lanes = [max(costs.passing[a][b] for a, b in zip(*groups, strict=True)) for groups in pairwise(found.groups)]
    again = placed(costs, found.groups)
    return (
        found.pipeline_s == pytest.approx(sum(lanes))
        and found.averaging_s == max(averaging_s(costs, group) for group in found.groups)
        and found.comm_cost_s == found.averaging_s + found.pipeline_s == again.comm_cost_s
        and sorted(device for group in found.groups for device in group) == list(range(len(costs.passing)))
    )


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 1000), st.sampled_from([(2, 6), (3, 9), (4, 8), (1, 3), (6, 6)]))
def test_a_search_is_no_worse_than_its_deal_and_the_order_of_the_list_changes_nothing(seed: int, shape: tuple[int, int]) -> None:
    num_stages, num_devices = shape
    for make in (irregular, volunteers):
        network = make(num_devices, seed)
        one, other = (costs_of(each, num_stages) for each in (network, shuffled(network, seed)))
        deal = dealt(one)
        found = searched(one, seed)
        assert found.comm_cost_s <= deal.comm_cost_s
        assert is_consistent(one, deal)
        assert is_consistent(one, found)
        assert dealt(other).comm_cost_s == deal.comm_cost_s
        assert searched(other, seed).comm_cost_s == found.comm_cost_s


def partitions(devices: Sequence[int], size: int) -> Iterator[list[tuple[int, ...]]]:
    """All ways to form groups of `size`."""
    if not devices:
        yield []
        return
    for mates in combinations(devices[1:], size - 1):
        left = [each for each in devices[1:] if each not in mates]
        for rest in partitions(left, size):
            yield [(devices[0], *mates), *rest]


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 1000), st.sampled_from([irregular, volunteers]), st.sampled_from([(2, 6), (3, 6), (4, 8)]))
def test_tiny_networks_are_placed_as_well_as_can_be(seed: int, make: Callable[[int, int], Topology], shape: tuple[int, int]) -> None:
    num_stages, num_devices = shape
    costs = costs_of(make(num_devices, seed), num_stages)
    best = min(placed(costs, groups).comm_cost_s for groups in partitions(range(num_devices), num_devices // num_stages))
    assert searched(costs, seed).comm_cost_s == pytest.approx(best)


def test_hops_and_averages_are_the_papers_equations() -> None:
    """Two stages of two: 100 MB/s and 50 ms everywhere but between devices 0 and 1, whose line carries ten times as much."""
    network = study(0).part([0, 8, 16, 24])
    delay = tuple(tuple(0.0 if a == b else 0.05 for b in range(4)) for a in range(4))
    rate = tuple(tuple(1e9 if {a, b} == {0, 1} else 1e8 for b in range(4)) for a in range(4))
    sizes = StudySizes(num_stages=2, num_replicas=2, gradient_bytes=4e8, activation_bytes=1e8)
    costs = pair_costs(Topology(network.peers, delay, rate), sizes)
    assert averaging_s(costs, [0, 1]) == pytest.approx(2 * (0.05 + 0.2))
    assert averaging_s(costs, [0, 2]) == pytest.approx(2 * (0.05 + 2))
    assert hop(costs, [0, 2], [1, 3]).longest == pytest.approx(2 * (0.05 + 1))
    assert hop(costs, [0], [1]).longest == pytest.approx(2 * (0.05 + 0.1))
    assert placed(costs, [(0, 1), (2, 3)]).comm_cost_s == pytest.approx(4.1 + 2.1)


def test_linkage_joins_the_nearest_and_clusters_stand_side_by_side() -> None:
    places = [0.0, 10.0, 1.0, 11.0, 30.0, 0.5]
    merges = average_linkage([[abs(a - b) for b in places] for a in places])
    assert [merge[0] for merge in merges] == sorted(merge[0] for merge in merges)
    assert {frozenset(each) for each in clusters_at(merges, 6, 3)} == {frozenset({0, 2, 5}), frozenset({1, 3}), frozenset({4})}
    assert [len(clusters_at(merges, 6, number)) for number in range(1, 7)] == [1, 2, 3, 4, 5, 6]
