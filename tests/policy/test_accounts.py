"""What is signed of who computed what: the rows' hash, whose signatures count, and which accounts follow one another."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.accounts import (
    EVERY,
    KEPT_EACH,
    MOST_SIGNERS,
    SignedAccount,
    WorkDone,
    chain_to,
    follows,
    needed_of,
    place_of,
    root_by,
    root_of,
    shortened,
    signers_of,
    thinned,
    told_by_most,
    why_not_certified,
)
from peerd.table.record import PeerId
from tests.policy.account_world import OTHER_RUN, is_of, names, signed_by, some_account

ROWS = st.integers(1, 40).flatmap(
    lambda size: st.lists(st.integers(1, 99), min_size=size, max_size=size).map(
        lambda counts: {peer: WorkDone(1, count, count * 8) for peer, count in zip(names(len(counts)), counts, strict=True)}
    )
)


def rows(number: int, microbatches: int = 100) -> dict[PeerId, WorkDone]:
    return {peer: WorkDone(5, microbatches + at, 8 * (microbatches + at)) for at, peer in enumerate(names(number))}


@given(ROWS, st.data())
def test_each_row_leads_to_the_root_and_no_other_does(works: dict[PeerId, WorkDone], data: st.DataObject) -> None:
    peer = data.draw(st.sampled_from(sorted(works)))
    place, path = place_of(works, peer)
    root, at = root_of(works), (place, len(works))
    assert root_by(peer, works[peer], at, path) == root
    assert root_by(peer, works[peer] + WorkDone(0, 1, 0), at, path) != root
    assert root_by(PeerId("stranger"), works[peer], at, path) != root
    assert root_by(peer, works[peer], (place, len(works) + 1), path) != root
    assert root_by(peer, works[peer], at, (*path, bytes(32))) == b""
    if path:
        assert root_by(peer, works[peer], at, path[1:]) != root
    others = {at for at in range(-1, len(works) + 1) if at != place}
    assert all(root_by(peer, works[peer], (other, len(works)), path) != root for other in others)


def test_the_way_of_a_row_grows_with_the_logarithm_of_their_number() -> None:
    assert [len(place_of(rows(number), PeerId("peer0000"))[1]) for number in (1, 2, 3, 300, 5000)] == [0, 1, 2, 9, 13]


def test_the_signers_are_those_that_computed_the_most_of_those_that_are_there() -> None:
    works = rows(300)
    assert signers_of(works, works) == tuple(names(300)[-MOST_SIGNERS:])
    assert signers_of(works, names(3)) == tuple(names(3))
    assert signers_of(works, [PeerId("newcomer")]) == ()


@pytest.mark.parametrize(("num_signers", "needed"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 3), (31, 16)])
def test_more_than_half_of_the_signers_have_to_sign(num_signers: int, needed: int) -> None:
    works = rows(num_signers)
    account = some_account(EVERY, works)
    assert needed_of(num_signers) == needed
    assert why_not_certified(signed_by(account, names(needed)), is_of) == ""
    assert "too few" in why_not_certified(signed_by(account, names(needed - 1)), is_of)


def test_a_signature_counts_for_one_account_of_one_run_at_one_time() -> None:
    works = rows(3)
    account = some_account(EVERY, works)
    vouches = signed_by(account, works).vouches
    for other in (some_account(EVERY, works, run=OTHER_RUN), some_account(EVERY, works | {PeerId("x"): WorkDone(1, 1, 1)}, works)):
        assert "is not its own" in why_not_certified(SignedAccount(other, vouches), is_of)
    later = tuple(type(each)(each.signer, each.time_s + 1, each.signature) for each in vouches)
    assert "is not its own" in why_not_certified(SignedAccount(account, later), is_of)
    assert "in order" in why_not_certified(SignedAccount(account, vouches[::-1]), is_of)
    assert "in order" in why_not_certified(SignedAccount(account, (vouches[0], *vouches)), is_of)


def test_an_account_follows_one_of_whose_signers_more_than_half_have_signed_it() -> None:
    before = some_account(EVERY, rows(5))
    account = some_account(2 * EVERY, rows(9), names(9)[2:])
    own = names(9)[5:]
    assert follows(signed_by(account, names(3) + own), before)
    assert not follows(signed_by(account, names(2) + own), before)
    assert not follows(signed_by(some_account(EVERY, rows(5)), names(5)), before), "it is not later"


def changing(number: int, turnover: int, size: int = 5) -> list[SignedAccount]:
    """Accounts of a stage in which one of its members is replaced every `turnover` accounts; those before sign, too."""
    found, before = [], set[PeerId]()
    for at in range(1, number + 1):
        there = names(number + size)[at // turnover : at // turnover + size]
        works = {peer: WorkDone(at, 16 * at, at) for peer in there}
        found.append(signed_by(some_account(at * EVERY, works), before | set(there)))
        before = set(there)
    return found


def test_accounts_are_skipped_as_long_as_their_signers_stay() -> None:
    assert chain_to(changing(40, turnover=100), 39) == [0, 39]
    places = chain_to(found := changing(40, turnover=2), 39)
    assert all(follows(found[after], found[before].account) for before, after in pairwise(places))
    assert 40 / 2 / 3 <= len(places) <= 14


def test_where_none_follows_the_chain_is_broken_there() -> None:
    one, other = (
        changing(3, turnover=100),
        [signed_by(some_account(at * EVERY, {PeerId("z"): WorkDone(1, 99, 1)}), [PeerId("z")]) for at in (4, 5)],
    )
    assert chain_to([*one, *other], 4) == [0, 2, 3, 4]


@given(st.integers(1, 400), st.sampled_from([1, 3, 50]), st.randoms(use_true_random=False))
def test_few_of_many_accounts_are_kept_and_the_chain_holds(number: int, turnover: int, random: Random) -> None:
    kept: list[SignedAccount] = []
    found = changing(number, turnover)
    for at, each in enumerate(found):
        kept.append(each)
        if random.random() < 0.1 or at == number - 1:
            kept = thinned(kept)
    assert kept[0] == found[0]
    assert kept[-1] == found[-1]
    assert all(follows(after, before.account) for before, after in pairwise(kept))
    most_by_age = KEPT_EACH * (2 + max(0, (number // KEPT_EACH).bit_length()))
    assert len(kept) <= most_by_age + number / turnover


def test_no_more_signatures_are_told_than_count() -> None:
    before = some_account(EVERY, rows(31))
    account = some_account(2 * EVERY, rows(60))
    signed = shortened(signed_by(account, names(60)), before)
    assert why_not_certified(signed, is_of) == ""
    assert follows(signed, before)
    assert len(signed.vouches) == 32
    assert len(shortened(signed, None).vouches) == 16


def test_the_newest_account_that_most_of_those_asked_tell_counts() -> None:
    works = rows(3)
    honest = [signed_by(some_account(step, works), works) for step in (EVERY, 2 * EVERY)]
    made_up = signed_by(some_account(3 * EVERY, rows(1)), rows(1))
    assert told_by_most([honest, honest, [made_up]], 3)[0] == honest[1]
    assert told_by_most([honest, honest[:1], [made_up]], 3)[0] == honest[0], "one is not as far"
    assert told_by_most([[made_up], [], []], 3) == told_by_most([[made_up]], 2) == []
    assert told_by_most([[made_up, made_up], [made_up]], 4) == [], "an account told twice by one peer counts once"
    assert told_by_most([honest], 1)[0] == honest[1], "its stage has one peer"
    few = signed_by(honest[1].account, names(1))
    assert told_by_most([[few], [few], [few]], 3) == [], "too few have signed it"
