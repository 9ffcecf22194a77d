"""Simulated swarms for tests: one line per scenario, and its figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from peerd.policy.swarm.rebalance import Rebalancing, Rule
from peerd.sim.devices import Devices
from peerd.sim.rebalance import Scenario, simulate
from peerd.sim.trace import generate

NONE = Rebalancing(rule=Rule.NONE)
EVERY_300_S = Rebalancing(rule=Rule.QUEUES, period_s=300)
EVERY_60_S = Rebalancing(rule=Rule.QUEUES, period_s=60)
IMPROVED = Rebalancing()


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the seeds: percent of optimal throughput, and moves."""

    overall: float
    first: float
    last: float
    moves: float


def figures(scenario: Scenario, num_peers: int, seeds: int) -> Figures:
    """Simulate the scenario with one generated trace for each seed."""
    outcomes = [simulate(replace(scenario, trace=generate(num_peers, seed), seed=seed)) for seed in range(seeds)]
    meters = [outcome.meter for outcome in outcomes]
    return Figures(
        fmean(meter.overall.percent for meter in meters),
        fmean(meter.first.percent for meter in meters),
        fmean(meter.last.percent for meter in meters),
        fmean(outcome.num_moves for outcome in outcomes),
    )


def scenario_of(params: Rebalancing, download_s: float, num_stages: int = 4, spread: float = 1.0) -> Scenario:
    """Joiners go to the weakest stage under the improved rule only, as for the reference figures."""
    return Scenario(
        trace=generate(1, 0),
        num_stages=num_stages,
        params=replace(params, download_s=download_s),
        devices=Devices.downloading(download_s, spread),
        joiners_to_weakest=params.rule is Rule.IMPROVED,
    )
