"""Simulates steps of a run on given links: the daemon's own policies launch, route and average in virtual time.

From `policy/`: which stage a joiner takes and which call a full peer refuses (admission), who owns which microbatch and how many are in
flight (launching, owning), to which peer each goes (wiring), and how averages pass (round/, by `sim/averaging.py`). Left out: the
optimizer's time, news that comes late (a round begins, and a step ends, one way across the network after the last microbatch), and what
averages and microbatches take of the same line. Peers may come and go (`sim/churn.py`); then the reliable ones launch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random
from statistics import median

from peerd.planner.network import PeerSpec
from peerd.planner.steady import SLOTS_FACTOR, Members, RunCost
from peerd.policy.round.needs import averaging_s
from peerd.policy.route.launching import OfStep, WayTime, Work, on_the_way, share, window
from peerd.policy.route.owning import ring_of
from peerd.policy.swarm.choosing import Joiner, choose_stage
from peerd.policy.swarm.rates import SampleDemand, carried
from peerd.sim.averaging import PlayedRound, exchanged
from peerd.sim.churn import Churn, ChurnCounts
from peerd.sim.clock import Clock
from peerd.sim.ledgers import Held, Ledgers
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
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    num_steps: int = 5
    slots: int
    microbatch_size: int
    noise: float = 0.05
    """Standard deviation of the logarithm of a pass's time."""
    seed: int = 0
    churn: Churn | None = None
    announce_period_s: float = 5.0
    slow_start: bool = True
    """Whether connections are slow again after a pause, as by default on Linux (net.ipv4.tcp_slow_start_after_idle)."""


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
    churn: ChurnCounts

    @property
    def tokens_per_s(self) -> float:
        """At the median step; the first one, in which routers know nothing, left out if there are others."""
        return self.tokens_per_step / median(self.step_s[1:] or self.step_s)


@dataclass(slots=True, eq=False)
class LaunchingPeer:
    peer: PipelinePeer
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight: int = 0
    left: dict[int, int] = field(default_factory=dict)
    """Its microbatches of each step that are not done."""


def joined(cost: RunCost, links: SimulatedLinks, unreliable: frozenset[int] = frozenset()) -> Members:
    """The stages that peers take which join one after another, by what computing and lines allow, and by who means to stay."""
    members: list[list[int]] = [[] for _ in cost.stages]
    totals, reliable = [0.0] * len(members), [0.0] * len(members)
    for number in range(len(links.peers)):
        says_so = bool(unreliable) and number not in unreliable
        stage = stage_for(PeerId(links.peers[number].name), totals, reliable, says_so)
        members[stage].append(number)
        rate = rate_in(cost, stage, links.peers[number])
        totals[stage] += rate
        reliable[stage] += rate * says_so
    return tuple(map(tuple, members))


def stage_for(joiner: PeerId, totals: Sequence[float], reliable: Sequence[float], says_so: bool) -> int:
    """The stage that a joiner takes, where stages do `totals`, and their `reliable` peers that much of it. Two records tell each stage."""
    told = [
        (stage, part, hours) for stage, total in enumerate(totals) for part, hours in ((total - reliable[stage], 0), (reliable[stage], 1))
    ]
    records = [
        PeerRecord(peer=PeerId(f"stage {stage} {hours}"), stage=stage, throughput=part, stays_hours=hours)
        for stage, part, hours in told
        if part > ROUNDING
    ]
    choice = choose_stage(LiveView(me=joiner, records=tuple(records)), Joiner(lacking=[""] * len(totals), is_reliable=says_so))
    if choice.stage is None:
        raise ValueError("no stage takes a joiner, though none lacks anything")
    return choice.stage


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


