"""Audits the mates of one seat: draws what to compute again by private coins, and settles with them what it finds wrong. Rule 20 (audit).

A step is audited during the next one. The executor computes audits when it has nothing else to do; what a case needs goes first, as it is
rare. The tensors come from the other ends of a mate's calls, so a mate does not know what is looked at.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import replace

import structlog

from peerd.audit.cases import CaseNews, Cases, KnownCase
from peerd.audit.early import EarlyCases
from peerd.audit.host import AuditHost
from peerd.audit.replays import AuditedStep, Replays, Told
from peerd.audit.tallies import AuditOutcome, AuditTallies
from peerd.audit.unclaimed import UnclaimedWork, few_at_once
from peerd.background import Tasks
from peerd.errors import BadMessageError, PeerdError, RemoteError
from peerd.policy.step.auditing import AuditWord, Item, chance, due
from peerd.policy.step.coins import secret_of
from peerd.policy.step.evidence import Evidence, SignedWord, insistence_text, word_text
from peerd.policy.step.parts import SentPart, basis_of, passes_of_part
from peerd.policy.step.receipts import SentOn, SignedPass
from peerd.policy.step.roster import Roster
from peerd.policy.step.verdicts import TELLERS, Ruling, is_convicting, tellers, verdict_on
from peerd.stage.executor import Priority
from peerd.stage.state import StageState
from peerd.stage.witnessing import PassWitness, hash_of_lineage
from peerd.swarm.clock import clock_s
from peerd.table.record import Lineage, PeerId
from peerd.wire.audit_client import AuditClient, KeptTensors

Work = SignedPass | SentOn | SentPart
"""A mate's work, as it has signed it: a microbatch, or its forward pass alone, or its whole part of a step."""
LOOKS_PER_JUDGE = 8
MOST_OF_A_MATE = 2
"""A peer tells a receipt of each microbatch at most as its caller, and one as the peer that was called."""
STEPS_KNOWN = 4
"""Steps of which this peer knows who may judge."""
LOG = structlog.get_logger()


