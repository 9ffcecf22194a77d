"""A judge of a round: what all members have, as they tell it, and whom the round ends without if it does not move."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from peerd.averaging.exchange import Exchange
from peerd.policy.round.debts import HEARD, AtFault, Debts, Edge
from peerd.policy.round.edges import Detours, PastEdges, blamed, named_by
from peerd.policy.round.leads import Leads, SentRate
from peerd.policy.step.judging import judges_of
from peerd.table.record import PeerId
from peerd.wire.messages import Beat

MEASURABLE = 0.05
"""Averaging times for which a member has to owe: shorter transfers show delays and computing, and not a line."""
TOLD_OF = 0.5
"""The share of a member's bytes that this judge has to know of when the round is done: it hears of what went to others later."""


class Judge:
    """Members are numbered by their places in the roster. Times are seconds on the caller's monotonic clock."""

    def __init__(self, exchange: Exchange, averaging_s: float, within_s: float, past: PastEdges, now_s: float) -> None:
        """`within_s`: how long the round takes at most at the rates that are assumed."""
        roster, layout = exchange.roster, exchange.layout
        self._averaging_s = averaging_s
        self._rank = judges_of(roster).index(roster.peers[exchange.me])
        self._me = exchange.me
        self.debts = Debts(layout.slice_bytes, layout.num_chunks, within_s, averaging_s, now_s)
        self._layout = layout
        self._place = {peer: number for number, peer in enumerate(roster.peers)}
        self._past = past.among(roster.peers)
        self._told_s, self._has_told = [now_s for _ in self.debts.members], [False for _ in self.debts.members]
        able = sorted(self.debts.members, key=lambda member: -(roster.shares[member] if roster.shares else 0))
        self._detours = Detours(able, averaging_s)  # those with the best links carry first
        self._leads = Leads(self.debts.sizes)
        self.edges: set[Edge] = set()
        """Told or seen in this round."""

    def told(self, member: int, beat: Beat, now_s: float) -> bool:
        """Take what a member says that it has. Returns whether anything has moved since."""
        debts = self.debts
        debts.heard(member, now_s)
        self._told_s[member], self._has_told[member] = now_s, True
        before = debts.num_verified
        self._leads.told(member, beat.parts, beat.sums)
        for author, chunks in zip(debts.members, beat.parts, strict=False):
            if author != member:
                debts.told_part(author, member, chunks, now_s)
        for reducer, chunks in zip(debts.members, beat.sums, strict=False):
            if reducer != member:
                debts.told_sum(reducer, member, chunks, now_s)
        for other in self._untold(now_s):
            if other < min(len(beat.given_parts), len(beat.given_sums)) and other != member:
                debts.told_part(member, other, beat.given_parts[other], now_s)
                debts.told_sum(member, other, beat.given_sums[other], now_s)
        for edge, chunks in beat.carried.items():
            if debts.carriers.get(edge) == member:
                debts.told_carried(edge, chunks, now_s)
        return debts.num_verified > before

    def _untold(self, now_s: float) -> list[int]:
        """Members that tell this judge nothing: what senders say of them counts in their place."""
        return [other for other, told_s in enumerate(self._told_s) if now_s - told_s > HEARD * self._averaging_s]

    def look(self, now_s: float) -> list[Edge]:
        """Take notice of the time. Returns the edges over which too little passes."""
        self.debts.heard(self._me, now_s)
        self.debts.look(now_s)
        edges = self.debts.behind(now_s)
        self.edges.update(edges)
        return edges

    def mates_for(self, edges: Sequence[Edge], dead: Collection[tuple[PeerId, PeerId]], now_s: float) -> dict[Edge, int]:
        """Let mates carry what does not pass. `dead`: pairs between which nothing does. Returns who carries what."""
        place = self._place
        cut = [Edge(place[source], place[target]) for source, target in dead if source in place and target in place]
        for edge, mate in self._detours.due(self.debts, edges, {*self.edges, *self._past}, now_s, cut):
            self.debts.carry(edge, mate, now_s)
        return dict(self.debts.carriers)

    def ruling(self, edges: Sequence[Edge], now_s: float) -> AtFault | None:
        """The member that the round is ended without; None while nobody is at fault. A judge of rank k waits k averaging times longer."""
        for fault in self.debts.at_fault(now_s, later=self._rank):
            worst = blamed(fault, self.debts, edges, {*self.edges, *self._past}, self._tellers)
            named = named_by(self._me, worst.member, fault.member, len(self.debts.members))
            if named is not None:
                return worst if named == worst.member else fault
        return None

    @property
    def _tellers(self) -> list[int]:
        """Members that say what they have."""
        return [member for member, has_told in enumerate(self._has_told) if has_told]

    def rates(self, now_s: float) -> dict[int, SentRate]:
        """What this round has shown of members' lines, as far as it lasted long enough to tell."""
        owed_s = [self.debts.owed_s(member, now_s) for member in self.debts.members]
        able = [member for member, each_s in enumerate(owed_s) if each_s > MEASURABLE * self._averaging_s]
        sent = {k: self._bytes_sent(k, self.debts.parts[k], self.debts.sums[k]) for k in able}
        full = {k: self._bytes_sent(k, self.debts.sizes, [self.debts.sizes[k]] * len(owed_s)) for k in able}
        return {k: SentRate(sent[k] / owed_s[k], self._leads.waited(k)) for k in able if sent[k] > TOLD_OF * full[k]}

    def _bytes_sent(self, member: int, parts: Sequence[int], sums: Sequence[int]) -> float:
        """What a member has sent where so many chunks of its part, and of its sum, have arrived at each of the others."""
        layout = self._layout
        sent = sum(here * self._mean_bytes(k, member) for k, here in enumerate(parts) if k != member)
        return sent + sum(here for i, here in enumerate(sums) if i != member) * layout.slice_bytes[member] / layout.num_chunks

    def _mean_bytes(self, slice_number: int, sender: int) -> float:
        """The mean size of a chunk of this slice, as the member sends it."""
        layout = self._layout
        return layout.num_bytes(slice_number, layout.num_chunks // 2, sender) if layout.chunks_of(slice_number) else 0.0
