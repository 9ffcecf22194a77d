"""Rule N2 (tied sum): which sum of the gradients of a weight that two stages hold a step is finished with, and who gives it.

Both stages average by themselves. Then each fetches the other's averaged gradient of the weight and adds the two, the
first stage's first: a sum is a function of one average of each stage, and its id is the hash of their ids. Where a
stage has two exact averages, which differ in rounding, there are two sums; so whoever finishes a step tells which one
was applied, and keeps it for those behind. What was applied is a fact, and it is the same for both stages.

Two peers that finish a step without knowing of each other may still apply unlike sums, and a stage may give a step up,
rule 11 (skip). Then the copies descend from unlike histories, which `PeerRecord.tied` tells apart: the worse one is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peerd.policy.hashing import digest
from peerd.table.record import AverageId, Lineage, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView


@dataclass(frozen=True, slots=True)
class TiedSource:
    """A peer that has the sum `id`, or the other stage's average `id` that it is made from."""

    peer: PeerId
    id: AverageId


@dataclass(frozen=True, slots=True)
class WantedSum:
    """The sum that my step is to be finished with, and who can help me to it."""

    id: AverageId
    sources: tuple[TiedSource, ...]


def other_end(stage: int, num_stages: int) -> int | None:
    """The stage that holds the other copy; None for one in between, and where there is but one."""
    ends = {0: num_stages - 1, num_stages - 1: 0}
    return ends.get(stage) if num_stages > 1 else None


def sum_id(first: AverageId, last: AverageId) -> AverageId:
    """The id of the sum of the first stage's average and the last stage's."""
    return AverageId(digest("tied", first, last))


def sum_told(record: PeerRecord, step: int) -> AverageId | None:
    """The sum that this peer has finished the step with, where it still keeps that."""
    return next((known.id for known in record.tied_sums if known.step == step), None)


def sum_of_step(mine: PeerRecord, live: LiveView, num_stages: int) -> WantedSum | None:
    """What my step, of which I have the average, is to be finished with; None while it cannot be known.

    As with norms: what my mates applied who have finished it, then what the other stage has; only where nobody tells of having
    finished it, the sum of my average and the other stage's, of two the one with the smaller id: rule 9 (adopt). Where the other
    stage has finished it and forgotten with what, a sum that my stage holds is the likeliest.
    """
    other = other_end(mine.stage, num_stages)
    if other is None:
        return None
    ahead = [r for r in live.records if r.phase is not Phase.JOINING and r.step > mine.step]
    for stage in (mine.stage, other):
        told = [(r.lineage, found) for r in ahead if r.stage == stage and (found := sum_told(r, mine.step)) is not None]
        if told:
            return _wanted(min(told)[1], mine, live, ())
    averaged = [m for m in live.members(other, mine.step) if m.phase is Phase.AVERAGED]
    if not averaged:
        held = [r.tied_sum for r in (mine, *live.members(mine.stage, mine.step)) if r.tied_sum]
        return _wanted(min(held), mine, live, ()) if held else None
    theirs = min((m.lineage, m.average_id) for m in averaged)[1]
    pair = (mine.average_id, theirs) if mine.stage == 0 else (theirs, mine.average_id)
    return _wanted(sum_id(*pair), mine, live, tuple(TiedSource(m.peer, theirs) for m in averaged if m.average_id == theirs))


def _wanted(wanted: AverageId, mine: PeerRecord, live: LiveView, halves: Sequence[TiedSource]) -> WantedSum:
    """Every peer that has the sum of this step is a source; each peer asks the sources in an order of its own."""
    others = [r for r in live.records if r.peer != mine.peer and r.phase is not Phase.JOINING]
    whole = [r.peer for r in others if sum_told(r, mine.step) == wanted or (r.step, r.tied_sum) == (mine.step, wanted)]
    sources = {source.peer: source for source in halves} | {peer: TiedSource(peer, wanted) for peer in whole}
    return WantedSum(wanted, tuple(sorted(sources.values(), key=lambda source: digest("source", mine.peer, source.peer, mine.step))))


def better_copy(mine: PeerRecord, live: LiveView, num_stages: int) -> PeerRecord | None:
    """A peer of the other stage at my step whose copy of the weight descends from a better history than mine."""
    other = other_end(mine.stage, num_stages)
    if other is None:
        return None
    better = [r for r in live.serving(other) if r.step == mine.step and r.tied < mine.tied]
    return min(better, key=lambda r: (r.tied, digest("source", mine.peer, r.peer, mine.step)), default=None)


def history_after(tied: Lineage, applied: AverageId, norm: float | None) -> Lineage:
    """What a copy descends from to which a sum was applied, with the step's gradient norm where the run shares norms."""
    return Lineage(tied.inexact, digest("tied sum", tied.chain, applied, *([] if norm is None else [norm.hex()])))


def lineage_replaced(lineage: Lineage, tied: Lineage) -> Lineage:
    """The lineage of a stage after the other stage's copy has replaced its own."""
    return Lineage(lineage.inexact, digest("copy", lineage.chain, tied.inexact, tied.chain))
