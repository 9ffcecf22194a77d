"""A judge of a round of the protocol model: it watches what is told, lets mates carry what does not pass, and closes the round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from peerd.policy.round.debts import AtFault, Debts, Edge
from peerd.policy.round.edges import Detours, blamed, named_by
from peerd.policy.step.roster import cut_links

if TYPE_CHECKING:
    from tests.policy.model_exchange import Exchange


class Judge:
    """By the very rules of the daemon: who is at fault (policy/round/debts.py), and what is done about an edge (edges.py)."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._peer, plan = exchange, exchange.peer, exchange.plan
        self._averaging_s = self._peer.world.rules.averaging_s
        self._rank = exchange.judges.index(exchange.me)
        self.debts = Debts(plan.slice_bytes, plan.num_chunks, plan.within_s, self._averaging_s, self._peer.now)
        self.edges: set[Edge] = set()
        self._detours = Detours(self.debts.members, self._averaging_s)

    def look(self) -> None:
        exchange, now_s, off = self._exchange, self._peer.now, self._peer.world.scenario.off
        self._note()
        self.debts.look(now_s)
        edges = self.debts.behind(now_s)
        self.edges.update(edges)
        if "judge" in off or self._peer.lies.is_silent:
            return
        if self._rank == 0 and "carry" not in off:
            self._go_around(edges)
        if self._peer.lies.misjudges and now_s - exchange.opened_at_s >= self._rank * self._averaging_s:
            self._peer.rounds.close_as_judge(exchange.names[(exchange.me + 1) % len(exchange.names)], "a lie")
            return
        for fault in self.debts.at_fault(now_s, self._rank):
            if self._close_for(fault, edges):
                return

    @property
    def _known(self) -> set[Edge]:
        return {*self.edges, *self._peer.rounds.past_edges.among(self._exchange.names)}

    def _close_for(self, fault: AtFault, edges: Sequence[Edge]) -> bool:
        """Close the round without the worse end of what a member owes, unless that is for the next judge to do."""
        exchange, tellers = self._exchange, [i for i, row in enumerate(self._exchange.rows) if row.number]
        worst = blamed(fault, self.debts, edges, self._known, tellers)
        named = named_by(exchange.me, worst.member, fault.member, len(exchange.names))
        if named is not None:
            self._peer.rounds.close_as_judge(exchange.names[named], fault.reason)
        return named is not None

    def _note(self) -> None:
        """Hand on what was told. A member whose record rises is there, though it may say nothing in the round."""
        now_s, debts, everyone = self._peer.now, self.debts, self.debts.members
        for number, (name, row) in enumerate(zip(self._exchange.names, self._exchange.rows, strict=True)):
            sighting = self._peer.view.sightings.get(name)
            risen_s = now_s if number == self._exchange.me else sighting.risen_at_s if sighting is not None else -math.inf
            if now_s - risen_s < debts.silent_s(number, now_s):
                debts.heard(number, risen_s)
            for other in everyone:
                debts.told_part(other, number, row.parts[other], now_s)
        for number, row in enumerate(self._exchange.rows):
            for other in everyone:
                debts.told_sum(other, number, row.sums[other], now_s)
            for edge, chunks in row.carried.items():
                if debts.carriers.get(edge) == number:
                    debts.told_carried(edge, chunks, now_s)

    def _go_around(self, edges: Sequence[Edge]) -> None:
        """Let mates carry what does not pass."""
        names, peer = self._exchange.names, self._peer
        pairs = cut_links(peer.live(), peer.record.stage)
        dead = [Edge(names.index(source), names.index(target)) for source, target in pairs if source in names and target in names]
        for edge, mate in self._detours.due(self.debts, edges, self._known, peer.now, dead):
            peer.world.counts["carried"] += 1
            self._tell(edge, mate)

    def _tell(self, edge: Edge, mate: int) -> None:
        average_id = self._exchange.roster.average_id
        for name in self._exchange.names:
            self._peer.world.stream(self._peer, name, lambda member: member.rounds.carry(average_id, edge, mate))
