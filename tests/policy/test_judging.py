"""Who judges a round, how far a judge is believed, and when a member ends a round that nobody ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from peerd.policy.step.acts import Act, CloseRound, Wait
from peerd.policy.step.judging import NUM_JUDGES, given_up_after_s, judges_of, lost_after_s, void_of, why_unheeded
from peerd.policy.step.roster import Roster, RosterEntry, entry_of
from peerd.policy.step.sidelining import Sidelining
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.step.stepping import decide
from peerd.table.record import PeerId, PeerRecord, Phase, Void
from tests.strategies import NUM_MICROBATCHES, member, view_of

T = 1.5
RULES = StepRules(num_stages=2, num_microbatches=NUM_MICROBATCHES, ttl_s=3.0, averaging_s=T)
NAMES = tuple(PeerId(f"p{number}") for number in range(6))


def roster_of(leader: PeerId = NAMES[2], num: int = 6, step: int = 7) -> Roster:
    return Roster(0, step, 0, leader, tuple(RosterEntry(peer, 3, 0, 0) for peer in NAMES[:num]))


def test_the_leader_judges_first_and_the_order_of_the_others_changes_with_each_step() -> None:
    assert {judges_of(roster_of(leader))[0] for leader in NAMES} == set(NAMES)
    assert all(len(judges_of(roster_of(num=num))) == min(num, NUM_JUDGES) for num in range(3, 7))
    assert {peer for step in range(60) for peer in judges_of(roster_of(step=step))[1:]} == {*NAMES} - {NAMES[2]}


def test_hole_40_a_judge_is_heeded_when_its_turn_has_come_and_no_other_member_ever() -> None:
    roster = roster_of()
    judges = judges_of(roster)
    named = next(peer for peer in NAMES if peer not in judges)
    for rank, judge in enumerate(judges):
        assert not why_unheeded(roster, judge, named, rank * T, T)
        assert rank == 0 or why_unheeded(roster, judge, named, (rank - 0.1) * T, T)
        assert why_unheeded(roster, judge, judge, 1e9, T)
        assert why_unheeded(roster, judge, PeerId("elsewhere"), 1e9, T)
    assert all(why_unheeded(roster, peer, judges[0], 1e9, T) for peer in NAMES if peer not in judges)
    assert not any(why_unheeded(roster, peer, None, 0.0, T) for peer in NAMES), "a round without one of its members cannot finish"
    assert why_unheeded(roster, PeerId("elsewhere"), None, 1e9, T)


def test_the_member_that_is_named_is_left_out_of_the_step_at_its_incarnation() -> None:
    assert void_of(roster_of(), NAMES[1]) == Void(NAMES[1], 3, 7)
    assert void_of(roster_of(), PeerId("elsewhere")) is None


def rounds_seen(me: PeerId, judge: PeerId, named: PeerId, leaders: Sequence[PeerId]) -> Sidelining:
    """What `me` has seen after a round of each leader, one in a step, that `judge` closed."""
    seen = Sidelining(me)
    for step, leader in enumerate(leaders):
        seen.closed(roster_of(leader, step=step), judge, named, T, float(step))
    return seen


def test_hole_40_one_judge_alone_makes_nobody_leave_a_member_out_of_further_steps_and_two_do() -> None:
    me, judge, named = NAMES[0], NAMES[1], NAMES[5]
    seen = rounds_seen(me, judge, named, [judge] * 9)
    assert not seen.peers
    seen.closed(roster_of(NAMES[2], step=9), NAMES[2], named, T, 9.0)
    assert seen.peers == (named,)
    assert rounds_seen(me, me, named, [me, me]).peers == (named,)
    assert not rounds_seen(named, judge, named, [judge, NAMES[2]]).peers, "the one that is named blames nobody"


def decided(still_s: float, silent_s: float, num: int, *, lost: bool = False) -> Act:
    mine, *others = (member(name, phase=Phase.AVERAGING, done=1 << number) for number, name in enumerate(NAMES[:num]))
    roster = Roster(0, 0, 0, mine.peer, tuple(entry_of(m) for m in (mine, *others)))
    own = OwnState(record=mine, round_roster=roster, round_still_s=still_s, judge_silent_s=silent_s)
    present: list[PeerRecord] = [replace(others[0], incarnation=1), *others[1:]] if lost else others
    return decide(Situation(own, view_of(mine, *present), 100.0, RULES))


@pytest.mark.parametrize("num", [2, 3])
def test_hole_44_a_member_whose_record_has_expired_is_waited_for_until_it_counts_as_lost(num: int) -> None:
    """Its link may be dead for some seconds, and what has been exchanged would be lost."""
    mine, other, *others = (member(name, phase=Phase.AVERAGING, done=1 << number) for number, name in enumerate(NAMES[:num]))
    own = OwnState(record=mine, round_roster=Roster(0, 0, 0, mine.peer, tuple(entry_of(m) for m in (mine, other, *others))))
    live = replace(view_of(mine, *others), expired=(other,))
    assert isinstance(decide(Situation(own, live, 100.0, RULES)), Wait)
    assert isinstance(decide(Situation(replace(own, round_lost=frozenset({other.peer})), live, 100.0, RULES)), CloseRound)
    assert isinstance(decide(Situation(own, replace(live, expired=(replace(other, leaving=True),)), 100.0, RULES)), CloseRound)
    assert lost_after_s(T) > RULES.ttl_s


@pytest.mark.parametrize(("num", "times"), [(2, 3), (3, 4), (6, 4)])
def test_a_member_ends_a_round_once_all_judges_had_their_turn_and_it_hears_of_no_progress_and_of_no_judge(num: int, times: int) -> None:
    after_s = given_up_after_s(num, T)
    assert after_s == times * T
    assert isinstance(decided(after_s + 0.1, after_s + 0.1, num), CloseRound)
    assert isinstance(decided(after_s - 0.1, 1e9, num), Wait)
    assert isinstance(decided(1e9, after_s - 0.1, num), Wait), "a judge is at work"
    assert isinstance(decided(0.0, 0.0, num, lost=True), CloseRound)
