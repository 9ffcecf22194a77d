"""Rounds of averaging, and fetching averages and state from mates, between peers of the protocol model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerd.policy.round.debts import BEHIND, Edge
from peerd.policy.round.edges import PastEdges
from peerd.policy.step.asides import all_merged
from peerd.policy.step.judging import lost_after_s, void_of, why_unheeded
from peerd.policy.step.ledger import full, with_sum
from peerd.policy.step.roster import Roster, union_of
from peerd.policy.step.sidelining import Sidelining
from peerd.table.record import MAX_SIDELINED, AverageId, PeerId, PeerRecord, Phase
from tests.policy.model_exchange import BROKE_S, FAST, Chunk, Exchange, Row, plan_of
from tests.policy.model_sections import Sections
from tests.policy.model_theta import is_made_up

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer

ANSWER_S, CALL_FAILS_S = 1.0, 0.3
REFUSED = "refused"
"""What a peer answers that it has banned."""
UNNAMED = "not all of the members are known here by their marks"


@dataclass(eq=False, slots=True)
class Join:
    """A handler of a proposal at work: it waits for the copy of the accumulator, and then notes the round."""

    roster: Roster
    cancelled: bool = False


class Rounds:
    """A peer's open round, if any, and its requests to mates."""

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self.current: Exchange | None = None
        self.lingering: Exchange | None = None
        """The last round whose average this peer has. Others may still need its chunks."""
        self.attempt = 0
        self.sidelining = Sidelining(peer.name)
        self.sections = Sections(peer)
        self.past_edges = PastEdges()
        self._edges: set[tuple[PeerId, PeerId]] = set()
        self.propose_after_s = float("-inf")
        self._dead: set[AverageId] = set()
        self._early: list[tuple[AverageId, float, Callable[[Exchange], None]]] = []
        self._joins: list[Join] = []
        self.is_opening = False
        """This peer waits until its own state has opened the round that it leads; it decides nothing meanwhile."""

    def drop(self) -> None:
        if self.current is not None:
            self.current.is_over = True
            self._dead.add(self.current.roster.average_id)
            self.current = None

    def end_giving(self) -> None:
        """Nobody gets anything of the last round any more."""
        if self.lingering is not None:
            self.lingering.is_over = True

    def close(self, reason: str) -> None:
        """End this peer's part in its round, and tell the others, which cannot finish it without this peer. Nobody is blamed."""
        if self.current is not None:
            self._tell_closed(self.current, None)
        self._closed(reason)

    def _closed(self, reason: str, author: PeerId | None = None, named: PeerId | None = None) -> None:
        """Back to accumulating, the ledger kept; what still comes for this round is dead."""
        peer, current = self._peer, self.current
        if current is not None:
            lasted_s = peer.now - current.opened_at_s
            if author is not None and named is not None and "sideline" not in peer.world.scenario.off:
                self.sidelining.closed(current.roster, author, named, lasted_s, peer.now)
                self._tell_sidelined()
            elif lasted_s > peer.world.rules.averaging_s:
                self.sidelining.gave_up(current.roster)
            self._remember_edges(current)
        peer.world.counts["failed rounds"] += 1
        peer.world.note(f"{peer.name} round fails: {reason}")
        self.drop()
        self.attempt += 1
        self.propose_after_s = peer.now + peer.world.rng.uniform(0.1, 0.5)
        if peer.record.phase is Phase.AVERAGING:
            peer.change(phase=Phase.ACCUMULATING)
            self.sections.complete()

    def _tell_closed(self, current: Exchange, named: PeerId | None) -> None:
        peer, average_id = self._peer, current.roster.average_id
        for member in current.names:
            if member != peer.name:
                peer.world.stream(peer, member, lambda mate: mate.rounds.closed_by(average_id, peer.name, named))

    def _remember_edges(self, current: Exchange) -> None:
        edges = current.judge.edges if current.judge is not None else ()
        self._edges.update((current.names[edge.source], current.names[edge.target]) for edge in edges)

    def close_as_judge(self, named: PeerId, reason: str, *, tells_whom: bool = True) -> None:
        """Leave the named member out of the step, and tell all that the round is closed, and for whom."""
        peer, current = self._peer, self.current
        assert current is not None
        void = void_of(current.roster, named)
        self._tell_closed(current, named if tells_whom else None)
        self._closed(f"{named} is left out: {reason}", peer.name, named)
        if void is not None and "void" not in peer.world.scenario.off:
            peer.world.counts.update(("voids", f"voids of {named}"))
            peer.change(voids=(*peer.record.voids, void))

    def closed_by(self, average_id: AverageId, author: PeerId, named: PeerId | None) -> None:
        peer, current = self._peer, self.current
        if current is None or current.roster.average_id != average_id or "tell of closes" in peer.world.scenario.off:
            return
        lasted_s = peer.now - current.opened_at_s
        if not why_unheeded(current.roster, author, named, lasted_s, peer.world.rules.averaging_s):
            self._closed(f"{author} closes it without {named}" if named else f"{author} left it", author, named)

    def exchange_of(self, average_id: AverageId) -> Exchange | None:
        found = (each for each in (self.current, self.lingering) if each is not None and not each.is_over)
        return next((each for each in found if each.roster.average_id == average_id), None)

    @property
    def lost(self) -> frozenset[PeerId]:
        """Members of the open round whose records have not risen for so long that they count as gone."""
        peer, names = self._peer, self.current.names if self.current is not None else ()
        after_s = lost_after_s(peer.world.rules.averaging_s)
        seen = ((name, peer.view.sightings.get(name)) for name in names)
        return frozenset(name for name, known in seen if known is None or peer.now - known.risen_at_s > after_s)

    @property
    def giving_to(self) -> frozenset[PeerId]:
        """Members of the last round that lack chunks of this peer's, as far as it was told."""
        given = self.lingering
        return given.lacking if given is not None and not given.is_over else frozenset()

    def look(self, members: Sequence[PeerRecord]) -> None:
        self._peer.trust.audits.look()
        if "sideline" not in self._peer.world.scenario.off:
            rules = self._peer.world.rules
            self.sidelining.banned(self._peer.trust.bans, self._peer.now)
            self.sidelining.look(self._peer.record, members, rules.averaging_s, self._peer.now, rules.group_size)
            self._tell_sidelined()

    def begin_step(self) -> None:
        self.past_edges.end_step(self._edges)
        self._edges = set()
        self.sidelining.begin_step(self._peer.now)
        self._tell_sidelined()

    def _tell_sidelined(self) -> None:
        peer = self._peer
        withheld = peer.trust.audits.withholding.left_out(peer.record.step)
        found = tuple(sorted({*self.sidelining.peers, *withheld}))[:MAX_SIDELINED]
        for mate in set(found).difference(peer.record.sidelined):
            peer.world.counts.update(("sidelined", f"{peer.name} sidelines"))
            peer.world.note(f"{peer.name} sidelines {mate}")
        if found != peer.record.sidelined:
            peer.change(sidelined=found)

    # rule 8 (exchange)

    def propose(self, roster: Roster) -> None:
        """Open the round here; the others are asked at the same time. A refusal ends it, and what the others still do for it."""
        if self._peer.lies.proposes_nothing:
            return
        self.is_opening = True
        found = (self._peer.world.peers.get(member) for member in roster.peers)
        told = [member.told_up if member is not None else FAST for member in found]  # one may be a ghost
        self._peer.world.plans[roster.average_id] = plan_of(told, self._peer.world.rules.averaging_s)

        def opened(joined: object) -> None:
            self.is_opening = False
            if not joined:
                self._withdraw(roster)

        for member in roster.peers:
            if member == self._peer.name:
                self.join(roster, opened, Join(roster))
                continue
            if member == self._peer.lies.never_asked(roster):
                continue

            self._propose_to(member, roster)

    def _propose_to(self, member: PeerId, roster: Roster, named: bool = False) -> None:
        """A refusal ends the round. Without an answer the member is asked again for a while, and then this leader gives the round up."""
        peer = self._peer

        def answered(joined: object) -> None:
            if joined == UNNAMED:
                peer.world.counts["proposals with names"] += 1
                self._propose_to(member, roster, named=True)
                return
            if joined is True and roster.average_id in self._dead:
                self._deliver(member, lambda mate: mate.rounds.abort(roster))  # it was over before this member had joined
            if joined is True or self.current is None or self.current.roster.average_id != roster.average_id:
                return
            if joined is False:
                self.close(f"{member} refuses")
                self._withdraw(roster)
                return
            if peer.world.network.has_dead_link(peer.name, member):
                peer.links.fails(member)
            if peer.now - self.current.opened_at_s > BEHIND * peer.world.rules.averaging_s:
                self._tell_closed(self.current, member)
                self._closed(f"{member} does not answer", peer.name, member)
                self._deliver(member, lambda mate: mate.rounds.cancel(roster))
                return
            peer.after(BROKE_S, lambda: self._propose_again(member, roster))

        self.call(member, lambda mate, reply: mate.rounds.serve(roster, reply, named), answered)

    def _propose_again(self, member: PeerId, roster: Roster) -> None:
        if self.current is not None and self.current.roster.average_id == roster.average_id:
            self._propose_to(member, roster)

    def _withdraw(self, roster: Roster) -> None:
        """End the calls and abort the round: a handler that is still at work is cancelled, and who has joined leaves."""
        for member in roster.peers:
            if member != self._peer.name:
                self._deliver(member, lambda mate: mate.rounds.abort(roster))

    def serve(self, roster: Roster, reply: Callable[[object], None], named: bool) -> None:
        peer, join, leader = self._peer, Join(roster), self._peer.view.sightings.get(roster.leader)
        if peer.lies.is_silent:
            return
        knows_all = {*peer.view.sightings, peer.name}.issuperset(roster.peers) and "marks" not in peer.world.scenario.off
        if not (named or knows_all):
            reply(UNNAMED)
            return
        if leader is None or leader.record.stage != peer.record.stage:
            reply(False)
            return
        if self.exchange_of(roster.average_id) is not None:
            reply(True)  # it was asked before, and its answer was lost
            return
        if roster.average_id in self._dead:
            reply(False)
            return
        self._joins.append(join)
        if peer.world.now < peer.cancelled_until:
            peer.after(peer.world.rng.uniform(0.0, peer.world.scenario.copy_s + 0.05), lambda: self.cancel(roster))
        self.join(roster, reply, join)

    def abort(self, roster: Roster) -> None:
        self.cancel(roster)
        if self.current is not None and self.current.roster == roster:
            self._closed("its leader aborts it")

    def cancel(self, roster: Roster) -> None:
        for join in self._joins:
            join.cancelled |= join.roster == roster

    def join(self, roster: Roster, reply: Callable[[object], None], join: Join) -> None:
        """The state opens the round, whatever becomes of the handler, which notes it and answers if it is still there."""
        copy_s = self._peer.world.scenario.copy_s

        def opened() -> None:
            joined = self._open(roster, join)
            if join in self._joins:
                self._joins.remove(join)
            if not join.cancelled:
                reply(joined)

        if copy_s:
            self._peer.after(copy_s, opened)
        else:
            opened()

    def _open(self, roster: Roster, join: Join) -> bool:
        peer = self._peer
        off = "roster content" in peer.world.scenario.off
        if peer.fenced or peer.downloading:
            return False
        is_refused = self.sections.why_refuse(roster) if not off else peer.record.step != roster.step
        if is_refused or peer.record.phase is not Phase.ACCUMULATING:
            return False
        if peer.local.is_on:
            peer.local.seal_all()
            peer.local.joins(roster.average_id)
        peer.record = all_merged(peer.record)
        peer.change(tell=False, phase=Phase.AVERAGING)
        if join.cancelled and peer.world.rng.random() < 0.5:  # else a task of its own goes on
            peer.world.counts["joins that broke"] += 1
            return False
        self.end_giving()
        peer.trust.joined.add(roster.average_id)
        self.current = current = Exchange(peer, roster, peer.world.plans[roster.average_id])
        current.begin()
        waiting = [act for average_id, until, act in self._early if average_id == roster.average_id and peer.now < until]
        self._early = [early for early in self._early if peer.now < early[1] and early[0] != roster.average_id]
        for act in waiting:
            act(current)
        return True

    def _in_round(self, average_id: AverageId, act: Callable[[Exchange], None]) -> None:
        """What comes before its proposal waits."""
        found = self.exchange_of(average_id)
        if found is not None:
            act(found)
        elif average_id not in self._dead:
            self._early.append((average_id, self._peer.now + 3 * self._peer.world.rules.averaging_s, act))

    def take_chunk(self, average_id: AverageId, chunk: Chunk) -> None:
        self._in_round(average_id, lambda found: found.take(chunk))

    def window_opens(self, average_id: AverageId, reducer: int, summed: int) -> None:
        self._in_round(average_id, lambda found: found.window_opens(reducer, summed))

    def told(self, average_id: AverageId, author: int, rows: list[Row]) -> None:
        found = self.exchange_of(average_id)
        if found is not None:
            found.told(author, rows)

    def carry(self, average_id: AverageId, edge: Edge, mate: int) -> None:
        found = self.exchange_of(average_id)
        if found is not None:
            found.carry(edge, mate)

    def confirmed(self, average_id: AverageId, author: PeerId, found: AverageId) -> None:
        self._in_round(average_id, lambda exchange: exchange.confirming.hear(author, found))

    def came_together(self, current: Exchange) -> None:
        """The average is complete at this peer. What others lack of it still goes out."""
        peer = self._peer
        if current is not self.current or current.claim is None:
            return
        totals = sorted(current.totals.values(), key=len, reverse=True)  # what is made up is longer
        if len({total for total in totals if not is_made_up(total)}) > 1:
            peer.world.violations.append(f"I1 at {peer.name}: the slices of one average were summed over different parts")
        peer.world.counts.update(("averages", f"averages of {peer.name}"))
        peer.world.counts["averages with a part too large"] += any(peer.world.peers[name].lies.inflates for name in current.names)
        if peer.local.is_on:
            peer.local.came_together(current.roster.average_id)
        self._remember_edges(current)
        self.sidelining.came_together(current.roster)
        self.lingering, self.current = current, None
        union = union_of(current.roster.entries)
        if current.roster.num_sections > 1:
            self.sections.made(current.claim, totals[0])
            return
        if union != full(peer.world.scenario.num_microbatches):  # the sum of a group takes the place of the ledger
            peer.world.counts["sums of groups"] += 1
            peer.accumulator = list(totals[0])
            peer.trust.group = current.roster.peers
            peer.record = with_sum(peer.record, current.roster.average_id, union)
            peer.change(phase=Phase.ACCUMULATING)
            return
        peer.adopt(current.claim.id, totals[0], current.claim)

    # messages

    def _deliver(self, member: PeerId, act: Callable[[ModelPeer], None], reply: bool = False) -> None:
        if member == self._peer.name:
            self._peer.after(0.001, lambda: act(self._peer))
        else:
            self._peer.world.send(self._peer, member, act, reply=reply)

    def ask(self, mate: PeerId, handle: Callable[[ModelPeer], object], answered: Callable[[object], None]) -> None:
        self.call(mate, lambda peer, reply: reply(handle(peer)), answered)

    def call(self, mate: PeerId, handle: Callable[[ModelPeer, Callable[[object], None]], None], answered: Callable[[object], None]) -> None:
        """One question with exactly one outcome: the answer, or None when none came in time."""
        asker = self._peer
        settled: list[bool] = []

        def settle(answer: object) -> None:
            if not settled:
                settled.append(True)
                answered(answer)

        def arrive(peer: ModelPeer) -> None:
            def reply(answer: object) -> None:
                peer.world.send(peer, asker.name, lambda _asker: settle(answer) if _asker is asker else None, reply=True)

            if asker.name in peer.trust.bans:
                reply(REFUSED)
            else:
                handle(peer, reply)

        asker.world.send(asker, mate, arrive, lambda: settle(None))
        asker.after(ANSWER_S, lambda: settle(None))
