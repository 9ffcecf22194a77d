"""The steady state of a swarm whose peers' lines are known: what a placement trains in a second, and what binds it.

A peer's rate is the least of what it computes, sends and receives. A stage's rate is the sum over its peers; where pairs of peers have
limits of their own, the swarm's is the most that flows through all stages. A step takes as long as its microbatches at that rate, the
passage of one through the empty pipeline, and what averaging is not hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from peerd.planner.flow import most_flow
from peerd.planner.network import Topology
from peerd.planner.queues import waiting_share
from peerd.planner.slow_start import held_up_s, round_waits_s
from peerd.policy.round.slices import bytes_each_way, least_exchange_s, shares_by_rate
from peerd.policy.route.launching import FORWARDS_PER_MICROBATCH, window_of

DAY_S = 86400.0
SLOTS_FACTOR = 4
"""Times as many slots as usual that a peer has where its memory is large enough."""
LUMP = 0.5
"""Part of the slowest peer's time for a microbatch by which a step ends later, as shares are whole numbers."""

Members = tuple[tuple[int, ...], ...]
"""The peers of each stage, by their positions in the topology."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDemand:
    """What a stage asks of its peers for a microbatch, and of all of them for a step. Bytes as they travel, in the run's codecs."""

    flops: float
    memory_bytes: float
    forth_bytes: float
    """Activations to the next stage."""
    back_bytes: float
    """The gradients that come back for them."""
    gradient_bytes: float
    """What the stage averages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    stages: tuple[StageDemand, ...]
    microbatches_per_step: int
    tokens_per_microbatch: int
    is_averaging_hidden: bool
    """Averaging overlaps the next step's microbatches."""
    slots: int = 0
    """Microbatches that a peer holds at once; 0: as many as may come."""


@dataclass(frozen=True, slots=True)
class PeerRate:
    """Microbatches per second that a peer can do in a stage, and why no more: "compute", "up" or "down"."""

    rate: float
    bound_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """What a placement does. Rates are microbatches per second."""

    rate: float
    step_s: float
    fill_s: float
    waiting_s: float
    """What peers wait for microbatches that wait at others."""
    averaging_s: float
    """Of the stage that takes longest."""
    exposed_s: float
    """What of it no microbatch hides."""
    tokens_per_s: float
    stage_rates: tuple[float, ...]
    bound_by: tuple[str, ...]
    """What binds each stage."""
    sent_bytes_a_day: dict[int, float]
    """By peer."""


