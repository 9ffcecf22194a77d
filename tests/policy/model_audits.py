"""Audits in the protocol model: what a peer computes again of its mates' work, and what they all make of it. Rule 20 (audit).

A gradient here has no numbers. The world notes which ones a liar has falsified, and an auditor that has the parameters of the step sees
that. One that has other parameters finds everything wrong. What a peer signs cannot be forged, and what it sends may be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from peerd.policy.hashing import digest
from peerd.policy.step.auditing import AuditWord, Item, Rates, chance, coin, due, was_due
from peerd.policy.step.coins import Commitments, heads_of, secret_of
from peerd.policy.step.ledger import indices
from peerd.policy.step.verdicts import Case, Ruling, Standing, asked, confirms, is_convicting, verdict_on, why_unheard
from peerd.policy.step.withholding import Withholding
from peerd.table.record import PeerId, Phase

if TYPE_CHECKING:
    from tests.policy.model_kept import Held
    from tests.policy.model_peer import ModelPeer

REPLAY_S = (0.05, 0.3)
JUDGE_S = 1.5
"""The time that a judge has."""
CASE_S = 6.0
"""After so long a case that nobody has decided is disputed."""
ANSWER_S = 0.6
"""How long a mate may take to tell the receipts of its part."""
AGAIN_S, MOST_AGAIN = 0.3, 10
"""What is heard of a step that this peer is about to finish waits so long, so often."""
WRONG, RIGHT, OTHER_PARAMETERS = 2.0, 1e-7, 1.4
TOLERANCE = 1e-4


def coins_seed(seed: int, peer: PeerId) -> bytes:
    return digest("coins of", seed, peer)


@dataclass(slots=True)
class Open:
    """A case as this peer knows it."""

    case: Case
    voters: frozenset[PeerId]
    """The members of the item's step, by the average of it, that stood when the case was opened."""
    opened_at_s: float
    is_asked: bool = False
    ruling: Ruling = Ruling.OPEN
    losers: set[PeerId] = field(default_factory=set)


