"""Cases as they travel: what they prove, and what others can change in them. Rule 20 (audit)."""

from __future__ import annotations

from dataclasses import replace

from peerd.policy.step.auditing import AuditWord
from peerd.policy.step.evidence import Evidence, SignedWord, insistence_text, word_text
from peerd.policy.step.receipts import NOTHING, AnsweredPass, AskedPass, Receipt, SignedPass
from peerd.table.record import PeerId, RunId

RUN = RunId("run")
CALLER, LIAR, FIRST, SECOND = (PeerId(name) for name in ("caller", "liar", "first", "second"))
WRONG, WORSE, RIGHT = AuditWord(2.0, 1e-4), AuditWord(2.5, 1e-4), AuditWord(1e-7, 1e-4)


def sign(peer: PeerId, text: bytes) -> bytes:
    return peer.encode() + text


def is_of(peer: PeerId, text: bytes, signature: bytes) -> bool:
    return signature == sign(peer, text)


def signed_pass() -> SignedPass:
    asked = AskedPass(0, 3, 1, CALLER, LIAR, b"i" * 32, b"l" * 32)
    answered = AnsweredPass(b"g" * 32, NOTHING, b"p" * 32)
    return SignedPass(Receipt(asked, answered, sign(CALLER, asked.text(RUN)), sign(LIAR, answered.text(asked, RUN))))


def word_of(judge: PeerId, word: AuditWord) -> SignedWord:
    return SignedWord(judge, word, sign(judge, word_text(RUN, signed_pass().own.item(RUN), word)))


def evidence(*words: SignedWord) -> Evidence:
    return Evidence(signed_pass(), FIRST, b"c" * 32).with_words(words)


def test_it_makes_the_case_of_its_words() -> None:
    assert evidence().case(RUN) is None, "its accuser has said nothing"
    case = evidence(word_of(SECOND, RIGHT), word_of(FIRST, WRONG)).case(RUN)
    assert case is not None
    assert (case.accuser, case.item.audited, dict(case.words), case.insists) == (FIRST, LIAR, {FIRST: WRONG, SECOND: RIGHT}, False)


def test_a_judge_has_one_word_and_a_second_one_only_if_it_contradicts_the_first() -> None:
    found = evidence(word_of(FIRST, WRONG), word_of(FIRST, AuditWord(2.0001, 1e-4)), word_of(FIRST, RIGHT), word_of(FIRST, WORSE))
    assert [each.word for each in found.words] == [WRONG, RIGHT]
    case = found.case(RUN)
    assert case is not None
    assert case.two_faced == {FIRST}


def test_merging_is_the_same_whoever_begins_but_for_the_order_of_words() -> None:
    one, other = evidence(word_of(FIRST, WRONG)), evidence(word_of(SECOND, WRONG))
    insists = replace(other, insists=sign(FIRST, insistence_text(RUN, other.item(RUN))))
    for merged in (one.merged(insists), insists.merged(one)):
        assert {each.judge for each in merged.words} == {FIRST, SECOND}
        assert merged.insists == insists.insists
        assert merged.why_unsigned(RUN, is_of) == ""
    assert one.merged(one) == one


def test_nothing_of_it_can_be_made_up() -> None:
    whole = evidence(word_of(FIRST, WRONG), word_of(SECOND, RIGHT))
    assert whole.why_unsigned(RUN, is_of) == ""
    assert isinstance(whole.signed, SignedPass)
    own = whole.signed.own
    changes = {
        "insist": replace(whole, insists=sign(SECOND, insistence_text(RUN, whole.item(RUN)))),
        "signed its word": replace(whole, words=(replace(whole.words[0], word=WORSE),)),
        "signed the call": replace(whole, signed=SignedPass(replace(own, asked=replace(own.asked, inputs=b"x" * 32)))),
        "signed the answer": replace(whole, signed=SignedPass(replace(own, answered=replace(own.answered, gradient=NOTHING)))),
        "another one": replace(whole, signed=SignedPass(own, own)),
    }
    for words, changed in changes.items():
        assert words in changed.why_unsigned(RUN, is_of)
    assert whole.why_unsigned(RunId("another"), is_of) != ""
