"""The step rules: the first that holds, one trace for each hole that is closed by a rule, and laws over any view."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.acts import Act, CloseRound, Commit, DropSums, FetchAverage, LoadCheckpoint, Propose, Reload, Serve, SkipStep, Wait
from peerd.policy.step.roster import Roster, compose, entry_of
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.step.stepping import decide, looks_lost
from peerd.table.record import TRANSITIONS, AverageId, Lineage, PeerId, PeerRecord, Phase, StepNorm, Void
from peerd.table.view import LiveView
from tests.strategies import FULL, NUM_MICROBATCHES, ledgers, live_views, member, view_of

RULES = StepRules(num_stages=2, num_microbatches=NUM_MICROBATCHES, ttl_s=3.0, averaging_s=1.5)
AVERAGE = AverageId(b"m")

NEXT_PHASE: dict[type[Act], Phase] = {
    Commit: Phase.ACCUMULATING,
    FetchAverage: Phase.AVERAGED,
    Reload: Phase.JOINING,
    CloseRound: Phase.ACCUMULATING,
    DropSums: Phase.ACCUMULATING,
    Propose: Phase.AVERAGING,
    SkipStep: Phase.ACCUMULATING,
    Serve: Phase.ACCUMULATING,
}


def decided(mine: PeerRecord, *others: PeerRecord, now_s: float = 100.0, own: OwnState | None = None) -> Act:
    state = replace(own, record=mine) if own else OwnState(record=mine)
    return decide(Situation(state, view_of(mine, *others), now_s, RULES))


def averaged(name: str, **fields: object) -> PeerRecord:
    return member(name, phase=Phase.AVERAGED, **{"average_id": AVERAGE, "done": FULL, **fields})


def in_round(*members: PeerRecord, still_s: float = 0.0) -> OwnState:
    roster = Roster(0, members[0].step, 0, members[0].peer, tuple(sorted(entry_of(m) for m in members)))
    return OwnState(record=members[0], round_roster=roster, round_still_s=still_s)


@given(live_views(), st.floats(0, 500), st.booleans(), st.none() | st.floats(0, 100))
def test_every_decision_is_a_legal_move_with_what_it_needs(live: LiveView, now_s: float, opened: bool, lost: float | None) -> None:
    mine = live.mine
    assert mine is not None
    others = [r for r in live.records if r.peer != mine.peer]
    own = in_round(mine, *others) if opened and mine.phase is Phase.AVERAGING else OwnState(record=mine)
    decision = decide(Situation(replace(own, lost_since_s=lost), live, now_s, RULES))
    assert decision.reason
    if type(decision) in NEXT_PHASE and not (isinstance(decision, FetchAverage) and mine.phase is Phase.JOINING):
        following = NEXT_PHASE[type(decision)]
        assert following is mine.phase or following in TRANSITIONS[mine.phase]
    if isinstance(decision, FetchAverage | Reload):
        mate = live.find(decision.peer)
        assert mate is not None
        assert mate.stage == mine.stage
        assert mate.peer != mine.peer
        assert mate.phase is not Phase.JOINING
    if isinstance(decision, FetchAverage):
        assert decision.step == mine.step
    if isinstance(decision, Commit | SkipStep):
        assert mine.phase is (Phase.AVERAGED if isinstance(decision, Commit) else Phase.ACCUMULATING)


@given(ledgers, ledgers, ledgers, ledgers)
def test_two_members_never_both_reset_however_stale_their_views(mine: int, mine_grew: int, other: int, other_grew: int) -> None:
    """Each sees an earlier state of the other: counts only grow."""
    one, two = member("p1", done=mine), member("p2", done=other)
    one_now, two_now = replace(one, done=mine | mine_grew), replace(two, done=other | other_grew)
    resets = [isinstance(decided(one_now, two), DropSums), isinstance(decided(two_now, one), DropSums)]
    assert not all(resets)


@given(ledgers, ledgers)
def test_of_two_ledgers_that_meet_exactly_one_is_dropped(first: int, second: int) -> None:
    one, two = member("p1", done=first), member("p2", done=second)
    resets = [isinstance(decided(one, two), DropSums), isinstance(decided(two, one), DropSums)]
    assert sum(resets) == bool(first & second)


@given(live_views())
def test_nobody_commits_before_every_stage_has_averaged(live: LiveView) -> None:
    assert live.mine is not None
    if isinstance(decide(Situation(OwnState(record=live.mine), live, 100.0, RULES)), Commit):
        for stage in range(2):
            at_or_past = [
                r for r in live.serving(stage) if r.step > live.mine.step or (r.step == live.mine.step and r.phase is Phase.AVERAGED)
            ]
            mate_ahead = any(r.step > live.mine.step for r in live.serving(live.mine.stage))
            assert at_or_past or mate_ahead


# Rules 1 (commit behind), 2 (fetch from ahead) and 3 (reload)


def test_hole_6_an_averaged_peer_with_a_mate_ahead_commits_its_own_average() -> None:
    assert isinstance(decided(averaged("p1"), member("p2", step=1)), Commit)


def test_hole_5_a_stage_that_has_gone_on_counts_as_averaged() -> None:
    assert isinstance(decided(averaged("p3", stage=0), member("p2", stage=1, step=1)), Commit)


def test_hole_5_a_peer_that_missed_the_average_takes_it_from_the_log_of_a_mate_ahead() -> None:
    ahead = member("p2", step=1)
    assert decided(member("p1"), ahead) == FetchAverage("a stage mate is one step ahead", ahead.peer, 0)


def test_a_peer_whose_mates_ahead_cannot_give_their_average_downloads_the_state() -> None:
    mine, ahead = member("p1"), member("p2", step=1)
    own = OwnState(record=mine, refused=frozenset({(ahead.peer, 0)}))
    assert isinstance(decided(mine, ahead, own=own), Reload)


def test_a_peer_far_behind_downloads_the_state() -> None:
    assert decided(member("p1"), member("p2", step=2), member("p3", step=5)) == Reload("the stage is at step 2", PeerId("p3"), 2)


def test_of_two_lineages_at_one_step_the_larger_gives_way_and_the_smaller_waits() -> None:
    good, bad = member("p1", step=2, lineage=Lineage(0, b"a")), member("p2", step=2, lineage=Lineage(1, b""))
    assert isinstance(decided(bad, good), Reload)
    assert isinstance(decided(good, bad), Wait)


# Rules 4 (close), 5 (fetch), 6 (reset) and 7 (propose)


def test_a_round_is_closed_early_when_a_member_dies_or_restarts() -> None:
    mine, mate = member("p1", phase=Phase.AVERAGING, done=1), member("p2", phase=Phase.AVERAGING, done=2)
    own = in_round(mine, mate)
    assert isinstance(decided(mine, own=own), CloseRound)
    assert isinstance(decided(mine, replace(mate, incarnation=1), own=own), CloseRound)


def test_hole_21_a_round_that_no_task_runs_is_closed() -> None:
    mine, mate = member("p1", phase=Phase.AVERAGING, done=1), member("p2", phase=Phase.AVERAGING, done=2)
    assert isinstance(decided(mine, mate, own=OwnState(record=mine)), CloseRound)


def test_a_round_stays_open_while_a_member_is_further_along_in_it() -> None:
    mine, mate = member("p1", phase=Phase.AVERAGING, done=1), averaged("p2", done=2)
    own = in_round(mine, replace(mate, phase=Phase.AVERAGING))
    assert isinstance(decided(mine, mate, own=own), Wait)


def test_hole_3_what_a_live_mate_has_averaged_is_adopted_and_not_averaged_again() -> None:
    assert decided(member("p4", done=FULL), averaged("p2")) == FetchAverage("a stage mate has the average", PeerId("p2"), 0)


def test_hole_19_a_mate_that_did_not_answer_is_asked_last() -> None:
    mine, silent, other = member("p4"), averaged("p1"), averaged("p2")
    own = OwnState(record=mine, unanswered=frozenset({(silent.peer, 0)}))
    from_silent, from_other = (FetchAverage("a stage mate has the average", mate.peer, 0) for mate in (silent, other))
    assert decided(mine, silent, other) == replace(from_silent, others=(other.peer,))
    assert decided(mine, silent, other, own=own) == from_other
    assert decided(mine, silent, own=own) == from_silent


def test_hole_3_a_slow_round_gives_way_to_the_average_of_a_mate() -> None:
    mine, mate = member("p1", phase=Phase.AVERAGING, done=1), averaged("p2", done=2)
    assert isinstance(decided(mine, mate, own=in_round(mine, mate, still_s=1.4)), Wait)
    assert isinstance(decided(mine, mate, own=in_round(mine, mate, still_s=1.6)), FetchAverage)


def test_hole_7_the_smaller_of_two_ledgers_that_meet_is_dropped() -> None:
    small, large = member("p1", done=0b001), member("p2", done=0b011)
    assert isinstance(decided(small, large), DropSums)
    assert isinstance(decided(large, small), Wait)


def test_hole_1_a_roster_is_proposed_only_over_all_members_and_the_whole_step() -> None:
    one, two = member("p1", done=0b000111), member("p2", done=0b111000)
    (decision,) = [d for d in (decided(one, two), decided(two, one)) if isinstance(d, Propose)]
    assert {entry.done for entry in decision.roster.entries} == {0b000111, 0b111000}
    assert all(isinstance(d, Wait) for d in (decided(replace(one, done=0b11), two), decided(two, replace(one, done=0b11))))


def test_a_proposer_pauses_after_a_round_that_failed() -> None:
    mine = member("p1", done=FULL)
    own = OwnState(record=mine, propose_after_s=101.0, attempt=1)
    assert isinstance(decided(mine, own=own, now_s=100.0), Wait)
    roster = compose(mine, view_of(mine), NUM_MICROBATCHES, 1)
    assert roster is not None
    assert decided(mine, own=own, now_s=101.0) == Propose("every microbatch is held exactly once", roster)


def test_hole_19_a_voided_peer_keeps_nobody_from_averaging_and_adopts() -> None:
    mine, voided = member("p1", done=FULL, voids=(Void(PeerId("p2"), 0, 0),)), member("p2", done=1)
    assert isinstance(decided(mine, voided), Propose)
    done = replace(mine, phase=Phase.AVERAGED, average_id=AVERAGE)
    assert isinstance(decided(voided, done), FetchAverage)
    assert isinstance(decided(done, voided, averaged("p3", stage=1)), Commit)
    alone = averaged("p2", done=FULL), replace(mine, leaving=True), averaged("p3", stage=1)
    assert isinstance(decided(*alone), Commit), "its own average counts though whoever made it is gone"


# Rules 9 (adopt) and 10 (commit)


def test_hole_2_of_two_exact_averages_the_smaller_id_is_everyones() -> None:
    larger, smaller = averaged("p1", average_id=AverageId(b"z")), averaged("p2", average_id=AverageId(b"a"))
    assert isinstance(decided(larger, smaller), FetchAverage)
    assert isinstance(decided(smaller, larger), Wait)
    assert isinstance(decided(larger, smaller, member("p3", stage=1, step=1)), Commit)


def test_hole_4_nobody_commits_while_a_live_member_has_not_the_average() -> None:
    mine, elsewhere = averaged("p1"), averaged("p3", stage=1)
    behind = member("p2", done=1)
    assert isinstance(decided(mine, elsewhere, behind), Wait)
    assert isinstance(decided(mine, elsewhere, replace(behind, leaving=True)), Commit)
    assert isinstance(decided(mine, elsewhere), Commit)
    assert isinstance(decided(mine), Wait)


def test_a_run_of_one_stage_commits_when_its_members_have_averaged() -> None:
    mine = averaged("p1")
    alone = replace(RULES, num_stages=1)
    assert isinstance(decide(Situation(OwnState(record=mine), view_of(mine), 0.0, alone)), Commit)
    assert isinstance(decide(Situation(OwnState(record=mine), view_of(mine, member("p2")), 0.0, alone)), Wait)


def test_a_peer_at_the_last_step_just_waits() -> None:
    mine = member("p1", step=5)
    ended = replace(RULES, last_step=5)
    now = Situation(OwnState(record=mine), view_of(mine, member("p2", step=5)), 1e6, ended)
    assert decide(now) == Wait("the run is complete")


# Hole 20 (fork)


def test_hole_20_an_average_made_by_another_lineage_is_not_asked_for() -> None:
    mine = member("p1", step=1, done=1, lineage=Lineage(0, b"a"))
    other = averaged("p2", step=1, lineage=Lineage(0, b"b"))
    assert isinstance(decided(mine, other), Wait)
    assert isinstance(decided(other, mine), Reload)


# Rule 11 (skip)


def test_hole_16_a_stage_whose_newest_holders_died_is_lost_and_says_so_after_a_while() -> None:
    mine, others = member("p0"), [member("p1", stage=1, step=2)]
    live = view_of(mine, *others)
    assert looks_lost(Situation(OwnState(record=mine), live, 0.0, RULES))
    own = OwnState(record=mine, lost_since_s=100.0)
    assert isinstance(decided(mine, *others, own=own, now_s=108.9), Wait)
    assert isinstance(decided(mine, *others, own=own, now_s=109.1), SkipStep)


def test_hole_16_with_the_others_one_step_ahead_only_it_takes_longer() -> None:
    mine, ahead = member("p0"), member("p1", stage=1, step=1)
    own = OwnState(record=mine, lost_since_s=100.0)
    assert isinstance(decided(mine, ahead, own=own, now_s=139.0), Wait)
    assert isinstance(decided(mine, ahead, own=own, now_s=141.0), SkipStep)


def test_hole_14_a_step_is_not_lost_while_a_mate_holds_it_and_a_fence_starts_the_wait_anew() -> None:
    zombie, elsewhere = member("p3", stage=1, step=4), member("p0", stage=0, step=6)
    own = OwnState(record=zombie, lost_since_s=0.0)
    assert isinstance(decided(zombie, elsewhere, member("p5", stage=1, step=6), own=own), Reload)
    assert isinstance(decided(zombie, elsewhere, own=OwnState(record=zombie)), Wait)


@given(live_views())
def test_no_step_is_lost_while_a_mate_is_ahead_or_averaged(live: LiveView) -> None:
    mine = live.mine
    assert mine is not None
    mates = [r for r in live.serving(mine.stage) if r.peer != mine.peer]
    if any(m.step > mine.step or (m.step == mine.step and m.phase is Phase.AVERAGED) for m in mates):
        assert not looks_lost(Situation(OwnState(record=mine), live, 0.0, RULES))


# Rule J1 (join)


def joiner(step: int, lineage: Lineage | None = None) -> PeerRecord:
    return member("j", step=step, phase=Phase.JOINING, lineage=lineage or Lineage())


def test_hole_10_a_joiner_catches_up_from_the_log_of_a_mate_before_it_serves() -> None:
    """However many steps that takes, if the mate says that it keeps the averages."""
    mates = [member("p1", step=30, kept_averages=4), member("p2", step=29, kept_averages=27)]
    assert decided(joiner(2), *mates) == FetchAverage("the stage is at step 30", PeerId("p2"), 2)
    assert decided(joiner(1), *mates) == Reload("the stage is at step 30, and no mate gives the average of step 1", PeerId("p1"))


def test_a_joiner_serves_when_it_is_like_the_stage_or_better() -> None:
    mate = member("p1", step=2, lineage=Lineage(0, b"m"))
    assert isinstance(decided(joiner(2, Lineage(0, b"m")), mate), Serve)
    assert isinstance(decided(joiner(2, Lineage(0, b"z")), mate), Reload)
    assert isinstance(decided(joiner(2, Lineage(0, b"a")), mate), Serve)
    assert isinstance(decided(joiner(2)), Serve)
    assert isinstance(decided(joiner(2), member("p1", step=1)), Serve)


def test_hole_26_a_joiner_with_a_later_checkpoint_than_its_mates_does_not_take_the_first_word_for_the_last() -> None:
    """What a peer hears first as it comes back may be the record of the mate that slept, and an old one of another stage."""
    mine, slept, old = replace(joiner(0), checkpoints=(10, 16)), member("p1", step=12), member("p2", stage=1, step=12)
    just, long_ago = (OwnState(record=mine, later_since_s=100.0 - ago_s) for ago_s in (0.0, RULES.ttl_s))
    assert isinstance(decided(mine, slept, own=long_ago), Wait), "nobody who serves stage 1 is known yet"
    assert isinstance(decided(mine, slept, old, own=just), Wait)
    brought = decided(mine, slept, member("p2", stage=1, step=16), own=just)
    assert isinstance(brought, LoadCheckpoint)
    assert brought.step == 16
    assert isinstance(decided(mine, slept, old, own=long_ago), Reload), "16 is of a run that was given up"
    assert isinstance(decided(replace(mine, checkpoints=(10,)), slept), Reload)


def test_a_joiner_does_not_serve_like_mates_that_may_be_dead_while_another_stage_is_ahead() -> None:
    """The record of a mate that died at the run's start is new to a peer that has just come."""
    assert isinstance(decided(joiner(0), member("p1", step=0), member("p2", stage=1, step=1)), Serve)
    assert isinstance(decided(joiner(0), member("p1", step=0), member("p2", stage=1, step=2)), Wait)


