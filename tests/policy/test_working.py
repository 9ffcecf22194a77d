"""What a peer says of the step that its stage computes."""

from __future__ import annotations

import pytest

from peerd.policy.step.acts import Wait
from tests.policy.test_stepping import decided
from tests.strategies import FULL, NUM_MICROBATCHES, member


@pytest.mark.parametrize(("mine", "mate", "told"), [(0b1, 0b110, 3), (0b1, 0, 1), (0, 0, 0)])
def test_the_normal_state_says_how_much_of_the_step_is_done(mine: int, mate: int, told: int) -> None:
    act = decided(member("p1", done=mine), member("p2", done=mate), member("q", stage=1, done=FULL))
    assert isinstance(act, Wait)
    assert str(act) == f"working: {told} of {NUM_MICROBATCHES} microbatches done"


def test_a_whole_step_is_not_told_as_work() -> None:
    mine, mate = member("p2", done=0b1), member("p1", done=FULL & ~0b1)
    assert all("of" not in str(decided(each, other)).split() for each, other in ((mine, mate), (mate, mine)))
