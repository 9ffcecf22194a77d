"""Rounds of averaging, and fetching averages and state from mates, between peers of the protocol model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from peerd.policy.step.asides import all_merged
from peerd.policy.step.roster import ROUNDS_BEFORE_VOID, Roster, whom_to_void, why_not_adopt, why_refuse
from peerd.policy.step.sidelining import Sidelining, absent_from
from peerd.table.record import AverageId, Lineage, PeerId, PeerRecord, Phase, StepNorm
from tests.policy.model_kept import Held
from tests.policy.model_theta import Average, ThetaId
from tests.policy.model_tied import Copy

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer

ANSWER_S = 1.0
CALL_FAILS_S = 0.3


@dataclass(slots=True)
class Round:
    roster: Roster
    opened_at_s: float
    moved_at_s: float
    parts: dict[PeerId, Average] = field(default_factory=dict)
    slices: dict[int, Average] = field(default_factory=dict)
    refused_by: PeerId | None = None
    silent: PeerId | None = None


@dataclass(eq=False, slots=True)
class Join:
    """A handler of a proposal at work: it waits for the copy of the accumulator, and then notes the round."""

    roster: Roster
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    stage: int
    step: int
    lineage: Lineage
    theta: ThetaId
    previous: ThetaId | None
    norms: tuple[StepNorm, ...]
    copy: Copy
    """Of a tied weight."""


class Rounds:
    """A peer's open round, if any, and its requests to mates."""

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self.current: Round | None = None
        self.attempt = 0
        self.missed: Counter[PeerId] = Counter()
        self.sidelining = Sidelining(peer.name)
        self.propose_after_s = float("-inf")
        self._early: list[tuple[AverageId, float, Callable[[], None]]] = []
        self._joins: list[Join] = []
        self.is_opening = False
        """This peer waits until its own state has opened the round that it leads; it decides nothing meanwhile."""

    def drop(self) -> None:
        self.current = None

    def close(self, reason: str) -> None:
        """Back to accumulating, the ledger kept; what still comes for this round is dead."""
        peer = self._peer
        if self.current is not None:
            self._note_absent(self.current)
        if self.current is not None and self.current.roster.leader == peer.name:
            self._count_missed(self.current)
        peer.world.counts["failed rounds"] += 1
        peer.world.note(f"{peer.name} round fails: {reason}")
        self.current = None
        self.attempt += 1
        self.propose_after_s = peer.now + peer.world.rng.uniform(0.1, 0.5)
        if peer.record.phase is Phase.AVERAGING:
            peer.change(phase=Phase.ACCUMULATING)

    def _note_absent(self, current: Round) -> None:
        peer, lasted_s = self._peer, self._peer.now - current.opened_at_s
        if "sideline" in peer.world.scenario.off:
            return
        absent = absent_from(current.roster, peer.name, current.parts, lasted_s, peer.world.rules.averaging_s)
        self.sidelining.failed(current.roster, absent, lasted_s, peer.now)
        self._tell_sidelined()

    def look(self, members: Sequence[PeerRecord]) -> None:
        if "sideline" not in self._peer.world.scenario.off:
            self.sidelining.look(self._peer.record, members, self._peer.world.rules.averaging_s, self._peer.now)
            self._tell_sidelined()

    def begin_step(self) -> None:
        self.sidelining.begin_step(self._peer.now)
        self._tell_sidelined()

    def _tell_sidelined(self) -> None:
        peer, found = self._peer, self.sidelining.peers
        for mate in set(found).difference(peer.record.sidelined):
            peer.world.counts.update(("sidelined", f"{peer.name} sidelines"))
            peer.world.note(f"{peer.name} sidelines {mate}")
        if found != peer.record.sidelined:
            peer.change(sidelined=found)

    def _count_missed(self, current: Round) -> None:
        """The leader remembers who was missing, and after some rounds leaves one of them out of the step."""
        peer = self._peer
        if current.refused_by is not None:
            return
        absent = {name for number, name in enumerate(current.roster.reducers) if number not in current.slices}
        if peer.name in current.roster.reducers and "go around" not in peer.world.scenario.off:
            absent |= {name for name in current.roster.peers if name not in current.parts}
        self.missed.update([current.silent] if current.silent else absent)
        void = whom_to_void(current.roster, self.missed)
        if void is not None and "void" not in peer.world.scenario.off:
            peer.world.counts["voids"] += 1
            self.missed = Counter({void.peer: ROUNDS_BEFORE_VOID - 1})
            peer.change(voids=(*peer.record.voids, void))

    # rule 8 (exchange)

    def propose(self, roster: Roster) -> None:
        """Open the round here; the others are asked at the same time. A refusal ends it, and what the others still do for it."""
        if self._peer.lies.is_silent:
            return
        self.is_opening = True

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

            def answered(joined: object, member: PeerId = member) -> None:
                if joined is not True and self.current is not None and self.current.roster.average_id == roster.average_id:
                    self.current.refused_by = member if joined is False else None
                    self.current.silent = member if joined is None else None
                    if joined is None and self._peer.world.has_dead_link(self._peer.name, member):
                        self._peer.links.fails(member)
                    self.close(f"{member} refuses")
                    self._withdraw(roster)

            self._call(member, lambda mate, reply: mate.rounds.serve(roster, reply), answered)

    def _withdraw(self, roster: Roster) -> None:
        """End the calls and abort the round: a handler that is still at work is cancelled, and who has joined leaves."""
        for member in roster.peers:
            if member != self._peer.name:
                self._deliver(member, lambda mate: mate.rounds.abort(roster))

    def serve(self, roster: Roster, reply: Callable[[object], None]) -> None:
        peer, join, leader = self._peer, Join(roster), self._peer.view.sightings.get(roster.leader)
        if peer.lies.is_silent:
            return
        if leader is None or leader.record.stage != peer.record.stage:
            reply(False)
            return
        self._joins.append(join)
        if peer.world.now < peer.cancelled_until:
            peer.after(peer.world.rng.uniform(0.0, peer.world.scenario.copy_s + 0.05), lambda: self.cancel(roster))
        self.join(roster, reply, join)

    def abort(self, roster: Roster) -> None:
        self.cancel(roster)
        if self.current is not None and self.current.roster == roster:
            self.close("its leader aborts it")

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
        if off and (peer.record.phase is not Phase.ACCUMULATING or peer.record.step != roster.step):
            return False
        if not off and why_refuse(peer.record, roster, peer.world.scenario.num_microbatches) is not None:
            return False
        peer.record = all_merged(peer.record)
        peer.change(tell=False, phase=Phase.AVERAGING)
        if join.cancelled and peer.world.rng.random() < 0.5:  # else a task of its own goes on
            peer.world.counts["joins that broke"] += 1
            return False
        self.current = Round(roster, opened_at_s=peer.now, moved_at_s=peer.now)
        for member in roster.reducers:
            self._send_part(member, roster, tuple(peer.accumulator), peer.record.done)
        waiting = [act for average_id, until, act in self._early if average_id == roster.average_id and peer.now < until]
        self._early = [early for early in self._early if peer.now < early[1] and early[0] != roster.average_id]
        for act in waiting:
            act()
        return True

    def _send_part(self, member: PeerId, roster: Roster, part: Average, done: int) -> None:
        sender = self._peer.name
        self._deliver(member, lambda mate: mate.rounds.take_part(roster.average_id, sender, part, done))
        if self._peer.world.has_dead_link(sender, member):
            self._peer.after(CALL_FAILS_S, lambda: self._part_failed(member, roster))

    def _part_failed(self, member: PeerId, roster: Roster) -> None:
        self._peer.links.fails(member)
        if self.current is not None and self.current.roster == roster:
            self.close(f"{member} does not answer")

    def take_part(self, average_id: AverageId, sender: PeerId, part: Average, done: int) -> None:
        peer, current = self._peer, self.current
        if current is None or current.roster.average_id != average_id:
            self._early.append(
                (average_id, peer.now + peer.world.rules.averaging_s, lambda: self.take_part(average_id, sender, part, done))
            )
            return
        entry = current.roster.entry_of(sender)
        if entry is None or (entry.done != done and "roster content" not in peer.world.scenario.off):
            return
        current.parts[sender] = part
        current.moved_at_s = peer.now
        if len(current.parts) < len(current.roster.entries):
            return
        total = tuple(sorted(gradient for part in current.parts.values() for gradient in part))
        number = current.roster.reducers.index(peer.name)
        for member in current.roster.peers:
            self._deliver(member, lambda mate: mate.rounds.take_slice(average_id, number, total), reply=True)

    def take_slice(self, average_id: AverageId, number: int, total: Average) -> None:
        peer, current = self._peer, self.current
        if current is None or current.roster.average_id != average_id:
            self._early.append((average_id, peer.now + peer.world.rules.averaging_s, lambda: self.take_slice(average_id, number, total)))
            return
        current.slices[number] = total
        current.moved_at_s = peer.now
        if len(current.slices) < len(current.roster.reducers):
            return
        if len(set(current.slices.values())) > 1:
            peer.world.violations.append(f"I1 at {peer.name}: the slices of one average were summed over different parts")
        peer.world.counts["averages"] += 1
        self.sidelining.came_together(current.roster)
        peer.adopt(current.roster.step, average_id, total)

    # GET_AVERAGE, GET_STATE

    def fetch_average(self, mate: PeerId, step: int) -> None:
        peer = self._peer
        peer.fetching = True
        asked_at = (peer.record.incarnation, peer.record.ledger_no)

        def answered(found: object) -> None:
            peer.fetching = False
            if found is None:
                peer.unanswered[mate, step] = peer.now
                return
            if not isinstance(found, Held) or self._is_useless(found):
                peer.refused[mate, step] = peer.now
                return
            smaller = peer.record.phase is not Phase.AVERAGED or found.average_id < peer.record.average_id
            if asked_at == (peer.record.incarnation, peer.record.ledger_no) and smaller and not peer.downloading:
                peer.world.counts["adopted"] += 1
                peer.adopt(step, found.average_id, found.average, found.norm, found.tied)

        self.ask(mate, lambda peer: peer.rounds.average_of(step), answered)

    def _is_useless(self, found: Held) -> bool:
        peer, rules = self._peer, self._peer.world.rules
        is_unfinished = (found.norm is None and rules.shares_norms) or (found.tied is None and peer.tied.exists)
        refused = why_not_adopt(peer.record, found.step, found.lineage) is not None
        return refused or (is_unfinished and peer.record.phase is Phase.JOINING)

    def average_of(self, step: int) -> Held | str:
        peer = self._peer
        if peer.record.step == step and peer.record.phase is Phase.AVERAGED and peer.average is not None:
            return Held(step, peer.record.average_id, peer.average, peer.record.lineage)
        return peer.kept.of_step(step) or "refused"

    def fetch_state(self, donor: PeerId, arrived: Callable[[Snapshot | None], None]) -> None:
        """A long download of a snapshot that does not change; it fails when the donor dies under it."""
        peer = self._peer
        whole_s = peer.world.rng.lognormvariate(peer.world.scenario.download, 0.8)
        peer.world.counts["downloads"] += 1

        def answered(found: object) -> None:
            if not isinstance(found, Snapshot):
                arrived(None)
                return
            source = peer.world.peers[donor]
            peer.after(whole_s, lambda: arrived(self._whole(source, found) if source.alive else None))

        self.ask(donor, lambda mate: mate.rounds.give(peer.name, whole_s), answered)

    def give(self, joiner: PeerId, lasts_s: float) -> Snapshot | None:
        peer = self._peer
        if peer.record.phase is Phase.JOINING:
            return None
        peer.kept.give_state(joiner, lasts_s)
        return self.state()

    def state(self) -> Snapshot:
        peer, record = self._peer, self._peer.record
        return Snapshot(record.stage, record.step, record.lineage, peer.theta, peer.previous, record.norms, peer.tied.now)

    def _whole(self, donor: ModelPeer, found: Snapshot) -> Snapshot:
        if "snapshot" not in donor.world.scenario.off:
            return found
        torn = donor.world.thetas.torn(found.theta, donor.theta)
        return replace(found, theta=torn)

    # messages

    def _deliver(self, member: PeerId, act: Callable[[ModelPeer], None], reply: bool = False) -> None:
        if member == self._peer.name:
            self._peer.after(0.001, lambda: act(self._peer))
        else:
            self._peer.world.send(self._peer, member, act, reply=reply)

    def ask(self, mate: PeerId, handle: Callable[[ModelPeer], object], answered: Callable[[object], None]) -> None:
        self._call(mate, lambda peer, reply: reply(handle(peer)), answered)

    def _call(
        self, mate: PeerId, handle: Callable[[ModelPeer, Callable[[object], None]], None], answered: Callable[[object], None]
    ) -> None:
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

            handle(peer, reply)

        asker.world.send(asker, mate, arrive, lambda: settle(None))
        asker.after(ANSWER_S, lambda: settle(None))
