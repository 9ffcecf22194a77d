"""Members that failed rounds have missed: which of them the leader leaves out of the step, and this peer of the steps that follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import structlog

from peerd.averaging.exchange import Round
from peerd.policy.step.roster import ROUNDS_BEFORE_VOID, Roster, whom_to_void
from peerd.policy.step.sidelining import Sidelining, absent_from
from peerd.table.record import PeerId, PeerRecord, Void
from peerd.table.view import LiveView

LOG = structlog.get_logger()


class Absences:
    """What this peer counts when one of its rounds has failed."""

    def __init__(self, me: PeerId, averaging_s: float) -> None:
        self._me = me
        self._averaging_s = averaging_s
        self.sidelining = Sidelining(me)
        self.missed: Counter[PeerId] = Counter()
        """Number of rounds of this step, led by this peer, that failed because the member was missing."""

    def count(self, current: Round, now_s: float) -> Void | None:
        """Note a round that has failed. Returns whom its leader leaves out of this step, if anybody."""
        roster, lasted_s, before = current.roster, now_s - current.opened_s, self.sidelining.peers
        absent = absent_from(roster, self._me, current.heard, lasted_s, self._averaging_s)
        self.sidelining.failed(roster, absent, lasted_s, now_s)
        for peer in set(self.sidelining.peers).difference(before):
            LOG.warning("member left out of the next steps: rounds waited for it in vain", member=peer, step=roster.step)
        return None if current.refused or roster.leader != self._me else self._count_missed(current)

    def _count_missed(self, current: Round) -> Void | None:
        """Count the members that a failed round missed. One missed in enough rounds is left out of this step (hole 19)."""
        absent = {peer for number, peer in enumerate(current.roster.reducers) if number not in current.slices}
        if current.mine >= 0 and not current.complete:
            absent |= {peer for peer in current.roster.peers if peer not in current.parts}  # they cannot call this peer: hole 22
        self.missed.update(current.silent or absent - {current.roster.leader})
        void = whom_to_void(current.roster, self.missed)
        if void is not None:
            LOG.warning("member left out of this step's rounds: it cannot reach another member", member=void.peer, step=void.step)
            self.missed = Counter({void.peer: ROUNDS_BEFORE_VOID - 1})
        return void

    def look(self, mine: PeerRecord, live: LiveView, banned: Mapping[PeerId, float], now_s: float) -> bool:
        """Note members that stay in rounds without this peer, or that it has banned (each with the seconds that are left).

        Returns whether its record changes.
        """
        before, mates = self.sidelining.peers, live.serving(mine.stage) if banned else ()
        self.sidelining.look(mine, live.members(mine.stage, mine.step), self._averaging_s, now_s)
        self.sidelining.banned({m.peer: banned[m.peer] for m in mates if m.peer in banned}, now_s)
        for peer in set(self.sidelining.peers).difference(before):
            reason = "it is banned here" if peer in banned else "it stays in a round that others are not in"
            LOG.warning("member left out of the next steps", member=peer, step=mine.step, reason=reason)
        return self.sidelining.peers != before

    def applied(self, roster: Roster, now_s: float) -> None:
        """Note that an average was applied, and the next step begins."""
        self.missed.clear()
        self.sidelining.came_together(roster)
        self.sidelining.begin_step(now_s)
