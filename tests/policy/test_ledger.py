"""The ledgers' laws: held and missing are complements, the work step is the slowest stage's, nothing is added twice.

Where steps overlap a peer has two ledgers, and a commit loses nothing of the second.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from peerd.policy.step.ledger import (
    accumulate_set,
    at_next_step,
    both_dropped,
    full,
    held,
    holders,
    indices,
    marked,
    may_accumulate,
    missing,
    number_of,
    stage_step,
    stages_missing,
    this_dropped,
    with_overlap,
    work_step,
)
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


@given(live_views(), stages, steps, st.integers(0, NUM_MICROBATCHES - 1))
def test_who_holds_a_microbatch_is_asked_for_it_and_where_nobody_does_it_is_missing(
    live: LiveView, stage: int, step: int, index: int
) -> None:
    found = holders(live.serving(stage), step, index)
    for record in live.serving(stage):
        ledger = {record.step: record.done, record.step + 1: record.next_done}.get(step, 0)
        assert (record.peer in found) == (index in indices(ledger))
    if not found and not any(record.summary for record in live.records):
        assert missing(live, stage, step, NUM_MICROBATCHES) >> index & 1


@given(live_views(), records(), steps)
def test_a_death_never_makes_less_missing_and_a_birth_never_more(live: LiveView, record: PeerRecord, step: int) -> None:
    fewer = LiveView(me=live.me, records=tuple(r for r in live.records if r.peer != record.peer))
    assume(not any(r.next_done and r.phase is Phase.ACCUMULATING for r in fewer.records))  # left behind by the newcomer's step
    more = LiveView(me=live.me, records=(*fewer.records, record))
    assume(not any(more.is_outlived(r) for r in more.records))  # the run has gone back without it
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


@given(live_views(), steps)
def test_nothing_is_launched_for_a_stage_whose_round_has_all_and_one_word_stops_no_other(live: LiveView, step: int) -> None:
    wanted = stages_missing(live, 2, step, NUM_MICROBATCHES)
    for stage in range(2):
        members = live.members(stage, step)
        in_round = [r for r in members if r.phase is Phase.AVERAGING]
        if stage in wanted:
            assert len(in_round) <= len(members) / 2
        elif len(in_round) == 1 < len(members) and stage_step(live, stage) == step and missing(live, stage, step, NUM_MICROBATCHES):
            assert any(r.phase is Phase.AVERAGED for r in members)


def test_a_member_of_a_round_that_is_out_of_sight_is_not_computed_anew_before_the_round_has_failed() -> None:
    own = PeerRecord(peer=PeerId("a"), incarnation=1, phase=Phase.AVERAGING, done=0b0011)
    assert stages_missing(LiveView(me=own.peer, records=(own,)), 1, 0, NUM_MICROBATCHES) == {}
    failed = replace(own, phase=Phase.ACCUMULATING)
    assert stages_missing(LiveView(me=own.peer, records=(failed,)), 1, 0, NUM_MICROBATCHES) == {0: FULL & ~0b0011}


@given(st.integers(0, FULL), st.integers(0, FULL))
def test_a_replay_for_one_stage_leaves_the_others_alone(first: int, second: int) -> None:
    wanted = {stage: bits for stage, bits in enumerate((first, second)) if bits}
    for index in range(NUM_MICROBATCHES):
        assert accumulate_set(wanted, index) == {s for s, bits in wanted.items() if index in set(indices(bits))}


@given(live_views(), steps, st.integers(0, NUM_MICROBATCHES - 1), st.integers(0, 2), st.integers(0, 3))
def test_what_may_be_added_is_new_to_the_stage_and_of_my_present_ledger(
    live: LiveView, step: int, index: int, incarnation: int, ledger_no: int
) -> None:
    mine = live.mine
    assert mine is not None
    if may_accumulate(mine, live, step=step, index=index, accept_mark=(incarnation, ledger_no)) is None:
        early = mine.next_ledger_no > 0 and step == mine.step + 1
        assert mine.phase is Phase.ACCUMULATING or (early and mine.phase is not Phase.JOINING)
        assert step == mine.step or early
        assert (mine.incarnation, number_of(mine, step)) == (incarnation, ledger_no)
        assert not held(live, mine.stage, step) >> index & 1
        assert not (mine.next_done if early else mine.done) >> index & 1


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


# Two ledgers, where steps overlap


@given(records(), st.integers(0, NUM_MICROBATCHES - 1), st.booleans())
def test_a_commit_makes_the_next_ledger_this_one_and_its_calls_still_count(mine: PeerRecord, index: int, overlaps: bool) -> None:
    mine = replace(mine, phase=Phase.ACCUMULATING, next_done=0, next_ledger_no=0)
    if overlaps:
        mine = marked(with_overlap(mine), mine.step + 1, index)
    after = at_next_step(mine)
    assert after.step == mine.step + 1
    assert (after.done, after.next_done) == (1 << index if overlaps else 0, 0)
    assert (after.next_ledger_no > 0) == overlaps
    if overlaps:
        assert number_of(after, after.step) == number_of(mine, after.step)
    assert after.ledger_no != mine.ledger_no
    assert after.next_ledger_no != after.ledger_no


@given(records())
def test_a_dropped_ledger_never_comes_back_under_its_number(mine: PeerRecord) -> None:
    this, both = this_dropped(mine), both_dropped(mine)
    assert (this.done, this.next_done, this.next_ledger_no) == (0, mine.next_done, mine.next_ledger_no)
    assert (both.done, both.next_done) == (0, 0)
    numbers = {mine.ledger_no, mine.next_ledger_no}
    assert {this.ledger_no, both.ledger_no}.isdisjoint(numbers)
    assert bool(both.next_ledger_no) == bool(mine.next_ledger_no)
    assert not both.next_ledger_no or both.next_ledger_no not in numbers | {both.ledger_no}


@given(live_views(), stages, steps)
def test_what_an_averaged_peer_holds_of_the_next_step_is_held_before_and_after_its_commit(live: LiveView, stage: int, step: int) -> None:
    averaged = [r for r in live.serving(stage) if r.step == step and r.phase is Phase.AVERAGED and r.next_ledger_no]
    after = LiveView(me=live.me, records=tuple(at_next_step(r) if r in averaged else r for r in live.records))
    assume(not any(after.is_outlived(at_next_step(r)) for r in averaged))  # it could not have committed: another stage is far behind
    kept = held(after, stage, step + 1)
    assert all(r.next_done & ~held(live, stage, step + 1) == r.next_done & ~kept == 0 for r in averaged)
    assert kept & ~held(live, stage, step + 1) == 0


def test_nobody_waits_for_what_a_peer_left_behind_holds_of_the_next_step() -> None:
    """Hole 19: it was left out of the last step's rounds, and maybe reaches nobody who has the average."""
    behind = marked(with_overlap(member("p1")), 1, 2)
    assert held(view_of(behind), 0, 1) == 0b100
    assert held(view_of(behind, with_overlap(member("p2", step=1))), 0, 1) == 0
    assert held(view_of(replace(behind, phase=Phase.AVERAGED), with_overlap(member("p2", step=1))), 0, 1) == 0b100


