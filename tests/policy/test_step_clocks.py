"""Since when what the rules wait for has held, and how long a step takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.policy.step.acts import Act, Commit, LoadCheckpoint, Wait
from peerd.policy.step.clocks import StepClocks
from peerd.policy.step.roster import turns
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.step.stepping import decide
from peerd.table.record import AverageId, PeerRecord, Phase
from tests.strategies import FULL, NUM_MICROBATCHES, member, view_of

RULES = StepRules(num_stages=2, num_microbatches=NUM_MICROBATCHES, ttl_s=3.0, averaging_s=1.5)


def averaged(name: str, stage: int = 0) -> PeerRecord:
    return member(name, stage=stage, phase=Phase.AVERAGED, average_id=AverageId(b"m"), done=FULL)


def looked(clocks: StepClocks, now_s: float, mine: PeerRecord, *others: PeerRecord) -> OwnState:
    return clocks.noted(OwnState(record=mine), view_of(mine, *others), RULES, now_s)


def test_a_step_takes_as_long_as_the_shorter_of_the_last_two() -> None:
    clocks = StepClocks()
    assert clocks.step_s is None
    for now_s, step_s in ((10.0, None), (14.0, 4.0), (1000.0, 4.0), (1006.0, 6.0), (1011.0, 5.0)):
        clocks.committed(now_s)
        assert clocks.step_s == step_s
    clocks.restart()
    clocks.committed(2000.0)
    assert clocks.step_s is None


def test_the_average_stands_since_the_last_stage_has_it_and_a_member_that_lacks_it_changes_nothing() -> None:
    clocks, mine, behind, elsewhere = StepClocks(), averaged("p1"), member("p2"), averaged("p3", stage=1)
    assert looked(clocks, 1.0, mine, behind, replace(elsewhere, phase=Phase.ACCUMULATING)).averaged_since_s is None
    assert looked(clocks, 2.0, mine, behind, elsewhere).averaged_since_s == 2.0
    assert looked(clocks, 3.0, mine, elsewhere).averaged_since_s == 2.0
    assert looked(clocks, 4.0, mine, behind, replace(elsewhere, step=1, phase=Phase.ACCUMULATING)).averaged_since_s == 2.0
    assert looked(clocks, 5.0, behind, mine, elsewhere).averaged_since_s is None
    assert looked(clocks, 6.0, mine, behind, elsewhere).averaged_since_s == 6.0
    clocks.restart()
    assert looked(clocks, 7.0, mine, behind, elsewhere).averaged_since_s == 7.0


def test_hole_64_a_member_that_is_in_a_round_for_moments_stops_the_turns_for_these_moments_alone() -> None:
    clocks, mine = StepClocks(), member("p1", done=0b000111)
    mate = member("p2", done=0b111000)
    away, missing = replace(mate, phase=Phase.AVERAGING), replace(mate, done=0)
    assert looked(clocks, 1.0, mine, mate).complete_since_s == 1.0
    for now_s, other in ((3.0, away), (4.0, missing)):
        assert looked(clocks, now_s, mine, other).complete_since_s is None
    assert looked(clocks, 5.0, mine, mate).complete_since_s == 3.0
    assert looked(clocks, 9.0, mine, mate).complete_since_s == 3.0
    assert looked(clocks, 10.0, replace(mine, phase=Phase.AVERAGING), mate).complete_since_s is None
    assert looked(clocks, 11.0, mine, mate).complete_since_s == 11.0, "a round of its own begins it anew"
    assert looked(clocks, 12.0, replace(mine, step=1), replace(mate, step=1)).complete_since_s == 12.0


def test_hole_65_members_that_let_their_turn_pass_come_last_for_some_steps_and_for_twice_as_many_each_time() -> None:
    clocks, now_s, names = StepClocks(), 0.0, ("p1", "p2", "p3")

    def look(step: int, waited_s: float) -> tuple[str, ...]:
        nonlocal now_s
        now_s += 100.0
        records = [member(name, step=step, done=done) for name, done in zip(names, (0b11, 0b1100, 0b110000), strict=True)]
        looked(clocks, now_s, *records)
        return looked(clocks, now_s + waited_s, *records).last_in_turn

    first = turns([member(name) for name in names])[0]
    assert look(0, 2.9) == ()
    clocks.restart()
    assert look(0, 3.1) == (), "in this step the order stays"
    assert look(1, 0.0) == look(16, 0.0) == (first,)
    assert look(17, 0.0) == ()
    again = next(step for step in range(18, 32) if turns([member(name, step=step) for name in names])[0] == first)
    look(again, 3.1)
    assert look(again + 32, 0.0) == (first,)
    assert look(again + 33, 0.0) == ()


def decided(own: OwnState, now_s: float, *others: PeerRecord) -> Act:
    return decide(Situation(own, view_of(own.record, *others), now_s, RULES))


def test_a_round_lasts_for_as_long_as_this_peer_was_seen_in_it() -> None:
    clocks, mine = StepClocks(), averaged("p1")
    for now_s in (3.0, 10.0, 253.0):
        assert looked(clocks, now_s, replace(mine, phase=Phase.AVERAGING)).round_s == now_s - 3.0
    assert looked(clocks, 254.0, mine).round_s == 250.0
    assert looked(clocks, 255.0, replace(mine, step=mine.step + 1, phase=Phase.ACCUMULATING)).round_s is None


@pytest.mark.parametrize(
    ("step_s", "round_s", "waits_s"), [(None, None, 1.5), (4.0, 4.0, 1.5), (80.0, None, 20.0), (14.0, 250.0, 62.5), (80.0, 40.0, 20.0)]
)
def test_hole_39_members_that_lack_the_average_are_waited_for_an_averaging_time_or_a_quarter_of_a_step(
    step_s: float | None, round_s: float | None, waits_s: float
) -> None:
    mine, elsewhere, behind = averaged("p1"), averaged("p3", stage=1), member("p2")
    own = OwnState(record=mine, step_s=step_s, round_s=round_s, averaged_since_s=100.0)
    assert isinstance(decided(own, 99.9 + waits_s, elsewhere, behind), Wait)
    assert isinstance(decided(own, 100.0 + waits_s, elsewhere, behind), Commit)
    alone = replace(elsewhere, phase=Phase.ACCUMULATING)
    assert isinstance(decided(own, 1e6, alone, behind), Wait), "a stage has no average any more"


def test_a_checkpoint_to_return_with_is_loaded_at_once_and_others_once_they_have_been_the_ones_for_a_while() -> None:
    clocks = StepClocks()
    for is_lasting, now_s, loads in ((False, 0.0, True), (True, 1.0, False), (True, 4.9, False), (True, 5.1, True)):
        act = LoadCheckpoint("it is there", 5, is_lasting=is_lasting)
        assert (clocks.once_settled(act, RULES, now_s) is act) == loads
