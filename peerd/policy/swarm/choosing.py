"""Which stage a joiner takes: the weakest one, and among near-equals one that it helps most and that lies near.

A run is as fast as its weakest stage, by what devices compute and lines carry (policy/swarm/rates.py). A joiner whose line does not carry a
stage's averages adds nothing there. Several stages are about equally weak most of the time; then a stage whose peers are near saves time at
each boundary and in each round. What others say of their place moves a joiner among near-equals only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean, median

from peerd.policy.hashing import digest
from peerd.policy.swarm.coordinates import predicted_s
from peerd.policy.swarm.rates import Demands, carried, demand_of, speed_of
from peerd.table.record import Coordinate
from peerd.table.view import LiveView

NEAR_EQUAL = 1.05
"""Stages whose strengths, or the joiner's own rates there, differ by less than that count as equal: measuring errors are as large."""
AS_NEAR, AS_NEAR_S = 1.1, 0.002
"""Round trips that differ by no more than that, as a factor and in seconds, are equal: coordinates are not more exact."""
MOST_SEEN = 64
"""Peers of a stage and its neighbours whose distance is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """What a peer that looks for a stage knows of itself. Lines in bytes per second; 0: unknown."""

    lacking: Sequence[str]
    """By stage, what this machine has too little of for it, in words, or an empty string."""
    is_reliable: bool = False
    wished: int | None = None
    """The stage that the organiser wishes it in."""
    up: float = 0.0
    down: float = 0.0
    coordinate: Coordinate | None = None
    demands: Demands = ()
    round_rates: Sequence[float] = ()
    """By stage, the rate that its line needs in both directions for the stage's averages. Empty: unknown."""
    least_peers: int = 1
    """Stages of fewer peers come first: of few nobody can say which of them lies (hole 62), and one that lies may make its stage look
    strong."""

    def carries(self, stage: int) -> bool:
        """Whether its line carries the stage's averages, as far as is known."""
        needed = self.round_rates[stage] if self.round_rates else 0.0
        return all(rate <= 0 or rate >= needed for rate in (self.up, self.down))


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The stage to serve and why; `stage` is None where none fits."""

    stage: int | None
    reason: str


def choose_stage(live: LiveView, joiner: Joiner) -> StageChoice:
    """The stage that a joiner takes of those that fit its memory.

    It takes the one that the organiser wishes it in; without such a wish an empty one, else one that lacks what it brings, else a weak one.
    """
    lacking = joiner.lacking
    fitting = [stage for stage, lacks in enumerate(lacking) if not lacks]
    if not fitting:
        return StageChoice(None, f"stage 0 needs {lacking[0]}, and the others do not fit either")
    if joiner.wished in fitting:
        return StageChoice(joiner.wished, f"the organiser wishes this peer in stage {joiner.wished}")
    weakest, total = weakest_stage(live, fitting)
    if total == 0:
        return StageChoice(weakest, f"stage {weakest} has nobody")
    useful = [stage for stage in fitting if joiner.carries(stage)] or fitting
    sizes = {stage: _num_peers(live, stage) for stage in useful}
    if min(sizes.values()) < joiner.least_peers:
        useful = [stage for stage, size in sizes.items() if size == min(sizes.values())]
    reliable = [record for record in live.records if record.is_reliable and record.peer != live.me]
    known = [stage for stage in useful if live.summary(stage) is None]
    if joiner.is_reliable and reliable and known:
        return _among_weakest(live, replace(live, records=tuple(reliable)), known, joiner)
    return _among_weakest(live, live, useful, joiner)


def _num_peers(live: LiveView, stage: int) -> int:
    """The peers that serve a stage or are on their way there, without this one and those that leave."""
    told = live.summary(stage)
    return max(sum(r.peer != live.me and not r.leaving for r in live.of_stage(stage)), told.peers if told is not None else 0)


def _among_weakest(live: LiveView, counted: LiveView, stages: Sequence[int], joiner: Joiner) -> StageChoice:
    """Choose among stages that are about as weak as the weakest: that where this peer computes most, and of equals a near one.

    `counted`: those whose strengths count. For one that means to stay they are its like, so that each stage can go on while others go.
    """
    weakest, total = weakest_stage(counted, stages)
    told = f"stage {weakest} is the weakest, at {total:.1f} samples/s" + " by peers that mean to stay" * (counted is not live)
    strengths = stage_strengths(counted, stages)
    near_equal = [stage for stage in stages if strengths[stage] <= NEAR_EQUAL * total]
    rates = own_rates(live, joiner, near_equal)
    best = max(rates.values())
    able = [stage for stage in near_equal if best <= NEAR_EQUAL * rates[stage]]
    distances = {stage: found for stage in able if (found := distance_s(live, joiner, stage)) is not None}
    if len(distances) < 2:
        stage = weakest if weakest in able else min(able, key=lambda stage: _drawn(live, stage))
        return StageChoice(stage, told if stage == weakest else f"{told}; stage {stage} is as weak, and this peer does more there")
    most_s = AS_NEAR * min(distances.values()) + AS_NEAR_S
    near = [stage for stage, found in distances.items() if found <= most_s]
    stage = min(near, key=lambda stage: _drawn(live, stage))
    others = f"; of {len(able)} that are as weak stage {stage} is near, at {1000 * distances[stage]:.0f} ms"
    return StageChoice(stage, told + others)


def weakest_stage(live: LiveView, stages: Sequence[int]) -> tuple[int, float]:
    """The weakest of some stages, at least one, and its strength in samples per second.

    Ties go by hash, so that joiners at one moment spread.
    """
    strengths = stage_strengths(live, stages)
    weakest = min(stages, key=lambda stage: (strengths[stage], _drawn(live, stage)))
    return weakest, strengths[weakest]


def stage_strengths(live: LiveView, stages: Sequence[int]) -> dict[int, float]:
    """The sum of throughputs of each stage; a peer still downloading counts, and one not yet measured counts as the mean."""
    measured = [r.throughput for r in live.records if r.throughput > 0 and r.peer != live.me]
    mean = sum(measured) / len(measured) if measured else 1.0

    def strength(stage: int) -> float:
        told = live.summary(stage)
        known = sum(r.throughput or mean for r in live.of_stage(stage) if not r.leaving and r.peer != live.me)
        return max(known, told.throughput if told else 0.0)

    return {stage: strength(stage) for stage in stages}


def own_rates(live: LiveView, joiner: Joiner, stages: Sequence[int]) -> dict[int, float]:
    """Samples a second that the joiner would do in each of some stages, if it computes as the others do at the median."""
    speeds = [speed for r in live.records if 0 <= r.stage < len(joiner.lacking) and (speed := speed_of(r, joiner.demands)) > 0]
    usual = median(speeds) if speeds else 1.0
    demands = {stage: demand_of(joiner.demands, stage) for stage in stages}
    return {stage: min(usual / demand.work, carried(joiner.up, joiner.down, demand)) for stage, demand in demands.items()}


def distance_s(live: LiveView, joiner: Joiner, stage: int) -> float | None:
    """The round trip, s, to the peers that one of the stage exchanges tensors with: the mean of the medians of it and both neighbours.

    None: nothing is known of it.
    """
    here = joiner.coordinate
    if here is None:
        return None
    found = list[float]()
    for near in (stage, stage - 1, stage + 1):
        placed = (r.coordinate for r in live.of_stage(near) if r.coordinate is not None and r.peer != live.me)
        round_trips_s = [predicted_s(here, coordinate) for coordinate in islice(placed, MOST_SEEN)]
        found += [median(round_trips_s)] if round_trips_s else []
    return fmean(found) if found else None


def _drawn(live: LiveView, stage: int) -> bytes:
    return digest("stage", live.me, stage, size=8)