def test_no_step_is_given_up_while_nobody_serves_some_stage() -> None:
    """Nothing is finished meanwhile, and a step on the disks of all stages may be found: rule 14 (step back)."""
    mine, rules = member("me", step=15), replace(RULES, num_stages=3)
    ahead, last = member("p1", stage=1, step=17), member("p2", stage=2, step=17)
    own = OwnState(record=mine, lost_since_s=-1000.0)
    assert isinstance(decide(Situation(own, view_of(mine, ahead, last), 100.0, rules)), SkipStep)
    assert isinstance(decide(Situation(own, view_of(mine, ahead), 100.0, rules)), Wait)


def test_a_step_whose_norm_died_is_given_up_though_two_stages_are_still_at_it() -> None:
    """The third has given it up, and tells no norm of it: the averages of the others can never be applied."""
    mine, rules = averaged("me", step=9), replace(RULES, num_stages=3, shares_norms=True)
    mate, beyond = averaged("p1", stage=1, step=9), member("p2", stage=2, step=10)
    own = OwnState(record=mine, lost_since_s=-1000.0)
    assert isinstance(decide(Situation(own, view_of(mine, mate, beyond), 100.0, rules)), SkipStep)
    told = replace(beyond, norms=(StepNorm(9, 1.5),))
    assert not isinstance(decide(Situation(own, view_of(mine, mate, told), 100.0, rules)), SkipStep)


