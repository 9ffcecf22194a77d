"""Mates that have lied about an average: each stays left out of the stage until it has gone along with it. T6 (sideline), hole 55.

A ban ends by itself. A liar that lies again as soon as it counts again would cost its stage what it has computed of a step, each time. A
mate that is left out can show at no cost whether it has stopped: it fetches the averages of the others, as a peer does that is behind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from peerd.table.record import PeerId, PeerRecord, Phase

STEPS_TO_SHOW = 2
"""It has to go from one step to the next like this peer so many times. One time a lie of it may come too late to be seen."""
REMEMBERED = 64
"""Number of mates on probation. The first go first."""


class Probation:
    """What one peer has seen of mates that have lied, since they lied last."""

    def __init__(self) -> None:
        self._seen_at: dict[PeerId, range] = {}
        """The steps in a row at which each was seen with this peer's parameters."""

    def begin(self, peer: PeerId) -> None:
        """Note that a mate has lied about an average."""
        self._seen_at.pop(peer, None)
        self._seen_at[peer] = range(0)
        while len(self._seen_at) > REMEMBERED:
            del self._seen_at[next(iter(self._seen_at))]

    def look(self, mine: PeerRecord, mates: Sequence[PeerRecord], early: Collection[PeerId]) -> tuple[list[PeerId], list[PeerId]]:
        """Return those of `mates` that are on probation still, and those whose probation ends now.

        `mates`: the others of the stage, joiners too. `early`: mates that tell an average of this step which nobody else tells. An honest
        mate that is left out never has one first.
        """
        if not self._seen_at:
            return [], []
        on_probation = [mate for mate in mates if mate.peer in self._seen_at]
        for mate in on_probation:
            self._seen_at[mate.peer] = range(0) if mate.peer in early else _with(self._seen_at[mate.peer], mine, mate)
        ends = [mate.peer for mate in on_probation if len(self._seen_at[mate.peer]) > STEPS_TO_SHOW]
        for peer in ends:
            del self._seen_at[peer]
        return [mate.peer for mate in on_probation if mate.peer in self._seen_at], ends


def _with(seen_at: range, mine: PeerRecord, mate: PeerRecord) -> range:
    """The steps in a row at which a mate was seen, the present one included if it is seen there now."""
    step = mine.step
    if mate.phase is Phase.JOINING or (mate.step, mate.lineage) != (step, mine.lineage):
        return seen_at
    return range(seen_at.start if seen_at and step in (seen_at.stop - 1, seen_at.stop) else step, step + 1)
