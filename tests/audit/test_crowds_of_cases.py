"""Keys cost nothing: crowds of accusations by them push nothing out that peers say of each other. Rule 20 (audit)."""

from __future__ import annotations

from dataclasses import replace

from peerd.audit.cases import Cases
from peerd.policy.step.auditing import AuditWord
from peerd.policy.step.evidence import Evidence, SignedWord, word_text
from peerd.policy.step.receipts import NOTHING, AnsweredPass, AskedPass, Receipt, SignedPass
from peerd.policy.step.verdicts import MOST_CASES, MOST_KNOWN, Standing
from peerd.table.record import PeerId
from tests.audit.audited_stage import AuditedStage, lived, until
from tests.stage.signed_life import RUN, Key

WRONG, RIGHT = AuditWord(2.0, 1e-4), AuditWord(0.0, 1e-4)


def case_of(accuser: Key, index: int, words: tuple[AuditWord, ...] = (WRONG,), step: int = 0, callee: Key | None = None) -> Evidence:
    """A case that is signed rightly, of work that may never have been done."""
    callee = callee or accuser
    asked = AskedPass(1, step, index, accuser.peer, callee.peer, b"i" * 32, b"l" * 32)
    answered = AnsweredPass(b"g" * 32, NOTHING, b"p" * 32)
    own = Receipt(asked, answered, accuser.sign(asked.text(RUN)), callee.sign(answered.text(asked, RUN)))
    item = own.item(RUN)
    signed = [SignedWord(accuser.peer, word, accuser.sign(word_text(RUN, item, word))) for word in words]
    return Evidence(SignedPass(own), accuser.peer, b"coins").with_words(signed)


def test_hole_77_a_crowd_of_early_cases_pushes_no_mates_case_out() -> None:
    async def act(stage: AuditedStage) -> None:
        judge, accuser, other, *_ = stage.mates
        first = case_of(accuser.key, 1, callee=other.key)
        await judge.auditor.hear(first)
        for number in range(40):
            await judge.auditor.hear(case_of(Key(), number))
            await judge.auditor.hear(case_of(other.key, number, callee=Key()))
        taken = list[Evidence]()
        judge.auditor._take = lambda evidence, **_: taken.append(evidence)  # type: ignore[method-assign]
        judge.auditor._look()
        assert first in taken
        assert {each.accuser for each in taken} <= {accuser.me, other.me}
        assert len(taken) <= len(stage.mates) + 1

    lived(act)


def test_hole_78_keys_that_convict_themselves_push_no_conviction_out_and_nobody_passes_them_on() -> None:
    """Two words of one judge on one item are enough for a conviction, and anybody can sign them with any number of keys."""

    async def act(stage: AuditedStage) -> None:
        liar, *honest = stage.mates
        await stage.step()
        await until(lambda: all(each.cast == [liar.me] for each in honest))
        told = list[PeerId]()

        async def tell(_peer: PeerId, evidence: Evidence, _timeout_s: float) -> None:
            audited = evidence.item(stage.caller.run).audited
            told.extend([audited] if audited != liar.me else [])  # of the liar's own case all may still be told

        for each in honest:
            each.auditor._client.tell_case = tell  # type: ignore[method-assign, assignment]
        num_known = len(honest[0].cases.known)
        for number in range(MOST_CASES + 8):
            await honest[0].auditor.hear(case_of(Key(), number, (WRONG, RIGHT), callee=Key()))
            honest[0].auditor._look()
        assert len(honest[0].cases.known) == num_known
        assert honest[0].cases.losers == {liar.me}
        assert told == []

    lived(act, factors=[-1.0])


def test_hole_78_a_peer_that_has_lost_its_standing_is_convicted_of_nothing_else() -> None:
    async def act(stage: AuditedStage) -> None:
        liar, *honest = stage.mates
        await stage.step()
        await until(lambda: all(each.cast == [liar.me] for each in honest))
        num_known = len(honest[0].cases.known)
        for number in range(8):
            await honest[0].auditor.hear(case_of(liar.key, number, (WRONG, RIGHT), callee=Key()))
        assert len(honest[0].cases.known) == num_known

    lived(act, factors=[-1.0])


def test_hole_78_a_mate_that_contradicts_itself_is_out_all_the_same() -> None:
    async def act(stage: AuditedStage) -> None:
        liar, *honest = stage.mates
        await stage.step()
        evidence = case_of(liar.key, 1, (WRONG, RIGHT), callee=Key())
        await honest[0].auditor.hear(evidence)
        honest[0].auditor._look()
        assert honest[0].cast == [liar.me]
        await until(lambda: liar.me in honest[1].cases.losers)

    lived(act)


def test_hole_78_of_what_a_newcomer_learns_keys_that_it_never_met_go_first() -> None:
    cases = Cases(PeerId("me"), RUN)
    known = case_of(Key(), 0, (WRONG, RIGHT), callee=Key())
    cases.hear(known, (), 0.0)
    for number in range(MOST_CASES + 1):
        cases.hear(case_of(Key(), number, (WRONG, RIGHT), callee=Key()), (), 0.0, is_of_known=False)
        cases.rule(0.0, 1.0, 0)
    assert len(cases.known) == MOST_CASES
    assert known.item(RUN).id in cases.known


def test_hole_78_peers_that_work_are_not_forgotten_for_a_crowd_that_does_not() -> None:
    standing = Standing()
    founder = PeerId("founder")
    standing.found([founder])
    for number in range(MOST_KNOWN + 8):
        standing.finished([PeerId(str(number))], 1)
        standing.finished([founder], 1)
    assert standing.stands(founder)


def test_a_case_that_is_told_early_by_two_has_the_words_of_both() -> None:
    async def act(stage: AuditedStage) -> None:
        judge, accuser, other, *_ = stage.mates
        first = case_of(accuser.key, 1, callee=other.key)
        text = word_text(RUN, first.item(RUN), WRONG)
        more = replace(first, words=(*first.words, SignedWord(other.me, WRONG, other.sign(text))))
        await judge.auditor.hear(first)
        await judge.auditor.hear(more)
        assert judge.auditor._early.taken() == [more]

    lived(act)
