"""The meter: percent of the best partition's throughput, and the bound for it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.sim.meter import Meter, best_bottleneck


@given(st.lists(st.floats(1.0, 8.0), min_size=1, max_size=6), st.integers(1, 3))
def test_no_partition_beats_the_bound(speeds: list[float], num_stages: int) -> None:
    reached = 0.0
    for stages in product(range(num_stages), repeat=len(speeds)):
        strengths = [sum(v for v, at in zip(speeds, stages, strict=True) if at == stage) for stage in range(num_stages)]
        reached = max(reached, min(strengths))
    assert reached <= best_bottleneck(sorted(speeds), num_stages) * (1 + 1e-12)


@pytest.mark.parametrize(("num_peers", "num_stages", "most"), [(400, 4, 100), (403, 4, 100), (3, 4, 0), (4, 4, 1), (0, 1, 0)])
def test_equal_peers_give_whole_peers_to_each_stage(num_peers: int, num_stages: int, most: int) -> None:
    assert best_bottleneck([2.0] * num_peers, num_stages) == 2 * most


def test_a_peer_faster_than_the_fair_share_has_a_stage_to_itself() -> None:
    assert best_bottleneck([1.0, 1.0, 2.0, 50.0], 2) == 4.0


def test_work_done_is_set_against_work_possible_over_all_and_in_the_first_and_last_hour() -> None:
    meter = Meter(10 * 3600.0, num_points=10)
    meter.add(0.0, 1800.0, 0.0, 4.0)
    meter.add(1800.0, 9 * 3600.0, 4.0, 4.0)
    meter.add(9 * 3600.0, 10 * 3600.0, 1.0, 4.0)
    assert meter.first.percent == 50
    assert meter.last.percent == 25
    assert meter.overall.percent == pytest.approx(100 * (8.5 * 4 + 1) / 40)
    assert [part.percent for part in meter.parts] == [50, *[100] * 8, 25]


def test_a_simulation_shorter_than_an_hour_is_its_own_first_and_last_hour() -> None:
    meter = Meter(60.0)
    meter.add(0.0, 60.0, 3.0, 4.0)
    assert meter.overall.percent == meter.first.percent == meter.last.percent == 75
