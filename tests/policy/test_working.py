"""What a peer says of the step that its stage computes."""

from __future__ import annotations

import pytest
from hypothesis import given

from peerd.policy.step.acts import Wait
from peerd.policy.step.ledger import why_no_work
from peerd.table.record import PeerRecord
from peerd.table.view import LiveView
from tests.policy.test_stepping import decided
from tests.strategies import FULL, NUM_MICROBATCHES, live_views, member


@pytest.mark.parametrize(("mine", "mate", "told"), [(0b1, 0b110, 3), (0b1, 0, 1), (0, 0, 0)])
def test_the_normal_state_says_how_much_of_the_step_is_done(mine: int, mate: int, told: int) -> None:
    act = decided(member("p1", done=mine, trains=True), member("p2", done=mate), member("q", stage=1, done=FULL))
    assert isinstance(act, Wait)
    assert str(act) == f"working: {told} of {NUM_MICROBATCHES} microbatches done"


def test_a_whole_step_is_not_told_as_work() -> None:
    mine, mate = member("p2", done=0b1), member("p1", done=FULL & ~0b1)
    assert all("of" not in str(decided(each, other)).split() for each, other in ((mine, mate), (mate, mine)))


@given(view=live_views())
def test_it_is_called_work_only_where_a_microbatch_may_pass_all_stages(view: LiveView) -> None:
    reason = why_no_work(view, 2)
    is_served = all(view.serving(stage) for stage in range(2))
    assert (reason == "") == (is_served and any(record.trains for record in view.records))
    assert ("serves stage" in reason) == (not is_served)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ((member("p2", trains=True),), "wait: no peer in sight serves stage 1"),
        ((member("q", stage=1),), "wait: no peer in sight has the run's data"),
        ((member("q", stage=1, trains=True),), f"working: 1 of {NUM_MICROBATCHES} microbatches done"),
    ],
)
def test_a_peer_that_waits_for_others_does_not_say_that_it_works(others: tuple[PeerRecord, ...], told: str) -> None:
    assert str(decided(member("p1", done=0b1), *others)) == told
