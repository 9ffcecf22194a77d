"""Members that failed rounds have missed: which of them the leader leaves out of the step, and this peer of the steps that follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import structlog

from peerd.averaging.open_round import OpenRound
from peerd.policy.step.certifying import ahead_alone, telling_early
from peerd.policy.step.judging import void_of
from peerd.policy.step.roster import ROUNDS_BEFORE_VOID, Roster, whom_to_void
from peerd.policy.step.sidelining import Sidelining
from peerd.policy.step.situation import Situation
from peerd.table.record import PeerId, Void

LOG = structlog.get_logger()


class Absences:
    """What this peer counts when one of its rounds has failed."""

    def __init__(self, me: PeerId, averaging_s: float) -> None:
        self._me = me
        self._averaging_s = averaging_s
        self.sidelining = Sidelining(me)
        self.missed: Counter[PeerId] = Counter()
        """Number of rounds of this step, led by this peer, that failed because the member was missing."""

    def count(self, current: OpenRound, judge: PeerId | None, named: PeerId | None, now_s: float) -> Void | None:
        """Note a round that has failed, and the member that its judge names. Returns whom this peer leaves out of the step.

        A judge leaves out whom it names, at once; a leader those that gave up in enough rounds (hole 19).
        """
        roster, lasted_s, before = current.roster, now_s - current.opened_s, self.sidelining.peers
        silent = PeerId(current.waited_in_vain_for if roster.leader == self._me else "")
        if judge is not None and named is not None:
            self.sidelining.closed(roster, judge, named, lasted_s, now_s)
        elif silent:
            self.sidelining.closed(roster, self._me, silent, lasted_s, now_s)
        elif lasted_s > self._averaging_s:
            self.sidelining.gave_up(roster)
        for peer in set(self.sidelining.peers).difference(before):
            LOG.warning("member left out of the next steps: rounds waited for it in vain", member=peer, step=roster.step)
        if named is not None and judge == self._me:
            return void_of(roster, named)
        return None if current.refused or roster.leader != self._me else self._count_missed(current)

    def _count_missed(self, current: OpenRound) -> Void | None:
        self.missed.update(current.silent)
        void = whom_to_void(current.roster, self.missed)
        if void is not None:
            LOG.warning("member left out of this step's rounds: it leaves them", member=void.peer, step=void.step)
            self.missed = Counter({void.peer: ROUNDS_BEFORE_VOID - 1})
        return void

    def look(self, now: Situation, banned: Mapping[PeerId, float]) -> bool:
        """Note members that no round is possible with, or that it has banned (each with the seconds that are left).

        Returns whether its record changes.
        """
        mine, live, now_s = now.mine, now.live, now.now_s
        before = self.sidelining.peers
        doubted = [m for m in live.suspected if m.stage == mine.stage]  # one that is banned for a lie, among others
        mates = [m.peer for m in (*live.serving(mine.stage), *doubted)] if banned else ()
        self.sidelining.look(mine, live.members(mine.stage, mine.step), self._averaging_s, now_s, now.rules.group_size)
        self.sidelining.look_ahead(ahead_alone(now), self._averaging_s, now_s)
        self.sidelining.look_at_liars(mine, (*live.of_stage(mine.stage), *doubted), telling_early(now), now_s)
        self.sidelining.banned({peer: banned[peer] for peer in mates if peer in banned}, now_s)
        for peer in set(self.sidelining.peers).difference(before):
            reason = "it is banned here" if peer in banned else "it is in a round, at a step or at parameters where others are not"
            LOG.warning("member left out of the next steps", member=peer, step=mine.step, reason=reason)
        return self.sidelining.peers != before

    def applied(self, roster: Roster, now_s: float) -> None:
        """Note that an average was applied, and the next step begins."""
        self.missed.clear()
        self.sidelining.came_together(roster)
        self.sidelining.begin_step(now_s)
