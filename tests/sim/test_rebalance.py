"""The simulation's events, and the percentages that the rules must reach."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import pytest

from peerd.policy.swarm.rebalance import Rebalancing
from peerd.sim.devices import Devices
from peerd.sim.rebalance import Scenario, simulate
from peerd.sim.trace import Change, Trace, generate
from tests.sim.swarms import EVERY_60_S, EVERY_300_S, IMPROVED, NONE, figures, scenario_of


def trace_of(num_peers: int, *changes: tuple[float, int], duration_s: float = 3600.0) -> Trace:
    return Trace(num_peers=num_peers, changes=tuple(Change(*change) for change in changes), duration_s=duration_s)


# Events


def test_without_churn_a_swarm_does_all_that_is_possible() -> None:
    outcome = simulate(Scenario(trace=trace_of(8), num_stages=2, params=IMPROVED))
    assert outcome.meter.overall.percent == 100
    assert outcome.num_moves == 0


def test_a_joiner_counts_as_possible_work_at_once_and_works_once_it_has_downloaded() -> None:
    scenario = Scenario(trace=trace_of(2, (0.0, 2)), num_stages=2, params=NONE, devices=Devices.downloading(900.0))
    assert simulate(scenario).meter.overall.percent == pytest.approx(100 * (900 * 1 + 2700 * 2) / (3600 * 2))


def test_a_mover_is_out_of_service_while_it_downloads() -> None:
    """Stage 0 loses three of five: the plan at 60 s moves one peer from the other stage, which serves from 360 s on."""
    losses = [seed for seed in range(200) if _first_stages(seed) == [0, 0]]
    scenario = Scenario(trace=trace_of(8, (30.0, -2)), num_stages=2, params=IMPROVED, devices=Devices.downloading(300.0), seed=losses[0])
    outcome = simulate(scenario)
    assert outcome.num_moves == 1
    done = 30 * 4 + 330 * 2 + (3600 - 360) * 3
    assert outcome.meter.overall.percent == pytest.approx(100 * done / (30 * 4 + 3570 * 3))


def _first_stages(seed: int) -> list[int]:
    """The stages of the first two departures, as the simulation draws them from stages of equal size."""
    fate, sizes, hit = random.Random(f"fate/{seed}"), [4, 4], []
    for _ in range(2):
        stage = fate.choice([0, 1])
        fate.choice(range(sizes[stage]))
        sizes[stage] -= 1
        hit.append(stage)
    return hit


def test_a_simulation_is_a_function_of_its_scenario() -> None:
    devices = Devices.downloading(60.0, 8.0)
    scenario = Scenario(trace=generate(40, 3, hours=4), num_stages=4, params=IMPROVED, devices=devices, noise=0.1, seed=3)
    one, two = simulate(scenario), simulate(scenario)
    assert (one.meter.overall, one.num_moves) == (two.meter.overall, two.num_moves)
    assert simulate(replace(scenario, seed=4)).meter.overall != one.meter.overall


def test_devices_are_spread_as_told_and_faster_links_download_faster() -> None:
    chance = random.Random(0)
    drawn = [Devices(spread=8.0, state_bytes=1.25e9, link_delay_s=2.0).draw(chance) for _ in range(2000)]
    speeds, downloads = [device.speed for device in drawn], sorted(device.download_s for device in drawn)
    assert 1 <= min(speeds) < 1.02
    assert 7.9 < max(speeds) <= 8
    assert 2 + 100 / 8**0.5 <= downloads[0] < downloads[-1] <= 2 + 100 * 8**0.5
    assert downloads[1000] == pytest.approx(102, rel=0.1)
    assert Devices(spread=8.0, link_delay_s=2.0).draw(chance).download_s == 0


# Reference figures: percent of optimal throughput, overall, in the first and in the last hour


@pytest.mark.parametrize(
    ("params", "download_s", "overall", "last"),
    [(EVERY_300_S, 0.0, 98.6, 96.6), (EVERY_300_S, 240.0, 97.5, 94.4), (EVERY_60_S, 0.0, 99.7, 99.4)],
)
def test_algorithm_2_reaches_what_it_is_known_to_reach(params: Rebalancing, download_s: float, overall: float, last: float) -> None:
    """Two seeds; the last hour of so few runs varies by some points."""
    found = figures(scenario_of(params, download_s), 400, seeds=2)
    assert found.overall == pytest.approx(overall, abs=1)
    assert found.first > 99
    assert found.last == pytest.approx(last, abs=4)


@pytest.mark.parametrize(("download_s", "overall", "last"), [(0.0, 99.5, 99.0), (240.0, 98.3, 96.0)])
def test_the_improved_rule_does_better_with_far_fewer_moves(download_s: float, overall: float, last: float) -> None:
    found = figures(scenario_of(IMPROVED, download_s), 400, seeds=2)
    assert found.overall >= overall
    assert found.last >= last
    assert 50 <= found.moves <= 250


def test_unlike_peers_reach_97_percent_of_the_optimum_that_knows_everything() -> None:
    assert figures(scenario_of(IMPROVED, 240.0, spread=8.0), 400, seeds=1).overall >= 97


def test_a_small_swarm_does_not_thrash() -> None:
    """Forty peers and downloads of 240 s: algorithm 2 moves a peer nearly every minute and loses a tenth of the throughput."""
    paper, ours = (figures(scenario_of(params, 240.0), 40, seeds=3) for params in (EVERY_60_S, IMPROVED))
    assert ours.overall > paper.overall + 5
    assert ours.moves < 60 < 900 < paper.moves


@pytest.mark.parametrize("delay_s", [5.0, 90.0])
def test_views_that_are_late_cost_little_and_set_off_no_stampede(delay_s: float) -> None:
    """Views are ninety seconds late: the next plan is made before the last move shows."""
    late = replace(scenario_of(IMPROVED, 240.0), view_delay_s=delay_s)
    found = figures(late, 400, seeds=1)
    assert found.overall >= 97.5
    assert found.moves <= 400


def test_measuring_errors_of_30_percent_are_not_chased_where_the_rule_knows_of_them() -> None:
    noisy = replace(scenario_of(replace(IMPROVED, noise=0.3), 240.0), noise=0.3)
    knowing = figures(noisy, 100, seeds=1)
    believing = figures(replace(noisy, params=replace(noisy.params, noise=0.0)), 100, seeds=1)
    assert knowing.moves < believing.moves / 3
    assert knowing.overall > max(95, believing.overall)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "download_s", "expected", "last_deviation"),
    [
        (EVERY_300_S, 0.0, (98.6, 99.9, 96.6), 1.9),
        (EVERY_60_S, 0.0, (99.7, 100.0, 99.4), 0.54),
        (EVERY_300_S, 240.0, (97.5, 99.8, 94.4), 4.9),
        (EVERY_60_S, 240.0, (97.1, 99.2, 95.0), 2.4),
    ],
)
def test_algorithm_2_over_ten_seeds(
    params: Rebalancing, download_s: float, expected: tuple[float, float, float], last_deviation: float
) -> None:
    """Found and expected are means of ten seeds each: they may differ by two standard errors of such a difference.

    `last_deviation` is that of one seed's last hour, measured over 60 seeds; overall it is at most 0.24, in the first hour 0.61.
    """
    found = figures(scenario_of(params, download_s), 400, seeds=10)
    errors = 2 * math.sqrt(2 / 10)
    assert found.overall == pytest.approx(expected[0], abs=errors * 0.24)
    assert found.first == pytest.approx(expected[1], abs=errors * 0.61)
    assert found.last == pytest.approx(expected[2], abs=errors * last_deviation)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("download_s", "num_stages", "spread", "least", "most_moves"),
    [
        (0.0, 4, 1.0, (99.5, 99.0), 250),
        (240.0, 4, 1.0, (98.3, 96.5), 250),
        (0.0, 32, 1.0, (98.5, 97.0), 300),
        (240.0, 4, 8.0, (97.0, 92.5), 400),
    ],
)
def test_the_improved_rule_over_ten_seeds(
    download_s: float, num_stages: int, spread: float, least: tuple[float, float], most_moves: int
) -> None:
    """The last hour of unlike peers varies by 2.9 points between seeds, and no placement of the peers that have their state beats 98."""
    found = figures(scenario_of(IMPROVED, download_s, num_stages, spread), 100 * num_stages, seeds=10)
    assert found.overall >= least[0]
    assert found.last >= least[1]
    assert found.moves <= most_moves


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [4, 32])
def test_ten_thousand_peers_over_32_hours_take_less_than_a_minute(num_stages: int) -> None:
    scenario = replace(scenario_of(IMPROVED, 240.0, num_stages, 8.0), trace=generate(10_000, 0), view_delay_s=5.0)
    began_s = time.process_time()
    assert simulate(scenario).meter.overall.percent > 95
    assert time.process_time() - began_s < 60