def test_the_next_step_is_added_to_while_this_one_is_averaged_and_only_to_its_own_ledger() -> None:
    mine = with_overlap(member("p1", phase=Phase.AVERAGING, done=FULL))
    assert may_accumulate(mine, view_of(mine), step=1, index=2, accept_mark=(0, 1)) is None
    assert may_accumulate(mine, view_of(mine), step=0, index=2, accept_mark=(0, 0)) == "ledger is frozen"
    assert may_accumulate(mine, view_of(mine), step=2, index=2, accept_mark=(0, 1)) == "another step"
    mate = with_overlap(member("p2", step=1, done=0b100))
    assert may_accumulate(mine, view_of(mine, mate), step=1, index=2, accept_mark=(0, 1)) == "already held by a stage mate"
    behind = marked(with_overlap(member("p2")), 1, 2)
    assert may_accumulate(mine, view_of(mine, behind), step=1, index=2, accept_mark=(0, 1)) == "already held by a stage mate"
    assert may_accumulate(member("p1"), view_of(mine), step=1, index=2, accept_mark=(0, 0)) == "another step"


def test_when_a_peer_dies_its_microbatches_of_both_steps_are_missing() -> None:
    dead, lives = with_overlap(member("p1", done=0b11, phase=Phase.AVERAGING)), with_overlap(member("p2", done=0b111100))
    dead = marked(dead, 1, 4)
    both, rest = view_of(dead, lives), view_of(lives)
    assert (missing(both, 0, 0, NUM_MICROBATCHES), missing(both, 0, 1, NUM_MICROBATCHES)) == (0, FULL & ~0b10000)
    assert (missing(rest, 0, 0, NUM_MICROBATCHES), missing(rest, 0, 1, NUM_MICROBATCHES)) == (0b11, FULL)


def test_a_peer_that_its_mates_leave_out_does_not_say_at_which_step_its_stage_is() -> None:
    """Else what the stage lacks of its step would be computed by nobody for as long as one says that it is past it."""
    liar = member("c", step=3)
    mates = [member(name, step=2, sidelined=(liar.peer,)) for name in ("a", "b")]
    assert stage_step(view_of(liar, *mates), 0) == 2
    assert stage_step(view_of(liar, *(replace(mate, sidelined=()) for mate in mates)), 0) == 3
