"""What this peer has found too large in its rounds, and what follows from it: rule 22 (size)."""

from __future__ import annotations

from peerd.averaging.exchange import Exchange
from peerd.averaging.host import RoundHost
from peerd.averaging.layout import RoundLayout
from peerd.averaging.slice_norms import SliceNorms
from peerd.policy.step.part_sizes import FEWEST_MEMBERS, FoundLarge
from peerd.policy.step.roster import Roster
from peerd.stage.state import StageState
from peerd.table.record import PeerId


class LargeParts:
    """It knows of one stage's rounds which members' parts and sums were too large."""

    def __init__(self, state: StageState, host: RoundHost) -> None:
        self._state, self._host = state, host
        self._found = FoundLarge()

    def norms_of(self, roster: Roster, layout: RoundLayout) -> SliceNorms | None:
        """What looks at sizes in a round; None where nobody does."""
        if not self._state.looks_at_sizes or len(roster.entries) < FEWEST_MEMBERS:
            return None
        me = roster.peers.index(self._state.record.peer)
        return SliceNorms(roster, me, layout, self._spared(roster), with_directions=self._host.kept_parts is not None)

    def spares(self, roster: Roster) -> bool:
        """Whether a round has microbatches in it that may be as large as they are."""
        return bool(self._spared(roster))

    def _spared(self, roster: Roster) -> frozenset[PeerId]:
        """The members with microbatches that another peer's part was left out for. It is nobody's own that spares a part."""
        return frozenset(entry.peer for entry in roster.entries if entry.done & self._found.spared(roster.step, entry.peer))

    def found(self, roster: Roster, member: PeerId) -> None:
        """Note a member that is left out of the step for its size."""
        entry = roster.entry_of(member)
        if entry is not None:
            self._found.note(roster.step, member, entry.done)

    def told(self, roster: Roster, teller: PeerId, member: PeerId) -> None:
        """Another member says that it leaves a member out of the step for its size."""
        entry = roster.entry_of(member)
        if entry is not None and teller not in (member, self._state.record.peer):
            self._found.told(roster.step, member, entry.done, teller)

    def completed(self, exchange: Exchange) -> None:
        """A round is done: who was left out before for gradients that are not so large is left out of further steps."""
        for peer in self._found.guilty(exchange.roster.step, exchange.norms.large) if exchange.norms is not None else ():
            self._host.too_large(peer, exchange.roster.step)