class Audits:
    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        rate = peer.world.scenario.audits
        self.standing = Standing(Rates(newcomer=rate, usual=rate, odd=rate, settled=rate))
        self.cases: dict[bytes, Open] = {}
        self.commitments = Commitments()
        self.withholding = Withholding()
        self.ground: dict[bytes, bytes] = {}
        """Of a liar, secrets of coins that it has looked for, by item."""
        if rate > 0:
            peer.record = replace(peer.record, coins=heads_of(coins_seed(peer.world.scenario.seed, peer.name), 0))

    @property
    def is_on(self) -> bool:
        return self._peer.world.scenario.audits > 0

    def begin_step(self) -> None:
        """The present step ends: its work can be computed again until the next one ends."""
        peer = self._peer
        self._note_coins()
        held = peer.kept.of_step(peer.record.step)
        if not self.is_on or held is None or held.average_id != peer.record.average_id:
            return
        members = held.claim.roster.peers
        if held.step == 0:
            self.standing.found(members)
        self.standing.finished(members, held.step)
        if peer.record.phase is Phase.JOINING:
            return
        self._ask_for_receipts(held)
        each = [(item, self._chance(item, members)) for item in self._items(held)]
        if peer.lies.denounces:
            self._grind(each)
        for item in due(self._secret(peer.name, held.step), each):
            peer.after(peer.world.rng.uniform(*REPLAY_S), lambda item=item: self._audit(item))  # type: ignore[misc]

    def _ask_for_receipts(self, held: Held) -> None:
        """Ask mates for the receipts of their parts where the callers have not told all of them, as happens to honest ones, too."""
        peer, asked = self._peer, dict[PeerId, int]()

        def tell(mate: ModelPeer) -> None:
            def hear(_me: ModelPeer) -> None:
                asked.pop(mate.name, None)

            if not mate.lies.conceals and asked.get(mate.name) == mate.record.incarnation:
                peer.world.send(mate, peer.name, hear)

        def end() -> None:
            for name, incarnation in asked.items():
                record = peer.live().find(name)
                if record is not None and record.incarnation == incarnation and peer.record.step == held.step + 1:
                    peer.world.counts["withheld"] += self.withholding.withheld(name, held.step)

        lost = peer.world.scenario.lost_receipts
        for entry in held.claim.roster.entries:
            if entry.peer != peer.name and (peer.world.peers[entry.peer].lies.conceals or (lost and peer.world.rng.random() < lost)):
                asked[entry.peer] = entry.incarnation
                peer.world.send(peer, entry.peer, tell)
        if asked:
            peer.after(ANSWER_S, end)

    def look(self) -> None:
        """A peer that has lost its standing counts for nothing."""
        peer = self._peer
        self._note_coins()
        for name in peer.view.sightings if self.is_on else ():
            if self.standing.has_lost(name) and not peer.view.is_condemned(name, peer.now):
                peer.view.condemn(name, peer.now)

    def _note_coins(self) -> None:
        peer = self._peer
        for record in peer.view.live(peer.now).records if self.is_on else ():
            self.commitments.note(record, peer.record.step)

    # what a peer does itself

    def _grind(self, each: Sequence[tuple[Item, float]]) -> None:
        """A liar that accuses, of any of these items, one that its coins did not draw: it looks for a secret by which they would have."""
        peer = self._peer
        if not each:
            return
        item, its_chance = each[0]
        tries = (digest("ground", item.id, number, size=32) for number in range(10_000))
        self.ground[item.id] = next(found for found in tries if coin(found, item) < its_chance)
        case = Case(item, peer.name, {peer.name: AuditWord(WRONG, TOLERANCE)})
        self._tell(lambda mate: mate.trust.audits.hear(case))

    def _items(self, held: Held) -> list[Item]:
        mates = (entry for entry in held.claim.roster.entries if entry.peer != self._peer.name)
        return [self._item(entry.peer, held, index) for entry in mates for index in (*indices(entry.done), None)]

    def _ground(self, case: Case) -> bytes:
        """The secret that a liar shows with its case; empty if it shows its own."""
        return self._peer.world.peers[case.accuser].trust.audits.ground.get(case.item.id, b"")

    def _item(self, audited: PeerId, held: Held, index: int | None) -> Item:
        signed = digest("signed", audited, held.average_id, -1 if index is None else index)
        return Item(audited, self._peer.record.stage, held.step, index, signed)

    def _secret(self, auditor: PeerId, step: int) -> bytes:
        """In the model everybody can tell it, but only honest peers would not look."""
        return secret_of(coins_seed(self._peer.world.scenario.seed, auditor), step)

    def _chance(self, item: Item, members: Sequence[PeerId]) -> float:
        return chance(self.standing.rate_of(item.audited, item.step), len(members) - 1)

    def _measured(self, item: Item) -> AuditWord | None:
        """What this peer says of an item; None where it cannot compute it again, or does not want to."""
        peer, lies = self._peer, self._peer.lies
        held = self._held(item)
        conceals = peer.world.peers[item.audited].lies.conceals
        if held is None or (conceals and item.index is None):
            return None
        if lies.denounces or lies.shields or lies.equivocates:
            return AuditWord(WRONG if lies.denounces else 0.0, TOLERANCE)
        used = {gradient.thetas[item.stage] for gradient in held.average if item.index in (None, gradient.index)}
        late = peer.world.thetas.late if peer.world.scenario.delayed else lambda theta: theta
        if peer.previous is None or used != {late(peer.previous)}:
            return AuditWord(OTHER_PARAMETERS, TOLERANCE)
        done = next(entry.done for entry in held.claim.roster.entries if entry.peer == item.audited)
        done_here = indices(done) if item.index is None else [item.index]
        is_wrong = not conceals and any((item.audited, item.step, index) in peer.world.falsified for index in done_here)
        lost, has_other_hash = peer.world.scenario.lost_bytes, is_wrong or digest("device", peer.name)[0] % 2 == 1
        if lost and item.index is not None and has_other_hash and peer.world.rng.random() < lost:
            peer.world.counts["lost bytes"] += 1
            return None
        return AuditWord(WRONG if is_wrong else RIGHT, TOLERANCE)

    def _held(self, item: Item) -> Held | None:
        """The average of the item's step, if this peer can compute that step again and has the same average."""
        peer = self._peer
        held = peer.kept.of_step(item.step)
        if held is None or item not in self._items(held):
            return None
        has_parameters = peer.record.step == item.step + 1 and peer.record.phase is not Phase.JOINING
        return held if has_parameters or "judge without parameters" in peer.world.scenario.off else None

    def _audit(self, item: Item) -> None:
        peer = self._peer
        word = self._measured(item)
        if word is None or not word.accuses or self.standing.has_lost(item.audited):
            return
        case = Case(item, peer.name, {peer.name: word})
        if not self._why_unheard(case):
            peer.world.counts["cases"] += 1
            peer.world.note(f"{peer.name} accuses {item.audited} of {item.step}/{item.index}")
            self._take(case)
            self._tell(lambda mate: mate.trust.audits.hear(case))

    def _why_unheard(self, case: Case) -> str:
        peer, item = self._peer, case.item
        held = peer.kept.of_step(item.step)
        if held is None:
            return "this peer has no average of that step"
        members = held.claim.roster.peers
        if item.audited not in members or item != self._item(item.audited, held, item.index):
            return "the audited peer has signed no such work"
        secret = self._ground(case) or self._secret(case.accuser, item.step)
        has_committed = case.accuser == peer.name or self.commitments.has_committed(case.accuser, secret, item.step)
        has_committed = has_committed or "coins committed before the step" in peer.world.scenario.off
        is_due = has_committed and was_due(secret, item, self._chance(item, members))
        others = [each.case for each in self.cases.values() if each.ruling is Ruling.OPEN]
        return why_unheard(case, self.standing.standing(members), others, is_due, self.standing.is_paused(case.accuser, item.step))

    # what comes from others

    def hear(self, case: Case, again: int = 0) -> None:
        """A mate accuses another."""
        peer = self._peer
        if case.item.id in self.cases:
            self._merge(case)
        elif peer.kept.of_step(case.item.step) is None and again < MOST_AGAIN:
            peer.after(AGAIN_S, lambda: self.hear(case, again + 1))
        elif not self._why_unheard(case):
            self._take(case)
        else:
            self._believe(case)

    def _believe(self, case: Case) -> None:
        """Take what others have decided: by the words of those that had a vote, as far as this peer knows, or of most that serve there."""
        peer, item = self._peer, case.item
        held = peer.kept.of_step(item.step) if item.stage == peer.record.stage else None
        members = held.claim.roster.peers if held is not None else ()
        there = self.standing.not_lost(record.peer for record in peer.live().serving(item.stage))
        for voters in (self.standing.standing(members), there):
            if item.id not in self.cases and is_convicting(case, voters):
                known = self.cases[item.id] = Open(case, voters, peer.now)
                self._look_at(known)

    def hear_decided(self, case: Case) -> None:
        """A peer of another stage tells what is decided there."""
        if case.item.stage == self._peer.record.stage:
            self.hear(case)
        elif case.item.id in self.cases:
            self._merge(case)
        else:
            self._believe(case)

    def say(self, case: Case, judge: PeerId, word: AuditWord) -> None:
        """A mate has computed an item again. Its word comes with the case, as it may come before it."""
        self.hear(case.with_word(judge, word))

    def _take(self, case: Case) -> None:
        held = self._peer.kept.of_step(case.item.step)
        assert held is not None
        self.cases[case.item.id] = Open(case, self.standing.standing(held.claim.roster.peers), self._peer.now)
        self._peer.world.counts["ground cases"] += bool(self._ground(case))
        self._watch(case.item.id)

    def _merge(self, case: Case) -> None:
        known = self.cases[case.item.id]
        known.case = known.case.merged(case)
        self._look_at(known)

    def _watch(self, item_id: bytes) -> None:
        known = self.cases[item_id]
        self._look_at(known)
        if self._peer.now - known.opened_at_s < CASE_S:
            self._peer.after(JUDGE_S / 2, lambda: self._watch(item_id))

    def _look_at(self, known: Open) -> None:
        peer, case = self._peer, known.case
        age_s = peer.now - known.opened_at_s
        judges = asked(case, known.voters, int(age_s / JUDGE_S))
        confirms_it = confirms(case, known.voters, peer.name) and "new members confirm" not in peer.world.scenario.off
        if (peer.name in judges or confirms_it) and not known.is_asked:
            known.is_asked = True
            peer.after(peer.world.rng.uniform(*REPLAY_S), lambda: self._judge(known))
        if case.accuser == peer.name and not judges and not case.insists:
            known.case = replace(case, insists=True)
            self._tell(lambda mate: mate.trust.audits.hear(known.case))
        self._rule(known, age_s)

    def _judge(self, known: Open) -> None:
        peer = self._peer
        word, before = self._measured(known.case.item), known.case
        if word is None:
            return
        known.case = before.with_word(peer.name, word)
        for name in self._mates():
            told = AuditWord(WRONG, TOLERANCE) if peer.lies.equivocates and name < peer.name else word
            peer.world.send(peer, name, lambda mate, told=told: mate.trust.audits.say(before, peer.name, told))  # type: ignore[misc]
        if known.losers:
            self._tell_everybody(known.case)
        self._look_at(known)

    def _rule(self, known: Open, age_s: float) -> None:
        """Later words may name more losers, but change no ruling."""
        peer = self._peer
        verdict = verdict_on(known.case, known.voters, is_late=age_s >= CASE_S)
        fresh = verdict.losers - known.losers - {peer.name}
        if known.ruling is Ruling.OPEN and verdict.ruling is not Ruling.OPEN:
            known.ruling = verdict.ruling
            peer.world.counts[f"cases {verdict.ruling.value}"] += 1
        elif not fresh:
            return
        self.standing.closed(known.case, verdict, peer.record.step)
        known.losers |= verdict.losers
        case = known.case
        for name in sorted(fresh):
            peer.world.note(f"{peer.name} convicts {name}")
            peer.world.blames(name, "convicted")
        if fresh:
            self._tell_everybody(case)
            self.look()
            peer.poke()

    def _tell_everybody(self, case: Case) -> None:
        peer = self._peer
        for record in peer.live().records:
            if record.peer != peer.name:
                peer.world.send(peer, record.peer, lambda other: other.trust.audits.hear_decided(case))

    def _tell(self, act: object) -> None:
        peer = self._peer
        for name in self._mates():
            peer.world.send(peer, name, act)  # type: ignore[arg-type]

    def _mates(self) -> list[PeerId]:
        return [record.peer for record in self._peer.live().serving(self._peer.record.stage) if record.peer != self._peer.name]
