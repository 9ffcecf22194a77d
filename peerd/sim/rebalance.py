"""Simulated rebalancing: churn, downloads and late views around the daemon's own `policy.rebalance.plan`."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

from peerd.errors import UsageError
from peerd.policy.rebalance import Rebalancing, Rule, plan
from peerd.sim.meter import Meter, best_bottleneck
from peerd.sim.swarm import Peer, Swarm
from peerd.sim.table import Table
from peerd.sim.trace import Trace
from peerd.table.record import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulation. Times in seconds."""

    trace: Trace
    num_stages: int
    params: Rebalancing
    seed: int = 0
    joiners_to_weakest: bool = True
    """Else to a stage by chance, as in the paper's section 4.4."""
    download_s: float = 0.0
    """A stage's state over the median link; 0: at once."""
    link_delay_s: float = 0.0
    """Added to every download that takes any time."""
    view_delay_s: float = 0.0
    """From a change to the view that shows it."""
    noise: float = 0.0
    """Relative deviation of measured throughputs and queues."""
    spread: float = 1.0
    """The fastest device's speed over the slowest one's; the same for links, independently."""


@dataclass(frozen=True, slots=True)
class Outcome:
    meter: Meter
    num_moves: int


def simulate(scenario: Scenario) -> Outcome:
    return _Simulation(scenario).run()


@dataclass(slots=True)
class _Simulation:
    """Events in virtual time: changes of the trace, ends of downloads, plans. Between them nothing changes."""

    scenario: Scenario
    chance: random.Random = field(init=False)
    devices: random.Random = field(init=False)
    """Apart from `chance`, so that every rule meets the same machines."""
    swarm: Swarm = field(init=False)
    table: Table = field(init=False)
    downloads: list[tuple[float, PeerId, int]] = field(init=False, default_factory=list)
    """A heap of (end, peer, its number of moves when the download began)."""
    now_s: float = field(init=False, default=0.0)
    num_arrived: int = field(init=False, default=0)
    num_moves: int = field(init=False, default=0)
    optimum: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.chance = random.Random(f"swarm/{scenario.seed}")
        self.devices = random.Random(f"devices/{scenario.seed}")
        self.swarm = Swarm(scenario.num_stages)
        noise = random.Random(f"noise/{scenario.seed}")
        self.table = Table(scenario.num_stages, scenario.view_delay_s, scenario.noise, noise)

    def run(self) -> Outcome:
        scenario = self.scenario
        meter = Meter(scenario.trace.duration_s)
        self._populate()
        changes = scenario.trace.changes
        next_change, plan_at_s = 0, self._first_plan_s()
        while self.now_s < scenario.trace.duration_s:
            change_at_s = changes[next_change].time_s if next_change < len(changes) else math.inf
            download_at_s = self.downloads[0][0] if self.downloads else math.inf
            until_s = min(change_at_s, download_at_s, plan_at_s, scenario.trace.duration_s)
            meter.add(self.now_s, until_s, self.swarm.throughput, self.optimum)
            self.now_s = until_s
            self.table.advance(until_s)
            if until_s == download_at_s:
                self._end_download()
            elif until_s == change_at_s:
                self._change(changes[next_change].peers)
                next_change += 1
            elif until_s == plan_at_s:
                self._rebalance(round(plan_at_s / scenario.params.period_s))
                plan_at_s += scenario.params.period_s
        return Outcome(meter, self.num_moves)

    def _first_plan_s(self) -> float:
        return math.inf if self.scenario.params.rule is Rule.NONE else self.scenario.params.period_s

    def _populate(self) -> None:
        """Who is there at the start serves at once: strongest first to the weakest stage, as good a start as any."""
        newcomers = sorted((self._newcomer() for _ in range(self.scenario.trace.num_peers)), key=lambda peer: -peer.speed)
        strengths = [(0.0, stage) for stage in range(self.scenario.num_stages)]
        for peer in newcomers:
            strength, peer.stage = heapq.heappop(strengths)
            heapq.heappush(strengths, (strength + peer.speed, peer.stage))
        for peer in sorted(newcomers, key=lambda peer: peer.id):
            peer.serving = True
            self.swarm.enter(peer)
            self.table.publish(-self.scenario.view_delay_s, peer)
        self.table.advance(0.0)
        self._find_optimum()

    def _newcomer(self) -> Peer:
        scenario = self.scenario
        speed = scenario.spread ** self.devices.random()
        link = scenario.spread ** (self.devices.random() - 0.5)
        download_s = scenario.download_s * link + scenario.link_delay_s if scenario.download_s else 0.0
        self.num_arrived += 1
        return Peer(PeerId(f"peer{self.num_arrived:09}"), speed, download_s, stage=0, serving=False)

    def _find_optimum(self) -> None:
        self.optimum = best_bottleneck(self.swarm.speeds, self.scenario.num_stages)

    def _change(self, peers: int) -> None:
        for _ in range(peers):
            self._arrive()
        for _ in range(-peers):
            self._depart()
        self._find_optimum()

    def _arrive(self) -> None:
        peer = self._newcomer()
        num_stages = self.scenario.num_stages
        peer.stage = self.table.weakest_stage(peer.id) if self.scenario.joiners_to_weakest else self.chance.randrange(num_stages)
        peer.serving = peer.download_s == 0
        self.swarm.enter(peer)
        self._announce(peer)

    def _depart(self) -> None:
        """SWARM section 4.4: removing N peers is N draws of a stage; which of its peers it is, is chance too."""
        peopled = [members for members in self.swarm.stages if members]
        if not peopled:
            raise UsageError(f"at {self.now_s:g} s the trace takes away more peers than there are", "name more with --peers")
        peer = self.chance.choice(self.chance.choice(peopled))
        self.swarm.leave(peer)
        self.table.withdraw(self.now_s, peer)
        self.table.advance(self.now_s)

    def _announce(self, peer: Peer) -> None:
        if not peer.serving:
            heapq.heappush(self.downloads, (self.now_s + peer.download_s, peer.id, peer.moves))
        self.table.publish(self.now_s, peer)
        self.table.advance(self.now_s)

    def _end_download(self) -> None:
        _, peer_id, moves = heapq.heappop(self.downloads)
        peer = self.swarm.peers.get(peer_id)
        if peer is not None and peer.moves == moves:
            self.swarm.serve(peer)
            self._announce(peer)

    def _rebalance(self, period: int) -> None:
        params = self.scenario.params
        view = self.table.view(with_queues=params.rule is Rule.ALGORITHM_2)
        for move in plan(view, self.scenario.num_stages, period, params).moves:
            peer = self.swarm.peers.get(move.peer)
            if peer is None or peer.stage != move.from_stage or not peer.serving:
                continue  # gone, or moved, since the view was taken
            self.swarm.move(peer, move.to_stage, serving=peer.download_s == 0)
            self.num_moves += 1
            self._announce(peer)
