"""Rebalancing: which peer moves from which stage to which, and why (SWARM section 3.2, appendix D, and better).

`plan` is one function of the view. A daemon calls it once per period and looks up its own id (`move_of`); the simulator
calls it once per view. Every decision carries its reason, also that nobody moves. When to call it, and what a move
takes (a step boundary, a download), is not decided here.

What keeps many planners from stampeding on views that differ a little or are some seconds old: at most one peer moves
per plan; near-equal candidates are ordered by a hash that all planners share; a move in flight is a JOINING record at
its new stage and counts there; and the cost of a move is weighed last, so that each peer judges its own move by its own
measured download without disturbing what the others decide.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from peerd.policy.hashing import digest
from peerd.policy.swarm.rates import SampleDemand, demand_of, rate_at, speed_of
from peerd.policy.swarm.reliable import last_reliable, num_reliable, without_reliable
from peerd.table.record import PeerId, PeerRecord, Phase, StageSummary
from peerd.table.view import LiveView

MANY_STAGES = 8
SLACK = 0.01
SLACK_OF_MANY_STAGES = 0.03
ROUNDING = 1e-9
"""Relative; differences below it are the arithmetic's."""
PERIODS_PER_SEED = 10
LEAST_LONGER = 1.0
"""Microbatches by which the longest queue must exceed the shortest."""
ERRORS = 2.0
"""A peer moves only for a difference larger than this many standard deviations of the measuring error."""
NEAR = 0.9
"""Candidates that bring at least this share of the best one's gain are equals, and the hash decides."""
MOST_TIMES_TYPICAL = 100.0
"""A peer's speed is cut to this many times the median: a larger claim would otherwise drain its stage."""


