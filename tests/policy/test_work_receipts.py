"""A receipt proves what was computed, and nothing else: whatever is changed, added or told twice is refused, with its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.policy.step.accounts import EVERY, SignedAccount, Vouch, WorkDone
from peerd.policy.step.work_receipts import WorkReceipt, fitted, proven, why_not_added, why_refused
from peerd.table.record import PeerId
from tests.policy.account_world import (
    LAST,
    ORGANISER,
    OTHER_RUN,
    PER_STEP,
    RUN,
    Members,
    anchored,
    audit_word,
    is_of,
    names,
    receipt_of,
    sign,
)


@pytest.fixture(scope="module")
def members() -> Members:
    found = Members(names(3))
    for step in range(LAST):
        found.step(step)
    return found


ME = names(1)[0]
SHARE = PER_STEP // 3 + 1


def test_a_receipt_proves_the_work_of_all_steps_or_of_some(members: Members) -> None:
    whole, part = receipt_of(members, ME), receipt_of(members, ME, since=2 * EVERY)
    assert [why_refused(each, RUN, is_of) for each in (whole, part)] == ["", ""]
    (told,) = proven(whole)
    assert (told.steps, told.work.steps, told.work.microbatches) == ((0, LAST), LAST, LAST * SHARE)
    assert (told.chain_from, told.num_signed, told.num_signers, told.is_by_one) == (EVERY, 3, 3, False)
    (told,) = proven(part)
    assert (told.steps, told.work.microbatches, told.whole.microbatches) == ((2 * EVERY, LAST), 2 * EVERY * SHARE, 2 * EVERY * PER_STEP)
    assert told.times_s == (1_000 + 2 * EVERY - 1, 1_000 + LAST - 1)


def test_a_reader_that_knows_an_account_knows_whose_signatures_count(members: Members) -> None:
    receipt = receipt_of(members, ME)
    assert [proven(receipt, known)[0].is_anchored for known in ([], [b"x"], [members.kept[EVERY][0].account.id])] == [False, False, True]


def test_a_receipt_of_another_run_is_refused(members: Members) -> None:
    receipt = receipt_of(members, ME)
    assert "another run" in why_refused(receipt, OTHER_RUN, is_of)
    assert "of another run or stage" in why_refused(replace(receipt, run=OTHER_RUN), OTHER_RUN, is_of)


def test_counts_that_were_changed_are_refused(members: Members) -> None:
    receipt = receipt_of(members, ME, since=EVERY)
    (part,) = receipt.parts
    more, since = replace(part.until, work=part.until.work + WorkDone(0, 1, 0)), part.since
    assert since is not None
    assert "not those that were signed" in why_refused(replace(receipt, parts=(replace(part, until=more),)), RUN, is_of)
    less = replace(since, work=WorkDone(1, 1, 1))
    assert "at its beginning" in why_refused(replace(receipt, parts=(replace(part, since=less),)), RUN, is_of)
    assert "not those that were signed" in why_refused(replace(receipt, peer=names(2)[1]), RUN, is_of), "of another peer"
    last = part.accounts[-1]
    grown = SignedAccount(replace(last.account, counted=last.account.counted + WorkDone(0, 1, 1)), last.vouches)
    assert "is not its own" in why_refused(replace(receipt, parts=(replace(part, accounts=(*part.accounts[:-1], grown)),)), RUN, is_of)


def test_a_strangers_signature_is_refused_whether_it_is_needed_or_not(members: Members) -> None:
    receipt = receipt_of(members, ME)
    (part,) = receipt.parts
    last, zoe = part.accounts[-1], PeerId("zoe")
    theirs = Vouch(zoe, 5, sign(zoe, last.account.text(5)))
    added = SignedAccount(last.account, (*last.vouches, theirs))
    assert "a stranger has signed" in why_refused(
        replace(receipt, parts=(replace(part, accounts=(*part.accounts[:-1], added)),)), RUN, is_of
    )
    alone = SignedAccount(last.account, (theirs,))
    assert "too few" in why_refused(replace(receipt, parts=(replace(part, accounts=(*part.accounts[:-1], alone)),)), RUN, is_of)


def test_accounts_of_strangers_alone_prove_nothing_to_who_knows_an_account(members: Members) -> None:
    """Keys cost nothing, so anybody can make up a whole stage. What tells it apart is an account that the reader knows."""
    forged = Members([PeerId("forger1"), PeerId("forger2"), ME])
    for step in range(2 * EVERY):
        forged.step(step)
    known = [signed.account.id for signed, _ in members.kept.values()]
    receipt = receipt_of(forged, ME)
    assert why_refused(receipt, RUN, is_of) == ""
    assert not proven(receipt, known)[0].is_anchored
    (part,), (own,) = receipt.parts, receipt_of(members, ME).parts
    mixed = WorkReceipt(RUN, ME, (replace(part, accounts=(own.accounts[0], part.accounts[-1])),))
    assert "a stranger has signed" not in why_refused(mixed, RUN, is_of)
    assert not proven(mixed, known)[0].is_anchored, "it does not follow the account that is known"


@pytest.mark.parametrize("at", range(LAST // EVERY))
def test_an_account_that_the_organiser_has_signed_says_whose_signatures_count(members: Members, at: int) -> None:
    receipt = replace(receipt_of(members, ME), organiser=ORGANISER)
    (part,) = receipt.parts

    def having(signed: SignedAccount) -> WorkReceipt:
        return replace(receipt, parts=(replace(part, accounts=(*part.accounts[:at], signed, *part.accounts[at + 1 :])),))

    assert not proven(receipt)[0].is_anchored
    found = having(anchored(part.accounts[at]))
    assert why_refused(found, RUN, is_of) == ""
    short = fitted(found, size_of)
    assert short is not None
    for each in (found, short):
        (told,) = proven(each)
        assert (told.is_anchored, told.is_by_organiser, told.num_signed <= 3) == (True, True, True)
    assert "a stranger has signed" in why_refused(having(anchored(part.accounts[at], PeerId("another"))), RUN, is_of)
    forged = SignedAccount(part.accounts[at].account, tuple(sorted([*part.accounts[at].vouches, Vouch(ORGANISER, 5, bytes(64))])))
    assert "is not its own" in why_refused(having(forged), RUN, is_of)
    assert "too few" in why_refused(having(anchored(SignedAccount(part.accounts[at].account, ()))), RUN, is_of), "it signs no counts"


def test_the_organisers_signature_under_an_account_that_the_last_one_does_not_follow_says_nothing(members: Members) -> None:
    forged = Members([PeerId("forger1"), PeerId("forger2"), ME])
    for step in range(2 * EVERY):
        forged.step(step)
    (part,), (own,) = receipt_of(forged, ME).parts, receipt_of(members, ME).parts
    mixed = WorkReceipt(RUN, ME, (replace(part, accounts=(anchored(own.accounts[0]), part.accounts[-1])),), organiser=ORGANISER)
    (told,) = proven(mixed)
    assert (told.is_anchored, told.is_by_organiser) == (False, False)


def test_what_is_told_twice_counts_for_nothing(members: Members) -> None:
    early, late, whole = receipt_of(members, ME, until=2 * EVERY), receipt_of(members, ME, since=2 * EVERY), receipt_of(members, ME)
    assert why_not_added({"a": early, "b": late}) == ""
    assert "a and b both tell of steps 32 to 63 of stage 0" in why_not_added({"a": late, "b": whole})
    assert "both tell" in why_not_added({"a": early, "b": early})
    assert why_not_added({"a": whole, "b": receipt_of(members, names(2)[1])}) == ""
    assert "two runs" in why_not_added({"a": whole, "b": replace(early, run=OTHER_RUN)})
    assert "a stage twice" in why_refused(replace(whole, parts=whole.parts * 2), RUN, is_of)


def test_words_on_audits_are_those_of_signers(members: Members) -> None:
    receipt, mate = receipt_of(members, ME), names(2)[1]
    word = audit_word(mate, ME, LAST)
    sound = replace(receipt, audits=(word,))
    assert why_refused(sound, RUN, is_of) == ""
    assert proven(sound)[0].audits == (word,)
    for bad in (replace(word, right=4), audit_word(PeerId("zoe"), ME, LAST), audit_word(ME, ME, LAST)):
        assert "audits" in why_refused(replace(receipt, audits=(bad,)), RUN, is_of)
    assert "twice" in why_refused(replace(receipt, audits=(word, word)), RUN, is_of)


def size_of(receipt: WorkReceipt) -> int:
    """About what the file takes: 32 bytes for a key or hash, 64 for a signature, 8 for a number, and two for the form of each."""
    total = 200
    for part in receipt.parts:
        total += sum(34 * (4 + len(each.account.signers)) + 111 * len(each.vouches) + 80 for each in part.accounts)
        total += sum(60 + 34 * len(row.path) for row in (part.until, part.since) if row is not None)
    return total


def test_what_does_not_fit_are_the_oldest_accounts(members: Members) -> None:
    receipt = receipt_of(members, ME, since=2 * EVERY)
    whole = fitted(receipt, size_of)
    assert whole is not None
    assert len(whole.parts[0].accounts) == 4
    short = fitted(receipt, size_of, size_of(whole) - 1)
    assert short is not None
    assert why_refused(short, RUN, is_of) == ""
    assert proven(short)[0].work == proven(whole)[0].work
    assert proven(short)[0].chain_from > proven(whole)[0].chain_from
    assert fitted(receipt, size_of, 300) is None
