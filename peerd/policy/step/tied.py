"""Rule N2 (tied sum): the sum of gradients that a step applies to a weight that two stages hold, and the peers that have it.

Each stage averages by itself. Then each fetches the other's averaged gradient of the weight and adds the two, the
first stage's first: a sum is a function of one average of each stage, and its id is the hash of their ids. If a stage
has two exact averages, which differ in rounding, there are two sums. A peer that finishes a step therefore tells which
sum it applied, and keeps that sum for peers that are behind; they apply the same, at both stages.

Two peers that finish a step without knowing of each other may still apply different sums, and a stage may give a step up,
rule 11 (skip). Then the copies have different histories, which `PeerRecord.tied` names: the worse copy is replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from peerd.policy.hashing import digest
from peerd.policy.step.ledger import FEWEST
from peerd.table.record import AverageId, Lineage, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

MOST_ASKED = 8
"""So many other peers are asked for the hash of gradients that one has given."""


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


def sum_by_most(mine: PeerRecord, live: LiveView, num_stages: int) -> WantedSum | None:
    """The same in a run that certifies its averages: no single peer's word decides (hole 67).

    Each peer of both ends that has finished the step has a word, and what the averages make has one, which decides where words are equally
    many. The other stage's average is the one that more than half of its members hold. If nobody tells a sum any more, the one that most
    of this stage hold.
    """
    other = other_end(mine.stage, num_stages)
    if other is None:
        return None
    ends = [r for r in live.records if r.phase is not Phase.JOINING and r.stage in (mine.stage, other) and r.step > mine.step]
    words = Counter(found for r in ends if (found := sum_told(r, mine.step)) is not None)
    members = live.members(other, mine.step)
    held = Counter(m.average_id for m in members if m.phase is Phase.AVERAGED)
    theirs = next((each for each, number in held.items() if 2 * number > len(members)), None)
    made = None
    if theirs is not None:
        made = sum_id(*((mine.average_id, theirs) if mine.stage == 0 else (theirs, mine.average_id)))
        words[made] += 1
    elif not words and not held:
        words = Counter(r.tied_sum for r in (mine, *live.members(mine.stage, mine.step)) if r.tied_sum)
    if not words:
        return None
    wanted = made if made is not None and words[made] == max(words.values()) else min(words, key=lambda each: (-words[each], each))
    halves = [TiedSource(m.peer, theirs) for m in members if theirs is not None and m.average_id == theirs]
    return _wanted(wanted, mine, live, halves if wanted == made else ())


def witnesses(wanted: WantedSum, source: TiedSource, live: LiveView, certifies: bool) -> tuple[tuple[PeerId, ...], int]:
    """Other peers that have the same as this source, and how many peers have to tell the same of it, the source among them.

    More than half of all, and two at least where they are of a stage of three or more: of two peers nobody can say which one lies.
    """
    if not certifies:
        return (), 1
    others = tuple(each.peer for each in wanted.sources if each.id == source.id and each.peer != source.peer)[:MOST_ASKED]
    giver = live.find(source.peer)
    if giver is None or len(live.serving(giver.stage)) < FEWEST:
        return others, 1
    return others, max(2, (1 + len(others)) // 2 + 1)


def _wanted(wanted: AverageId, mine: PeerRecord, live: LiveView, halves: Sequence[TiedSource]) -> WantedSum:
    """The wanted sum with its sources: peers that have the sum, and `halves`. The order of the sources differs from peer to peer."""
    others = [r for r in live.records if r.peer != mine.peer and r.phase is not Phase.JOINING]
    whole = [r.peer for r in others if sum_told(r, mine.step) == wanted or (r.step, r.tied_sum) == (mine.step, wanted)]
    sources = {source.peer: source for source in halves} | {peer: TiedSource(peer, wanted) for peer in whole}
    return WantedSum(wanted, tuple(sorted(sources.values(), key=lambda source: digest("source", mine.peer, source.peer, mine.step))))


def better_copy(mine: PeerRecord, live: LiveView, num_stages: int, certifies: bool = False) -> PeerRecord | None:
    """A peer of the other stage, at this peer's step, whose copy of the weight has a better history; None if there is none.

    Where the run certifies, more than half of that stage have to tell that history (hole 67).
    """
    other = other_end(mine.stage, num_stages)
    if other is None:
        return None
    serving = live.serving(other)
    better = [r for r in serving if r.step == mine.step and r.tied < mine.tied]
    if certifies:
        told = Counter(r.tied for r in better)
        better = [r for r in better if 2 * told[r.tied] > len(serving)]
    return min(better, key=lambda r: (r.tied, digest("source", mine.peer, r.peer, mine.step)), default=None)


def history_after(tied: Lineage, applied: AverageId, norm: float | None) -> Lineage:
    """The history of a copy after a sum is applied to it, with the step's gradient norm if the run shares norms."""
    return Lineage(tied.inexact, digest("tied sum", tied.chain, applied, *([] if norm is None else [norm.hex()])))


def lineage_replaced(lineage: Lineage, tied: Lineage) -> Lineage:
    """The lineage of a stage after the other stage's copy of the weight has replaced its own."""
    return Lineage(lineage.inexact, digest("copy", lineage.chain, tied.inexact, tied.chain))
