"""How members come to the same accounts, whoever comes, goes or misses a step; and what liars among them can do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.policy.step.account_book import MOST_TAKEN, RECENT, AccountBook
from peerd.policy.step.accounts import EVERY, SignedAccount, Vouch, WorkDone, follows, is_anchored, root_of, why_not_certified
from peerd.table.record import PeerId
from tests.policy.account_world import (
    ORGANISER,
    PER_STEP,
    RUN,
    TOKENS,
    Members,
    anchored,
    is_of,
    names,
    roster,
    sign,
    signed_by,
    some_account,
)


def newest(members: Members, peer: PeerId) -> SignedAccount:
    found = members.books[peer].newest
    assert found is not None
    return found


def test_all_members_sign_the_same_account() -> None:
    members = Members(names(4))
    for step in range(3 * EVERY + 2):
        members.step(step)
    assert {newest(members, peer).account.id for peer in members.books} == {members.kept[3 * EVERY][0].account.id}
    signed, works = members.kept[3 * EVERY]
    assert why_not_certified(signed, is_of) == ""
    assert len(signed.vouches) == 4
    assert signed.account.counted == WorkDone(3 * EVERY, 3 * EVERY * PER_STEP, 3 * EVERY * PER_STEP * TOKENS)
    assert works[names(1)[0]] == WorkDone(3 * EVERY, 3 * EVERY * PER_STEP // 4, 3 * EVERY * PER_STEP // 4 * TOKENS)
    assert [member.lacks for member in members.books.values()] == [None] * 4


def test_who_came_later_takes_the_rows_over_and_signs_from_the_next_account_on() -> None:
    members = Members(names(3))
    for step in range(4 * EVERY):
        if step == EVERY + 3:
            members.join(PeerId("zoe"))
        members.step(step)
    steps = sorted(step for step, (signed, _) in members.kept.items() if any(each.signer == "zoe" for each in signed.vouches))
    assert steps == [3 * EVERY, 4 * EVERY]
    assert members.kept[4 * EVERY][1][PeerId("zoe")].steps == 3 * EVERY - 3, "all that others have counted of it"


@pytest.mark.parametrize("missed", [0, 5, EVERY - 1])
def test_who_has_missed_a_step_signs_nothing_until_it_has_the_rows_again(missed: int) -> None:
    members, late = Members(names(3)), names(3)[0]
    for step in range(4 * EVERY):
        members.step(step, missed_by=[late] if step == EVERY + missed else [])
    assert late not in {each.signer for each in members.kept[2 * EVERY][0].vouches}
    assert late in {each.signer for each in members.kept[4 * EVERY][0].vouches}
    assert root_of(members.books[late].recent[4 * EVERY].works) == members.kept[4 * EVERY][0].account.root


@pytest.mark.parametrize("missed", [range(3 * EVERY - 2, 3 * EVERY + 5), range(3 * EVERY + 1, 3 * EVERY + 2), range(EVERY, 3 * EVERY + 5)])
def test_who_comes_to_the_runs_end_by_a_mates_state_has_its_last_account(missed: range) -> None:
    """It applies no average after those that it has missed, and none of the accounts there is its own count."""
    end, late = 3 * EVERY + 5, names(3)[0]
    members = Members(names(3), last_step=end)
    for step in range(end):
        members.step(step, missed_by=[late] if step in missed else [])
    book = members.books[late]
    book.reached(end)
    members.talk()
    assert book.newest is not None
    assert book.newest.account == members.kept[end][0].account
    assert book.wanted() is None
    assert late not in {each.signer for each in members.kept[end][0].vouches}


def test_the_last_steps_of_a_run_are_in_an_account_and_what_is_reached_and_counted_is_counted_once() -> None:
    members = Members(names(3), last_step=EVERY + 3)
    for step in range(EVERY + 3):
        members.step(step)
        for book in members.books.values():
            book.reached(step + 1)
    assert sorted(members.kept) == [EVERY, EVERY + 3]
    assert members.kept[EVERY + 3][0].account.counted.steps == EVERY + 3
    assert len(members.kept[EVERY + 3][0].vouches) == 3
    assert follows(members.kept[EVERY + 3][0], members.kept[EVERY][0].account)
    stray = some_account(EVERY + 1, members.kept[EVERY][1])
    book = members.books[names(1)[0]]
    assert "step" in book.hear(names(2)[1], [signed_by(stray, names(3))], is_of)


def test_alone_a_member_goes_on_and_its_accounts_follow() -> None:
    members = Members(names(2))
    for step in range(2 * EVERY + 5):
        members.step(step)
    del members.books[names(2)[0]]
    for step in range(2 * EVERY + 5, 5 * EVERY):
        members.step(step)
    kept = [members.kept[step][0] for step in sorted(members.kept)]
    assert [each.account.step for each in kept] == [EVERY, 2 * EVERY, 3 * EVERY, 4 * EVERY, 5 * EVERY]
    assert all(follows(after, before.account) for before, after in pairwise(kept))


def test_after_a_restart_of_all_the_count_goes_on_without_the_steps_that_nobody_has_counted() -> None:
    members = Members(names(3))
    for step in range(2 * EVERY + 5):
        members.step(step)
    signed, rows = members.kept[2 * EVERY]
    for peer in members.books:
        members.books[peer] = AccountBook(RUN, 0, signed, rows)
    for step in range(2 * EVERY + 5, 5 * EVERY):
        members.step(step)
        for book in members.books.values():
            book.found(is_alone=False)
    last, works = members.kept[5 * EVERY]
    assert sorted(members.kept) == [EVERY, 2 * EVERY, 4 * EVERY, 5 * EVERY]
    assert (last.account.first_step, last.account.counted.steps) == (0, 5 * EVERY - (EVERY - 5) - 5)
    assert sum(row.microbatches for row in works.values()) == last.account.counted.microbatches
    assert follows(members.kept[4 * EVERY][0], signed.account)


def test_a_run_that_is_set_back_counts_no_step_twice() -> None:
    members = Members(names(3))
    for step in [*range(2 * EVERY + 3), *range(EVERY + 7, 4 * EVERY)]:
        members.step(step)
    assert members.kept[4 * EVERY][0].account.counted.steps == 4 * EVERY


def test_signatures_that_come_late_still_count_and_none_is_waited_for() -> None:
    members = Members(names(3))
    for step in range(3 * EVERY):
        members.step(step, talk=False)
    assert not members.kept
    members.talk()
    assert sorted(members.kept) == [EVERY, 2 * EVERY, 3 * EVERY]
    for step in range(3 * EVERY, (5 + RECENT) * EVERY):
        members.step(step, talk=False)
    members.talk()
    assert 4 * EVERY not in members.kept
    assert all(len(book.recent) == RECENT for book in members.books.values())


def test_who_begins_alone_in_the_middle_of_a_run_counts_from_there() -> None:
    book = AccountBook(RUN, 0)
    for step in range(EVERY + 5, 4 * EVERY):
        account = book.applied(roster(step, names(1)), TOKENS)
        assert (account is not None) == (step == 3 * EVERY - 1 or step == 4 * EVERY - 1)
        assert book.found(is_alone=True) == (step == 2 * EVERY + EVERY // 2 - 1)
    assert account is not None
    assert (account.first_step, account.step, account.counted.steps) == (2 * EVERY, 4 * EVERY, 2 * EVERY)


def test_a_mates_forgeries_are_refused_and_change_nothing() -> None:
    members = Members(names(3))
    for step in range(EVERY):
        members.step(step, talk=False)
    book, liar = members.books[names(3)[0]], names(3)[2]
    account = book.recent[EVERY].account
    forged = SignedAccount(account, (Vouch(names(3)[1], 5, sign(liar, account.text(5))),))
    assert "is not its own" in book.hear(liar, [forged], is_of)
    assert book.hear(liar, [signed_by(account, [PeerId("stranger")])], is_of) == ""
    assert set(book.recent[EVERY].vouches) == {names(3)[0]}
    assert not book.vouch(account.id, Vouch(PeerId("stranger"), 5, b""))
    alien = some_account(EVERY, {liar: WorkDone(16, 999, 999)})
    assert book.hear(liar, [signed_by(alien, [liar])], is_of) == ""
    assert book.wanted() is not None, "it is the only mate that was asked"
    assert book.hear(names(3)[1], [], is_of) == ""
    assert book.wanted() is None, "one of two is no majority"
    assert not book.take(signed_by(alien, [liar]), {liar: WorkDone(16, 998, 999)})


def test_the_organisers_signature_is_taken_from_anybody_and_goes_round_with_the_others() -> None:
    members = Members(names(3))
    for step in range(EVERY):
        members.step(step)
    first, *others = members.books.values()
    signed = anchored(members.kept[EVERY][0])
    assert first.gather([signed], is_of) == ""
    assert first.gather([anchored(signed_by(some_account(EVERY, {}, names(1)), names(1)))], is_of) == "", "an account that it does not have"
    assert "is not its own" in others[0].gather([SignedAccount(signed.account, (Vouch(ORGANISER, 5, bytes(64)),))], is_of)
    assert [is_anchored(book.recent[EVERY].signed, ORGANISER) for book in members.books.values()] == [True, False, False]
    assert [book.lacks for book in members.books.values()] == [None] * 3, "nobody asks for it alone"
    for step in range(EVERY, 2 * EVERY):
        members.step(step, talk=False)
    assert {book.lacks for book in others} == {EVERY}
    members.talk()
    assert all(is_anchored(book.recent[EVERY].signed, ORGANISER) for book in members.books.values())
    assert others[0].hear(names(2)[1], [signed_by(members.kept[EVERY][0].account, [ORGANISER])], is_of) == ""


@settings(max_examples=12)
@given(st.integers(0, 1 << 30), st.integers(2, 7))
def test_whoever_comes_goes_and_misses_steps_what_counts_is_what_was_computed(seed: int, size: int) -> None:
    random, members, truth, number = Random(seed), Members(names(size)), dict[PeerId, int](), size
    for step in range(7 * EVERY):
        if random.random() < 0.03:
            number += 1
            members.join(PeerId(f"peer{number:04}"))
        if random.random() < 0.03 and len(members.books) > 2:
            del members.books[random.choice(sorted(members.books))]
        there = sorted(members.books)
        missed = [peer for peer in there if random.random() < 0.01 and peer != there[0]]
        turn = Random(seed + step)
        for entry in roster(step, there, Random(seed + step)).entries:
            before = truth.get(entry.peer, 0)
            truth[entry.peer] = before + entry.done.bit_count()
        members.step(step, turn, missed)
        for book in members.books.values():
            book.found(is_alone=len(members.books) == 1)
        for book in members.books.values():
            found = book.newest
            if found is not None and found.account.step == step + 1 and found.account.counted.steps == step + 1:
                works = book.recent[step + 1].works
                assert {peer: row.microbatches for peer, row in works.items()} == {peer: count for peer, count in truth.items() if count}
    assert all(why_not_certified(signed, is_of) == "" for signed, _ in members.kept.values())
    assert len(members.kept) >= 2


@pytest.mark.parametrize("whole", [WorkDone(EVERY, EVERY, 9), WorkDone(EVERY, 2 * EVERY, 8), WorkDone(EVERY - 1, 2 * EVERY, 9)])
def test_rows_that_do_not_add_up_to_what_was_signed_are_not_taken_over(whole: WorkDone) -> None:
    """Their sum is what others are shown, and rows without a bound would soon exceed what a file can hold."""
    rows = {names(1)[0]: WorkDone(EVERY, 2 * EVERY, 9)}
    account = replace(some_account(EVERY, rows), counted=whole)
    book = AccountBook(RUN, 0)
    book.applied(roster(EVERY, names(2)), TOKENS)
    assert not book.take(signed_by(account, account.signers), rows)
    full = {names(1)[0]: WorkDone(EVERY, 2 * EVERY, MOST_TAKEN + 1)}
    endless = some_account(EVERY, full)
    assert not book.take(signed_by(endless, endless.signers), full)
    true = some_account(EVERY, rows)
    assert book.take(signed_by(true, true.signers), rows)


def test_what_a_mate_tells_again_and_again_takes_no_more_memory() -> None:
    """It makes accounts that its own signature is enough for, as many as it likes."""
    book, liar = AccountBook(RUN, 0), PeerId("liar")
    book.applied(roster(9 * EVERY, names(2)), TOKENS)
    for number in range(1, 40):
        account = some_account(EVERY, {liar: WorkDone(EVERY, EVERY + number, 9)})
        assert book.hear(liar, [signed_by(account, [liar])], is_of) == ""
    assert len(book._checked) == 1
