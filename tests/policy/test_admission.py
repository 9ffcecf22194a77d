"""Admission: which calls are taken on, and whom a joiner downloads from."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.route.admission import able_to_compute, donors, newest_taken, slots_for, why_refuse_call, why_refuse_caller
from peerd.policy.step.ledger import at_next_step, ledger_of
from peerd.table.record import Lineage, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from tests.strategies import live_views, member, records, view_of


@given(records(), st.integers(0, 1), st.integers(0, 5), st.booleans())
def test_holes_4_and_17_a_call_is_taken_for_a_step_that_i_have_or_am_sure_to_have_next_and_for_the_one_before(
    mine: PeerRecord, stage: int, step: int, holds_previous: bool
) -> None:
    taken = why_refuse_call(mine, stage=stage, step=step, holds_previous=holds_previous) is None
    able = mine.stage == stage and mine.phase is not Phase.JOINING and not mine.leaving
    newest = mine.step + (mine.next_ledger_no > 0) + (mine.phase is Phase.AVERAGED)
    assert taken == (able and (mine.step <= step <= newest or (holds_previous and step == mine.step - 1)))


@given(records())
def test_what_is_taken_before_its_step_has_a_ledger_has_one_after_the_commit(mine: PeerRecord) -> None:
    committed = at_next_step(mine)
    assert ledger_of(mine) <= newest_taken(mine) <= ledger_of(committed)
    assert newest_taken(replace(mine, phase=Phase.ACCUMULATING)) == ledger_of(mine), "nothing waits for an average that is not there"


@given(live_views(), st.integers(0, 1), st.integers(0, 4))
def test_who_can_add_a_microbatch_computes_it_and_else_who_is_just_past_its_step(live: LiveView, stage: int, step: int) -> None:
    found = able_to_compute(live, stage, step)
    taken = [why_refuse_call(replace(r, leaving=False), stage=stage, step=step, holds_previous=True) is None for r in found]
    assert all(taken)
    staying = [r for r in live.serving(stage) if not r.leaving]
    assert bool(found) >= any(r.step in (step, step + 1) for r in staying)
    if any(r.step == step for r in staying):
        assert all(not r.leaving and r.step <= step for r in found)


def test_hole_22_a_callee_behind_a_dead_link_is_asked_only_if_no_other_is_as_able() -> None:
    me, near, far = member("me", unreached=(PeerId("far"),)), member("near", stage=1), member("far", stage=1)
    assert [r.peer for r in able_to_compute(view_of(me, near, far), 1, 0)] == ["near"]
    assert [r.peer for r in able_to_compute(view_of(me, replace(near, leaving=True), far), 1, 0)] == ["far"]
    assert [r.peer for r in able_to_compute(view_of(me, replace(near, step=4), far), 1, 0)] == ["far"]


def test_hole_85_a_later_stage_takes_microbatches_from_those_that_serve_the_stage_before_it() -> None:
    caller, mine = member("caller", stage=1), member("me", stage=2)
    live = view_of(mine, caller, member("first", stage=0))
    assert why_refuse_caller(caller, live, 2) is None
    assert why_refuse_caller(caller, view_of(mine), 2) is None, "it calls, so it is there"
    for other in (None, mine, member("first", stage=0), replace(caller, phase=Phase.JOINING)):
        assert "not known here as a peer that serves stage 1" in str(why_refuse_caller(other, live, 2))
    assert why_refuse_caller(None, live, 0) is None, "anybody may launch"


def test_hole_85_who_is_left_out_of_its_stage_calls_no_later_one() -> None:
    out, *mates = (member(name, stage=0, sidelined=() if name == "out" else (PeerId("out"),)) for name in ("out", "one", "other"))
    live = view_of(member("me", stage=1), out, *mates)
    assert why_refuse_caller(out, live, 1) == "most of stage 0 leave the caller out"
    assert why_refuse_caller(mates[0], live, 1) is None


def test_a_sidelined_callee_is_not_asked_where_its_mates_are_just_past_the_step() -> None:
    """It would be refused by the next stage, again and again."""
    near, other, out = (member(name, stage=1, sidelined=() if name == "out" else (PeerId("out"),)) for name in ("near", "other", "out"))
    past = [replace(each, step=1) for each in (near, other)]
    assert [r.peer for r in able_to_compute(view_of(member("me"), *past, out), 1, 0)] == ["near", "other"]


def test_hole_36_a_sidelined_callee_is_asked_only_if_no_other_is_as_able() -> None:
    near, other, out = (member(name, stage=1, sidelined=() if name == "out" else (PeerId("out"),)) for name in ("near", "other", "out"))
    assert [r.peer for r in able_to_compute(view_of(member("me"), near, other, out), 1, 0)] == ["near", "other"]
    assert [r.peer for r in able_to_compute(view_of(member("me"), replace(near, step=4), replace(other, step=4), out), 1, 0)] == ["out"]


@given(st.integers(1, 40), st.integers(3, 1000))
def test_the_step_before_has_a_slot_more_and_the_next_one_fewer_but_never_none(slots: int, far: int) -> None:
    fewer = max(1, slots - 1)
    assert [slots_for(ahead, slots) for ahead in (-1, 0, 1, 2)] == [slots + 1, slots, fewer, fewer]
    assert slots_for(-far, slots) == slots_for(far, slots) == slots, "an evaluation of long ago takes no more memory than others"


@given(live_views(), st.integers(0, 1), st.frozensets(st.sampled_from([PeerId(f"peer{n}") for n in range(5)])))
def test_donors_are_the_stages_serving_peers_newest_first_and_those_tried_last(
    live: LiveView, stage: int, tried: frozenset[PeerId]
) -> None:
    found = donors(live, stage, tried)
    assert all(r.stage == stage and r.phase is not Phase.JOINING and r.peer != live.me for r in found)
    fresh = [r for r in found if r.peer not in tried]
    assert found[: len(fresh)] == fresh
    assert [r.step for r in fresh] == sorted((r.step for r in fresh), reverse=True)


def test_of_two_donors_at_one_step_the_better_lineage_is_asked_first() -> None:
    inexact, exact = member("a", step=3, lineage=Lineage(1, b"")), member("b", step=3, lineage=Lineage(0, b""))
    me = member("me", phase=Phase.JOINING)
    assert donors(view_of(me, inexact, exact), 0, frozenset()) == [exact, inexact]
    assert donors(view_of(me, inexact, replace(exact, step=2)), 0, frozenset())[0] == inexact


def test_hole_50_in_a_run_that_certifies_those_that_are_ahead_or_astray_alone_give_last() -> None:
    me, ahead, astray = member("me", phase=Phase.JOINING), member("a", step=9), member("b", step=3, lineage=Lineage(0, b""))
    one, two = (member(name, step=3, lineage=Lineage(0, b"most")) for name in ("c", "d"))
    assert {r.peer for r in donors(view_of(me, ahead, astray, one, two), 0, frozenset(), certifies=True)[:2]} == {"c", "d"}
    assert donors(view_of(me, ahead, astray, one, two), 0, frozenset())[:2] == [ahead, astray]
    assert donors(view_of(me, ahead, one), 0, frozenset(), certifies=True) == [ahead, one], "of two nobody can say"


def test_a_leaving_peer_gives_its_state_when_nobody_else_is_as_far() -> None:
    """Else a mate told to download from it would find no donor and ask again at once, for ever."""
    me, leaving, stays = member("me", phase=Phase.JOINING), member("a", step=3, leaving=True), member("b", step=3)
    assert donors(view_of(me, leaving), 0, frozenset()) == [leaving]
    assert donors(view_of(me, leaving, stays), 0, frozenset()) == [stays, leaving]
    assert donors(view_of(me, leaving, replace(stays, step=2)), 0, frozenset())[0] == leaving


def test_of_donors_that_are_as_good_one_that_means_to_stay_is_asked_first_and_of_those_a_fast_line() -> None:
    plain, reliable = member("a", step=3, up=1 << 30), member("b", step=3, up=1 << 20, stays_hours=2)
    faster = member("c", step=3, up=1 << 24, stays_hours=1)
    me = member("me", phase=Phase.JOINING)
    assert donors(view_of(me, plain, reliable, faster), 0, frozenset()) == [faster, reliable, plain]
    assert donors(view_of(me, replace(plain, step=4), reliable), 0, frozenset())[0].peer == "a"
    assert donors(view_of(me, plain, replace(reliable, leaving=True)), 0, frozenset())[0] == plain
