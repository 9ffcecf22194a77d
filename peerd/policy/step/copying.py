"""Copies of mates' moves in local steps: whose a peer keeps, and when it asks for what is new. They stand in for a disk that is lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from peerd.policy.step.asides import sums
from peerd.table.record import PeerId, PeerRecord

MOST_COPIED = 8
"""Mates whose moves a peer copies: each log has so many copies, however large the stage is."""
Shown = tuple[int, int, int]
"""A mate's incarnation, its step, and the bitmap of what its own updates hold."""


def whose_to_copy(me: PeerId, peers: Collection[PeerId], most: int = MOST_COPIED) -> list[PeerId]:
    """The peers whose moves this one copies: those that follow it in a ring of their names, so that each has as many copies."""
    ring = sorted({*peers, me})
    place = ring.index(me)
    return [*ring[place + 1 :], *ring[:place]][:most]


def shown_by(record: PeerRecord) -> Shown:
    """What a record shows of its peer's own updates. An open batch is none: others than before follow from a sealed one."""
    return record.incarnation, record.step, sums(record).get(record.peer, 0)


class DueCopies:
    """Which mates are to be asked for their moves: those whose records show updates that they have not shown before."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._shown: dict[PeerId, Shown] = {}

    def due(self, mates: Iterable[PeerRecord]) -> list[PeerId]:
        """The mates to ask now, by the newest records of a stage. One whose answer fails is due with its next update."""
        records = {record.peer: record for record in mates}
        shown = {peer: shown_by(records[peer]) for peer in whose_to_copy(self._me, records)}
        found = [peer for peer in shown if shown[peer] != self._shown.get(peer)]
        self._shown = shown
        return found
