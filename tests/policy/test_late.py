"""Trainers that are late: what they own is launched by the next in order, at once and not after a takeover time in each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from peerd.policy.route.launching import LATE_STEPS, Standstill, Work, launchable, with_banned
from peerd.policy.route.owning import first_owners, owned_among_first
from peerd.table.record import PeerId
from peerd.table.view import LiveView
from tests.strategies import FULL, NUM_MICROBATCHES, member, view_of

TAKEOVER_S = 4.0
ANEW = Standstill()

MANY = tuple(PeerId(f"p{number}") for number in range(8))


def missing_of(late: str, step: int) -> LiveView:
    """At this step only what one of eight trainers owns is missing."""
    records = [member(name, trains=True, step=step) for name in MANY] + [member("last", stage=1, step=step)]
    owned = owned_among_first(MANY, PeerId(late), step, NUM_MICROBATCHES)
    return view_of(*(replace(record, done=FULL & ~owned) for record in records))


def owned_by(late: str, from_step: int) -> Iterator[int]:
    """The steps of which a trainer owns something."""
    return (step for step in count(from_step) if work_of(missing_of(late, step), late, ANEW, 0.0).launches)


def work_of(live: LiveView, peer: str, still: Standstill, now_s: float) -> Work:
    return launchable(replace(live, me=PeerId(peer)), 2, NUM_MICROBATCHES, still, now_s, TAKEOVER_S)


def launching(live: LiveView, stills: dict[PeerId, Standstill], now_s: float) -> set[PeerId]:
    """Who of all trainers launches anything now."""
    works = {peer: work_of(live, peer, still, now_s) for peer, still in stills.items()}
    stills.update({peer: work.still for peer, work in works.items()})
    return {peer for peer, work in works.items() if work.launches}


def test_hole_34_what_a_trainer_owns_that_was_late_is_launched_at_once_by_the_next_and_it_gets_its_turn_again() -> None:
    steps, stills, times = owned_by("p3", 0), dict.fromkeys(MANY, ANEW), 1
    step, now_s = next(steps), 0.0
    for until in (LATE_STEPS, 2 * LATE_STEPS, 4 * LATE_STEPS):
        live = missing_of("p3", step)
        assert launching(live, stills, now_s) == {"p3"}
        assert launching(live, stills, now_s + 0.9 * TAKEOVER_S) == {"p3"}
        took_over = launching(live, stills, now_s + TAKEOVER_S)
        assert "p3" not in took_over
        assert all([late.times for late in still.late] == [times] for still in stills.values())
        last = step + until
        while (step := next(steps)) <= last:
            now_s += 100.0
            assert "p3" not in launching(missing_of("p3", step), stills, now_s)
            assert stills[MANY[0]].late[0].times == times, "no other is late, whoever stands in for it"
        times += 1
        now_s += 100.0


def test_hole_34_a_banned_trainer_is_late_at_once_and_once_for_each_time_that_it_gets_its_turn_again() -> None:
    """Nothing that it launches comes to the peer that has banned it."""
    step = next(owned_by("p3", 0))
    live, banned = missing_of("p3", step), {PeerId("p3"), PeerId("no trainer")}
    stills = {peer: with_banned(ANEW, live, banned, step) for peer in MANY}
    launch = launching(live, stills, 0.0)
    assert launch
    assert "p3" not in launch
    still = stills[MANY[0]]
    assert [(late.peer, late.until) for late in still.late] == [("p3", step + 1 + LATE_STEPS)]
    assert with_banned(still, live, banned, step + LATE_STEPS) == still
    assert [late.times for late in with_banned(still, live, banned, step + 1 + LATE_STEPS).late] == [2]
    assert with_banned(ANEW, live, banned, -1) == ANEW


def test_hole_53_a_trainer_that_its_stage_leaves_out_is_late_at_once() -> None:
    """It may say that its stage has averaged the step, and then launches nothing."""
    step = next(owned_by("p3", 0))
    told = missing_of("p3", step)
    live = view_of(*(replace(each, sidelined=(PeerId("p3"),)) if each.peer in MANY[4:] else each for each in told.records))
    launch = launching(live, dict.fromkeys(MANY, ANEW), 0.0)
    assert launch
    assert "p3" not in launch


def test_hole_34_where_most_trainers_would_be_late_something_else_stands_still() -> None:
    """A stage that commits for a minute, say: they all keep their turns."""
    live = view_of(*(member(name, trains=True) for name in MANY[:3]), member("z", stage=1))
    stills = dict.fromkeys(MANY[:3], ANEW)
    for turn in range(4):
        launching(live, stills, turn * TAKEOVER_S)
    assert all(still.late == () for still in stills.values())


def test_hole_61_a_trainer_that_launches_what_it_owns_one_by_one_is_late_after_a_takeover_time_all_the_same() -> None:
    num, trainers, liar = 64, MANY[:3], MANY[0]
    owned = [index for index in range(num) if owned_among_first(trainers, liar, 0, num) >> index & 1]
    still, now_s = ANEW, 0.0
    for number in range(len(owned)):
        absent = sum(1 << index for index in owned[number:])
        done = ((1 << num) - 1) & ~absent
        live = view_of(*(member(name, trains=True, done=done) for name in trainers), member("z", stage=1, done=done))
        still = launchable(replace(live, me=MANY[1]), 2, num, still, now_s, TAKEOVER_S).still
        if still.late:
            break
        now_s += 0.6 * TAKEOVER_S
    assert [late.peer for late in still.late] == [liar]
    assert now_s <= 2 * TAKEOVER_S


def test_hole_61_while_most_trainers_still_have_something_to_launch_none_is_late() -> None:
    num, trainers, still = 64, MANY[:3], ANEW
    for number in range(num // 2):
        done = (1 << number) - 1
        live = view_of(*(member(name, trains=True, done=done) for name in trainers), member("z", stage=1, done=done))
        still = launchable(replace(live, me=MANY[1]), 2, num, still, number * 0.6 * TAKEOVER_S, TAKEOVER_S).still
        if len({*first_owners(trainers, 0, still.absent, num)}) < 2:
            break
        assert still.late == ()
    assert number > 8


@pytest.mark.parametrize(("num_trainers", "num_microbatches"), [(8, 64), (40, 400)])
def test_hole_34_where_all_is_missing_of_a_large_step_nobody_is_late_though_the_first_of_it_are_one_trainers(
    num_trainers: int, num_microbatches: int
) -> None:
    names = [PeerId(f"p{number:02}") for number in range(num_trainers)]
    live = view_of(*(member(name, trains=True) for name in names), member("z", stage=1))
    still = ANEW
    for turn in range(4):
        still = launchable(live, 2, num_microbatches, still, turn * TAKEOVER_S, TAKEOVER_S).still
    assert still.late == ()


def test_a_trainer_alone_is_never_late() -> None:
    live = view_of(member("p0", trains=True), member("last", stage=1))
    stills = {MANY[0]: ANEW}
    for turn in range(4):
        assert launching(live, stills, turn * TAKEOVER_S) == {"p0"}
    assert stills[MANY[0]].late == ()
