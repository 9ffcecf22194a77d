"""What a joiner does where nobody serves: begin, wait, or resume at the newest step that every stage can provide."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.acts import Act, LoadCheckpoint, LoadStart, Serve, Wait
from peerd.policy.step.recovery import Beginning, checkpoint_to_bring, checkpoint_to_return_with, is_given_up, plan, step_to_go_back_to
from peerd.policy.step.situation import StepRules
from peerd.table.record import AverageId, Lineage, PeerId, PeerRecord, Phase, TiedSum
from peerd.table.view import LiveView


def joiner(name: str, stage: int, *checkpoints: int) -> PeerRecord:
    return PeerRecord(peer=PeerId(name), stage=stage, checkpoints=checkpoints)


def server(name: str, stage: int, step: int, *checkpoints: int) -> PeerRecord:
    return PeerRecord(peer=PeerId(name), stage=stage, step=step, phase=Phase.ACCUMULATING, checkpoints=checkpoints)


def view(*records: PeerRecord) -> LiveView:
    return LiveView(me=records[0].peer, records=tuple(sorted(records, key=lambda record: record.peer)))


def rules(num_stages: int, ties_stages: bool = False) -> StepRules:
    return StepRules(num_stages=num_stages, num_microbatches=4, ttl_s=15.0, averaging_s=9.0, ties_stages=ties_stages)


def test_hole_29_a_stage_goes_back_to_the_step_of_one_that_is_left_behind_if_it_can() -> None:
    behind, ahead = server("a", 0, 15, 12, 15), server("b", 1, 17, 15)
    assert step_to_go_back_to(ahead, view(ahead, behind), rules(2)) == 15
    assert step_to_go_back_to(behind, view(behind, ahead), rules(2)) is None, "it is there already"
    for near in (server("a", 0, 16), server("a", 0, 17), server("a", 0, 14, 14)):
        assert step_to_go_back_to(ahead, view(ahead, near), rules(2)) is None, "nothing to mend, or nothing on the disk"
    for far in (joiner("c", 1, 17), server("c", 1, 17)):
        assert step_to_go_back_to(ahead, view(ahead, behind, far), rules(2)) == 15


def step_to_load(act: Act | None) -> int | None:
    return act.step if isinstance(act, LoadCheckpoint) else None


def test_a_run_that_nobody_has_begun_begins() -> None:
    mine = joiner("a", 0)
    assert isinstance(plan(mine, view(mine, joiner("b", 1)), rules(2)), Serve)


def test_first_weights_are_wrong_once_anybody_holds_a_later_step() -> None:
    mine = joiner("a", 0)
    for other in (joiner("b", 1, 5), joiner("b", 0, 5), server("b", 1, 3)):
        assert isinstance(plan(mine, view(mine, other), rules(2)), Wait)


def test_who_sees_nobody_that_serves_begins_nothing_unless_it_founds_the_run() -> None:
    """Others that come back from a blackout, with nothing on disk yet, are no sign that the run begins."""
    mine = joiner("a", 0)
    follower = Beginning(founder=False)
    for others in ((), (joiner("b", 1),), (joiner("b", 0), joiner("c", 1))):
        assert isinstance(plan(mine, view(mine, *others), rules(2), beginning=Beginning(founder=True)), Serve)
        assert isinstance(plan(mine, view(mine, *others), rules(2), beginning=follower), Wait)
    assert isinstance(plan(mine, view(mine, server("b", 1, 0)), rules(2), beginning=follower), Serve)


def test_a_run_once_seen_at_a_later_step_is_never_begun_again() -> None:
    mine = joiner("a", 0)
    for founder in (True, False):
        found = plan(mine, view(mine, joiner("b", 1)), rules(2), beginning=Beginning(founder=founder), newest_seen=16)
        assert isinstance(found, Wait)
        assert "step 16" in found.reason


@given(st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_a_run_that_begins_though_it_had_come_further_says_so(first: int, reached: int, has_checkpoint: bool) -> None:
    mine = joiner("a", 0)
    others = [joiner("b", 1, *([first + 1] if has_checkpoint else []))]
    beginning = Beginning(step=first, reached=reached)
    found = plan(mine, view(mine, *others), rules(2), beginning=beginning)
    assert isinstance(found, Serve) is not has_checkpoint
    begins_anew = f"anew at step {first}: it was at step {reached}," in found.reason
    assert begins_anew is (isinstance(found, Serve) and beginning.loses_steps)


def test_the_newest_step_that_every_stage_holds_is_resumed() -> None:
    mine = joiner("a", 0, 5, 10, 15)
    assert step_to_load(plan(mine, view(mine, joiner("b", 1, 5, 10), joiner("c", 1, 5)), rules(2))) == 10


def test_a_stage_that_still_serves_provides_its_step_and_the_one_before() -> None:
    mine = joiner("a", 0, 3, 4)
    assert step_to_load(plan(mine, view(mine, server("b", 1, 5)), rules(2))) == 4
    assert step_to_load(plan(joiner("a", 0, 3), view(joiner("a", 0, 3), server("b", 1, 5)), rules(2))) is None


def test_a_peer_without_the_step_waits_for_a_mate_that_has_it() -> None:
    mine = joiner("a", 0, 5)
    found = plan(mine, view(mine, joiner("b", 0, 10), joiner("c", 1, 10)), rules(2))
    assert isinstance(found, Wait)
    assert "another peer" in found.reason


steps = st.sets(st.integers(1, 6), max_size=3).map(sorted)


@given(st.lists(st.tuples(st.integers(0, 2), steps), min_size=1, max_size=6))
def test_all_joiners_resume_at_one_step_that_each_stage_holds(homes: list[tuple[int, list[int]]]) -> None:
    records = [joiner(f"p{number}", stage, *held) for number, (stage, held) in enumerate(homes)]
    live = view(*records)
    loads = {step_to_load(plan(record, live, rules(3))) for record in records} - {None}
    assert len(loads) <= 1
    for load in loads:
        for stage in range(3):
            assert any(load in record.checkpoints for record in records if record.stage == stage)


def test_a_run_that_begins_from_a_state_waits_until_somebody_gives_it() -> None:
    mine = joiner("a", 0)
    beginning = Beginning(step=10, needs_state=True)
    assert isinstance(plan(mine, view(mine, joiner("b", 1)), rules(2), beginning=beginning), Wait)
    giver = replace(joiner("b", 1), gives_start=True)
    assert isinstance(plan(mine, view(mine, giver), rules(2), beginning=beginning), LoadStart)
    assert isinstance(plan(mine, view(mine, joiner("b", 1)), rules(2), beginning=replace(beginning, needs_state=False)), Serve)


def test_the_step_that_a_run_begins_at_does_not_mean_that_it_was_begun() -> None:
    mine = joiner("a", 0)
    beginning = Beginning(step=10)
    assert isinstance(plan(mine, view(mine, server("b", 1, 10)), rules(2), beginning=beginning, newest_seen=10), Serve)
    for other in (server("b", 1, 11), joiner("b", 1, 15)):
        assert isinstance(plan(mine, view(mine, other), rules(2), beginning=beginning), Wait)
    assert isinstance(plan(mine, view(mine, joiner("b", 1)), rules(2), beginning=beginning, newest_seen=11), Wait)


def test_a_joiner_brings_a_checkpoint_only_where_its_stage_has_lost_steps_that_others_still_hold() -> None:
    mine = joiner("a", 0, 12, 16, 19)

    def brings(mate: int, *others: int) -> int | None:
        found = checkpoint_to_bring(mine, view(mine, server("b", 0, mate), *(server(f"c{step}", 1, step) for step in others)), rules(2))
        return None if found is None else found.step if found.is_lossless else -found.step

    assert brings(15, 19) == 19
    assert brings(15, 18) == 19, "the other stage is about to commit step 18"
    assert brings(15, 21) == -19, "a last resort: step 19 has to be given up, and perhaps what seems to be at 15 is dead"
    assert brings(15, 17) == 16, "19 is of a run that the others have given up"
    assert brings(18, 19) is None, "the other stage still serves step 18"
    assert brings(19, 19) is None
    assert brings(15) is None, "nobody serves the other stage: J3 decides"


def test_an_end_of_a_tied_weight_brings_what_costs_the_other_end_no_step() -> None:
    """A checkpoint holds no sum of the step before, which the other end still has to finish."""
    for ties_stages, kept, brought in ((True, (16, 18), 16), (False, (16, 18), 18), (True, (18,), 18)):
        mine = joiner("a", 0, *kept)
        found = checkpoint_to_bring(mine, view(mine, server("b", 0, 15), server("c", 1, 17)), rules(2, ties_stages))
        assert found is not None
        assert (found.step, found.is_lossless) == (brought, brought == 16 or not ties_stages)


def test_in_a_run_of_one_stage_the_newest_state_wins() -> None:
    mine = joiner("a", 0, 16, 19)
    assert step_to_load(checkpoint_to_bring(mine, view(mine, server("b", 0, 18)), rules(1))) == 19
    assert checkpoint_to_bring(mine, view(mine, server("b", 0, 19)), rules(1)) is None


def test_a_serving_stage_goes_back_only_where_another_is_dead_and_cannot_come_to_its_frontier() -> None:
    mine = server("a", 0, 20, 10, 15)
    assert step_to_go_back_to(mine, view(mine, joiner("b", 1, 10, 15)), rules(2)) == 15
    assert step_to_go_back_to(mine, view(mine, joiner("b", 1, 15, 19)), rules(2)) is None
    assert step_to_go_back_to(mine, view(mine, server("c", 1, 20), joiner("b", 1, 15)), rules(2)) is None
    assert step_to_go_back_to(mine, view(mine, joiner("b", 1, 7)), rules(2)) is None, "no step in common"
    assert step_to_go_back_to(mine, view(mine), rules(2)) is None, "nobody has come back yet"


def test_a_joiner_that_holds_what_no_other_stage_can_go_on_from_goes_back_too() -> None:
    """Its mate has gone back while it downloaded; nobody serves its stage."""
    mine = replace(joiner("a", 1, 15), step=20)
    assert step_to_go_back_to(mine, view(mine, server("b", 0, 15, 15)), rules(2)) == 15
    assert step_to_go_back_to(mine, view(mine, server("b", 0, 21, 15)), rules(2)) is None, "its own state is the one that stage 0 needs"


def test_joiners_wait_until_the_serving_stages_have_gone_back() -> None:
    mine = joiner("a", 1, 15)
    found = plan(mine, view(mine, server("b", 0, 20, 15)), rules(2))
    assert isinstance(found, Wait)
    assert "stage 0 has to go back first" in found.reason
    assert step_to_load(plan(mine, view(mine, joiner("b", 0, 15)), rules(2))) == 15


def test_hole_24_the_step_before_is_offered_only_with_the_sum_that_it_applied_to_a_tied_weight() -> None:
    """A peer that downloaded its state does not have the sum, and without it the other end cannot finish the step."""
    tied = rules(3, ties_stages=True)
    last_resort = plan(joiner("d", 2, 19), view(joiner("d", 2, 19), server("a", 0, 20), server("c", 1, 20)), tied)
    assert isinstance(last_resort, LoadCheckpoint)
    assert not last_resort.is_lossless
    downloaded = server("a", 0, 20, 15, 18)
    finished = replace(server("b", 0, 20), tied_sums=(TiedSum(19, AverageId(b"sum")),))
    middle, back = server("c", 1, 20, 15, 18), joiner("d", 2, 15, 19)
    assert step_to_go_back_to(downloaded, view(downloaded, middle, back), tied) == 15
    assert step_to_go_back_to(downloaded, view(downloaded, finished, middle, back), tied) is None
    assert step_to_go_back_to(downloaded, view(downloaded, middle, back), rules(3)) is None
    assert step_to_load(plan(back, view(back, downloaded, finished, middle), tied)) == 19
    end = server("e", 2, 20)
    assert step_to_go_back_to(downloaded, view(downloaded, joiner("f", 1, 19), end), tied) is None, "both ends serve"


def keeping(name: str, step: int, averages: int) -> PeerRecord:
    return replace(server(name, 0, step), kept_averages=averages)


def test_a_peer_that_returns_loads_its_checkpoint_where_the_averages_since_then_are_less_than_the_state() -> None:
    def returns(mine: PeerRecord, *mates: PeerRecord, of_state: int = 3) -> int | None:
        return step_to_load(checkpoint_to_return_with(mine, mates, replace(rules(2), averages_in_state=of_state)))

    mine = joiner("a", 0, 3, 6, 8)
    assert returns(mine, keeping("b", 9, 4)) == 8
    assert returns(mine, keeping("b", 8, 0)) == 8, "the stage is still there"
    assert returns(mine, keeping("b", 10, 1), keeping("c", 9, 2)) == 8, "any mate that keeps them will do"
    assert returns(mine, keeping("b", 10, 1)) is None, "nobody keeps them"
    assert returns(mine, keeping("b", 11, 9)) == 8
    assert returns(mine, keeping("b", 12, 9)) is None, "the state is less"
    assert returns(mine, keeping("b", 10, 9), of_state=1) is None, "the state is less"
    assert returns(mine, keeping("b", 7, 9)) == 6, "the later one is of a run that others have given up, or that others have yet to bring"
    assert returns(replace(mine, step=8), keeping("b", 9, 4)) is None, "it is there"
    assert returns(joiner("a", 0), keeping("b", 9, 4)) is None
    assert returns(mine) is None


def test_a_checkpoint_of_another_lineage_than_all_mates_at_its_step_is_given_up() -> None:
    mine, theirs = Lineage(1, b"a"), Lineage(1, b"b")
    alike, unlike = replace(server("b", 0, 8), lineage=mine), replace(server("c", 0, 8), lineage=theirs)
    ahead = replace(server("d", 0, 9), lineage=theirs)
    assert is_given_up(8, mine, [unlike, ahead])
    assert not is_given_up(8, mine, [unlike, alike])
    assert not is_given_up(8, mine, [ahead]), "its average says so"
