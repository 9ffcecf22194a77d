"""What a joiner does where nobody serves: begin, wait, or resume at the newest step that every stage can provide."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.recovery import Beginning, plan
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView


def joiner(name: str, stage: int, *checkpoints: int) -> PeerRecord:
    return PeerRecord(peer=PeerId(name), stage=stage, checkpoints=checkpoints)


def server(name: str, stage: int, step: int) -> PeerRecord:
    return PeerRecord(peer=PeerId(name), stage=stage, step=step, phase=Phase.ACCUMULATING)


def view(*records: PeerRecord) -> LiveView:
    return LiveView(me=records[0].peer, records=tuple(sorted(records, key=lambda record: record.peer)))


def test_a_run_that_nobody_has_begun_begins() -> None:
    mine = joiner("a", 0)
    assert plan(mine, view(mine, joiner("b", 1)), 2).begin


def test_first_weights_are_wrong_once_anybody_holds_a_later_step() -> None:
    mine = joiner("a", 0)
    for other in (joiner("b", 1, 5), joiner("b", 0, 5), server("b", 1, 3)):
        found = plan(mine, view(mine, other), 2)
        assert not found.begin
        assert found.load is None


def test_who_sees_nobody_that_serves_begins_nothing_unless_it_founds_the_run() -> None:
    """Others that come back from a blackout, with nothing on disk yet, are no sign that the run begins."""
    mine = joiner("a", 0)
    follower = Beginning(founder=False)
    for others in ((), (joiner("b", 1),), (joiner("b", 0), joiner("c", 1))):
        assert plan(mine, view(mine, *others), 2, beginning=Beginning(founder=True)).begin
        assert not plan(mine, view(mine, *others), 2, beginning=follower).begin
    assert plan(mine, view(mine, server("b", 1, 0)), 2, beginning=follower).begin


def test_a_run_once_seen_at_a_later_step_is_never_begun_again() -> None:
    mine = joiner("a", 0)
    for founder in (True, False):
        found = plan(mine, view(mine, joiner("b", 1)), 2, beginning=Beginning(founder=founder), newest_seen=16)
        assert (found.begin, found.load) == (False, None)
        assert "step 16" in found.reason


@given(st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_a_run_that_begins_though_it_had_come_further_says_so(first: int, reached: int, has_checkpoint: bool) -> None:
    mine = joiner("a", 0)
    others = [joiner("b", 1, *([first + 1] if has_checkpoint else []))]
    found = plan(mine, view(mine, *others), 2, beginning=Beginning(step=first, reached=reached))
    assert found.begin is not has_checkpoint
    assert found.anew is (found.begin and reached > first)
    assert (f"anew at step {first}: it was at step {reached}," in found.reason) is found.anew


def test_the_newest_step_that_every_stage_holds_is_resumed() -> None:
    mine = joiner("a", 0, 5, 10, 15)
    found = plan(mine, view(mine, joiner("b", 1, 5, 10), joiner("c", 1, 5)), 2)
    assert found.load == 10


def test_a_stage_that_still_serves_provides_its_step_and_the_one_before() -> None:
    mine = joiner("a", 0, 3, 4)
    assert plan(mine, view(mine, server("b", 1, 5)), 2).load == 4
    assert plan(joiner("a", 0, 3), view(joiner("a", 0, 3), server("b", 1, 5)), 2).load is None


def test_a_peer_without_the_step_waits_for_a_mate_that_has_it() -> None:
    mine = joiner("a", 0, 5)
    found = plan(mine, view(mine, joiner("b", 0, 10), joiner("c", 1, 10)), 2)
    assert found.load is None
    assert "another peer" in found.reason


steps = st.sets(st.integers(1, 6), max_size=3).map(sorted)


@given(st.lists(st.tuples(st.integers(0, 2), steps), min_size=1, max_size=6))
def test_all_joiners_resume_at_one_step_that_each_stage_holds(homes: list[tuple[int, list[int]]]) -> None:
    records = [joiner(f"p{number}", stage, *held) for number, (stage, held) in enumerate(homes)]
    live = view(*records)
    loads = {found.load for record in records if (found := plan(record, live, 3)).load is not None}
    assert len(loads) <= 1
    for load in loads:
        for stage in range(3):
            assert any(load in record.checkpoints for record in records if record.stage == stage)


def test_a_run_that_begins_from_a_state_waits_until_somebody_gives_it() -> None:
    mine = joiner("a", 0)
    beginning = Beginning(step=10, needs_state=True)
    found = plan(mine, view(mine, joiner("b", 1)), 2, beginning=beginning)
    assert (found.begin, found.load) == (False, None)
    giver = replace(joiner("b", 1), gives_start=True)
    assert plan(mine, view(mine, giver), 2, beginning=beginning).begin
    assert plan(mine, view(mine, joiner("b", 1)), 2, beginning=replace(beginning, needs_state=False)).begin


def test_the_step_that_a_run_begins_at_does_not_mean_that_it_was_begun() -> None:
    mine = joiner("a", 0)
    beginning = Beginning(step=10)
    assert plan(mine, view(mine, server("b", 1, 10)), 2, beginning=beginning, newest_seen=10).begin
    for other in (server("b", 1, 11), joiner("b", 1, 15)):
        assert not plan(mine, view(mine, other), 2, beginning=beginning).begin
    assert not plan(mine, view(mine, joiner("b", 1)), 2, beginning=beginning, newest_seen=11).begin