@pytest.mark.parametrize(("near", "far", "expected"), [(4, 3, Reload), (4, 4, Reload), (3, 4, Reload), (4, 5, Serve), (1, 4, Serve)])
def test_hole_24_a_joiner_is_no_step_ahead_of_the_other_end_of_a_tied_weight(near: int, far: int, expected: type[Act]) -> None:
    """Its state holds no sum of a step that the other end has yet to finish. If the mates are left behind, a step is lost anyway."""
    mine = joiner(5)
    live = view_of(mine, member("p1", step=near), member("p2", stage=1, step=far))
    assert isinstance(decide(Situation(OwnState(record=mine), live, 100.0, replace(RULES, ties_stages=True))), expected)


def test_hole_29_no_step_is_given_up_that_the_other_stages_can_go_back_to() -> None:
    mine, long_ago = member("me", step=15), -1000.0
    own = OwnState(record=mine, lost_since_s=long_ago)
    assert isinstance(decided(mine, member("p1", stage=1, step=17), own=own), SkipStep)
    assert isinstance(decided(mine, member("p1", stage=1, step=17, checkpoints=(15,)), own=own), Wait)


def test_a_joiner_whose_mates_refuse_downloads_again() -> None:
    mine, mate = joiner(2), member("p1", step=3)
    own = OwnState(record=mine, refused=frozenset({(mate.peer, 2)}))
    assert isinstance(decided(mine, mate, own=own), Reload)


