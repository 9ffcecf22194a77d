"""Peers of one stage audit each other with real microbatches: a liar is out by the word of most, and nobody honest is accused. Rule 20."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peerd.audit.cases import Cases
from peerd.audit.store import CaseStore
from peerd.audit.tallies import AuditOutcome
from peerd.errors import BadMessageError
from peerd.policy.step.auditing import AuditWord
from peerd.policy.step.evidence import MOST_WORDS, SignedWord, word_text
from peerd.policy.step.receipts import SignedPass
from peerd.policy.step.verdicts import Ruling
from peerd.wire.audit_service import WantedBytes
from peerd.wire.messages import TensorBytes
from tests.audit.audited_stage import ALL, AuditedStage, counts, lived, num_done, until
from tests.stage.signed_life import Key


def test_honest_mates_find_each_other_right() -> None:
    async def act(stage: AuditedStage) -> None:
        for step in (1, 2):
            await stage.step()
            await until(lambda step=step: all(num_done(each) == 9 * step for each in stage.mates))  # type: ignore[misc]
        for mate in stage.mates:
            assert counts(mate) == {AuditOutcome.RIGHT: 18}
            assert {note.deviation for note in mate.auditor.tallies.last} == {0.0}
            assert (mate.auditor.tallies.num_items, mate.auditor.tallies.num_drawn) == (18, 18)
            assert (mate.cases.known, mate.cast) == ({}, [])

    lived(act)


def test_an_audit_of_an_honest_mate_gets_what_the_mate_got_and_nothing_that_it_gave() -> None:
    async def act(stage: AuditedStage) -> None:
        await stage.step()
        await until(lambda: all(num_done(each) == 9 for each in stage.mates))
        [inputs, labels] = {(kept.inputs.num_bytes, kept.labels.num_bytes) for kept in stage.caller.witness.kept._kept.values()}.pop()
        for mate in stage.mates:
            microbatches = 6 + 3 * 2  # one by one, and those of three parts
            assert mate.fetched == {
                WantedBytes.INPUTS: microbatches * inputs,
                WantedBytes.LABELS: microbatches * labels,
                WantedBytes.GRADIENT: 0,
            }

    lived(act)


@pytest.mark.parametrize("factor", [-1.0, 0.0, 1.01, 100.0])
def test_a_mate_that_gives_back_false_gradients_is_out_in_all_views_and_hears_of_it(factor: float) -> None:
    async def act(stage: AuditedStage) -> None:
        liar, *honest = stage.mates
        await stage.step()
        await until(lambda: all(each.cast == [liar.me] for each in honest))
        await until(lambda: liar.me in liar.cases.losers)
        for each in honest:
            assert each.cases.losers == {liar.me}
            assert next(known.ruling for known in each.cases.known.values() if known.losers) is Ruling.CONVICTED

    lived(act, factors=[factor])


@pytest.mark.parametrize("factor", [-1.0, 0.0, 1.01, 1000.0])
def test_a_mate_that_falsifies_its_part_of_the_average_is_out_in_all_views_and_hears_of_it(factor: float) -> None:
    async def act(stage: AuditedStage) -> None:
        liar, *honest = stage.mates
        await stage.step()
        await until(lambda: all(each.cast == [liar.me] for each in honest))
        await until(lambda: liar.me in liar.cases.losers)
        assert all(each.cases.losers == {liar.me} for each in honest)
        assert "this peer's part of step 0 again" in liar.cases.own_fault

    lived(act, part_factors=[factor])


def test_a_reducer_that_forges_what_it_has_kept_of_a_part_convicts_nobody() -> None:
    async def act(stage: AuditedStage) -> None:
        framer, *honest = stage.mates
        true_find = framer.witness.parts.find

        def find(signed: bytes) -> TensorBytes:
            value = true_find(signed)
            return value.with_chunks((bytes(value.num_bytes),))

        framer.witness.parts.find = find  # type: ignore[method-assign]
        await stage.step()
        await until(lambda: any(known.ruling is Ruling.DISPUTED for known in honest[0].cases.known.values()))
        assert {known.case.accuser for each in honest for known in each.cases.known.values()} == {framer.me}
        assert all(each.cases.losers == frozenset() for each in stage.mates)
        assert honest[0].cases.standing.is_paused(framer.me, 1)

    lived(act)


def test_a_false_part_in_a_stage_of_two_is_disputed() -> None:
    async def act(stage: AuditedStage) -> None:
        liar, honest = stage.mates
        await stage.step()
        await until(lambda: any(known.ruling is Ruling.DISPUTED for known in honest.cases.known.values()))
        [known] = [known for known in honest.cases.known.values() if known.item.audited == liar.me]
        assert known.item.index is None
        assert honest.cases.losers == liar.cases.losers == frozenset()
        assert honest.cases.standing.rate_of(liar.me, 1) == ALL.newcomer

    lived(act, num_mates=2, part_factors=[-1.0])


def test_a_mate_that_falsifies_and_accuses_nobody_costs_no_honest_mate_anything_in_a_stage_of_two() -> None:
    async def act(stage: AuditedStage) -> None:
        liar, honest = stage.mates
        await stage.step()
        await until(lambda: any(known.ruling is Ruling.DISPUTED for known in honest.cases.known.values()))
        assert honest.cases.losers == liar.cases.losers == frozenset()
        assert honest.cases.standing.rate_of(liar.me, 1) == ALL.newcomer

    lived(act, num_mates=2, factors=[-1.0])


def test_a_false_accuser_loses_its_standing() -> None:
    async def act(stage: AuditedStage) -> None:
        liar, victim, *others = stage.mates
        audited = liar.auditor._replays

        async def measure(told: Any, finished: Any, priority: Any) -> AuditWord:
            return AuditWord(2.0, 1e-4)

        audited.measure = measure  # type: ignore[method-assign]
        await stage.step()
        await until(lambda: all(each.cast == [liar.me] for each in (victim, *others)))
        assert all(each.cases.losers == {liar.me} for each in (victim, *others))

    lived(act)


def test_what_others_have_decided_is_believed_by_the_stage_before_and_by_a_newcomer_that_asks_for_receipts() -> None:
    async def act(stage: AuditedStage) -> None:
        liar, *honest = stage.mates
        await stage.step()
        await until(lambda: all(each.cast == [liar.me] for each in honest))
        evidence = honest[0].cases.convictions()[0]
        await until(lambda: stage.caller.cases.known != {})
        stage.caller.auditor._look()
        assert stage.caller.cast == [liar.me]
        assert [each.item(liar.run) for each in stage.caller.cases.convictions()] == [evidence.item(liar.run)]
        newcomer = stage.bystander()
        await newcomer.auditor.hear(replace(evidence, words=evidence.words[:1]))
        assert not newcomer.cases.known, "one word is no majority"
        await newcomer.auditor._ask(honest[0].me, 0)
        newcomer.auditor._look()
        assert newcomer.cast == [liar.me]

    lived(act, factors=[-1.0])


def test_the_stage_before_believes_a_conviction_although_not_all_mates_had_a_vote() -> None:
    """Two of four stand, as the others came after the first step. The stage before cannot know that, and wants the words of three."""

    async def act(stage: AuditedStage) -> None:
        liar, newcomer, *founders = stage.mates
        for each in stage.mates:
            each.cases.standing.found(founder.me for founder in founders)
        await stage.step()
        await until(lambda: all(each.cast == [liar.me] for each in (newcomer, *founders)))

        def is_out() -> bool:
            stage.caller.auditor._look()
            return stage.caller.cast == [liar.me]

        await until(is_out)
        convicting = [known.case for known in stage.caller.cases.known.values() if known.losers]  # several may have accused it
        judges = [{judge for judge, word in case.words.items() if word.differs} for case in convicting]
        assert {newcomer.me, *(each.me for each in founders)} in judges

    lived(act, factors=[-1.0])


def test_a_peer_that_comes_later_asks_its_mates_for_convictions_and_checks_them_itself() -> None:
    async def act(stage: AuditedStage) -> None:
        liar, *honest = stage.mates
        await stage.step()
        await until(lambda: all(each.cast == [liar.me] for each in honest))
        forger, newcomer = honest[0], stage.bystander()
        evidence = forger.cases.convictions()[0]
        forger.auditor.receipts = lambda *_: ([replace(evidence, words=evidence.words[:1])], [])  # type: ignore[method-assign]
        honest[1].auditor.receipts = lambda *_: ([replace(evidence, insists=b"x" * 64)], [])  # type: ignore[method-assign]
        await newcomer.auditor._learn()
        newcomer.auditor._look()
        assert newcomer.cast == [liar.me]
        alone = stage.bystander()
        stage.is_cut = lambda one, other: alone in (one, other) and other not in honest[:2]
        await alone.auditor._learn()
        assert alone.cases.known == {}, "words that nobody has signed, or too few of them, convict nobody"

    lived(act, factors=[-1.0])


def test_a_peer_that_restarts_has_its_convictions_and_its_mates_standing_in_its_home(tmp_path: Path) -> None:
    async def act(stage: AuditedStage) -> None:
        liar, *honest = stage.mates
        await stage.step()
        await until(lambda: all(each.cast == [liar.me] for each in honest))
        await until(lambda: all(list(each.store.folder.glob("*.case")) for each in honest if each.store))
        again = Cases(honest[0].me, liar.run)
        CaseStore(tmp_path / honest[0].me, again).read()
        assert again.losers == {liar.me}
        assert again.known.keys() <= honest[0].cases.known.keys()
        assert again.standing.standing(each.me for each in stage.mates) == {each.me for each in honest}

    lived(act, factors=[-1.0], folder=tmp_path)


def test_evidence_that_somebody_has_changed_is_refused() -> None:
    async def act(stage: AuditedStage) -> None:
        liar, *honest = stage.mates
        await stage.step()
        await until(lambda: all(each.cast == [liar.me] for each in honest))
        evidence = honest[0].cases.convictions()[0]
        item, victim, forger = evidence.item(liar.run), honest[1], stage.bystander()
        forged = SignedWord(victim.me, AuditWord(0.0, 1e-4), forger.sign(word_text(liar.run, item, AuditWord(0.0, 1e-4))))
        assert isinstance(evidence.signed, SignedPass)
        own = evidence.signed.own
        for false in (
            replace(evidence, words=(*evidence.words[:1], forged)),
            replace(evidence, insists=b"yes" * 21),
            replace(evidence, signed=replace(evidence.signed, own=replace(own, asked=replace(own.asked, callee=victim.me)))),
        ):
            with pytest.raises(BadMessageError, match="proves nothing"):
                await forger.auditor.hear(false)
        assert not forger.cases.known

    lived(act, factors=[-1.0])


def test_a_crowd_of_keys_leaves_room_for_the_words_that_count() -> None:
    """A liar that is accused signs as many words as a case may have, each with a key of its own, before its mates have judged."""

    async def act(stage: AuditedStage) -> None:
        (liar, *honest), gate = stage.mates, asyncio.Event()
        accuser = honest[0]
        for each in honest[1:]:

            async def measure(*given: Any, its: Any = each.auditor._replays.measure) -> Any:
                await gate.wait()
                return await its(*given)

            each.auditor._replays.measure = measure  # type: ignore[assignment, method-assign]
        await stage.step()
        await until(lambda: all(accuser.me in {known.case.accuser for known in each.cases.known.values()} for each in honest))
        (known,) = (known for known in accuser.cases.known.values() if known.case.accuser == accuser.me)
        text = word_text(liar.run, known.item, right := AuditWord(0.0, 1e-4))
        crowd = known.evidence.with_words(SignedWord(each.peer, right, each.sign(text)) for each in (Key() for _ in range(MOST_WORDS)))
        for each in honest:
            await each.auditor.hear(crowd)
        assert [each.judge for each in known.evidence.words] == [accuser.me]
        gate.set()
        await until(lambda: all(each.cast == [liar.me] for each in honest))

    lived(act, factors=[-1.0])


def test_what_nobody_gives_is_not_audited_and_is_told() -> None:
    async def act(stage: AuditedStage) -> None:
        stage.caller.witness.kept.most_bytes = 0
        for mate in stage.mates:
            mate.witness.kept.most_bytes = 0
        await stage.step()
        await until(lambda: all(num_done(each) == 3 for each in stage.mates))
        for mate in stage.mates:
            assert {note.item.index for note in mate.auditor.tallies.last} <= {None}
            assert counts(mate) == {AuditOutcome.MISSED: 3}, "of parts nobody has what they were computed from"
            assert mate.auditor.tallies.num_items == 3

    lived(act)


def test_the_audited_peer_itself_gives_what_the_other_end_does_not() -> None:
    async def act(stage: AuditedStage) -> None:
        stage.caller.auditor.kept_pass = stage.mates[0].auditor.kept_pass  # type: ignore[method-assign]
        await stage.step()
        await until(lambda: all(num_done(each) == 9 for each in stage.mates))
        assert all(counts(mate) == {AuditOutcome.RIGHT: 9} for mate in stage.mates)

    lived(act)
