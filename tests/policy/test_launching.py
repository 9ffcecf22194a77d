"""Launching: who launches which microbatch, when another takes over, and that nothing missing stays unlaunched."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from peerd.policy.route.launching import (
    Standstill,
    WayTime,
    Work,
    at_first,
    first_owned,
    first_step_owned,
    launchable,
    on_the_way,
    share,
    trainers_of,
    what_launches_hang_on,
    window,
)
from peerd.policy.step.ledger import indices, is_averaged, stages_missing, work_step
from peerd.table.record import PeerId, Phase, StageSummary, Void
from peerd.table.view import LiveView
from tests.strategies import FULL, NUM_MICROBATCHES, live_views, member, view_of
from tests.tiny_run import tiny_manifest

TAKEOVER_S = 4.0
sizes = (2, NUM_MICROBATCHES)


ANEW = Standstill()


def absent_of(work: Work) -> set[tuple[int, int]]:
    return {(work.still.step, index) for index in indices(work.still.absent)}


def as_seen_by(live: LiveView, peer: PeerId) -> LiveView:
    return replace(live, me=peer)


@given(live_views())
def test_exactly_one_trainer_launches_a_microbatch_that_has_just_gone_missing(live: LiveView) -> None:
    launches = [
        launch for peer in trainers_of(live, 0) for launch in launchable(as_seen_by(live, peer), *sizes, ANEW, 0.0, TAKEOVER_S).launches
    ]
    absent = absent_of(launchable(live, *sizes, ANEW, 0.0, TAKEOVER_S))
    if trainers_of(live, 0):
        assert sorted((launch.step, launch.index) for launch in launches) == sorted(absent)


@given(live_views(), st.integers(0, 3))
def test_what_is_first_owned_is_shared_out_among_the_trainers(live: LiveView, step: int) -> None:
    shares = [first_owned(as_seen_by(live, peer), step, NUM_MICROBATCHES) for peer in trainers_of(live, step)]
    assert sorted(index for each in shares for index in each) == (list(range(NUM_MICROBATCHES)) if shares else [])


@given(live_views(), st.integers(0, FULL), st.booleans(), st.data())
def test_that_a_ledger_grows_gives_nobody_more_to_launch(live: LiveView, more: int, overlaps: bool, data: st.DataObject) -> None:
    grown = data.draw(st.sampled_from(live.records))
    after = view_of(*(replace(r, done=r.done | more) if r.peer == grown.peer else r for r in live.records))
    assert list(map(what_launches_hang_on, after.records)) == list(map(what_launches_hang_on, live.records))
    for peer in trainers_of(live, 0):
        before, now = (
            {
                (launch.step, launch.index, stage)
                for launch in launchable(as_seen_by(view, peer), *sizes, ANEW, 0.0, TAKEOVER_S, overlaps=overlaps).launches
                for stage in launch.accumulate
            }
            for view in (live, after)
        )
        assert now <= before


@pytest.mark.parametrize(
    "changes",
    [{"voids": (Void(PeerId("b"), 1, 0),)}, {"leaving": True}, {"ledger_no": 7}, {"next_ledger_no": 7}, {"phase": Phase.AVERAGED}]
    + [{"summary": StageSummary(peers=1, trainers=1, queue=0, throughput=1.0, held=held)} for held in (0, 1)]
    + [{"incarnation": 2}, {"trains_from": 3}],
)
def test_what_may_bring_work_makes_a_trainer_look(changes: dict[str, Any]) -> None:
    record = member("a", trains=True)
    assert what_launches_hang_on(replace(record, **changes)) != what_launches_hang_on(record)


@given(live_views())
def test_hole_18_whatever_stays_missing_is_in_the_end_launched_by_every_live_trainer(live: LiveView) -> None:
    names = trainers_of(live, 0)
    stills, launched = dict.fromkeys(names, ANEW), defaultdict[tuple[int, int], set[PeerId]](set)
    for turn in range(2 * len(names)):
        for peer in names:
            work = launchable(as_seen_by(live, peer), *sizes, stills[peer], turn * TAKEOVER_S, TAKEOVER_S)
            stills[peer] = work.still
            for launch in work.launches:
                launched[launch.step, launch.index].add(peer)
        assert all(len(found) >= min(turn + 1, 2, len(names)) for found in launched.values())
    assert all(found == set(names) for found in launched.values())


def test_none_is_taken_over_while_others_are_done_or_lost() -> None:
    """Microbatches that take a minute each are not late after a takeover time, if the step goes on."""
    still, now_s = ANEW, 0.0
    for done in (0b000000, 0b100000, 0b110000, 0b111000, 0b110000):
        first = member("p1", trains=True, done=done)
        live = view_of(first, member("p2", trains=True), member("last", stage=1, done=done))
        mine = {index for index in first_owned(live, 0, NUM_MICROBATCHES) if not done >> index & 1}
        work = launchable(live, *sizes, still, now_s, TAKEOVER_S)
        assert {launch.index for launch in work.launches} == mine
        still, now_s = work.still, now_s + 0.9 * TAKEOVER_S
    late = launchable(live, *sizes, still, now_s + TAKEOVER_S, TAKEOVER_S)
    assert {launch.index for launch in late.launches} == {0, 1, 2, 3}
    assert {launch.index for launch in late.launches if launch.again} == {0, 1, 2, 3} - mine


@given(live_views())
def test_a_launch_is_for_the_work_step_and_for_the_stages_that_miss_it(live: LiveView) -> None:
    launches = launchable(live, *sizes, ANEW, 99.0, TAKEOVER_S).launches
    step = work_step(live, 2)
    for launch in launches:
        assert step is not None
        is_early = launch.step == step + 1 and is_averaged(live, 2, step)
        assert launch.step == step or is_early
        wanted = stages_missing(live, 2, launch.step, NUM_MICROBATCHES, is_early)
        assert launch.accumulate == {stage for stage, absent in wanted.items() if absent >> launch.index & 1}
        assert launch.accumulate


@given(live_views(), st.integers(1, 5))
def test_nothing_is_launched_from_the_last_step_on(live: LiveView, last_step: int) -> None:
    step = work_step(live, 2)
    assume(step is not None)
    endless = launchable(live, *sizes, ANEW, 0.0, TAKEOVER_S)
    ending = launchable(live, *sizes, ANEW, 0.0, TAKEOVER_S, last_step)
    over = step is not None and step + is_averaged(live, 2, step) >= last_step
    assert ending == (Work() if over else endless)


@given(live_views(), st.integers(0, 5))
def test_where_steps_overlap_this_step_comes_first_and_the_next_counts_as_missing_only_after_it(live: LiveView, last_step: int) -> None:
    alone = launchable(live, *sizes, ANEW, 0.0, TAKEOVER_S, last_step)
    work = launchable(live, *sizes, ANEW, 0.0, TAKEOVER_S, last_step, overlaps=True)
    assert work.launches[: len(alone.launches)] == alone.launches
    assert work.missing >= alone.missing
    step = work_step(live, 2)
    early = work.launches[len(alone.launches) :]
    assert all(step is not None and launch.step == step + 1 and launch.accumulate for launch in early)
    assert not last_step or all(launch.step < last_step for launch in work.launches)
    if alone.still.absent:
        assert work.still == alone.still
    else:
        assert {(launch.step, launch.index) for launch in early} <= absent_of(work)


def test_the_next_step_is_launched_for_stages_at_this_one_and_at_the_next() -> None:
    """While stage 0 averages what stage 1 has committed already."""
    averages = member("p1", trains=True, phase=Phase.AVERAGING, done=FULL, next_ledger_no=1, next_done=0b1)
    ahead = member("p2", stage=1, step=1, next_ledger_no=2, done=0b11)
    work = launchable(view_of(averages, ahead), *sizes, ANEW, 0.0, TAKEOVER_S, overlaps=True)
    assert [(launch.step, launch.index, set(launch.accumulate)) for launch in work.launches] == [
        (1, 1, {0}),
        *((1, index, {0, 1}) for index in range(2, NUM_MICROBATCHES)),
    ]
    assert absent_of(work) == {(1, index) for index in range(1, NUM_MICROBATCHES)}
    assert launchable(view_of(averages, ahead), *sizes, ANEW, 0.0, TAKEOVER_S) == Work()


def test_the_next_step_is_launched_as_soon_as_all_have_averaged_this_one() -> None:
    """Its microbatches are on their way while it is being made. Before that nothing is: whoever has no average yet would refuse them."""
    first = [member(name, trains=True, phase=Phase.AVERAGED, done=FULL) for name in ("p1", "p2")]
    last = member("p3", stage=1, phase=Phase.AVERAGED, done=FULL)
    work = launchable(view_of(*first, last), *sizes, ANEW, 0.0, TAKEOVER_S)
    assert absent_of(work) == {(1, index) for index in range(NUM_MICROBATCHES)}
    assert work.launches
    assert {launch.step for launch in work.launches} == {1}
    assert all(launch.accumulate == {0, 1} for launch in work.launches)
    committed = replace(first[1], phase=Phase.ACCUMULATING, step=1, done=0b1)
    assert launchable(view_of(first[0], committed, last), *sizes, ANEW, 0.0, TAKEOVER_S).still == work.still, "stage 1 lacks that one, too"
    for waits in (replace(last, phase=Phase.AVERAGING), replace(last, phase=Phase.ACCUMULATING)):
        assert launchable(view_of(*first, waits), *sizes, ANEW, 0.0, TAKEOVER_S) == Work()
        assert launchable(view_of(*first, last, replace(waits, peer=PeerId("p4"))), *sizes, ANEW, 0.0, TAKEOVER_S) == Work()


def test_a_stage_left_behind_is_replayed_alone() -> None:
    """Hole 4: stage 0 lost its average after stage 1 had committed."""
    behind, ahead = member("p2", trains=True), member("p3", stage=1, step=1)
    launches = launchable(view_of(behind, ahead), *sizes, ANEW, 0.0, TAKEOVER_S).launches
    assert [launch.index for launch in launches] == list(range(NUM_MICROBATCHES))
    assert {launch.accumulate for launch in launches} == {frozenset({0})}
    assert {launch.step for launch in launches} == {0}


def test_nothing_is_launched_while_a_stage_has_nobody() -> None:
    assert launchable(view_of(member("p1", trains=True)), *sizes, ANEW, 0.0, TAKEOVER_S) == Work()


@given(live_views())
def test_a_newcomer_owns_nothing_of_the_step_under_way_nor_of_the_next_unless_nobody_else_trains(live: LiveView) -> None:
    others = [record.peer for record in live.records if record.trains and record.peer != live.me]
    found = first_step_owned(live, 2, overlaps=False)
    step = work_step(live, 2) or 0
    assert found == (step + 2 if others else 0)
    newcomer = member("newcomer", trains=True, trains_from=found)
    seen = replace(live, records=(*live.records, newcomer))
    assert all((newcomer.peer in trainers_of(seen, at)) == (not others) for at in (step, step + 1))
    assert first_step_owned(live, 2, overlaps=True) == (found + 1 if others else 0)


def test_a_leaving_trainer_owns_its_share_until_it_says_that_it_trains_no_more() -> None:
    """What it has in flight would be launched twice, and of two ledgers that then meet one is dropped."""
    leaving, stays = member("p1", leaving=True, trains=True), member("p2", trains=True, stage=1)
    assert trainers_of(view_of(leaving, stays), 0) == ["p1", "p2"]
    assert trainers_of(view_of(replace(leaving, trains=False), stays), 0) == ["p2"]


@given(live_views(), st.integers(1, 8))
def test_a_window_is_never_shut_and_never_more_than_the_slots(live: LiveView, slots: int) -> None:
    narrowest = min(len(live.serving(stage)) for stage in range(2))
    assert 1 <= window(live, 2, slots) <= max(1, slots * max(1, narrowest))


@pytest.mark.parametrize("peers", [1, 2, 4])
def test_with_two_stages_as_many_are_in_flight_as_keep_all_busy_for_the_usual_slots_suffice(peers: int) -> None:
    live = view_of(*(member(f"{stage}{number}", stage=stage) for stage in (0, 1) for number in range(peers)))
    assert window(live, 2, tiny_manifest(2).slots) == window(live, 2, 1000) == 6 * peers


@given(live_views(), st.integers(1, 200), st.booleans())
def test_the_trainers_parts_of_a_window_are_as_large_as_what_they_have_to_launch(live: LiveView, total: int, overlaps: bool) -> None:
    works = [launchable(as_seen_by(live, peer), *sizes, ANEW, 0.0, TAKEOVER_S, overlaps=overlaps) for peer in trainers_of(live, 0)]
    for work in works:
        assert abs(share(total, work) - total * work.num_mine / max(1, work.missing)) <= 1
    if works and works[0].missing:
        assert abs(sum(share(total, work) for work in works if work.num_mine) - total) <= len(works)


@given(live_views(), st.integers(1, 8), st.integers(0, 40), st.integers(0, 40), st.integers(0, 32))
def test_long_links_widen_the_window_as_far_as_memory_goes_and_never_narrow_it(
    live: LiveView, slots: int, one: int, other: int, most: int
) -> None:
    fewer, more = sorted((one, other))
    plain, narrow, wide = (window(live, 2, slots, underway, most) for underway in (0, fewer, more))
    assert plain == window(live, 2, slots)
    assert plain <= narrow <= wide <= plain + more
    narrowest = max(1, min(len(live.serving(stage)) for stage in range(2)))
    assert wide <= max(plain, most * narrowest)


@given(live_views(), st.integers(0, 3), st.integers(0, 40), st.integers(1, 100))
def test_at_first_go_out_what_keeps_the_first_stage_busy_and_what_is_on_the_links(live: LiveView, step: int, more: int, total: int) -> None:
    first, fewer = live.serving(0), at_first(live, step, 0, total)
    assert fewer <= at_first(live, step, more, total) <= total
    if any(record.step >= step for record in first):
        assert fewer == total
    else:
        assert fewer == min(total, 2 * len(first))
        assert at_first(live, step, more, 1000) == 2 * len(first) + more


@given(live_views(), st.integers(1, 64), st.floats(0.0, 10.0))
def test_so_many_are_on_the_way_that_the_slowest_stage_never_waits(live: LiveView, size: int, way_s: float) -> None:
    """Little's law for forward passes alone, three of which take as long as a microbatch; to the whole one below."""
    rate = 3 * min(sum(record.throughput for record in live.serving(stage)) for stage in range(2)) / size
    assert rate * way_s - 1 <= on_the_way(live, 2, size, way_s) <= rate * way_s


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 9.0)), max_size=8), min_size=2, max_size=5))
def test_the_way_is_the_median_peers_least_of_this_step_and_the_last(steps: list[list[tuple[str, float]]]) -> None:
    """A link that has become longer is known for it after a step; waiting for one another on a busy one never counts."""
    way = WayTime()
    for step in steps:
        way.next_step()
        for first, way_s in step:
            way.note(PeerId(first), way_s)
    told = steps[-1] + steps[-2]
    least_s = sorted(min(way_s for name, way_s in told if name == first) for first in {name for name, _ in told})
    assert way.least_s == (least_s[len(least_s) // 2] if least_s else 0.0)


def test_one_peer_that_tells_that_it_held_a_microbatch_all_the_time_makes_no_way_short() -> None:
    way = WayTime()
    for name, way_s in (("a", 0.3), ("liar", 0.0), ("b", 0.4), ("a", 0.5), ("liar", math.nan), ("liar", -1e9)):
        way.note(PeerId(name), way_s)
    assert way.least_s == 0.3


def test_hole_18_a_trainer_that_can_call_nobody_of_the_first_stage_owns_nothing() -> None:
    first, other = member("a", trains=True), member("b", trains=True, phase=Phase.JOINING)
    assert trainers_of(view_of(first, other), 0) == ["a", "b"]
    assert trainers_of(view_of(first, replace(other, unreached=(first.peer,))), 0) == ["a"]
    assert trainers_of(view_of(member("a", trains=False), replace(other, unreached=(first.peer,))), 0) == ["b"]


def test_hole_22_a_trainer_that_stepped_aside_behind_a_dead_link_owns_nothing_of_steps_that_it_cannot_deliver() -> None:
    """It is of the first stage itself, but at an older step, and cannot call the mate that goes on."""
    goes_on, aside = member("a", trains=True, step=7), member("b", trains=True, step=5, unreached=(PeerId("a"),))
    assert trainers_of(view_of(goes_on, aside), 7) == ["a"]
    assert trainers_of(view_of(goes_on, replace(aside, step=7)), 7) == ["a", "b"]
    assert trainers_of(view_of(goes_on, replace(aside, step=6, phase=Phase.AVERAGED)), 7) == ["a", "b"]
    assert trainers_of(view_of(goes_on, replace(aside, unreached=())), 7) == ["a", "b"], "it calls the mate"
