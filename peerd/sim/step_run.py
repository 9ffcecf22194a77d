"""Simulates steps of a run on given links: the daemon's own policies launch, route and average in virtual time.

From `policy/`: which stage a joiner takes and which call a full peer refuses (admission), who owns which microbatch and how many are in
flight (launching, owning), to which peer each goes (wiring), and how slices are cut (round/slices). Left out: the optimizer's time, news
that comes late (a round begins, and a step ends, one way across the network after the last microbatch), rounds that fail, what averages
and microbatches take of the same line, and peers that come and go.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random
from statistics import median

from peerd.planner.network import PeerSpec
from peerd.planner.steady import SLOTS_FACTOR, Members, RunCost
from peerd.policy.round.slices import exchange_s, shares_by_rate
from peerd.policy.route.admission import weakest_stage
from peerd.policy.route.launching import OfStep, WayTime, Work, on_the_way, share, window
from peerd.policy.route.owning import ring_of
from peerd.policy.swarm.rates import SampleDemand, carried
from peerd.sim.clock import Clock
from peerd.sim.network import SharedLines, SimulatedLinks
from peerd.sim.passage import Hop, Passages, PipelinePeer, machine_of
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from peerd.timeline.spans import PeerTimeline, SpanKind

MOST_TRACED = 64
"""Peers whose spans are kept, as many of each stage: `peerd trace` asks as many."""
MOST_TRAINERS = 127
"""In a larger swarm the peers of the first stage launch for all."""
DELAYS_DRAWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    num_steps: int = 5
    slots: int
    microbatch_size: int
    noise: float = 0.05
    """Standard deviation of the logarithm of a pass's time."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Times in seconds."""

    step_s: tuple[float, ...]
    """What each step took: from the end of the one before."""
    averaging_s: float
    """Of the stage that takes longest."""
    sent_bytes: tuple[float, ...]
    """By peer, of microbatches and averages."""
    refused: int
    """Calls that found all slots of their callee taken."""
    timelines: tuple[PeerTimeline, ...]
    tokens_per_step: int

    @property
    def tokens_per_s(self) -> float:
        """At the median step; the first one, in which routers know nothing, left out if there are others."""
        return self.tokens_per_step / median(self.step_s[1:] or self.step_s)


@dataclass(slots=True, eq=False)
class _Trainer:
    peer: PipelinePeer
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight: int = 0
    left: dict[int, int] = field(default_factory=dict)
    """Its microbatches of each step that are not done."""


def joined(cost: RunCost, links: SimulatedLinks) -> Members:
    """The stages that peers take which join one after another, each the weakest, by what computing and lines allow."""
    members: list[list[int]] = [[] for _ in cost.stages]
    totals = [0.0] * len(members)
    for number in range(len(links.peers)):
        records = [PeerRecord(peer=PeerId(f"stage {stage}"), stage=stage, throughput=total) for stage, total in enumerate(totals) if total]
        stage, _ = weakest_stage(LiveView(me=PeerId(links.peers[number].name), records=tuple(records)), range(len(members)))
        members[stage].append(number)
        totals[stage] += rate_in(cost, stage, links.peers[number])
    return tuple(map(tuple, members))


def microbatch_s(cost: RunCost, stage: int, spec: PeerSpec) -> float:
    """Computing time of a microbatch: as it was measured in the device's own stage, or by its speed."""
    if spec.microbatches_per_s is None or spec.stage is None:
        return cost.stages[stage].flops / spec.flops
    return cost.stages[stage].flops / cost.stages[spec.stage].flops / spec.microbatches_per_s


def rate_in(cost: RunCost, stage: int, spec: PeerSpec) -> float:
    """Microbatches a second that a device does in a stage, its line included."""
    here = cost.stages[stage]
    forth, back = (cost.stages[stage - 1].forth_bytes, cost.stages[stage - 1].back_bytes) if stage else (0.0, 0.0)
    demand = SampleDemand(work=here.flops, sends=here.forth_bytes + back, receives=here.back_bytes + forth)
    return min(1 / microbatch_s(cost, stage, spec), carried(spec.up, spec.down, demand))


def simulate_run(cost: RunCost, links: SimulatedLinks, members: Members, settings: RunSettings) -> RunResult:
    """Run the steps. The result depends on the arguments alone. ValueError if a stage has no peer."""
    if not all(members):
        raise ValueError(f"stage {next(stage for stage, peers in enumerate(members) if not peers)} has no peer")
    return _Run(cost, links, members, settings).run()