def test_hole_22_an_average_is_fetched_from_a_mate_that_this_peer_can_call_and_nobody_is_asked_in_vain() -> None:
    mine, near, far = member("p1", unreached=(PeerId("p2"),)), averaged("p3"), averaged("p2")
    decision = decided(mine, near, far)
    assert isinstance(decision, FetchAverage)
    assert decision.peer == near.peer
    assert isinstance(decided(mine, far), Wait)
    assert isinstance(decided(mine, member("p2", step=1)), Wait), "it catches up once the link is there again"


def test_hole_22_nobody_waits_for_a_member_that_can_get_the_average_from_nobody() -> None:
    mine, behind, elsewhere = averaged("p1"), member("p2"), averaged("p3", stage=1)
    assert isinstance(decided(mine, behind, elsewhere), Wait)
    assert isinstance(decided(mine, replace(behind, unreached=(mine.peer,)), elsewhere), Commit)


def test_a_member_that_can_call_nobody_is_waited_for_while_it_still_gets_the_sums_of_its_round() -> None:
    """The stream of a pair is opened by the end that can call the other. A member that missed them could fetch the average from nobody."""
    mine, deaf, elsewhere = averaged("p1"), member("p2", unreached=(PeerId("p1"),)), averaged("p3", stage=1)
    own = OwnState(record=mine, giving_to=frozenset({deaf.peer}))
    assert isinstance(decided(mine, deaf, elsewhere, own=own), Wait)
    assert isinstance(decided(mine, deaf, elsewhere, own=replace(own, averaged_since_s=100.0 - RULES.averaging_s)), Commit)


def test_no_mate_is_everybodys_donor_by_its_id() -> None:
    """A key can be made whose id sorts first."""
    ahead = [member(f"p{number}", step=2) for number in range(20)]
    joining = [decided(member(f"me{number}", phase=Phase.JOINING), *ahead) for number in range(20)]
    fetching = [decided(member(f"me{number}", step=1, done=0b1), *(averaged(r.peer, step=1) for r in ahead)) for number in range(20)]
    for acts in (joining, fetching):
        assert len({getattr(act, "peer", None) for act in acts}) > 5


def test_a_long_round_says_how_long_it_takes() -> None:
    mine, mate = member("p1", phase=Phase.AVERAGING, done=1), member("p2", phase=Phase.AVERAGING, done=2)
    own = in_round(mine, mate)
    assert own.round_roster is not None
    told = [decided(mine, mate, own=replace(own, round_roster=replace(own.round_roster, expected_s=each))).reason for each in (0.1, 25.6)]
    assert told == ["the round is under way", "the round is under way, and takes about 26 s"]
