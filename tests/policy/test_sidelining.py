"""Members of which nothing comes in rounds: whom a peer leaves out, on what evidence, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.policy.step.probation import STEPS_TO_SHOW
from peerd.policy.step.roster import Roster, RosterEntry, turns
from peerd.policy.step.sidelining import PATIENCE, TIMES_ITS_COST, Sidelining
from peerd.table.record import Lineage, PeerId, PeerRecord, Phase
from tests.strategies import member

ME, A, B, C = (PeerId(name) for name in ("me", "a", "b", "c"))
AVERAGING_S = 2.0


def roster_of(leader: PeerId, *others: PeerId, step: int = 0) -> Roster:
    entries = tuple(RosterEntry(peer, 0, 0, 0) for peer in sorted({leader, ME, *others}))
    return Roster(0, step, 0, leader, entries)


def after(*leaders: PeerId, lasted_s: float = 1.0) -> Sidelining:
    """Rounds of these leaders have waited for C in vain, one a second."""
    seen = Sidelining(ME)
    for number, leader in enumerate(leaders):
        seen.closed(roster_of(leader, A, B, C), leader, C, lasted_s, float(number))
    return seen


@pytest.mark.parametrize("leaders", [(A,), (A, A, A), (A, B), (ME,), (ME, ME), (A, ME)])
def test_hole_36_rounds_of_two_leaders_or_two_of_this_peers_own_are_needed(leaders: tuple[PeerId, ...]) -> None:
    """A leader that does not ask a member makes it look absent."""
    is_out = len(leaders) > 1 and leaders != (A, A, A)
    assert after(*leaders).peers == ((C,) if is_out else ())


def test_hole_36_it_comes_back_between_steps_after_a_multiple_of_what_it_has_cost_and_one_more_round_is_enough_then() -> None:
    seen = after(A, B, lasted_s=3.0)
    until_s = 1.0 + TIMES_ITS_COST * 6.0
    assert at_next_step(seen, until_s - 0.1) == (C,)
    assert at_next_step(seen, until_s) == ()
    seen.closed(roster_of(A, C, step=9), A, C, 3.0, until_s)
    assert at_next_step(seen, until_s + TIMES_ITS_COST * 9.0 - 0.1) == (C,)


def at_next_step(seen: Sidelining, now_s: float) -> tuple[PeerId, ...]:
    seen.begin_step(now_s)
    return seen.peers


def test_hole_36_a_round_that_comes_together_clears_its_members() -> None:
    seen = after(A, B)
    seen.begin_step(1e3)
    seen.came_together(roster_of(A, B, C))
    seen.closed(roster_of(B, C), B, C, 1.0, 1e3)
    assert seen.peers == ()
    seen = after(A, B)
    seen.forget()
    assert seen.peers == ()


def test_hole_36_who_led_in_vain_proposes_after_all_others_and_who_was_waited_for_last() -> None:
    seen, members = after(A), [member(name) for name in (ME, A, B, C)]
    assert turns(members, seen.last_in_turn(0))[2:] == [A, C]
    assert turns(members, seen.last_in_turn(1)) == turns(members)
    seen.begin_step(0.0)
    assert seen.last_in_turn(0) == ()


def test_hole_36_a_member_that_stays_in_a_round_without_this_peer_counts_as_absent_after_two_patiences() -> None:
    seen, patience_s = Sidelining(ME), PATIENCE * AVERAGING_S
    mine, away, others = member(ME), member(C, phase=Phase.AVERAGING), [member(A), member(B)]

    def look(now_s: float, *members: PeerRecord) -> tuple[PeerId, ...]:
        seen.look(members[0], members, AVERAGING_S, now_s)
        return seen.peers

    for now_s in (0.0, patience_s - 0.1, patience_s, 2 * patience_s - 0.1):
        assert look(now_s, mine, away, *others) == ()
    assert look(2 * patience_s, mine, away, *others) == (C,)
    seen.forget()
    for now_s in range(100):
        busy = [replace(other, phase=Phase.AVERAGING) for other in others]
        assert look(now_s, mine, away, *busy) == (), "all others are: this peer is late"
        assert look(now_s, replace(mine, phase=Phase.AVERAGING), away, *others) == (), "it is in a round itself"
        if now_s % 5 == 0:
            assert look(now_s, mine, replace(away, phase=Phase.ACCUMULATING), *others) == (), "rounds that fail and begin anew"


def test_hole_63_a_member_that_is_in_a_round_without_this_peer_again_and_again_is_left_out_though_rounds_come_together() -> None:
    mine, away, others, odd_s = member(ME), member(C, phase=Phase.AVERAGING), [member(A), member(B)], PATIENCE * AVERAGING_S - 0.5

    def after(times: int, pause_s: float) -> tuple[PeerId, ...]:
        seen, now_s = Sidelining(ME), 0.0
        for _ in range(times):
            for mate, lasts_s in ((away, odd_s), (replace(away, phase=Phase.ACCUMULATING), pause_s)):
                for look_s in (now_s, now_s + lasts_s):
                    seen.look(mine, [mine, mate, *others], AVERAGING_S, look_s)
                now_s += lasts_s
            seen.came_together(roster_of(A, B, C))
        return seen.peers

    assert after(2, 0.5) == ()
    assert after(4, 0.5) == (C,)
    assert after(20, 2.1 * odd_s) == (), "it costs less than a third of the time"


def test_hole_36_a_banned_member_is_left_out_at_once_for_as_long_as_its_ban_and_twice_as_long_each_further_time() -> None:
    seen, now_s = Sidelining(ME), 0.0
    for times in (1, 2, 4, 8):
        seen.banned({C: 10.0}, now_s)
        assert seen.peers == (C,)
        seen.banned({C: 5.0}, now_s + 5.0)
        seen.banned({}, now_s + 10.0)
        assert at_next_step(seen, now_s + 10.0 * times - 0.1) == (C,)
        now_s += 10.0 * times
        assert at_next_step(seen, now_s) == ()
    seen.came_together(roster_of(A, B, C))
    seen.banned({C: 10.0}, now_s)
    assert at_next_step(seen, now_s + 10.0) == ()


def test_hole_36_a_member_that_is_still_banned_after_a_fence_is_left_out_again() -> None:
    seen = Sidelining(ME)
    seen.banned({C: 10.0}, 0.0)
    seen.forget()
    assert at_next_step(seen, 4.0) == ()
    seen.banned({C: 5.0}, 5.0)
    assert seen.peers == (C,)
    assert at_next_step(seen, 10.1) == ()


def test_hole_55_one_that_has_lied_stays_out_after_its_ban_until_it_has_gone_along_for_some_steps() -> None:
    seen, step = Sidelining(ME), 0
    seen.lied(C)
    seen.banned({C: 10.0}, 0.0)
    seen.banned({}, 10.0)

    def goes_on(early: tuple[PeerId, ...] = ()) -> tuple[PeerId, ...]:
        nonlocal step
        step += 1
        mine, liar = (replace(member(name), step=step) for name in (ME, C))
        seen.look_at_liars(mine, [liar], early, 10.0 + step)
        return at_next_step(seen, 10.0 + step)

    assert {goes_on(early=(C,)) for _ in range(9)} == {(C,)}
    assert [goes_on() for _ in range(STEPS_TO_SHOW + 1)] == [*[(C,)] * STEPS_TO_SHOW, ()]


def test_hole_55_its_bans_are_remembered_until_it_has_been_in_for_as_long_as_it_was_out() -> None:
    seen, rounds = Sidelining(ME), roster_of(A, B, C)

    def lies_again(now_s: float, out_s: float) -> None:
        seen.lied(C)
        seen.banned({C: 10.0}, now_s)
        seen.banned({}, now_s + 10.0)
        seen.forget()  # a fence changes nothing
        assert at_next_step(seen, now_s + out_s - 0.1) == (C,)
        assert at_next_step(seen, now_s + out_s) == ()
        seen.came_together(rounds)

    lies_again(0.0, 10.0)
    lies_again(15.0, 20.0)
    lies_again(54.0, 40.0)
    assert at_next_step(seen, 134.0) == ()
    lies_again(134.0, 10.0)


def test_hole_55_one_whose_average_nobody_takes_is_on_probation_once_it_is_left_out() -> None:
    seen, patience_s = Sidelining(ME), PATIENCE * AVERAGING_S
    for number in range(3):
        seen.disbelieved(C, AVERAGING_S, number * patience_s)
    seen.look_at_liars(member(ME), [member(C)], (), 1e6)
    assert at_next_step(seen, 1e6) == (C,)


def test_hole_56_one_that_shows_nothing_of_what_it_holds_when_asked_twice_is_left_out() -> None:
    seen = Sidelining(ME)
    assert not seen.disbelieved(C, AVERAGING_S, 0.0)
    assert not seen.kept_back(C, 3.0)
    assert seen.kept_back(C, 8.0)
    assert at_next_step(seen, 8.0 + TIMES_ITS_COST * 8.0 - 0.1) == (C,)
    assert at_next_step(seen, 8.0 + TIMES_ITS_COST * 8.0) == ()
    seen.look_at_liars(member(ME), [member(C)], (), 1e6)
    assert at_next_step(seen, 1e6) == (C,), "it is on probation"


def test_hole_56_an_average_with_it_ends_what_it_did_not_show_before() -> None:
    seen = Sidelining(ME)
    for now_s in range(3):
        assert not seen.kept_back(C, float(now_s))
        seen.came_together(roster_of(A, B, C))


def test_a_mate_whose_average_nobody_takes_counts_once_it_has_held_it_for_long_and_is_out_the_second_time() -> None:
    """It keeps its stage from averaging: what a mate says that it has is not averaged again."""
    seen, patience_s = Sidelining(ME), PATIENCE * AVERAGING_S
    assert [seen.disbelieved(C, AVERAGING_S, now_s) for now_s in (0.0, patience_s - 0.1, patience_s)] == [False, False, True]
    assert C not in seen.peers
    assert seen.disbelieved(C, AVERAGING_S, 2 * patience_s)
    assert C in seen.peers


def test_in_another_step_what_was_disbelieved_in_the_last_one_says_nothing() -> None:
    seen = Sidelining(ME)
    seen.disbelieved(C, AVERAGING_S, 0.0)
    seen.begin_step(1e3)
    assert not seen.disbelieved(C, AVERAGING_S, 1e3)


def test_hole_48_a_member_with_parameters_that_most_lack_is_left_out_and_one_of_two_or_of_a_half_is_not() -> None:
    astray = Lineage(0, b"astray")
    mine, alike, stray = member(ME), member(A), member(C, lineage=astray)
    patience_s = PATIENCE * AVERAGING_S

    def look(seen: Sidelining, *members: PeerRecord, until: int = 3) -> tuple[PeerId, ...]:
        for number in range(until):
            seen.look(mine, members, AVERAGING_S, number * patience_s)
        return seen.peers

    assert look(Sidelining(ME), mine, alike, stray) == (C,)
    assert look(Sidelining(ME), mine, alike, stray, until=2) == (), "one time is not enough"
    assert look(Sidelining(ME), mine, stray) == (), "of two nobody can say which is right"
    assert look(Sidelining(ME), mine, alike, stray, member(B, lineage=astray)) == (), "it is not most"
    assert look(Sidelining(ME), mine, stray, member(B, lineage=astray)) == (), "this peer is astray"
    seen = Sidelining(ME)
    for number in range(9):
        seen.look(mine, (mine, alike, member(B), *((stray,) if number % 2 else ())), AVERAGING_S, number * patience_s)
    assert seen.peers == (), "it downloads what others have"


def test_hole_50_one_that_is_ahead_alone_is_left_out_after_two_patiences_and_not_while_others_come_after_it() -> None:
    seen, patience_s = Sidelining(ME), PATIENCE * AVERAGING_S
    for number in range(9):
        seen.look_ahead([C] if number % 2 else [], AVERAGING_S, number * patience_s)
    told = [seen.peers]
    for number in range(9, 12):
        seen.look_ahead([C], AVERAGING_S, number * patience_s)
        told.append(seen.peers)
    assert told == [(), (), (), (C,)]
