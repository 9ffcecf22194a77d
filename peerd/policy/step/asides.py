"""Asides: what another peer may hold as well is summed by itself, so that an overlap costs the overlap and not the ledger.

Only a microbatch that is launched again can be computed twice: its peer was suspected, a call failed, or another trainer took over.
The peer that adds it can tell: its table still shows who held it, or the call says that somebody may have it. It adds
such a microbatch to an aside, one for each peer that may hold it. A peer's sums are its main one and its asides; rule 6 (reset) in
docs/protocol.md drops the smaller of two sums that meet, and keeps the others. When a round opens they all become one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from peerd.policy.hashing import peer_rank
from peerd.policy.step.ledger import holders
from peerd.table.record import MAX_ASIDES, NO_AVERAGE, Aside, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

UNKNOWN = PeerId("")
"""The other holder of what was launched again, where no record shows who it is."""


def other_holder(mine: PeerRecord, live: LiveView, *, step: int, index: int, again: bool) -> PeerId | None:
    """The peer that may hold (step, index) as well, if it is still alive; None: nobody. `again`: the call was made before.

    While a round is open its memory is not there for asides.
    """
    if mine.phase is not Phase.ACCUMULATING:
        return None
    found = holders((r for r in (*live.suspected, *live.expired) if r.stage == mine.stage and r.peer != mine.peer), step, index)
    return min(found) if found else (UNKNOWN if again else None)


def to_merge(mine: PeerRecord, step: int, other: PeerId) -> PeerId | None:
    """The aside that becomes part of the main sum before one for `other` is begun: the one that has not grown for longest."""
    asides = _asides(mine, step)
    return asides[0].other if len(asides) >= MAX_ASIDES and other not in [aside.other for aside in asides] else None


def merged(mine: PeerRecord, step: int, other: PeerId) -> PeerRecord:
    rest = tuple(aside for aside in _asides(mine, step) if aside.other != other)
    return replace(mine, next_asides=rest) if step == mine.step + 1 else replace(mine, asides=rest)


def all_merged(mine: PeerRecord) -> PeerRecord:
    return replace(mine, asides=(), next_asides=())


def sums(record: PeerRecord) -> dict[PeerId, int]:
    """The bitmaps of this step's sums that hold anything: the main one under the peer's own id, each aside under the other holder's."""
    found = {aside.other: aside.done & record.done for aside in record.asides}
    rest = record.done
    for bitmap in found.values():
        rest &= ~bitmap
    return {name: bitmap for name, bitmap in (found | {record.peer: rest}).items() if bitmap}


def sums_to_drop(mine: PeerRecord, mate: PeerRecord, seals: bool = False) -> list[PeerId]:
    """My sums that meet a larger one of the mate's. Of two sums never both are dropped: a sum only grows, until it is dropped.

    `seals`: steps are local, so asides are open batches, and any of these goes before a main sum (batches.py).
    """
    is_same = mine.group != NO_AVERAGE and (mine.group, mine.done) == (mate.group, mate.done)
    if is_same or not mine.done & mate.done:
        return []
    theirs = [(held, (seals and name == mate.peer, *_key(mate, held))) for name, held in sums(mate).items()]
    own = [(name, bits, (seals and name == mine.peer, *_key(mine, bits))) for name, bits in sums(mine).items()]
    return [name for name, bits, key in own if any(bits & held and key < other for held, other in theirs)]


def dropped(mine: PeerRecord, names: Collection[PeerId]) -> PeerRecord:
    """Without these of the peer's own sums: what they held is missing again. What was accepted before may still be added to the ledger."""
    held = sums(mine)
    kept = sum(bitmap for name, bitmap in held.items() if name not in names)
    asides = tuple(Aside(a.other, held[a.other]) for a in mine.asides if a.other not in names)
    if mine.peer in names:
        mine = replace(mine, group=NO_AVERAGE, own_done=0, sections=0)
    return replace(mine, done=kept, asides=asides)


def _asides(mine: PeerRecord, step: int) -> tuple[Aside, ...]:
    return mine.next_asides if step == mine.step + 1 else mine.asides


def _key(record: PeerRecord, bitmap: int) -> tuple[int, bytes]:
    """(popcount, -hash): among equal counts the peer with the higher hash gives way."""
    inverted = bytes(255 - byte for byte in peer_rank(record.peer, record.stage, record.step))
    return (bitmap.bit_count(), inverted)
