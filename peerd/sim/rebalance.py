"""Simulates rebalancing: churn, downloads and late views around the daemon's own `policy.swarm.rebalance.plan`."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from peerd.policy.swarm.rebalance import Rebalancing, Rule, plan, seed_at
from peerd.sim.delayed_table import DelayedTable
from peerd.sim.devices import Devices
from peerd.sim.meter import Meter, best_bottleneck
from peerd.sim.simulated_swarm import SimulatedPeer, SimulatedSwarm
from peerd.sim.trace import Trace
from peerd.table.record import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulation. Times are in seconds."""

    trace: Trace
    num_stages: int
    params: Rebalancing
    devices: Devices = field(default_factory=Devices)
    seed: int = 0
    joiners_to_weakest: bool = True
    """False: joiners take a random stage."""
    view_delay_s: float = 0.0
    """Time from a change until views show it."""
    noise: float = 0.0
    """Relative standard deviation of measured throughputs and queues."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    meter: Meter
    num_moves: int


def simulate(scenario: Scenario) -> SimulationResult:
    """Simulate from time 0 to the trace's end; the result depends on the scenario alone."""
    return _Simulation(scenario).run()


class _Simulation:
    """The events are the trace's changes, ends of downloads, and plans; the swarm is constant between them."""

    def __init__(self, scenario: Scenario) -> None:
        seed, num_stages = scenario.seed, scenario.num_stages
        self._scenario = scenario
        self._fate = random.Random(f"fate/{seed}")
        # a separate generator, so that every rule meets the same machines
        self._lottery = random.Random(f"devices/{seed}")
        self._swarm = SimulatedSwarm(num_stages)
        self._table = DelayedTable(num_stages, scenario.view_delay_s, scenario.noise, random.Random(f"noise/{seed}"))
        self._downloads: list[tuple[float, PeerId, int]] = []
        """A heap of (end, peer, its number of moves when the download began)."""
        self._now_s = 0.0
        self._num_arrived = 0
        self._num_moves = 0

    def run(self) -> SimulationResult:
        duration_s = self._scenario.trace.duration_s
        meter = Meter(duration_s)
        changes, periods = iter(self._scenario.trace.changes), self._periods()
        self._populate()
        change, period_at_s = next(changes, None), next(periods)
        optimum = self._optimum()
        while self._now_s < duration_s:
            download_at_s = self._downloads[0][0] if self._downloads else math.inf
            change_at_s = change.time_s if change else math.inf
            until_s = min(download_at_s, change_at_s, period_at_s, duration_s)
            meter.add(self._now_s, until_s, self._swarm.throughput, optimum)
            self._now_s = until_s
            self._table.advance(until_s)
            if until_s == download_at_s:
                self._end_download()
            elif change and until_s == change_at_s:
                self._apply(change.peers)
                change, optimum = next(changes, None), self._optimum()
            elif until_s == period_at_s:
                self._rebalance()
                period_at_s = next(periods)
        return SimulationResult(meter, self._num_moves)

    def _periods(self) -> Iterator[float]:
        """The times at which plans are made."""
        params, number = self._scenario.params, 1
        while params.rule is not Rule.NONE:
            yield number * params.period_s
            number += 1
        yield math.inf

    def _populate(self) -> None:
        """Peers of the start serve at once. Each goes to the weakest stage, the fastest peer first, so that the start is balanced."""
        newcomers = [self._newcomer() for _ in range(self._scenario.trace.num_peers)]
        strengths = [(0.0, stage) for stage in range(self._scenario.num_stages)]
        for peer in sorted(newcomers, key=lambda peer: -peer.device.speed):
            strength, peer.stage = heapq.heappop(strengths)
            heapq.heappush(strengths, (strength + peer.device.speed, peer.stage))
        for peer in newcomers:
            peer.serving = True
            self._swarm.enter(peer)
            self._table.publish(-self._scenario.view_delay_s, peer)
        self._table.advance(0.0)

    def _newcomer(self) -> SimulatedPeer:
        self._num_arrived += 1
        return SimulatedPeer(PeerId(f"peer{self._num_arrived:09}"), self._scenario.devices.draw(self._lottery))

    def _optimum(self) -> float:
        return best_bottleneck(self._swarm.speeds, self._scenario.num_stages)

    def _apply(self, peers: int) -> None:
        for _ in range(peers):
            self._arrive()
        for _ in range(-peers):
            self._depart()

    def _arrive(self) -> None:
        peer = self._newcomer()
        if self._scenario.joiners_to_weakest:
            peer.stage = self._table.weakest_stage(peer.id)
        else:
            peer.stage = self._fate.randrange(self._scenario.num_stages)
        peer.serving = peer.device.download_s == 0
        self._swarm.enter(peer)
        self._announce(peer)

    def _depart(self) -> None:
        """SWARM section 4.4: "removing N peers corresponds to N samples from the uniform distribution over" the stages."""
        peer = self._fate.choice(self._fate.choice([members for members in self._swarm.stages if members]))
        self._swarm.leave(peer)
        self._table.withdraw(self._now_s, peer)
        self._table.advance(self._now_s)

    def _announce(self, peer: SimulatedPeer) -> None:
        if not peer.serving:
            heapq.heappush(self._downloads, (self._now_s + peer.device.download_s, peer.id, peer.moves))
        self._table.publish(self._now_s, peer)
        self._table.advance(self._now_s)

    def _end_download(self) -> None:
        _, peer_id, moves = heapq.heappop(self._downloads)
        peer = self._swarm.peers.get(peer_id)
        if peer is not None and peer.moves == moves:
            self._swarm.serve(peer)
            self._announce(peer)

    def _rebalance(self) -> None:
        params = self._scenario.params
        view = self._table.view(with_queues=params.rule is Rule.QUEUES)
        for move in plan(view, self._scenario.num_stages, seed_at(self._now_s, params), params).moves:
            peer = self._swarm.peers.get(move.peer)
            if peer is None or peer.stage != move.from_stage or not peer.serving:
                continue  # it has left or moved since the view was taken
            self._swarm.move(peer, move.to_stage, serving=peer.device.download_s == 0)
            self._num_moves += 1
            self._announce(peer)
