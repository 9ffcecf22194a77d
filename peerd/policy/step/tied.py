"""Rule N2 (tied sum): the sum of gradients that a step applies to a weight that two stages hold, and the peers that have it.

Each stage averages by itself. Then each fetches the other's averaged gradient of the weight and adds the two, the
first stage's first: a sum is a function of one average of each stage, and its id is the hash of their ids. If a stage
has two exact averages, which differ in rounding, there are two sums. A peer that finishes a step therefore tells which
sum it applied, and keeps that sum for peers that are behind; they apply the same, at both stages.

Two peers that finish a step without knowing of each other may still apply different sums, and a stage may give a step up,
rule 11 (skip). Then the copies have different histories, which `PeerRecord.tied` names: the worse copy is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peerd.policy.hashing import digest
from peerd.table.record import AverageId, Lineage, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView


@dataclass(frozen=True, slots=True)
class TiedSource:
    """A peer that has the sum with this `id`, or the other stage's average with this `id`, from which the sum is made."""

    peer: PeerId
    id: AverageId


@dataclass(frozen=True, slots=True)
class WantedSum:
    """The id of the sum that this peer must apply at its step, and the peers that can provide it."""

    id: AverageId
    sources: tuple[TiedSource, ...]


def other_end(stage: int, num_stages: int) -> int | None:
    """The stage that holds the other copy of a tied weight; None for a stage in between, or if there is only one stage."""
    ends = {0: num_stages - 1, num_stages - 1: 0}
    return ends.get(stage) if num_stages > 1 else None


def sum_id(first: AverageId, last: AverageId) -> AverageId:
    """The id of the sum of the first stage's average `first` and the last stage's average `last`."""
    return AverageId(digest("tied", first, last))


def sum_told(record: PeerRecord, step: int) -> AverageId | None:
    """The id of the sum that this peer applied at `step`; None if it applied none or has forgotten it."""
    return next((known.id for known in record.tied_sums if known.step == step), None)


def sum_of_step(mine: PeerRecord, live: LiveView, num_stages: int) -> WantedSum | None:
    """The sum to apply at this peer's step, of which it has the average; None while that cannot be known.

    A sum that a mate has applied comes first, then one that a peer of the other stage has applied. If no peer tells of a sum, it is made
    from this stage's average and the other's; if the other stage has two, from the one with the smaller id: rule 9 (adopt). If the
    other stage has finished the step and forgotten the sum, one that this stage holds is the most likely.
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
    """The wanted sum with its sources: peers that have the sum, and `halves`. The order of the sources differs from peer to peer."""
    others = [r for r in live.records if r.peer != mine.peer and r.phase is not Phase.JOINING]
    whole = [r.peer for r in others if sum_told(r, mine.step) == wanted or (r.step, r.tied_sum) == (mine.step, wanted)]
    sources = {source.peer: source for source in halves} | {peer: TiedSource(peer, wanted) for peer in whole}
    return WantedSum(wanted, tuple(sorted(sources.values(), key=lambda source: digest("source", mine.peer, source.peer, mine.step))))


def better_copy(mine: PeerRecord, live: LiveView, num_stages: int) -> PeerRecord | None:
    """A peer of the other stage, at this peer's step, whose copy of the weight has a better history; None if there is none."""
    other = other_end(mine.stage, num_stages)
    if other is None:
        return None
    better = [r for r in live.serving(other) if r.step == mine.step and r.tied < mine.tied]
    return min(better, key=lambda r: (r.tied, digest("source", mine.peer, r.peer, mine.step)), default=None)


def history_after(tied: Lineage, applied: AverageId, norm: float | None) -> Lineage:
    """The history of a copy after a sum is applied to it, with the step's gradient norm if the run shares norms."""
    return Lineage(tied.inexact, digest("tied sum", tied.chain, applied, *([] if norm is None else [norm.hex()])))


def lineage_replaced(lineage: Lineage, tied: Lineage) -> Lineage:
    """The lineage of a stage after the other stage's copy of the weight has replaced its own."""
    return Lineage(lineage.inexact, digest("copy", lineage.chain, tied.inexact, tied.chain))
