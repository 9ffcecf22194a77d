"""Named states: each appears when it is so, says why, and goes away by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.swarm.health import STALLED_AFTER_S, Facts, HealthNote, advance, health
from peerd.table.record import AverageId, Lineage, PeerRecord, Phase
from peerd.table.view import LiveView
from tests.strategies import FULL, NUM_MICROBATCHES, live_views, member, view_of

ME = member("me", step=5, trains=True)


def facts_of(*records: PeerRecord, still_s: float = 0.0, step_s: float = 0.0, complete: bool = False) -> Facts:
    return Facts(
        mine=records[0],
        live=view_of(*records),
        num_stages=2,
        num_microbatches=NUM_MICROBATCHES,
        decision="microbatches are still missing",
        still_s=still_s,
        step_s=step_s,
        complete=complete,
    )


def codes(facts: Facts) -> list[str]:
    return [item.code for item in health(facts)]


def stalled(facts: Facts) -> HealthNote:
    return next(item for item in health(facts) if item.code == "stalled")


def test_a_run_that_goes_on_has_nothing_to_tell() -> None:
    assert health(facts_of(ME, member("a", stage=1, step=5))) == []


def test_an_empty_stage_is_named_and_is_not_called_a_stall_too() -> None:
    assert codes(facts_of(ME, still_s=1e6)) == ["stage-empty"]
    assert "stage 1" in health(facts_of(ME))[0].title


def test_a_run_without_data_says_so() -> None:
    assert codes(facts_of(replace(ME, trains=False), member("a", stage=1, step=5))) == ["no-trainer"]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (member("a", stage=1, step=5, done=0b11), "stage 0 lacks 6 of 6 microbatches of step 5"),
        (member("a", stage=1, step=4, done=0b11), "stage 1 lacks 4 of 6 microbatches of step 4"),
        (member("a", stage=1, step=4, done=FULL), "stage 1 has not averaged step 4"),
        (member("a", stage=1, step=4, phase=Phase.AVERAGED, average_id=AverageId(b"x")), "stage 1 has not averaged step 4"),
    ],
)
def test_a_stall_names_the_stage_that_is_behind_and_what_it_lacks(other: PeerRecord, reason: str) -> None:
    facts = facts_of(ME, other, still_s=STALLED_AFTER_S)
    assert reason in stalled(facts).title
    assert "microbatches are still missing" in stalled(facts).title
    assert stalled(facts).severity == "problem"


def test_a_stall_is_called_one_only_after_long_for_this_run_and_never_at_its_end() -> None:
    other = member("a", stage=1, step=5)
    assert codes(facts_of(ME, other, still_s=STALLED_AFTER_S - 1)) == []
    assert codes(facts_of(ME, other, still_s=100.0, step_s=40.0)) == []
    assert codes(facts_of(ME, other, still_s=130.0, step_s=40.0)) == ["stalled"]
    assert codes(facts_of(ME, other, still_s=1e6, complete=True)) == []


def test_a_joiner_behind_its_stage_and_steps_given_up_are_named() -> None:
    joiner = replace(ME, phase=Phase.JOINING, step=3)
    assert codes(facts_of(joiner, member("a", step=5, trains=True), member("b", stage=1, step=5))) == ["behind"]
    assert codes(facts_of(replace(joiner, step=0), member("a", step=5), member("b", stage=1, step=5))) == ["joining"]
    given_up = replace(ME, lineage=Lineage(2, b"x"))
    assert codes(facts_of(given_up, member("b", stage=1, step=5))) == ["inexact"]


@given(live_views(), st.floats(0, 1e6))
def test_the_same_view_is_no_progress(live: LiveView, later_s: float) -> None:
    before = advance(None, live, 2, NUM_MICROBATCHES, 0.0)
    assert advance(before, live, 2, NUM_MICROBATCHES, later_s) == before


def test_what_falls_back_is_no_progress_until_it_comes_further_than_before() -> None:
    def at(done: int, step: int = 5, phase: Phase = Phase.ACCUMULATING) -> LiveView:
        return view_of(replace(ME, done=done, step=step, phase=phase), member("a", stage=1, step=5))

    progress = advance(None, at(0b11), 2, NUM_MICROBATCHES, 0.0)
    for number, view in enumerate((at(0), at(0b11), at(0b11, phase=Phase.AVERAGING), at(0b11))):
        progress = advance(progress, view, 2, NUM_MICROBATCHES, 1.0 + number)
    assert progress.since_s == 0.0, "a dropped ledger that is filled again has come no further"
    assert advance(progress, at(0b111), 2, NUM_MICROBATCHES, 9.0).since_s == 9.0
    assert advance(progress, at(0, step=6), 2, NUM_MICROBATCHES, 9.0).since_s == 9.0
    assert advance(progress, at(0, step=2), 2, NUM_MICROBATCHES, 9.0).since_s == 9.0, "resumed at an earlier step"
