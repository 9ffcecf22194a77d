"""The papers' tables that the planner and the simulator make."""

from __future__ import annotations

import pytest

from scripts.benchmarks import paper


def test_parameters_and_flops_are_those_of_swarms_table_6() -> None:
    """The paper rounds down or to two digits."""
    counted = {layers.name: (layers.num_parameters, layers.flops) for layers in paper.LAYERS}
    assert counted["base"] == pytest.approx((7.08e6, 2.2e10), rel=0.02)
    assert counted["xxlarge"] == pytest.approx((201e6, 6.2e11), rel=0.01)
    assert counted["GPT-3"] == pytest.approx((1.81e9, 5.5e12), rel=0.02)
    assert counted["ours"] == pytest.approx((201e6, 1.8e12), rel=0.04)


def test_large_layers_lose_little_by_latency_and_small_ones_wait_for_the_network() -> None:
    base, *_, ours = paper.LAYERS
    rows = {(row["layers"], row["round trip ms"]): float(row["peerd %"] or 0) for row in paper.utilisation((base, ours), (0, 200))}
    assert rows["ours", 200] > 0.9 * rows["ours", 0] > 80
    assert rows["base", 0] < 18, "the line is full"


def test_a_tenth_of_a_second_costs_no_more_than_in_the_paper() -> None:
    for row in paper.latency():
        assert 1.0 <= float(row["peerd"] or 0) <= 1.02 * float(row["paper's SWARM"] or 0)
