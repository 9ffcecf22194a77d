"""Whose clock is wrong is what most clocks say; one against one proves nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.swarm.clocks import AGREED, MAX_CLOCK_OFFSET_S, ClockOffset, Whose, judge_clocks, span
from peerd.table.record import PeerId

DAY_S = 86400.0
NAMES = "abcdefgh"


def asked(*offsets_s: float) -> Sequence[ClockOffset]:
    return [ClockOffset(PeerId(name), offset_s, 0.1) for name, offset_s in zip(NAMES, offsets_s, strict=False)]


@pytest.mark.parametrize(
    ("offsets_s", "whose", "words"),
    [
        ((), Whose.NOBODYS, ""),
        ((0.5, -2.0), Whose.NOBODYS, ""),
        ((DAY_S,), Whose.UNKNOWN, "this machine's clock is 24.0 hours ahead of a's, and no other peer tells whose is right"),
        ((DAY_S, 0.0), Whose.THEIRS, "this machine's clock is 24.0 hours ahead of a's, and agrees with those of 1 others"),
        ((-3 * DAY_S, -3 * DAY_S + 1), Whose.MINE, "this machine's clock is 3.0 days behind those of 2 peers, which agree"),
        ((DAY_S, DAY_S, 0.0), Whose.UNKNOWN, "ahead of those of 2 peers, and no other peer tells whose is right"),
        ((DAY_S, -DAY_S), Whose.UNKNOWN, "ahead of a's"),
        ((DAY_S, -DAY_S, 0.0), Whose.THEIRS, "those of 2 peers, and agrees with those of 1 others"),
        ((90.0, 90.0, 90.0, 0.0), Whose.MINE, "90.0 s ahead of those of 3 peers, which agree"),
    ],
)
def test_the_larger_group_of_clocks_that_agree_is_right(offsets_s: Sequence[float], whose: Whose, words: str) -> None:
    verdict = judge_clocks(asked(*offsets_s))
    assert verdict.whose is whose
    assert words in verdict.title
    assert bool(verdict.remedy) == (verdict != AGREED)


@given(st.integers(1, 8), st.floats(2 * MAX_CLOCK_OFFSET_S, 1e9), st.data())
def test_a_right_majority_is_never_told_that_its_clocks_are_off_and_the_wrong_peer_always_is(
    num_right: int, off_s: float, data: st.DataObject
) -> None:
    """One clock is off; all others agree to within what is allowed of two."""
    right_s = data.draw(st.lists(st.floats(-MAX_CLOCK_OFFSET_S / 2, MAX_CLOCK_OFFSET_S / 2), min_size=num_right, max_size=num_right))
    as_the_wrong_one = judge_clocks(asked(*(off_s + each for each in right_s)))
    assert as_the_wrong_one.whose is (Whose.MINE if num_right > 1 else Whose.UNKNOWN)
    as_a_right_one = judge_clocks(asked(-off_s, *right_s))
    assert as_a_right_one.whose is Whose.THEIRS


def test_a_difference_is_told_in_units_that_one_can_grasp() -> None:
    assert [span(each) for each in (3.04, -119.0, 7000.0, -86400.0, 1e6)] == [
        "3.0 s",
        "119.0 s",
        "116.7 minutes",
        "24.0 hours",
        "11.6 days",
    ]