class Rule(enum.StrEnum):
    NONE = "none"
    QUEUES = "queues"
    """The paper's algorithm 2: the least loaded peer of the stage with the least queued moves to the stage with the most."""
    IMPROVED = "improved"
    """The bottleneck rule: while the weakest stage has less than its fair share, one peer moves to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalancing:
    """How to rebalance. Times in seconds."""

    rule: Rule = Rule.IMPROVED
    period_s: float = 60.0
    """One plan per period."""
    slack: float | None = None
    """Share of the fair share that the weakest stage may lack. None: 1 % below 8 stages, 3 % from there up."""
    download_s: float = 0.0
    """Measured: from the decision to move until the peer serves its new stage."""
    horizon_s: float = 3600.0
    """How long a gain is expected to last before churn undoes it or would have brought it anyway."""
    noise: float = 0.02
    """Relative error of one peer's measured throughput; a difference within it moves nobody (hysteresis)."""
    demands: tuple[SampleDemand, ...] = ()
    """What a sample asks of a peer of each stage. Empty: all stages take the same, and no line binds."""
    needed_bytes: tuple[int, ...] = ()
    """Memory that a peer of each stage needs. Empty: every peer fits every stage."""
    least_peers: int = 1
    """A move leaves so many peers in its stage, or as many as are then in the other one: of few nobody can say which of them lies (hole
    59), and a peer that claims to be fast makes its stage look strong."""

    def __post_init__(self) -> None:
        positive = {"period_s": self.period_s, "horizon_s": self.horizon_s}
        shares = {"slack": self.slack or 0.0, "noise": self.noise}
        for name, value in positive.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {value}")
        for name, value in shares.items():
            if not 0 <= value < 1:
                raise ValueError(f"{name} must lie in [0, 1), not {value}")
        if not 0 <= self.download_s < math.inf:
            raise ValueError(f"download_s must be finite and not negative, not {self.download_s}")

    def slack_at(self, num_stages: int) -> float:
        """With many stages one of them lacks something at any moment, and chasing it moves peers without end."""
        if self.slack is not None:
            return self.slack
        return SLACK_OF_MANY_STAGES if num_stages >= MANY_STAGES else SLACK

    def demand_at(self, stage: int) -> SampleDemand:
        return demand_of(self.demands, stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """`peer` shall go on in `to_stage`, at its next step boundary."""

    peer: PeerId
    from_stage: int
    to_stage: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The moves, and the reason for them or for their absence."""

    moves: tuple[Move, ...]
    reason: str


def plan(live: LiveView, num_stages: int, seed: int | str, params: Rebalancing) -> Plan:
    """Plan at most one move. The plan is a function of the arguments alone; the order of the records and whose view it is do not matter.

    `seed` is what all planners of one period share (see `seed_at`).
    """
    if params.demands and len(params.demands) != num_stages:
        raise ValueError(f"demands names {len(params.demands)} stages of {num_stages}")
    if params.needed_bytes and len(params.needed_bytes) != num_stages:
        raise ValueError(f"needed_bytes names {len(params.needed_bytes)} stages of {num_stages}")
    if num_stages < 2:
        return Plan((), "there is one stage only")
    records = [record for record in live.records if 0 <= record.stage < num_stages and not record.leaving]
    if not records:
        return Plan((), "nobody is there")
    if params.rule is not Rule.NONE and (move := _reliable_move(records, live, num_stages, seed, params)) is not None:
        return Plan((move,), move.reason)
    match params.rule:
        case Rule.NONE:
            return Plan((), "rebalancing is off")
        case Rule.QUEUES:
            return _algorithm_2(records, [stage for stage in range(num_stages) if live.summary(stage)], num_stages, seed, params)
        case Rule.IMPROVED:
            return _Improvement(records, [live.summary(stage) for stage in range(num_stages)], num_stages, seed, params).plan()


def seed_at(now_s: float, params: Rebalancing) -> int:
    """The seed that planners share at this time on a clock that they share.

    It outlasts some periods: a view too old to show the last move names the same peer again, which has moved and stays.
    It changes all the same, so that a peer that does not follow the plan does not stand in the others' way for ever.
    """
    return int(now_s // (PERIODS_PER_SEED * params.period_s))


def move_of(found: Plan, mine: PeerRecord) -> Move | None:
    """The move that a plan asks of this peer; None when it has moved, still downloads or is leaving."""
    if mine.phase is Phase.JOINING or mine.leaving:
        return None
    return next((move for move in found.moves if move.peer == mine.peer and move.from_stage == mine.stage), None)


def _reliable_move(records: list[PeerRecord], live: LiveView, num_stages: int, seed: int | str, params: Rebalancing) -> Move | None:
    """A reliable peer for a stage that has none, from the stage that has most; None if each has one, or no stage can spare one.

    In a swarm too large for everybody to know everybody it compares the stages whose peers are known.
    """
    known = [stage for stage in range(num_stages) if live.summary(stage) is None]
    bare, counts, sizes = without_reliable(records, known), num_reliable(records, num_stages), Counter(record.stage for record in records)
    if not bare or max(counts) < 2:
        return None
    to_stage = min(bare, key=lambda stage: _rank(seed, stage))
    needed = params.needed_bytes[to_stage] if params.needed_bytes else 0
    pinned = last_reliable(records)
    able = [
        record
        for record in records
        if record.is_reliable and record.peer not in pinned and record.phase is not Phase.JOINING and not 0 < record.memory_bytes < needed
        if _may_spare(sizes[record.stage], sizes[to_stage], params)
    ]
    if not able:
        return None
    source = max((record.stage for record in able), key=lambda stage: (counts[stage], _rank(seed, stage)))
    mover = min((record for record in able if record.stage == source), key=lambda record: _rank(seed, record.peer))
    reason = f"stage {to_stage} has no peer that means to stay, and stage {source} has {counts[source]}"
    return Move(peer=mover.peer, from_stage=source, to_stage=to_stage, reason=reason)


def _may_spare(source: int, target: int, params: Rebalancing) -> bool:
    """Whether a stage of so many peers may give one to another one. No stage is left empty."""
    return source > min(params.least_peers, target + 1)


def _algorithm_2(records: Iterable[PeerRecord], told_of: Collection[int], num_stages: int, seed: int | str, params: Rebalancing) -> Plan:
    """Appendix D, algorithm 2, lines 5-30. Ours: queues that differ by less than a microbatch are equal, hashes settle ties, so that a view
    too old to show a move names the same peer again, and the last peer of a stage stays.

    In a swarm too large for everybody to know everybody it compares the stages whose peers are known.
    """
    peers: list[list[PeerRecord]] = [[] for _ in range(num_stages)]
    for record in records:
        if record.phase is not Phase.JOINING:
            peers[record.stage].append(record)
    loads = [math.fsum(record.backlog for record in found) for found in peers]
    ties = [_rank(seed, stage) for stage in range(num_stages)]
    known = [stage for stage in range(num_stages) if stage not in told_of]
    least = min((stage for stage in known if peers[stage]), key=lambda stage: (loads[stage], ties[stage]), default=known[0])
    most = max(known, key=lambda stage: (loads[stage], ties[stage]))
    told = f"stage {least} has {loads[least]:.3g} queued and stage {most} has {loads[most]:.3g}"
    if loads[most] - loads[least] < LEAST_LONGER:
        return Plan((), f"all stages have about {loads[most]:.3g} queued")
    if not _may_spare(len(peers[least]), len(peers[most]), params):
        return Plan((), f"{told}, but stage {least} would be left " + ("empty" if len(peers[least]) < 2 else "with too few peers"))
    pinned = last_reliable(peers[least])
    free = [record for record in peers[least] if record.peer not in pinned]
    idle = min(record.backlog for record in free) + LEAST_LONGER
    mover = min((record for record in free if record.backlog < idle), key=lambda record: _rank(seed, record.peer))
    move = Move(peer=mover.peer, from_stage=least, to_stage=most, reason=f"{told}: its least loaded peer moves")
    return Plan((move,), move.reason)


def _rank(seed: int | str, who: str | int) -> bytes:
    return digest("rebalance", seed, who, size=8)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A peer that might move: its rate where it is, and by how much its move would raise the weakest stage, in samples/s."""

    record: PeerRecord
    rate: float
    gain: float


class _Improvement:
    """The bottleneck rule on one view (see `Rule.IMPROVED`), with throughputs in place of counts of peers.

    It reads no queues: they are snapshots, and noisy. A peer's speed is what it computes times its stage's work, so that
    it can be foretold what it would do elsewhere, on its line. A stage's strength is the sum of its members' rates, those still
    downloading included; sums are exact, so that the order of the records does not matter.
    """

    def __init__(
        self, records: list[PeerRecord], summaries: Sequence[StageSummary | None], num_stages: int, seed: int | str, params: Rebalancing
    ) -> None:
        self._records, self._seed, self._params = records, seed, params
        self._demands = [params.demand_at(stage) for stage in range(num_stages)]
        self._speeds = self._believed_speeds()
        self._rates: list[list[float]] = [[] for _ in range(num_stages)]
        for record, speed in zip(records, self._speeds, strict=True):
            self._rates[record.stage].append(rate_at(record, speed, self._demands[record.stage]))
        unseen = [0.0 if told is None else max(0.0, told.throughput - math.fsum(self._rates[s])) for s, told in enumerate(summaries)]
        self._strengths = [math.fsum([*rates, rest]) for rates, rest in zip(self._rates, unseen, strict=True)]
        self._fair = self._fair_share(unseen)
        least = min(self._strengths)
        equals = [stage for stage in range(num_stages) if self._strengths[stage] == least]
        self._weakest = min(equals, key=lambda stage: _rank(seed, stage))

    def _fair_share(self, unseen: Sequence[float]) -> float:
        """What every stage would have if each peer could divide its time among all stages.

        `unseen`: samples/s of peers that are not known, by stage; their lines are taken not to bind.
        """
        free = [rest * demand.work for rest, demand in zip(unseen, self._demands, strict=True)]
        divided = list[float]()
        for record, speed in zip(self._records, self._speeds, strict=True):
            if record.computes <= 0:
                free.append(speed)
            elif rates := [rate for demand in self._demands if (rate := rate_at(record, speed, demand)) > 0]:
                divided.append(1 / math.fsum(1 / rate for rate in rates))
        return math.fsum([math.fsum(free) / sum(demand.work for demand in self._demands), *divided])

    def _believed_speeds(self) -> list[float]:
        """Speed of each peer; one not yet measured counts as the mean."""
        speeds = [speed_of(record, self._params.demands) for record in self._records]
        measured = [speed for speed in speeds if speed > 0]
        if not measured:
            return [1.0] * len(speeds)
        most = MOST_TIMES_TYPICAL * median(measured)
        if len(measured) == len(speeds) and max(measured) <= most:
            return speeds
        mean = math.fsum(min(speed, most) for speed in measured) / len(measured)
        return [min(speed, most) if speed > 0 else mean for speed in speeds]

    def plan(self) -> Plan:
        weakest, strength, slack = self._weakest, self._strengths[self._weakest], self._params.slack_at(len(self._demands))
        told = f"stage {weakest} is the weakest, at {strength:.4g} of a fair {self._fair:.4g} samples/s"
        lack = self._fair - strength
        if lack <= slack * self._fair:
            return Plan((), f"{told}: it has its share" + (f" within {slack:.0%}" if lack > 0 else ""))
        serving = self._serving()
        if self._rates[weakest] and not serving[weakest]:
            return Plan((), f"{told}: a peer is on its way and nobody else has the stage's state")
        best = self._choose(serving)
        least = min(rate_at(record, speed, self._demands[weakest]) for record, speed in zip(self._records, self._speeds, strict=True))
        lacks_a_peer = lack >= least * (1 - ERRORS * self._params.noise - ROUNDING)
        if not lacks_a_peer and (best is None or not self._others_are_stronger(best.record.stage)):
            return Plan((), f"{told}: it lacks less than one peer")
        if best is None:
            return Plan((), f"{told}: nobody's move would raise it by more than what may be measuring error")
        return self._if_it_pays(best, told)

    def _serving(self) -> list[list[tuple[PeerRecord, float]]]:
        """Per stage the peers that have its state, with their speeds; only these can move."""
        found: list[list[tuple[PeerRecord, float]]] = [[] for _ in self._demands]
        for record, speed in zip(self._records, self._speeds, strict=True):
            if record.phase is not Phase.JOINING:
                found[record.stage].append((record, speed))
        return found

    def _choose(self, serving: list[list[tuple[PeerRecord, float]]]) -> _Candidate | None:
        """The peer whose move raises the weakest stage most; among equals from the strongest stage, then by hash."""
        there, params = len(self._rates[self._weakest]), self._params
        able = [(source, peers) for source, peers in enumerate(serving) if _may_spare(len(peers), there, params)]
        candidates = [candidate for source, peers in able for candidate in self._candidates(source, peers)]
        if not candidates:
            return None
        enough = NEAR * max(candidate.gain for candidate in candidates)
        near = [candidate for candidate in candidates if candidate.gain >= enough]
        source = max((candidate.record.stage for candidate in near), key=lambda stage: self._strengths[stage])
        return min((c for c in near if c.record.stage == source), key=lambda c: _rank(self._seed, c.record.peer))

    def _others_are_stronger(self, source: int) -> bool:
        """True if a move from `source` raises the whole: every third stage is stronger than the weakest, measuring error aside."""
        others = (stage for stage in range(len(self._demands)) if stage not in (source, self._weakest))
        return all(self._strengths[stage] > self._bar(stage) for stage in others)

    def _bar(self, stage: int) -> float:
        """The strength above which `stage` is stronger than the weakest by more than the measuring error."""
        error = self._params.noise * math.hypot(*self._rates[stage], *self._rates[self._weakest])
        return self._strengths[self._weakest] * (1 + ROUNDING) + ERRORS * error

    def _candidates(self, source: int, peers: list[tuple[PeerRecord, float]]) -> Iterator[_Candidate]:
        """Peers of `source` whose stage would stay stronger than the weakest without them, by more than the measuring error."""
        weakest, strength = self._weakest, self._strengths[source]
        floor, bar = self._strengths[weakest], self._bar(source)
        needed = self._params.needed_bytes[weakest] if self._params.needed_bytes else 0
        pinned = last_reliable([record for record, _ in peers])
        for record, speed in peers:
            if record.peer in pinned:
                continue
            rate = rate_at(record, speed, self._demands[source])
            left = strength - rate
            if left > bar and source != weakest and not 0 < record.memory_bytes < needed:
                gain = min(left, floor + rate_at(record, speed, self._demands[weakest]), self._fair) - floor
                yield _Candidate(record, rate, gain)

    def _if_it_pays(self, best: _Candidate, told: str) -> Plan:
        """The move, unless the samples lost while downloading outweigh those gained over the horizon."""
        params, source = self._params, best.record.stage
        gained = best.gain * max(0.0, params.horizon_s - params.download_s)
        lost = best.rate * params.download_s
        weighed = f"+{best.gain:.4g} samples/s for {params.horizon_s:.0f} s against a download of {params.download_s:.0f} s"
        if gained <= lost:
            return Plan((), f"{told}: moving {best.record.peer} does not pay, {weighed}")
        reason = f"{told}; stage {source} has {self._strengths[source]:.4g}: {weighed}"
        move = Move(peer=best.record.peer, from_stage=source, to_stage=self._weakest, reason=reason)
        return Plan((move,), reason)
