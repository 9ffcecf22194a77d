"""The ledger's laws: held and missing are complements, the work step is the slowest stage's, nothing is added twice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.ledger import accumulate_set, full, held, indices, may_accumulate, missing, stage_step, stages_missing, work_step
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from tests.strategies import FULL, NUM_MICROBATCHES, live_views, member, records, view_of

stages = st.integers(0, 1)
steps = st.integers(0, 3)


@given(live_views(), stages, steps)
def test_every_microbatch_is_either_held_or_missing(live: LiveView, stage: int, step: int) -> None:
    have, lack = held(live, stage, step), missing(live, stage, step, NUM_MICROBATCHES)
    assert have | lack == full(NUM_MICROBATCHES)
    assert have & lack == 0


@given(live_views(), records(), steps)
def test_a_death_never_makes_less_missing_and_a_birth_never_more(live: LiveView, record: PeerRecord, step: int) -> None:
    fewer = LiveView(me=live.me, records=tuple(r for r in live.records if r.peer != record.peer))
    more = LiveView(me=live.me, records=(*fewer.records, record))
    lacking = missing(fewer, record.stage, step, NUM_MICROBATCHES)
    assert missing(more, record.stage, step, NUM_MICROBATCHES) & ~lacking == 0


@given(live_views())
def test_the_work_step_is_that_of_the_slowest_stage(live: LiveView) -> None:
    newest = [stage_step(live, stage) for stage in range(2)]
    step = work_step(live, 2)
    if None in newest:
        assert step is None
    else:
        assert step == min(s for s in newest if s is not None)


@given(live_views(), steps)
def test_a_stage_that_has_the_average_or_is_past_the_step_needs_nothing(live: LiveView, step: int) -> None:
    for stage, absent in stages_missing(live, 2, step, NUM_MICROBATCHES).items():
        assert 0 < absent <= FULL
        assert stage_step(live, stage) == step
        assert all(r.phase is not Phase.AVERAGED for r in live.members(stage, step))


@given(st.integers(0, FULL), st.integers(0, FULL))
def test_a_replay_for_one_stage_leaves_the_others_alone(first: int, second: int) -> None:
    wanted = {stage: bits for stage, bits in enumerate((first, second)) if bits}
    for index in range(NUM_MICROBATCHES):
        assert accumulate_set(wanted, index) == {s for s, bits in wanted.items() if index in set(indices(bits))}


@given(live_views(), steps, st.integers(0, NUM_MICROBATCHES - 1), st.integers(0, 2), st.integers(0, 2))
def test_what_may_be_added_is_new_to_the_stage_and_of_my_present_ledger(
    live: LiveView, step: int, index: int, incarnation: int, ledger_no: int
) -> None:
    mine = live.mine
    assert mine is not None
    if may_accumulate(mine, live, step=step, index=index, accept_mark=(incarnation, ledger_no)) is None:
        assert (mine.step, mine.phase) == (step, Phase.ACCUMULATING)
        assert (mine.incarnation, mine.ledger_no) == (incarnation, ledger_no)
        assert not held(live, mine.stage, step) >> index & 1
        assert not mine.done >> index & 1


@given(live_views(), st.integers(0, NUM_MICROBATCHES - 1))
def test_a_missing_microbatch_of_my_step_may_be_added_by_me(live: LiveView, index: int) -> None:
    mine = replace(live.records[0], phase=Phase.ACCUMULATING, done=0)
    live = LiveView(me=mine.peer, records=(mine, *live.records[1:]))
    refusal = may_accumulate(mine, live, step=mine.step, index=index, accept_mark=(mine.incarnation, mine.ledger_no))
    assert (refusal is None) == bool(missing(live, mine.stage, mine.step, NUM_MICROBATCHES) >> index & 1)


def test_hole_8_a_late_backward_does_not_reach_the_next_step() -> None:
    mine = member("p3", step=1, ledger_no=1)
    assert may_accumulate(mine, view_of(mine), step=0, index=1, accept_mark=(0, 0)) == "another step"


def test_hole_8_a_ledger_dropped_since_the_call_was_accepted_takes_nothing_of_it() -> None:
    mine = member("p3", step=1, ledger_no=2)
    assert may_accumulate(mine, view_of(mine), step=1, index=1, accept_mark=(0, 1)) == "ledger was dropped since"
    assert may_accumulate(member("p3", incarnation=1), view_of(mine), step=0, index=1, accept_mark=(0, 0)) == "ledger was dropped since"


def test_hole_7_what_a_live_mate_holds_is_not_added_again() -> None:
    mine, mate = member("p1"), member("p2", done=0b10)
    assert may_accumulate(mine, view_of(mine, mate), step=0, index=1, accept_mark=(0, 0)) == "already held by a stage mate"
    assert may_accumulate(mine, view_of(mine, mate), step=0, index=0, accept_mark=(0, 0)) is None


def test_an_open_round_freezes_the_ledger() -> None:
    mine = member("p1", phase=Phase.AVERAGING)
    assert may_accumulate(mine, view_of(mine), step=0, index=0, accept_mark=(0, 0)) == "ledger is frozen"


def test_a_joining_peer_counts_for_nothing() -> None:
    joiner = member("p1", phase=Phase.JOINING, step=7, done=FULL)
    live = view_of(joiner)
    assert stage_step(live, 0) is None
    assert held(live, 0, 7) == 0
    assert live.find(PeerId("p1")) == joiner
