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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from peerd.policy.hashing import digest
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

MANY_STAGES = 8
SLACK_OF_MANY_STAGES = 0.02
NEAR = 0.9
"""Candidates that bring at least this share of the best one's gain are equals, and the hash decides."""
MOST_TIMES_TYPICAL = 100.0
"""No peer is believed to outdo more than so many median peers: who claims more would else drain its stage."""


class Rule(enum.StrEnum):
    NONE = "none"
    ALGORITHM_2 = "algorithm-2"
    """The paper's: the least loaded peer of the stage with the least queued moves to the stage with the most."""
    IMPROVED = "improved"
    """The bottleneck rule: while the weakest stage has less than its fair share, one peer moves to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalancing:
    """How to rebalance. Times in seconds."""

    rule: Rule = Rule.IMPROVED
    period_s: float = 60.0
    """One plan per period."""
    slack: float | None = None
    """Share of the fair share that the weakest stage may lack. None: nothing below 8 stages, 2 % from there up."""
    download_s: float = 0.0
    """Measured: from the decision to move until the peer serves its new stage."""
    horizon_s: float = 3600.0
    """For how long a gain is expected to last before churn would have undone or brought it anyway."""
    noise: float = 0.05
    """Relative error of one peer's measured throughput; a difference within it moves nobody (hysteresis)."""
    stage_work: tuple[float, ...] = ()
    """Compute per sample of each stage, in any unit. Empty: all stages take the same."""
    needed_bytes: tuple[int, ...] = ()
    """Memory that a peer of each stage needs. Empty: every peer fits every stage."""

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
        if not all(0 < work < math.inf for work in self.stage_work):
            raise ValueError("stage_work must be positive and finite")

    def slack_at(self, num_stages: int) -> float:
        """With many stages one of them lacks something at any moment, and chasing it moves peers without end."""
        if self.slack is not None:
            return self.slack
        return SLACK_OF_MANY_STAGES if num_stages >= MANY_STAGES else 0.0

    def work_at(self, stage: int) -> float:
        return self.stage_work[stage] if self.stage_work else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """`peer` shall go on in `to_stage`, at its next step boundary."""

    peer: PeerId
    from_stage: int
    to_stage: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Who moves, and why nobody else does."""

    moves: tuple[Move, ...]
    reason: str


def plan(live: LiveView, num_stages: int, seed: int | str, params: Rebalancing) -> Plan:
    """At most one move. A function of the arguments alone; the order of the records and whose view it is do not matter.

    `seed` is what all planners of one period share, such as the period's number.
    """
    if params.stage_work and len(params.stage_work) != num_stages:
        raise ValueError(f"stage_work names {len(params.stage_work)} stages of {num_stages}")
    if params.needed_bytes and len(params.needed_bytes) != num_stages:
        raise ValueError(f"needed_bytes names {len(params.needed_bytes)} stages of {num_stages}")
    if params.rule is Rule.NONE:
        return Plan((), "rebalancing is off")
    if num_stages < 2:
        return Plan((), "there is one stage only")
    records = [record for record in live.records if 0 <= record.stage < num_stages and not record.leaving]
    if not records:
        return Plan((), "nobody is there")
    if params.rule is Rule.ALGORITHM_2:
        return _algorithm_2(records, num_stages, seed)
    return _Improvement(records, num_stages, seed, params).plan()


def move_of(found: Plan, mine: PeerRecord) -> Move | None:
    """The move that a plan asks of me; None when I have moved, am still downloading or am leaving."""
    if mine.phase is Phase.JOINING or mine.leaving:
        return None
    return next((move for move in found.moves if move.peer == mine.peer and move.from_stage == mine.stage), None)


def _algorithm_2(records: Iterable[PeerRecord], num_stages: int, seed: int | str) -> Plan:
    """Appendix D, algorithm 2, lines 5-30. Ours: hashes settle ties, and the last peer of a stage stays."""
    peers: list[list[PeerRecord]] = [[] for _ in range(num_stages)]
    for record in records:
        if record.phase is not Phase.JOINING:
            peers[record.stage].append(record)
    loads = [sum(record.queue for record in found) for found in peers]
    ties = [_rank(seed, stage) for stage in range(num_stages)]
    least = min((stage for stage in range(num_stages) if peers[stage]), key=lambda stage: (loads[stage], ties[stage]), default=0)
    most = max(range(num_stages), key=lambda stage: (loads[stage], ties[stage]))
    told = f"stage {least} has {loads[least]} queued and stage {most} has {loads[most]}"
    if loads[least] == loads[most]:
        return Plan((), f"all stages have {loads[most]} queued")
    if len(peers[least]) < 2:
        return Plan((), f"{told}, but stage {least} would be left empty")
    mover = min(peers[least], key=lambda record: (record.queue, _rank(seed, record.peer)))
    move = Move(peer=mover.peer, from_stage=least, to_stage=most, reason=f"{told}: its least loaded peer moves")
    return Plan((move,), move.reason)


def _rank(seed: int | str, who: str | int) -> bytes:
    return digest("rebalance", seed, who, size=8)


@dataclass(slots=True)
class _Stage:
    """One stage's standing. Rates are samples/s; sums are exact, so that the order of the records does not matter."""

    number: int
    rates: list[float] = field(default_factory=list)
    """Of all members, those still downloading included."""
    serving: list[tuple[PeerRecord, float]] = field(default_factory=list)
    """Peers that have the stage's state, with their rates; only these can move."""
    strength: float = 0.0