class StepRun:
    """Peers that stay. `ChurningRun` (sim/run.py) lets them come and go."""

    def __init__(
        self, cost: RunCost, links: SimulatedLinks, members: Members, settings: RunSettings, ledgers: Ledgers | None = None
    ) -> None:
        if not all(members):
            raise ValueError(f"stage {next(stage for stage, peers in enumerate(members) if not peers)} has no peer")
        self._cost, self._links, self._settings, self._ledgers = cost, links, settings, ledgers
        self._num_microbatches = cost.microbatches_per_step
        self._clock, self._lines = Clock(), SharedLines(links, slow_start=settings.slow_start)
        order = [peers[turn] for turn in range(max(map(len, members))) for peers in members if turn < len(peers)]
        traced = set(order[:MOST_TRACED])
        self._stages = [[self._peer(number, stage, number in traced) for number in peers] for stage, peers in enumerate(members)]
        self.counts = ChurnCounts()
        self._live = self._view()
        self._passages = Passages(self._clock, self._lines, cost, settings.slots, self._added, self._ledgers)
        self._passages.serve(self._stages)
        train = self._stages[0] if sum(map(len, members)) > MOST_TRAINERS else self._everybody()
        self._trainers = {peer.record.peer: LaunchingPeer(peer) for peer in train}
        self._order = tuple(sorted(self._trainers))
        self._way = WayTime()
        self._delay_s = self._widest_delay_s()
        self._exchanges: dict[int, PlayedRound] = {}
        """The round of each stage, as far as one was due since its members changed."""
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
            averaging_s=max(self._exchange(stage).took_s for stage, peers in enumerate(self._stages) if peers),
            sent_bytes=tuple(self._lines.sent_bytes),
            refused=self._passages.num_refused,
            timelines=tuple(timelines),
            tokens_per_step=self._num_microbatches * self._cost.tokens_per_microbatch,
            churn=self.counts,
        )

    def _everybody(self) -> list[PipelinePeer]:
        return [peer for peers in self._stages for peer in peers]

    def _view(self) -> LiveView:
        return LiveView(me=PeerId(""), records=tuple(sorted((peer.record for peer in self._everybody()), key=lambda r: r.peer)))

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

    def _exchange(self, stage: int) -> PlayedRound:
        """A round of the present peers of a stage."""
        found = self._exchanges.get(stage)
        if found is None:
            members = tuple(peer.number for peer in self._stages[stage])
            num_bytes, settings = self._cost.stages[stage].gradient_bytes, self._settings
            found = exchanged(num_bytes, members, self._links, averaging_s(settings.announce_period_s), slow_start=settings.slow_start)
            self._exchanges[stage] = found
        return found

    # Steps

    def _open(self, step: int) -> None:
        """Launch a step: its parameters are known in every stage."""
        if step >= self._settings.num_steps:
            return
        self._missing[step] = self._num_microbatches
        self._averaged_s[step] = [math.nan] * len(self._stages)
        self._opened(step)
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

    def _launch(self, trainer: LaunchingPeer) -> None:
        while trainer.waiting:
            step, index = trainer.waiting[0]
            mine = sum(count for at, count in trainer.left.items() if at <= step)
            missing = sum(count for at, count in self._missing.items() if at <= step)
            if trainer.in_flight >= share(self._total, Work((OfStep(step, (1 << mine) - 1),), missing=missing)):
                return
            trainer.waiting.popleft()
            trainer.in_flight += 1
            self._passages.launch(trainer.peer, step, index, partial(self._done, trainer, self._clock.now_s))

    def _done(self, trainer: LaunchingPeer, began_s: float, hop: Hop, callee: PipelinePeer) -> None:
        self._way.note(callee.record.peer, max(0.0, self._clock.now_s - began_s - hop.held_s))
        trainer.in_flight -= 1
        if hop.step in self._missing:  # the step may have ended before this news of it came
            trainer.left[hop.step] -= 1
            self._missing[hop.step] -= 1
        self._launch(trainer)

    def _opened(self, step: int) -> None:
        """A step begins."""

    def _closed(self, step: int) -> None:
        """A step is over."""

    def _added(self, what: Held, _number: int) -> None:
        """A peer has computed a microbatch."""
        stage, step, _ = what
        held = self._held[stage, step] = self._held.get((stage, step), 0) + 1
        if held == self._num_microbatches:
            self._clock.at(self._begin_round(stage), self._averaged, stage, step, self._rounds_end_s[stage] - self._exchange(stage).took_s)

    def _begin_round(self, stage: int) -> float:
        """When the round that is due ends. It begins once the news is there, and the stage's last round is over."""
        began_s = max(self._clock.now_s + self._delay_s, self._rounds_end_s[stage])
        self._rounds_end_s[stage] = began_s + self._exchange(stage).took_s
        return self._rounds_end_s[stage]

    def _averaged(self, stage: int, step: int, began_s: float) -> None:
        now_s, averages = self._clock.now_s, self._averaged_s[step]
        averages[stage] = now_s
        peers = self._stages[stage]
        sent = self._exchange(stage).sent_bytes
        for peer in peers:
            self._lines.sent_bytes[peer.number] += sent.get(peer.number, 0.0)
        for peer in peers:
            peer.note(SpanKind.ACCUMULATING, self._began_s.get((peer.number, step), began_s), began_s, step)
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
        self._closed(step)
        self._open(step + 1 + self._overlaps)
