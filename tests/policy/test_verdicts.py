"""Rule 20 (audit): what comes of an accusation, whoever lies, and which peers stand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from peerd.policy.step.auditing import NEWCOMER_STEPS, AuditWord, Item
from peerd.policy.step.verdicts import (
    PAUSE_STEPS,
    Case,
    CaseVerdict,
    Ruling,
    Standing,
    asked,
    confirms,
    is_convicting,
    judges_in_turn,
    tellers,
    verdict_on,
    why_unheard,
)
from peerd.table.record import PeerId, PeerRecord

WRONG, RIGHT = AuditWord(2.0, 1e-4), AuditWord(1e-7, 1e-4)
TOLERANCES = (1e-4, 1e-4, 5e-2)


def peers(number: int) -> list[PeerId]:
    return [PeerId(f"p{each}") for each in range(number)]


def case(words: dict[str, AuditWord], accuser: str = "p1", audited: str = "p0", insists: bool = False) -> Case:
    item = Item(PeerId(audited), 0, 3, 5, b"signed")
    return Case(item, PeerId(accuser), {PeerId(name): word for name, word in words.items()}, insists)


def test_a_second_auditor_that_agrees_sets_the_ledger_aside_and_more_than_half_convict() -> None:
    standing = peers(4)
    opened = case({"p1": WRONG})
    assert verdict_on(opened, standing) == CaseVerdict(Ruling.OPEN)
    second = opened.with_word(PeerId("p2"), WRONG)
    assert verdict_on(second, standing) == CaseVerdict(Ruling.OPEN, sets_aside=True)
    assert verdict_on(second.with_word(PeerId("p3"), WRONG), standing) == CaseVerdict(Ruling.CONVICTED, frozenset({PeerId("p0")}), True)


def test_one_mate_is_asked_first_and_all_once_it_agrees_or_the_accuser_insists() -> None:
    standing = peers(6)
    opened = case({"p1": WRONG})
    [second] = asked(opened, standing)
    assert second not in ("p0", "p1")
    assert asked(opened, standing, num_silent=1) == judges_in_turn(opened, standing)[:2]
    denied = opened.with_word(second, RIGHT)
    assert asked(denied, standing) == []
    rest = set(standing) - {PeerId("p0"), PeerId("p1"), second}
    assert set(asked(replace(denied, insists=True), standing)) == rest
    assert set(asked(opened.with_word(second, WRONG), standing)) == rest


def test_who_is_asked_first_depends_on_the_item_so_no_accuser_chooses_it() -> None:
    firsts = {judges_in_turn(Case(Item(PeerId("p0"), 0, 3, index, b""), PeerId("p1"), {}), peers(9))[0] for index in range(100)}
    assert firsts == set(peers(9)[2:])


def test_a_false_accuser_loses_its_standing_and_its_victim_nothing() -> None:
    found = verdict_on(case({"p1": WRONG, "p2": RIGHT, "p3": RIGHT}), peers(4))
    assert found == CaseVerdict(Ruling.CLEARED, frozenset({PeerId("p1")}))


def test_a_judge_says_one_word_and_the_audited_peer_none() -> None:
    opened = case({"p1": WRONG}).with_word(PeerId("p2"), RIGHT)
    assert opened.with_word(PeerId("p2"), AuditWord(3e-7, 1e-4)) == opened
    assert opened.with_word(PeerId("p0"), RIGHT) == opened


def test_a_judge_that_tells_one_peer_this_and_another_that_has_lied_whatever_comes_of_the_case() -> None:
    opened, two_faced = case({"p1": WRONG}), PeerId("p2")
    one, other = opened.with_word(two_faced, RIGHT), opened.with_word(two_faced, WRONG)
    for met in (one.merged(other), other.merged(one)):
        assert verdict_on(met, peers(9)) == CaseVerdict(Ruling.OPEN, frozenset({two_faced}))
        assert verdict_on(met, peers(9), is_late=True).losers == {two_faced}
    assert verdict_on(one.merged(one), peers(9)).losers == frozenset()
    assert one.merged(replace(one, insists=True)).insists


def test_words_of_peers_that_do_not_stand_count_for_nothing() -> None:
    crowd = {f"x{number}": WRONG for number in range(50)}
    assert verdict_on(case({"p1": WRONG, **crowd}), peers(4)).ruling is Ruling.OPEN


def test_hole_57_a_peer_without_a_vote_that_signs_a_false_word_loses_its_standing_in_its_own_stage_as_in_others() -> None:
    words = {"p1": WRONG, "p2": WRONG, "p3": WRONG, "new": RIGHT}
    for standing in (peers(4), [*peers(4), PeerId("new")]):
        assert verdict_on(case(words), standing) == CaseVerdict(Ruling.CONVICTED, frozenset({PeerId("p0"), PeerId("new")}), True)
    cleared = case({"p1": WRONG, "p2": RIGHT, "p3": RIGHT, "new": WRONG})
    assert verdict_on(cleared, peers(4)).losers == {PeerId("p1"), PeerId("new")}
    assert verdict_on(case({**words, "new": WRONG}), peers(4)).losers == {PeerId("p0")}


@pytest.mark.parametrize("number", [1, 2])
def test_where_nobody_else_can_judge_it_is_disputed_and_nobody_loses(number: int) -> None:
    assert verdict_on(case({"p1": WRONG}), peers(number)) == CaseVerdict(Ruling.DISPUTED)


def test_silence_convicts_nobody() -> None:
    few = case({"p1": WRONG, "p2": WRONG})
    assert verdict_on(few, peers(9), is_late=True) == CaseVerdict(Ruling.DISPUTED, sets_aside=True)


def test_a_lie_that_only_exact_devices_see_costs_no_honest_peer_its_standing() -> None:
    """The accuser's device is exact, and most of the judges' are not."""
    exact, coarse = AuditWord(1e-3, 1e-4), AuditWord(1.5e-2, 5e-2)
    assert verdict_on(case({"p1": exact, "p2": coarse, "p3": coarse}), peers(4)) == CaseVerdict(Ruling.CLEARED)
    assert verdict_on(case({"p1": exact, "p2": exact, "p3": exact, "p4": coarse}), peers(5)).losers == {PeerId("p0")}


def test_fewer_than_half_convict_no_honest_peer_and_up_to_a_third_save_no_liar() -> None:
    """Honest judges measure the right deviation as exactly as their devices do. Liars say what they like, and some peers say nothing."""
    rng = random.Random(0)
    rulings = dict.fromkeys(Ruling, 0)
    for _ in range(20_000):
        number = rng.randint(3, 15)
        standing = peers(number)
        liars = set(rng.sample(standing, rng.randint(0, (number - 1) // 2)))
        audited, accuser = rng.sample(standing, 2)
        deviation = rng.choice((1e-3, 1e-2, 0.1, 0.5, 2.0, 1e9)) if audited in liars and rng.random() < 0.8 else 0.0
        words = {}
        is_silent = rng.random() < 0.3
        for peer in standing:
            if peer in liars:
                words[peer] = AuditWord(rng.choice((0.0, 1e-3, 0.05, 0.45, 2.0, 1e9)), rng.choice((0.0, *TOLERANCES, 1e9)))
            else:
                bound = rng.choice(TOLERANCES)
                words[peer] = AuditWord(abs(deviation + rng.uniform(-1, 1) * bound * max(1.0, deviation)), bound)
        if not words[accuser].accuses:
            continue
        mute = {peer for peer in standing if is_silent and peer != accuser and rng.random() < 0.3}
        told = {peer: word for peer, word in words.items() if peer not in mute and peer != audited}
        found = verdict_on(Case(Item(audited, 0, 0, 0, b""), accuser, told), standing, is_late=True)
        rulings[found.ruling] += 1
        assert found.losers <= liars
        if is_silent or 3 * len(liars) > number:
            continue
        if deviation > 0.5:
            assert audited in found.losers
        if accuser in liars and not deviation and all(words[peer].bound <= 1e-4 for peer in standing if peer not in liars):
            assert accuser in found.losers
    assert min(rulings[each] for each in (Ruling.CONVICTED, Ruling.CLEARED, Ruling.DISPUTED)) > 100


@pytest.mark.parametrize(
    ("opened", "is_due", "is_paused", "reason"),
    [
        (case({"p1": WRONG}), True, False, ""),
        (case({"x": WRONG}, accuser="x"), True, False, "does not stand"),
        (case({"p1": RIGHT}), True, False, "accuses nobody"),
        (case({"p2": WRONG}), True, False, "accuses nobody"),
        (case({"p0": WRONG}, accuser="p0"), True, False, "accuses nobody"),
        (case({"p1": WRONG}), False, False, "did not draw"),
        (case({"p1": WRONG}), True, True, "came to no end"),
        (case({"p3": WRONG}, accuser="p3"), True, False, "is open"),
    ],
)
def test_a_case_is_heard_only_of_peers_that_stand_for_what_their_coins_drew_and_one_at_a_time(
    opened: Case, is_due: bool, is_paused: bool, reason: str
) -> None:
    other = case({"p3": WRONG}, accuser="p3", audited="p2")
    found = why_unheard(opened, peers(4), [other], is_due, is_paused)
    assert reason in found
    assert bool(found) == bool(reason)


def test_founders_stand_and_newcomers_once_their_work_was_clean_for_some_steps() -> None:
    standing, (old, new, lost) = Standing(), peers(3)
    standing.found([old, lost])
    for step in range(NEWCOMER_STEPS):
        assert standing.standing([old, new]) == {old}
        assert standing.rate_of(new, step) == 0.25
        standing.finished([old, new], step)
    assert standing.standing([old, new]) == {old, new}
    assert standing.rate_of(new, NEWCOMER_STEPS) == 0.025
    standing.closed(case({"p1": WRONG}, audited=lost), CaseVerdict(Ruling.CONVICTED, frozenset({lost})), 12)
    assert standing.has_lost(lost)
    assert not standing.stands(lost)


def test_a_peer_audits_the_other_members_of_the_step_that_it_has_finished_and_that_have_not_lost() -> None:
    standing, (me, mate, lost, stranger) = Standing(), peers(4)
    members = [me, mate, lost]
    standing.closed(case({"p1": WRONG}, audited=lost), CaseVerdict(Ruling.CONVICTED, frozenset({lost})), 2)
    audited = [peer for peer in (me, mate, lost, stranger) if standing.may_audit(Item(peer, 1, 3, 0, b""), me, 1, 3, members)]
    assert audited == [mate]
    assert not standing.may_audit(Item(mate, 0, 3, 0, b""), me, 1, 3, members)
    assert not standing.may_audit(Item(mate, 1, 4, 0, b""), me, 1, 3, members)
    assert standing.not_lost(peers(4)) == {me, mate, stranger}


def test_an_accuser_may_know_its_mates_as_newcomers() -> None:
    standing = Standing()
    standing.found(peers(6))
    assert standing.most_chance(peers(6)) == standing.rates.newcomer / 5
    assert standing.most_chance(peers(1)) == standing.rates.newcomer


def test_words_convict_by_themselves_once_they_are_those_of_most_of_the_stage() -> None:
    opened = case({"p1": WRONG, "p2": WRONG})
    assert not is_convicting(None, peers(4))
    assert not is_convicting(opened, peers(4))
    assert is_convicting(opened.with_word(PeerId("p3"), WRONG), peers(4))
    assert not is_convicting(opened.with_word(PeerId("x"), WRONG), peers(4)), "a stranger to the stage has no vote"


def test_a_member_without_a_vote_computes_the_item_once_those_with_one_have_convicted_somebody() -> None:
    voters, new = peers(4), PeerId("new")
    opened = case({"p1": WRONG, "p2": WRONG})
    assert not confirms(opened, voters, new)
    convicting = opened.with_word(PeerId("p3"), WRONG)
    assert confirms(convicting, voters, new)
    assert not confirms(convicting.with_word(new, WRONG), voters, new), "it has done so"
    assert not any(confirms(convicting, voters, peer) for peer in voters)
    assert confirms(case({"p1": WRONG, "p2": RIGHT, "p3": RIGHT}), voters, new), "the accuser has lied"


def test_convictions_are_asked_of_mates_and_others_in_turn_and_in_an_order_of_ones_own() -> None:
    me, *rest = (PeerRecord(peer=peer, stage=number % 2) for number, peer in enumerate(peers(41)))
    mates = [record for record in (me, *rest) if record.stage == 0]
    found = tellers(me.peer, mates, [me, *rest])
    assert sorted(found) == sorted(record.peer for record in rest)
    assert found != tellers(PeerId("p1"), mates, rest)
    assert tellers(me.peer, [me], [me]) == []


def test_standing_outlasts_the_daemon_but_for_what_cases_say() -> None:
    before, after = Standing(), Standing()
    before.found(peers(2))
    for step in range(NEWCOMER_STEPS):
        before.finished(peers(3), step)
    before.closed(case({"p1": WRONG}), CaseVerdict(Ruling.DISPUTED), 10)
    after.restore(before.notes())
    assert after.notes() == before.notes()
    assert after.standing(peers(4)) == before.standing(peers(4)) == frozenset(peers(3))
    assert after.is_paused(PeerId("p1"), 10 + PAUSE_STEPS)
    assert after.rate_of(PeerId("p0"), 10 + PAUSE_STEPS) == 0.25


def test_who_accuses_in_vain_pauses_for_longer_each_time_and_both_are_watched_for_a_while() -> None:
    standing, disputed = Standing(), case({"p1": WRONG})
    for _ in range(NEWCOMER_STEPS):
        standing.finished(peers(2), 0)
    standing.closed(disputed, CaseVerdict(Ruling.DISPUTED), 10)
    assert standing.is_paused(PeerId("p1"), 10 + PAUSE_STEPS)
    assert not standing.is_paused(PeerId("p1"), 11 + PAUSE_STEPS)
    assert not standing.is_paused(PeerId("p0"), 11)
    assert [standing.rate_of(peer, 10 + PAUSE_STEPS) for peer in peers(2)] == [0.25, 0.25]
    assert standing.rate_of(PeerId("p0"), 11 + PAUSE_STEPS) == 0.025
    standing.closed(disputed, CaseVerdict(Ruling.DISPUTED), 30)
    assert standing.is_paused(PeerId("p1"), 30 + 2 * PAUSE_STEPS)
    standing.closed(disputed, CaseVerdict(Ruling.CONVICTED, frozenset({PeerId("p0")})), 60)
    standing.closed(disputed, CaseVerdict(Ruling.CLEARED), 70)
    assert not standing.is_paused(PeerId("p1"), 71 + PAUSE_STEPS)
