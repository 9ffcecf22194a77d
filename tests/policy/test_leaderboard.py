"""What is shown of who computed how much: signed rows, this week's, and peers that are not named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.accounts import EVERY, WorkDone, Works
from peerd.policy.step.contributions import Contribution, StageContributions
from peerd.policy.step.leaderboard import NAMELESS, nameless, of_week, with_signed, without_names
from peerd.table.record import PeerId
from tests.policy.account_world import names, signed_by, some_account

A, B, C = names(3)
NUMBERS = st.dictionaries(st.sampled_from([A, B, C]), st.integers(1, 99).map(lambda n: WorkDone(1, n, 8 * n)), min_size=1)


def stage(rows: dict[PeerId, int], reporter: PeerId = A) -> StageContributions:
    told = tuple(Contribution(peer=peer, steps=1, microbatches=n, tokens=8 * n, stage=0, reporter=reporter) for peer, n in rows.items())
    return StageContributions(stage=0, first_step=5, last_step=9, steps=5, rows=told)


def account(step: int, works: Works, time_s: int = 1000):  # type: ignore[no-untyped-def]
    return signed_by(some_account(step, works), works, time_s), works


def test_this_week_is_what_came_after_the_account_of_a_week_ago() -> None:
    before, now = {A: WorkDone(9, 90, 900)}, {A: WorkDone(10, 100, 1000), B: WorkDone(1, 5, 50)}
    found = of_week(account(2 * EVERY, now), account(EVERY, before, 77))
    assert (found.week, found.since_s) == ({A: WorkDone(1, 10, 100), B: WorkDone(1, 5, 50)}, 77)
    assert of_week(account(EVERY, now), None).week == now
    assert of_week(account(EVERY, now), account(EVERY, now)).week == now, "a count that began anew"
    assert of_week(account(2 * EVERY, now), account(EVERY, now)).week == {}


SIGNED = of_week(account(EVERY, {A: WorkDone(9, 40, 320), B: WorkDone(9, 90, 720), C: WorkDone(1, 1, 8)}), None)


def test_what_is_signed_takes_the_place_of_smaller_counts() -> None:
    found = with_signed(stage({A: 50, B: 7}), SIGNED, EVERY + 2, 8)
    assert [(row.peer, row.microbatches, row.reporter) for row in found.rows] == [(B, 90, A), (A, 50, A), (C, 1, A)]
    assert (found.first_step, found.last_step, found.steps) == (0, EVERY - 1, EVERY)


def test_a_count_is_no_larger_than_what_is_signed_and_the_steps_since() -> None:
    """Else a reporter could claim anything of the time before the others came."""
    found = with_signed(stage({A: 57, B: 106, PeerId("made up"): 17}), SIGNED, EVERY + 2, 8)
    assert {row.peer: row.microbatches for row in found.rows} == {A: 40, B: 106, C: 1}


@given(NUMBERS, st.sets(st.sampled_from([A, B, C])))
def test_who_is_not_named_is_added_up_and_nothing_is_lost(works: Works, hidden: set[PeerId]) -> None:
    shown = nameless(works, hidden)
    assert sum(work.microbatches for work in shown.values()) == sum(work.microbatches for work in works.values())
    assert not hidden.intersection(shown)
    told = without_names(stage({peer: work.microbatches for peer, work in works.items()}), hidden)
    assert sum(row.microbatches for row in told.rows) == sum(work.microbatches for work in works.values())
    assert not hidden.intersection(row.peer for row in told.rows)
    assert not hidden.intersection(row.reporter for row in told.rows if row.reporter != row.peer)
    assert (NAMELESS in [row.peer for row in told.rows]) == bool(hidden.intersection(works))