class SteadyModel:
    """The model of one run on one network; rates are kept, for searches ask for them again and again."""

    def __init__(self, run: RunCost, topology: Topology) -> None:
        self.run = run
        self.topology = topology
        self._rates: dict[tuple[int, int], PeerRate] = {}

    def fits(self, stage: int, peer: int) -> bool:
        return self.run.stages[stage].memory_bytes <= self.topology.peers[peer].memory_bytes

    def traffic(self, stage: int) -> tuple[float, float]:
        """Bytes that a microbatch makes a peer of the stage send and receive."""
        here, before = self.run.stages[stage], self._before(stage)
        return here.forth_bytes + before.back_bytes, before.forth_bytes + here.back_bytes

    def peer_rate(self, stage: int, peer: int) -> PeerRate:
        """0 where the stage does not fit."""
        if (stage, peer) not in self._rates:
            self._rates[stage, peer] = self._peer_rate(stage, peer)
        return self._rates[stage, peer]

    def averaging_s(self, stage: int, peers: Sequence[int]) -> float:
        """The least time of a round, by the members' lines (`policy/round/slices.py`), its round trips and TCP's slow start."""
        if len(peers) < 2:
            return 0.0
        delay = max(self.topology.delay_s[a][b] + self.topology.delay_s[b][a] for a in peers for b in peers if a != b)
        num_bytes, lines = self.run.stages[stage].gradient_bytes, self._lines(peers)
        return least_exchange_s(num_bytes, lines) + round_waits_s(num_bytes, len(peers), min(lines), delay)

    def state(self, members: Members) -> SteadyState:
        """What comes of this placement. A stage without peers stops the swarm: its step takes for ever."""
        run, stages = self.run, range(len(members))
        stage_rates = tuple(sum(self.peer_rate(stage, peer).rate for peer in members[stage]) for stage in stages)
        rate = self._rate(members, stage_rates)
        averages = [self.averaging_s(stage, members[stage]) for stage in stages]
        busy_s = run.microbatches_per_step / rate if rate > 0 else math.inf
        passed_s = self._passed_s(members, stage_rates)
        fill_s = self._computed_s(members, stage_rates) + passed_s + self._slow_start_s(members, stage_rates)
        waiting_s = self._waiting_s(members, stage_rates, passed_s, busy_s)
        exposed_s = max(0.0, max(averages) - busy_s - waiting_s) if run.is_averaging_hidden and rate > 0 else max(averages)
        step_s = busy_s + waiting_s + fill_s + exposed_s
        return SteadyState(
            rate=rate,
            step_s=step_s,
            fill_s=fill_s,
            waiting_s=waiting_s,
            averaging_s=max(averages),
            exposed_s=exposed_s,
            tokens_per_s=run.microbatches_per_step * run.tokens_per_microbatch / step_s,
            stage_rates=stage_rates,
            bound_by=tuple(self._bound_by(stage, members[stage], averages[stage], busy_s) for stage in stages),
            sent_bytes_a_day=self._sent(members, stage_rates, step_s),
        )

    def _before(self, stage: int) -> StageDemand:
        return self.run.stages[stage - 1] if stage else _NOTHING

    def _peer_rate(self, stage: int, peer: int) -> PeerRate:
        spec, (sends, receives) = self.topology.peers[peer], self.traffic(stage)
        if not self.fits(stage, peer):
            return PeerRate(0.0, "memory")
        options = [(self._computed(stage, peer), "compute"), (_per(spec.up, sends), "up"), (_per(spec.down, receives), "down")]
        return PeerRate(*min(options, key=lambda each: each[0]))

    def _computed(self, stage: int, peer: int) -> float:
        """Microbatches a second that the peer computes in a stage: as it was measured in its own, or by the device's speed."""
        spec, demand = self.topology.peers[peer], self.run.stages[stage]
        if spec.microbatches_per_s is None or spec.stage is None:
            return spec.flops / demand.flops
        return spec.microbatches_per_s * self.run.stages[spec.stage].flops / demand.flops

    def _lines(self, peers: Sequence[int]) -> list[float]:
        """The rate at which each member exchanges: its slower direction, and its slowest pair, as each mate gets an equal part."""
        network, mates = self.topology, len(peers) - 1
        return [
            min(
                network.peers[one].up,
                network.peers[one].down,
                mates * min(min(network.link_rate(one, other), network.link_rate(other, one)) for other in peers if other != one),
            )
            for one in peers
        ]

    def _rate(self, members: Members, stage_rates: Sequence[float]) -> float:
        """The slowest stage's rate, or less where pairs bind: the most that flows through the layers of peers."""
        least = min(stage_rates)
        if least <= 0 or not self.has_pair_limits:
            return least
        nodes = [[self.peer_rate(stage, peer).rate for peer in peers] for stage, peers in enumerate(members)]
        pairs = []
        for stage, (here, there) in enumerate(pairwise(members)):
            cost = self.run.stages[stage]
            pairs.append([[self._pair_rate(a, b, cost) for b in there] for a in here])
        return min(least, most_flow(nodes, pairs))

    @cached_property
    def has_pair_limits(self) -> bool:
        """Whether any pair has a limit besides the access lines of both."""
        network, count = self.topology, range(len(self.topology.peers))
        return any(network.rate[a][b] < min(network.peers[a].up, network.peers[b].down) for a in count for b in count if a != b)

    def _pair_rate(self, a: int, b: int, cost: StageDemand) -> float:
        network = self.topology
        return min(_per(network.link_rate(a, b), cost.forth_bytes), _per(network.link_rate(b, a), cost.back_bytes))

    def _shares(self, members: Members, stage_rates: Sequence[float]) -> list[list[float]]:
        """What each peer of each stage does of the stage's work."""
        return [[self.peer_rate(stage, peer).rate / stage_rates[stage] for peer in peers] for stage, peers in enumerate(members)]

    def _computed_s(self, members: Members, stage_rates: Sequence[float]) -> float:
        """What one microbatch computes in all stages but the slowest, where that counts already, by the mean of each stage's peers."""
        if not all(stage_rates):
            return 0.0
        computed = [
            sum(share / self._computed(stage, peer) for share, peer in zip(found, peers, strict=True))
            for stage, (found, peers) in enumerate(zip(self._shares(members, stage_rates), members, strict=True))
        ]
        return sum(computed) - max(computed)

    def _passed_s(self, members: Members, stage_rates: Sequence[float]) -> float:
        """What one microbatch spends between peers, forth and back, by the mean of each stage's peers."""
        if not all(stage_rates):
            return 0.0
        shares, passed = self._shares(members, stage_rates), 0.0
        for stage in range(len(members) - 1):
            cost = self.run.stages[stage]
            for a, share in zip(members[stage], shares[stage], strict=True):
                for b, other in zip(members[stage + 1], shares[stage + 1], strict=True):
                    forth, back = self.topology.hop_s(a, b, cost.forth_bytes), self.topology.hop_s(b, a, cost.back_bytes)
                    passed += share * other * (forth + back)
        return passed

    def _slow_start_s(self, members: Members, stage_rates: Sequence[float]) -> float:
        """What TCP holds the first microbatch of a step up on its way, forth and back, by the mean of each stage's peers."""
        if not all(stage_rates):
            return 0.0
        network, shares, held_up = self.topology, self._shares(members, stage_rates), 0.0
        for stage in range(len(members) - 1):
            cost = self.run.stages[stage]
            for a, share in zip(members[stage], shares[stage], strict=True):
                for b, other in zip(members[stage + 1], shares[stage + 1], strict=True):
                    round_trip_s = network.delay_s[a][b] + network.delay_s[b][a]
                    forth = held_up_s(cost.forth_bytes, network.link_rate(a, b), round_trip_s)
                    held_up += share * other * (forth + held_up_s(cost.back_bytes, network.link_rate(b, a), round_trip_s))
        return held_up

    def _works_s(self, members: Members, stage_rates: Sequence[float]) -> list[float]:
        """What each peer's device, uplink and downlink work for a microbatch of the swarm, as far as they do."""
        found = []
        for stage, (shares, peers) in enumerate(zip(self._shares(members, stage_rates), members, strict=True)):
            sends, receives = self.traffic(stage)
            for share, peer in zip(shares, peers, strict=True):
                spec = self.topology.peers[peer]
                found += [share / self._computed(stage, peer), share * sends / spec.up, share * receives / spec.down]
        return [work_s for work_s in found if work_s > 0]

    def _waiting_s(self, members: Members, stage_rates: Sequence[float], passed_s: float, busy_s: float) -> float:
        """Queues, as long as the daemons' window makes them; and a peer's share of a step is a whole number of microbatches."""
        if not all(stage_rates) or not self.run.slots:
            return 0.0
        sizes = [len(peers) for peers in members]
        underway = int(FORWARDS_PER_MICROBATCH * min(stage_rates) * passed_s)
        in_flight = window_of(sizes, self.run.slots, underway, SLOTS_FACTOR * self.run.slots)
        slowest_s = max(1 / self.peer_rate(stage, peer).rate for stage, peers in enumerate(members) for peer in peers)
        lump_s = 0.0 if self.run.is_averaging_hidden else LUMP * min(slowest_s, busy_s)
        return busy_s * waiting_share(self._works_s(members, stage_rates), in_flight, passed_s) + lump_s

    def _bound_by(self, stage: int, peers: Sequence[int], averaging_s: float, busy_s: float) -> str:
        """In words: averaging where it takes longer than the microbatches, else what holds the peers that lose most by it."""
        if not peers:
            return "no peer"
        if averaging_s > busy_s:
            return "averaging"
        lost: dict[str, dict[int, float]] = {}
        for peer in peers:
            found = self.peer_rate(stage, peer)
            lost.setdefault(found.bound_by, {})[peer] = self._computed(stage, peer) - found.rate
        lines = {way: sum(each.values()) for way, each in lost.items() if way != "compute"}
        way = max(lines, key=lambda each: lines[each], default="compute")
        computing = sum(self.peer_rate(stage, peer).rate for peer in peers)
        if way == "compute" or lines[way] < 0.1 * computing:
            return "compute"
        names = [self.topology.peers[peer].name for peer in sorted(lost[way], key=lambda peer: -lost[way][peer])]
        return f"{way} of {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    def _sent(self, members: Members, stage_rates: Sequence[float], step_s: float) -> dict[int, float]:
        sent = {}
        for stage, peers in enumerate(members):
            rates = self._lines(peers) if len(peers) > 1 else []
            limited = [min(rate, 1e15) for rate in rates]
            shares = shares_by_rate(limited) if rates else (0.0,) * len(peers)
            for peer, share in zip(peers, shares, strict=True):
                own = self.peer_rate(stage, peer).rate / stage_rates[stage] if stage_rates[stage] else 0.0
                a_step = own * self.run.microbatches_per_step * self.traffic(stage)[0]
                a_step += bytes_each_way(self.run.stages[stage].gradient_bytes, len(peers), share)
                sent[peer] = DAY_S * a_step / step_s
        return sent


_NOTHING = StageDemand(flops=0.0, memory_bytes=0.0, forth_bytes=0.0, back_bytes=0.0, gradient_bytes=0.0)


def _per(rate: float, num_bytes: float) -> float:
    return rate / num_bytes if num_bytes else math.inf
