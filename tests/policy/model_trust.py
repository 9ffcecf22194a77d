"""What a peer of the protocol model believes of averages, and the proofs that it has: rule 18 (certify)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerd.policy.hashing import digest
from peerd.policy.step.certificates import (
    SignedSlice,
    average_id_of,
    can_count,
    is_upheld,
    told_twice,
    voters,
    why_distrust,
    why_distrust_section,
    words_on,
)
from peerd.policy.step.certifying import ahead_alone, holding_alone, telling_early
from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId, PeerId, Phase
from tests.policy.model_audits import Audits
from tests.policy.model_theta import Average, Gradient, ThetaId

if TYPE_CHECKING:
    from tests.policy.model_exchange import Exchange
    from tests.policy.model_kept import Held
    from tests.policy.model_peer import ModelPeer

BAN_S = 24.0
"""Eight lives of a record."""
SIGNED = b"signed"
CONFIRMED = b"confirmed"


@dataclass(frozen=True, slots=True)
class Claim:
    """Of which round an average is, and what its reducers have signed."""

    roster: Roster
    slices: tuple[SignedSlice, ...] = ()
    confirmed_by: tuple[PeerId, ...] = ()
    """Members of the round that have signed that this came of it."""
    sections: tuple[Claim, ...] = ()
    """Of the sections of an average that several rounds have made."""

    @property
    def id(self) -> AverageId:
        return average_id_of(self.roster, self.slices)

    @property
    def has_all_parts(self) -> bool:
        return self.roster.parts == tuple(each.id for each in self.sections)


def falsified(total: Average, step: int, for_whom: int) -> Average:
    """Numbers that are not the sum of anything, others for each listener."""
    return (*total, Gradient(step, -1 - for_whom, (ThetaId(-1),)))


def root_of(total: Average) -> bytes:
    return digest(repr(total))


class Trust:
    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self.joined: set[AverageId] = set()
        """The rounds of this step in which this peer was. A fence changes nothing of that."""
        self.refuted: set[AverageId] = set()
        self.group: tuple[PeerId, ...] = ()
        """The members of the round that made the sum which this peer holds."""
        self._copies: dict[AverageId, tuple[SignedSlice, ...]] = {}
        self._banned_until_s: dict[PeerId, float] = {}
        self.audits = Audits(peer)

    def begin_step(self) -> None:
        self.audits.begin_step()
        self.joined.clear()
        self.group = ()
        self._copies.clear()

    def signs(self, average_id: AverageId, total: Average) -> None:
        """This peer's slice of a round, as it sends it."""
        self._peer.world.signed.add((self._peer.name, average_id, root_of(total)))

    def claim_of(self, exchange: Exchange) -> Claim:
        """Of a round that has come together here. The reducers' signatures came with their slices."""
        roster = exchange.roster
        if not self._peer.world.rules.certifies:
            return Claim(roster)
        roots = [(exchange.names[k], root_of(total)) for k, total in sorted(exchange.totals.items())]
        claim = Claim(roster, tuple(SignedSlice(reducer, root, SIGNED) for reducer, root in roots))
        self._copies[roster.average_id] = claim.slices
        return claim

    def confirms(self, claim: Claim) -> None:
        """This peer signs that this came of a round."""
        self._peer.world.signed.add((self._peer.name, claim.roster.average_id, CONFIRMED + claim.id))

    def copy_of(self, round_id: AverageId) -> tuple[SignedSlice, ...]:
        """The slices of a round of this step, as they came here."""
        return self._copies.get(round_id, ())

    def compare(self, mate: PeerId, exchange: Exchange, said: AverageId) -> None:
        """A mate says that it holds something else of a round than this peer: either a reducer has signed two slices of it, or it lies."""
        roster, round_id = exchange.roster, exchange.roster.average_id

        def answered(found: object) -> None:
            slices = found if isinstance(found, tuple) else ()
            is_proven = self._is_signed(Claim(roster, slices)) and average_id_of(roster, slices) == said
            pair = told_twice(self.copy_of(round_id), slices) if is_proven else None
            if pair is not None:
                self.refute(round_id, pair)
            exchange.confirming.shown(mate, is_proven)

        self._peer.rounds.ask(mate, lambda other: other.trust.copy_of(round_id), answered)

    def is_certified(self, claim: Claim) -> bool:
        """Whether more than half of a round's members have signed that this came of it."""
        signed, round_id = self._peer.world.signed, claim.roster.average_id
        sure = {name for name in claim.confirmed_by if (name, round_id, CONFIRMED + claim.id) in signed}
        return 2 * len(sure.intersection(claim.roster.peers)) > len(claim.roster.peers)

    def takes_section(self, mate: PeerId, claim: Claim, total: Average) -> bool:
        """Whether this peer takes a section that a mate gives. One that is made up costs its giver a ban."""
        peer = self._peer
        if not peer.world.rules.certifies or "certificates" in peer.world.scenario.off:
            return True
        is_whole = self.is_certified(claim) and {each.root for each in claim.slices} == {root_of(total)}
        whole, signed_by = peer.world.rules.num_microbatches, claim.confirmed_by
        distrust = why_distrust_section(claim.roster, is_whole, signed_by, peer.record, self.group, whole)
        if distrust is not None and distrust.is_lie:
            self._ban(mate, distrust.reason)
        elif distrust is not None:
            self.disbelieve(mate)
        return distrust is None

    def believes(self, mate: PeerId, found: Held) -> bool:
        """Whether this peer takes the average that a mate gives it. One that is made up costs its giver a ban."""
        peer, world = self._peer, self._peer.world
        if not world.rules.certifies or peer.record.phase is Phase.JOINING:
            return True
        if found.claim.roster.parts:
            if not (found.claim.has_all_parts and all(map(self.is_certified, found.claim.sections))):
                self._ban(mate, "a section of it is not certified")
                return False
            whole, mine = world.rules.num_microbatches, peer.record
            doubts = [why_distrust_section(each.roster, True, each.confirmed_by, mine, self.group, whole) for each in found.claim.sections]
            if any(doubts) and not words_on(mine, peer.live()).certify(found.average_id):
                self.disbelieve(mate)
                return False
            return True
        claim, round_id = found.claim, found.claim.roster.average_id
        is_signed = claim.id == found.average_id and self._is_signed(claim)
        pair = told_twice(self._copies.get(round_id, ()), claim.slices) if is_signed else None
        if pair is not None:
            self.refute(round_id, pair)
        mine, live = peer.record, peer.live()
        if round_id in self.refuted:
            counts = is_upheld(found.average_id, claim.roster, mine, live)
        else:
            counts = words_on(mine, live).certify(found.average_id)
        distrust = why_distrust(claim.roster, is_signed, mine, counts, self.joined, self.refuted)
        if distrust is not None and distrust.is_lie:
            self._ban(mate, distrust.reason)
        elif distrust is not None:
            self.disbelieve(mate)
            if not can_count(found.average_id, claim.roster, mate, mine, voters(mine, live)):
                self.kept_back(mate)
        return distrust is None

    def kept_back(self, mate: PeerId) -> None:
        """It was asked for the average that it tells, and has shown none that could come to count."""
        peer, off = self._peer, self._peer.world.scenario.off
        if not peer.world.rules.certifies or peer.record.phase is Phase.JOINING or not off.isdisjoint({"sideline", "kept back"}):
            return
        if mate in holding_alone(peer.situation()) and peer.rounds.sidelining.kept_back(mate, peer.now):
            peer.world.note(f"{peer.name} leaves {mate} out: it shows nothing of what it holds")
            peer.poke()

    def look(self) -> None:
        """Count the mates that are ahead alone, and those that hold an average alone: T6 (sideline), rule 18 (certify)."""
        peer, rules = self._peer, self._peer.world.rules
        if rules.certifies and "sideline" not in peer.world.scenario.off:
            now = peer.situation()
            peer.rounds.sidelining.look_ahead(ahead_alone(now), rules.averaging_s, peer.now)
            if "probation" not in peer.world.scenario.off:
                mates = (*now.live.of_stage(now.mine.stage), *(m for m in now.live.suspected if m.stage == now.mine.stage))
                peer.rounds.sidelining.look_at_liars(now.mine, mates, telling_early(now), peer.now)
            for mate in holding_alone(now):
                self.disbelieve(mate)

    def disbelieve(self, mate: PeerId) -> None:
        """It holds an average that is of no use here. That does not go on for long where it is honest."""
        peer, rules = self._peer, self._peer.world.rules
        if (
            rules.certifies
            and peer.record.phase is not Phase.JOINING
            and peer.rounds.sidelining.disbelieved(mate, rules.averaging_s, peer.now)
        ):
            peer.view.doubt(mate, peer.now)

    def _is_signed(self, claim: Claim) -> bool:
        round_id, plan = claim.roster.average_id, self._peer.world.plans[claim.roster.average_id]
        reducers = [name for name, size in zip(claim.roster.peers, plan.slice_bytes, strict=True) if size]
        named = [each.reducer for each in claim.slices]
        return named == reducers and all((each.reducer, round_id, each.root) in self._peer.world.signed for each in claim.slices)

    def _ban(self, mate: PeerId, reason: str) -> None:
        peer = self._peer
        peer.world.note(f"{peer.name} bans {mate}: {reason}")
        peer.world.blames(mate, "bans")
        self._banned_until_s[mate] = peer.now + BAN_S
        peer.view.doubt(mate, peer.now)
        peer.rounds.sidelining.lied(mate)

    @property
    def bans(self) -> dict[PeerId, float]:
        """Those whose calls are refused, with the seconds that are left."""
        return {mate: until_s - self._peer.now for mate, until_s in self._banned_until_s.items() if until_s > self._peer.now}

    def refute(self, round_id: AverageId, pair: tuple[SignedSlice, SignedSlice]) -> None:
        """A reducer has signed two slices of one round. All that hear of it can check that, and it counts for nothing from now on."""
        peer, (one, other) = self._peer, pair
        is_proof = one.reducer == other.reducer and one.root != other.root
        are_signed = all((each.reducer, round_id, each.root) in peer.world.signed for each in pair)
        if round_id in self.refuted or not (is_proof and are_signed) or "refute" in peer.world.scenario.off:
            return
        self.refuted.add(round_id)
        if peer.name == one.reducer:
            return
        peer.world.note(f"{peer.name} refutes the round {round_id.hex()[:6]}: {one.reducer} has signed two slices")
        peer.world.blames(one.reducer, "convicted")
        told = [record.peer for record in peer.live().records]
        peer.view.condemn(one.reducer, peer.now)
        for name in told:
            peer.world.send(peer, name, lambda mate: mate.trust.refute(round_id, pair))
        peer.poke()