@dataclass(frozen=True, slots=True)
class _Candidate:
    record: PeerRecord
    source: _Stage
    rate: float
    gain: float


class _Improvement:
    """The bottleneck rule on one view (see `Rule.IMPROVED`), with throughputs in place of counts of peers.

    It reads no queues: they are snapshots, and noisy. A peer's speed is its throughput times its stage's work, so that
    it can be foretold what it would do elsewhere.
    """

    def __init__(self, records: list[PeerRecord], num_stages: int, seed: int | str, params: Rebalancing) -> None:
        self._seed = seed
        self._params = params
        self._work = [params.work_at(stage) for stage in range(num_stages)]
        self._stages = [_Stage(number) for number in range(num_stages)]
        speeds = self._speeds(records)
        for record, speed in zip(records, speeds, strict=True):
            stage, rate = self._stages[record.stage], speed / self._work[record.stage]
            stage.rates.append(rate)
            if record.phase is not Phase.JOINING:
                stage.serving.append((record, rate))
        for stage in self._stages:
            stage.strength = math.fsum(stage.rates)
        self._slowest = min(speeds)
        self._fair = math.fsum(speeds) / sum(self._work)
        """What every stage would have if speed could be cut up at will: no partition does better."""
        self._weakest = min(self._stages, key=lambda stage: (stage.strength, _rank(seed, stage.number)))

    def _speeds(self, records: list[PeerRecord]) -> list[float]:
        """Speed of each peer; one not yet measured counts as the mean."""
        claimed = [max(0.0, record.throughput) * self._work[record.stage] for record in records]
        measured = [speed for speed in claimed if speed > 0]
        if not measured:
            return [1.0] * len(records)
        most = MOST_TIMES_TYPICAL * median(measured)
        mean = math.fsum(min(speed, most) for speed in measured) / len(measured)
        return [min(speed, most) or mean for speed in claimed]

    def plan(self) -> Plan:
        weakest, slack = self._weakest, self._params.slack_at(len(self._stages))
        told = f"stage {weakest.number} is the weakest, at {weakest.strength:.4g} of a fair {self._fair:.4g} samples/s"
        lack = self._fair - weakest.strength
        if lack <= slack * self._fair:
            return Plan((), f"{told}: it has its share" + (f" within {slack:.0%}" if slack else ""))
        if lack * self._work[weakest.number] < self._slowest * (1 - 1e-9):
            return Plan((), f"{told}: it lacks less than one peer")
        if weakest.rates and not weakest.serving:
            return Plan((), f"{told}: a peer is on its way and nobody else has the stage's state")
        best = self._choose()
        if best is None:
            return Plan((), f"{told}: nobody's move would raise it by more than what may be measuring error")
        return self._if_it_pays(best, told)

    def _choose(self) -> _Candidate | None:
        """The peer whose move raises the weakest stage most; among equals from the strongest stage, then by hash."""
        candidates = list(self._candidates())
        if not candidates:
            return None
        enough = NEAR * max(candidate.gain for candidate in candidates)
        near = [candidate for candidate in candidates if candidate.gain >= enough]
        source = max(near, key=lambda candidate: candidate.source.strength).source
        return min((candidate for candidate in near if candidate.source is source), key=lambda c: _rank(self._seed, c.record.peer))

    def _candidates(self) -> Iterator[_Candidate]:
        """Serving peers whose stage, without them, still stands above the weakest by more than measuring errors."""
        weakest, fair, noise = self._weakest, self._fair, self._params.noise
        floor, work = weakest.strength * (1 + 1e-9), self._work[weakest.number]
        needed = self._params.needed_bytes[weakest.number] if self._params.needed_bytes else 0
        for source in self._stages:
            if source is weakest or len(source.serving) < 2:
                continue
            bar = floor + noise * math.hypot(*source.rates, *weakest.rates)
            share = self._work[source.number] / work
            for record, rate in source.serving:
                left = source.strength - rate
                if left > bar and not 0 < record.memory_bytes < needed:
                    yield _Candidate(record, source, rate, min(left, floor + rate * share, fair) - floor)

    def _if_it_pays(self, best: _Candidate, told: str) -> Plan:
        """The move, unless the samples lost while downloading outweigh those gained over the horizon."""
        params = self._params
        gained = best.gain * max(0.0, params.horizon_s - params.download_s)
        lost = best.rate * params.download_s
        weighed = f"+{best.gain:.4g} samples/s for {params.horizon_s:.0f} s against a download of {params.download_s:.0f} s"
        if gained <= lost:
            return Plan((), f"{told}: moving {best.record.peer} does not pay, {weighed}")
        move = Move(
            peer=best.record.peer,
            from_stage=best.source.number,
            to_stage=self._weakest.number,
            reason=f"{told}; stage {best.source.number} has {best.source.strength:.4g}: {weighed}",
        )
        return Plan((move,), move.reason)