class Auditor:
    """What one seat does for rule 20 (audit). Everything runs on the event loop, but for replays, hashes and signatures."""

    def __init__(
        self, state: StageState, witness: PassWitness, replays: Replays, client: AuditClient, cases: Cases, host: AuditHost
    ) -> None:
        self._state, self._witness, self._replays = state, witness, replays
        self._client, self._cases, self._host = client, cases, host
        self._unclaimed_work = UnclaimedWork(state, client, host)
        self.tallies = AuditTallies()
        self._finished: dict[int, AuditedStep] = {}
        self._early = EarlyCases()
        self._work = Tasks()
        self._changed = asyncio.Event()

    # What the seat tells

    def applied(self, roster: Roster, before: Lineage) -> None:
        """This peer has finished a step with this average. `before`: the lineage of the parameters that the step was computed with."""
        self._note_coins()
        standing, step = self._cases.standing, roster.step
        if not self._finished and not standing.standing(peer for peer in roster.peers if peer != self._host.me):
            standing.found(peer for peer in roster.peers if not standing.has_lost(peer))
        standing.finished(roster.peers, step)
        self._work.start(self._host.keep_cases())
        lineage = self._witness.lineage_at(step)  # which also notes those of the step that begins
        if lineage != hash_of_lineage(before):
            return  # it holds parameters of another origin
        finished = AuditedStep(step, roster, lineage, self._state.holdings.generation)
        self._finished[step] = finished
        for old in [old for old in self._finished if old <= step - STEPS_KNOWN]:
            del self._finished[old]
        self._work.start(self._audit_step(finished), expects=(PeerdError,))
        self._changed.set()

    def _note_coins(self) -> None:
        """Note to which coins the mates are committed: an audit counts by those that were known before its step."""
        for record in self._host.live().of_stage(self._state.record.stage):
            self._cases.commitments.note(record, self._state.record.step)

    async def run(self) -> None:
        """Look at the cases, until cancelled."""
        self._work.start(self._learn(), expects=(PeerdError,))
        try:
            while True:
                self._look()
                try:
                    async with asyncio.timeout(self._judge_s / LOOKS_PER_JUDGE):
                        await self._changed.wait()
                except TimeoutError:
                    continue
                self._changed.clear()
        finally:
            await self._work.close()

    # What other peers ask

    def receipts(self, stage: int, step: int, known: Collection[bytes]) -> tuple[Sequence[Evidence], Sequence[SignedPass]]:
        """The convictions that the caller lacks, and what is signed of this peer's own calls to a stage in a step, and of its answers."""
        asked = self._witness.kept.asked_by(self._host.me, stage, step)
        own = [each for each in self._witness.kept.answered_by(self._host.me, stage, step) if each not in asked]
        return self._cases.convictions(known), [*asked, *own]

    def sent_on(self, stage: int, step: int, known: Collection[bytes]) -> Sequence[SentOn]:
        """What peers of the stage before have sent on to this one in a step, but for the calls of these names."""
        return self._witness.sent_on(stage, step, known)

    def kept_pass(self, signed: bytes) -> KeptTensors:
        return self._replays.kept(signed)

    async def hear(self, evidence: Evidence, *, is_learning: bool = False) -> Evidence | None:
        """Take a case that a peer tells, with the words of those that may judge it. Raises BadMessageError if its signatures are wrong."""
        item = evidence.item(self._host.run)
        known = self._cases.known.get(item.id)
        evidence = evidence.of_judges(self._judges_of(item, known))
        if known is None or known.evidence != known.evidence.merged(evidence):
            await self._check(evidence)
            self._take(evidence, is_learning=is_learning)
            self._changed.set()
        known = self._cases.known.get(item.id)
        return known.evidence if known is not None else None

    def _judges_of(self, item: Item, known: KnownCase | None) -> set[PeerId]:
        """Those whose words on an item may count: who was in its average, as far as this peer knows, or serves its stage now."""
        finished = self._finished.get(item.step) if item.stage == self._state.record.stage else None
        there = {record.peer for record in self._host.live().of_stage(item.stage)}
        return there.union(finished.members if finished is not None else (), known.voters if known is not None else ())

    async def _check(self, evidence: Evidence) -> None:
        reason = await asyncio.to_thread(evidence.why_unsigned, self._host.run, self._host.has_signed)
        if reason:
            raise BadMessageError(f"an accusation that proves nothing: {reason}")

    # Audits

    async def _audit_step(self, finished: AuditedStep) -> None:
        told = await self._receipts_of(finished)
        standing, run = self._cases.standing, self._host.run
        mates = {*finished.members} - {self._host.me}
        pairs = await self._replays.sound([each for each in told if each.own.asked.callee in mates])
        shown = [*pairs, *await self._shown_by_mates(finished, pairs)]
        num_auditors = len(standing.standing(finished.members)) - 1
        parts = self._witness.parts.of(finished.roster.average_id)
        by_receipts = [replace(part, basis=basis_of(self._passes_of(part.author, finished, shown), run)) for part in parts]
        unclaimed = await self._unclaimed(finished, shown)
        work: list[Work] = [*pairs, *by_receipts, *unclaimed]
        whole, place = {signed.item(run): signed for signed in work}, (self._state.record.stage, finished.step)
        audited = {*finished.members, *(each.got.asked.callee for each in unclaimed)}
        items = {item: signed for item, signed in whole.items() if standing.may_audit(item, self._host.me, *place, audited)}
        secret = secret_of(self._host.coins_seed, finished.step)
        chances = ((item, chance(self._rate_of(item, signed, finished), num_auditors)) for item, signed in items.items())
        drawn = due(secret, chances)
        self.tallies.drew(len(items), len(drawn))
        for item in drawn:
            telling = self._told(items[item], finished, self._host.me, shown)
            await self._audit(Evidence(items[item], self._host.me, secret), telling, finished)

    def _rate_of(self, item: Item, signed: Work, finished: AuditedStep) -> float:
        """The share of such work that all auditors together compute again. Work that no caller knows of is looked at as a newcomer's is."""
        if isinstance(signed, SentOn):
            return self._cases.standing.rates.newcomer
        is_odd = isinstance(signed, SentPart) and self._witness.parts.looked_odd(signed)
        return self._cases.standing.rate_of(item.audited, finished.step, is_odd)

    async def _unclaimed(self, finished: AuditedStep, shown: Sequence[SignedPass]) -> list[SentOn]:
        """What mates have sent on without a receipt of it. Those that name other parameters are noted."""
        found, apart = await self._unclaimed_work.of(finished, shown)
        for mate in apart:
            self._withheld(mate, finished, "a mate has sent on what it made with parameters of its own")
        return found

    def _withheld(self, mate: PeerId, finished: AuditedStep, told: str) -> None:
        self.tallies.withheld(mate, self._state.record.stage, finished.step)
        is_left_out = self._cases.withholding.withheld(mate, finished.step)
        LOG.warning(told, mate=mate, step=finished.step, left_out=is_left_out)

    async def _told(self, signed: Work, finished: AuditedStep, keeper: PeerId, pairs: Sequence[SignedPass] | None = None) -> Told:
        """What is needed to compute some work again. `keeper`: who has the chunk of a part; `pairs`: what is signed of the step's calls."""
        if isinstance(signed, SignedPass):
            return await self._replays.told(signed, finished)
        if isinstance(signed, SentOn):
            return await self._replays.told_sent_on(signed, finished)
        if pairs is None:
            its = [each for each in await self._receipts_of(finished) if each.own.asked.callee == signed.author]
            pairs = await self._replays.sound(its)
            pairs += await self._of_mate(signed.author, finished, pairs) or ()
        return await self._replays.told_part(signed, pairs, finished, keeper)

    async def _shown_by_mates(self, finished: AuditedStep, pairs: Sequence[SignedPass]) -> list[SignedPass]:
        """The receipts that mates give themselves, as the callers' are not all of their parts. Who gives none is noted."""
        found, state = list[SignedPass](), self._state
        for entry in finished.roster.entries:
            if entry.peer == self._host.me or self._cases.standing.has_lost(entry.peer):
                continue
            own = await self._of_mate(entry.peer, finished, pairs)
            found += own or ()
            record = self._host.live().find(entry.peer)
            is_there = record is not None and record.incarnation == entry.incarnation and state.record.step == finished.step + 1
            if own is None and is_there:
                self._withheld(entry.peer, finished, "a mate shows no receipts of its part")
        return found

    async def _of_mate(self, mate: PeerId, finished: AuditedStep, pairs: Sequence[SignedPass]) -> list[SignedPass] | None:
        """What a mate has to add to these sound receipts, so that they are all of its part; None if it does not. Signatures count."""
        if self._passes_of(mate, finished, pairs) is not None:
            return []
        stage, most = self._state.record.stage, MOST_OF_A_MATE * self._state.num_microbatches
        try:
            _, told = await self._client.get_receipts(mate, stage, finished.step, (), most, self._host.patience_s)
        except RemoteError:
            told = []
        sound = await self._replays.sound([each for each in told if each.own.asked.callee == mate])
        return None if self._passes_of(mate, finished, [*pairs, *sound]) is None else sound

    def _passes_of(self, mate: PeerId, finished: AuditedStep, pairs: Sequence[SignedPass]) -> list[SignedPass] | None:
        return passes_of_part(finished.roster, mate, pairs, finished.lineage)

    async def _receipts_of(self, finished: AuditedStep) -> list[SignedPass]:
        """What is signed of all calls to this stage in a step, from those that made them."""
        live, stage = self._host.live(), self._state.record.stage
        callers = [record.peer for record in (live.serving(stage - 1) if stage else live.records) if record.peer != self._host.me]
        found = self._witness.kept.asked_by(self._host.me, stage, finished.step)
        for told in await few_at_once(callers, lambda peer: self._ask(peer, finished.step)):
            found += told or ()
        return found

    async def _learn(self) -> None:
        """Ask peers for the convictions that this one lacks, as it begins: it may have come, or come back, after they were told."""
        live, step = self._host.live(), self._state.record.step + STEPS_KNOWN  # of which nothing is signed yet
        num_told = 0
        for peer in tellers(self._host.me, live.of_stage(self._state.record.stage), live.records):
            num_told += await self._ask(peer, step, is_learning=True) is not None
            if num_told == TELLERS:
                return

    async def _ask(self, peer: PeerId, step: int, *, is_learning: bool = False) -> list[SignedPass] | None:
        """One peer's receipts; None if it does not answer. The convictions that come with them are heard."""
        known = [item_id for item_id, each in self._cases.known.items() if each.losers]
        try:
            convictions, pairs = await self._client.get_receipts(
                peer, self._state.record.stage, step, known, MOST_OF_A_MATE * self._state.num_microbatches, self._host.patience_s
            )
            for evidence in convictions:
                await self.hear(evidence, is_learning=is_learning)
        except RemoteError:
            return None
        return [each for each in pairs if peer in (each.own.asked.caller, each.own.asked.callee)]

    async def _audit(self, evidence: Evidence, telling: Awaitable[Told], finished: AuditedStep) -> None:
        """Compute some work again, and accuse if it is wrong. `evidence`: without words."""
        item = evidence.item(self._host.run)
        try:
            told = await telling
            word = await self._replays.measure(told, finished, Priority.IDLE)
            if word.accuses:
                again = await self._replays.measure(told, finished, Priority.FORWARD)
                word = again if again.distance < word.distance else word
        except PeerdError as error:
            self.tallies.missed(item, error.message)
            return
        self.tallies.audited(item, word)
        if word.accuses and not self._cases.standing.has_lost(item.audited):
            LOG.warning("a mate's work is wrong here", mate=item.audited, step=item.step, index=item.index, deviation=word.deviation)
            await self._replays.hold(finished)
            self._open(evidence.with_words([self._signed_word(item, word)]), finished)

    def _open(self, evidence: Evidence, finished: AuditedStep) -> None:
        if self._cases.why_unheard(evidence, self._voters(finished), 1.0, finished.step):
            return
        known = self._cases.hear(evidence, self._voters(finished), clock_s())
        if known is not None:
            known.is_asked = True
            self._tell(known)
            self._changed.set()

    # Cases

    @property
    def _judge_s(self) -> float:
        """How long a judge has: to get the tensors and to compute, while passes of the step go before."""
        return 2 * self._host.patience_s + 2 * self._host.pass_s()

    def _voters(self, finished: AuditedStep) -> frozenset[PeerId]:
        return self._cases.standing.standing(finished.members)

    def _take(self, evidence: Evidence, *, is_learning: bool = False) -> None:
        """Take a case whose signatures are right: one to judge, or one that others have decided.

        `is_learning`: this peer asks for those as it begins, and does not know yet who is there.
        """
        item = evidence.item(self._host.run)
        finished = self._finished.get(item.step) if item.stage == self._state.record.stage else None
        known = self._cases.known.get(item.id)
        if known is not None:
            self._cases.hear(evidence, None, clock_s())
        elif finished is not None and self._is_to_judge(evidence, finished):
            self._cases.hear(evidence, self._voters(finished), clock_s())
            self._work.start(self._replays.hold(finished), expects=(PeerdError,))
        elif (voters := self._convinced_by(evidence, finished)) is not None:
            is_of_known = self._is_news(evidence, voters)
            if is_of_known or is_learning:
                self._cases.hear(evidence, voters, clock_s(), is_of_known)
        elif finished is None and item.stage == self._state.record.stage and item.step == self._state.record.step:
            mates = {record.peer for record in self._host.live().of_stage(item.stage)}
            self._early.add(evidence, self._host.run, self._cases.standing.not_lost(mates))

    def _is_news(self, evidence: Evidence, voters: frozenset[PeerId]) -> bool:
        """Whether a conviction costs a peer its standing that this one knows, and that has it yet.

        A key costs nothing: anybody can convict any number of keys of its own, by words that contradict each other (hole 78).
        """
        case, standing = evidence.case(self._host.run), self._cases.standing
        losers = verdict_on(case, voters).losers if case is not None else ()
        return any(not standing.has_lost(peer) and self._knows(peer) for peer in losers)

    def _knows(self, peer: PeerId) -> bool:
        return peer == self._host.me or self._host.live().find(peer) is not None or self._cases.standing.has_worked(peer)

    def _is_to_judge(self, evidence: Evidence, finished: AuditedStep) -> bool:
        most_chance = self._cases.standing.most_chance(finished.members)
        return not self._cases.why_unheard(evidence, self._voters(finished), most_chance, finished.step)

    def _convinced_by(self, evidence: Evidence, finished: AuditedStep | None) -> frozenset[PeerId] | None:
        """The voters by whose words others have convicted somebody; None: they have not."""
        case, item = evidence.case(self._host.run), evidence.item(self._host.run)
        known = [self._voters_of(item)] if finished is None else [self._voters(finished), self._voters_of(item)]
        return next((voters for voters in known if is_convicting(case, voters)), None)

    def _voters_of(self, item: Item) -> frozenset[PeerId]:
        """The peers of the item's stage, as this peer knows them."""
        return self._cases.standing.not_lost(record.peer for record in self._host.live().of_stage(item.stage))

    def _look(self) -> None:
        """Do what is due in the cases that this peer knows."""
        self._note_coins()
        now_s = clock_s()
        for evidence in self._early.taken():
            self._take(evidence)
        for known in self._cases.to_judge(now_s, self._judge_s):
            self._work.start(self._judge(known), expects=(PeerdError,))
        for known in self._cases.to_insist():
            insists = self._host.sign(insistence_text(self._host.run, known.item))
            self._cases.hear(replace(known.evidence, insists=insists), None, now_s)
            self._tell(known)
        for news in self._cases.rule(now_s, self._judge_s, self._state.record.step):
            self._heed(news)
        self._replays.release(self._cases.steps_needed())
        self._host.cast_out([peer for peer in self._cases.losers if peer != self._host.me])

    async def _judge(self, known: KnownCase) -> None:
        finished = self._finished.get(known.item.step)
        try:
            if finished is None or known.item.stage != self._state.record.stage:
                return
            told = await self._told(known.evidence.signed, finished, known.case.accuser)
            word = await self._replays.measure(told, finished, Priority.FORWARD)
        except PeerdError as error:
            LOG.info("this peer cannot judge a mate's work", mate=known.item.audited, step=known.item.step, reason=error.message)
            return
        finally:
            known.is_computing = False
        self._cases.hear(known.evidence.with_words([self._signed_word(known.item, word)]), None, clock_s())
        self._tell(known, everybody=bool(known.losers))
        self._changed.set()

    def _signed_word(self, item: Item, word: AuditWord) -> SignedWord:
        word = AuditWord(word.deviation if math.isfinite(word.deviation) else math.inf, word.tolerance)
        return SignedWord(self._host.me, word, self._host.sign(word_text(self._host.run, item, word)))

    def _heed(self, news: CaseNews) -> None:
        item = news.known.item
        told = {"mate": item.audited, "stage": item.stage, "step": item.step, "index": item.index, "accuser": news.known.case.accuser}
        LOG.warning("a case has ended, or cost somebody its standing", ruling=news.verdict.ruling.value, losers=sorted(news.fresh), **told)
        if news.verdict.ruling is not Ruling.OPEN:  # a judge that contradicts itself loses its standing before the case has ended
            self.tallies.ruled(item, AuditOutcome(news.verdict.ruling.value))
        if news.fresh:
            if any(self._knows(peer) for peer in news.fresh):
                self._tell(news.known, everybody=True)
            self._work.start(self._host.keep_cases())

    def _tell(self, known: KnownCase, *, everybody: bool = False) -> None:
        """Tell a case to the mates that judge it, or to everybody, its losers included: they may not know that they compute wrongly."""
        live = self._host.live()
        others = {record.peer for record in (live.records if everybody else live.of_stage(known.item.stage))} | known.losers | known.voters
        for peer in others - {self._host.me}:
            self._work.start(self._tell_to(peer, known), expects=(PeerdError,))

    async def _tell_to(self, peer: PeerId, known: KnownCase) -> None:
        answer = await self._client.tell_case(peer, known.evidence, self._host.patience_s)
        if answer is not None and answer.item(self._host.run) == known.item:
            await self.hear(answer)