class _Run:
    def __init__(self, cost: RunCost, links: SimulatedLinks, members: Members, settings: RunSettings) -> None:
        self._cost, self._links, self._settings = cost, links, settings
        self._num_microbatches = cost.microbatches_per_step
        self._clock, self._lines = Clock(), SharedLines(links)
        order = [peers[turn] for turn in range(max(map(len, members))) for peers in members if turn < len(peers)]
        traced = set(order[:MOST_TRACED])
        self._stages = [[self._peer(number, stage, number in traced) for number in peers] for stage, peers in enumerate(members)]
        self._live = LiveView(me=PeerId(""), records=tuple(sorted((p.record for ps in self._stages for p in ps), key=lambda r: r.peer)))
        self._passages = Passages(self._clock, self._lines, cost, settings.slots, self._added)
        self._passages.serve(self._stages)
        train = self._stages[0] if sum(map(len, members)) > MOST_TRAINERS else [peer for peers in self._stages for peer in peers]
        self._trainers = {peer.record.peer: _Trainer(peer) for peer in train}
        self._order = tuple(sorted(self._trainers))
        self._way = WayTime()
        self._delay_s = self._widest_delay_s()
        self._averaging_s = [self._exchange_s(stage) for stage in range(len(members))]
        self._held: dict[tuple[int, int], int] = {}
        self._averaged_s: dict[int, list[float]] = {}
        self._rounds_end_s = [0.0] * len(members)
        """When the last round of each stage ends: a stage has one at a time."""
        self._missing: dict[int, int] = {}
        self._began_s: dict[tuple[int, int], float] = {}
        self._total = 1
        self._ends_s: list[float] = []

    def run(self) -> RunResult:
        for step in range(1 + self._overlaps):
            self._clock.at(0.0, self._open, step)
        self._clock.run()
        ends_s = [0.0, *self._ends_s]
        timelines = [
            PeerTimeline(peer=peer.record.peer, stage=stage, spans=peer.spans)
            for stage, peers in enumerate(self._stages)
            for peer in peers
            if peer.keeps_spans
        ]
        return RunResult(
            step_s=tuple(after - before for before, after in pairwise(ends_s)),
            averaging_s=max(self._averaging_s),
            sent_bytes=tuple(self._lines.sent_bytes),
            refused=self._passages.num_refused,
            timelines=tuple(timelines),
            tokens_per_step=self._num_microbatches * self._cost.tokens_per_microbatch,
        )

    @property
    def _overlaps(self) -> bool:
        return self._cost.is_averaging_hidden

    def _peer(self, number: int, stage: int, keeps_spans: bool) -> PipelinePeer:
        spec = self._links.peers[number]
        throughput = rate_in(self._cost, stage, spec) * self._settings.microbatch_size
        computes = self._settings.microbatch_size / microbatch_s(self._cost, stage, spec)
        record = PeerRecord(
            peer=PeerId(spec.name), stage=stage, phase=Phase.ACCUMULATING, throughput=throughput, computes=computes, trains=True
        )
        machine = machine_of(self._clock, self._settings.noise, self._settings.seed, number)
        return PipelinePeer(number, record, machine, microbatch_s(self._cost, stage, spec), keeps_spans)

    def _widest_delay_s(self) -> float:
        """One way across the network: of all pairs, or of some if they are many."""
        numbers, random = [peer.number for peers in self._stages for peer in peers], Random(self._settings.seed)
        if len(numbers) ** 2 <= DELAYS_DRAWN**2:
            pairs = [(a, b) for a in numbers for b in numbers if a != b]
        else:
            pairs = [(random.choice(numbers), random.choice(numbers)) for _ in range(DELAYS_DRAWN)]
        return max((self._links.delay_s(a, b) for a, b in pairs if a != b), default=0.0)

    def _exchange_s(self, stage: int) -> float:
        """A round: what the members' lines need for slices cut by their rates, and a round trip for the proposal."""
        specs = [self._links.peers[peer.number] for peer in self._stages[stage]]
        if len(specs) < 2:
            return 0.0
        numbers = [peer.number for peer in self._stages[stage]]
        rates = []
        for one, spec in zip(numbers, specs, strict=True):
            pair = math.inf
            if len(numbers) <= DELAYS_DRAWN:
                pair = min(min(self._links.pair_rate(one, other), self._links.pair_rate(other, one)) for other in numbers if other != one)
            rates.append(min(spec.up, spec.down, (len(numbers) - 1) * pair))
        if math.isinf(min(rates)):
            return 2 * self._delay_s
        most = 1e3 * min(rates)
        finite = [min(rate, most) for rate in rates]
        return exchange_s(self._cost.stages[stage].gradient_bytes, finite, shares_by_rate(finite)) + 2 * self._delay_s

    # Steps

    def _open(self, step: int) -> None:
        """Launch a step: its parameters are known in every stage."""
        if step >= self._settings.num_steps:
            return
        self._missing[step] = self._num_microbatches
        self._averaged_s[step] = [math.nan] * len(self._stages)
        ring = ring_of(self._order, step)
        for peer, trainer in self._trainers.items():
            mine = ring.owned(ring.places[peer], 1, self._num_microbatches)
            trainer.left[step] = mine.bit_count()
            while mine:
                low = mine & -mine
                trainer.waiting.append((step, low.bit_length() - 1))
                mine ^= low
        underway = on_the_way(self._live, len(self._stages), self._settings.microbatch_size, self._way.least_s)
        slots = self._settings.slots
        self._total = window(self._live, len(self._stages), slots, underway, SLOTS_FACTOR * slots)
        self._way.next_step()
        for peers in self._stages:
            for served in peers:
                self._began_s[served.number, step] = self._clock.now_s
        for trainer in self._trainers.values():
            self._launch(trainer)

    def _launch(self, trainer: _Trainer) -> None:
        while trainer.waiting:
            step, index = trainer.waiting[0]
            mine = sum(count for at, count in trainer.left.items() if at <= step)
            missing = sum(count for at, count in self._missing.items() if at <= step)
            if trainer.in_flight >= share(self._total, Work((OfStep(step, (1 << mine) - 1),), missing=missing)):
                return
            trainer.waiting.popleft()
            trainer.in_flight += 1
            self._passages.launch(trainer.peer, step, index, partial(self._done, trainer, self._clock.now_s))

    def _done(self, trainer: _Trainer, began_s: float, hop: Hop, callee: PipelinePeer) -> None:
        self._way.note(callee.record.peer, max(0.0, self._clock.now_s - began_s - hop.held_s))
        trainer.in_flight -= 1
        if hop.step in self._missing:  # the step may have ended before this news of it came
            trainer.left[hop.step] -= 1
            self._missing[hop.step] -= 1
        self._launch(trainer)

    def _added(self, stage: int, step: int) -> None:
        held = self._held[stage, step] = self._held.get((stage, step), 0) + 1
        if held == self._num_microbatches:
            began_s = max(self._clock.now_s + self._delay_s, self._rounds_end_s[stage])
            self._rounds_end_s[stage] = began_s + self._averaging_s[stage]
            self._clock.at(self._rounds_end_s[stage], self._averaged, stage, step, began_s)

    def _averaged(self, stage: int, step: int, began_s: float) -> None:
        now_s, averages = self._clock.now_s, self._averaged_s[step]
        averages[stage] = now_s
        peers = self._stages[stage]
        if len(peers) > 1:
            share_of = 2 * (len(peers) - 1) / len(peers) * self._cost.stages[stage].gradient_bytes
            for peer in peers:
                self._lines.sent_bytes[peer.number] += share_of
        for peer in peers:
            peer.note(SpanKind.ACCUMULATING, self._began_s[peer.number, step], began_s, step)
            peer.note(SpanKind.AVERAGING, began_s, now_s, step)
        if not any(map(math.isnan, averages)):
            self._clock.after(self._delay_s, self._committed, step)

    def _committed(self, step: int) -> None:
        now_s = self._clock.now_s
        for stage, peers in enumerate(self._stages):
            for peer in peers:
                peer.note(SpanKind.AVERAGED, self._averaged_s[step][stage], now_s, step)
                peer.note(SpanKind.COMMIT, now_s, now_s, step)
        self._ends_s.append(now_s)
        self._passages.step_ended()
        for trainer in self._trainers.values():
            trainer.left.pop(step, None)
        self._missing.pop(step, None)
        self._open(step + 1 + self._overlaps)
