"""Which line a run needs, and what is said of one that is too slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.round.needs import StageTraffic, averaging_s, mbit, rounds_s, stage_need, too_slow, within_s
from peerd.policy.round.proposing import fit

MBIT = 125_000.0
TRAFFIC = StageTraffic(gradient_bytes=27_000_000, boundary_up=262_144, boundary_down=131_072)


def test_a_round_may_take_the_averaging_time_or_as_long_as_the_slowest_stage_computes() -> None:
    assert within_s(5.0, 100, []) == averaging_s(5.0) == pytest.approx(9.0)
    assert within_s(5.0, 100, [50.0, 20.0]) == 9.0
    assert within_s(5.0, 100, [50.0, 2.0]) == 50.0


def test_a_line_too_slow_for_the_averages_is_told_with_what_it_needs() -> None:
    need = stage_need(TRAFFIC, num_members=4, round_s=9.0, microbatches_per_s=2.0)
    assert too_slow(5 * MBIT, 100 * MBIT, need) == "its upload is too slow for this run (needs 24 Mbit/s, has 5)"
    assert too_slow(100 * MBIT, 5 * MBIT, need) == "its download is too slow for this run (needs 24 Mbit/s, has 5)"
    assert too_slow(24 * MBIT, 24 * MBIT, need) == ""
    assert too_slow(0, 0, need) == ""


def test_boundaries_need_what_a_peer_computes() -> None:
    need = stage_need(TRAFFIC, num_members=4, round_s=9.0, microbatches_per_s=2.0)
    assert (need.boundary_up, need.boundary_down) == (2 * 262_144, 2 * 131_072)


def test_a_peer_alone_in_its_stage_averages_with_nobody() -> None:
    assert too_slow(1.0, 1.0, stage_need(TRAFFIC, num_members=1, round_s=9.0, microbatches_per_s=0.0)) == ""


@given(st.integers(2, 8), st.floats(0.5, 40))
def test_a_member_that_needs_more_than_it_has_is_the_one_that_a_proposal_leaves_out(num_members: int, slow: float) -> None:
    need = stage_need(TRAFFIC, num_members, 9.0, 1.0)
    rates = [1000 * MBIT] * (num_members - 1) + [slow * MBIT]
    fitted = fit(rates, rates, [TRAFFIC.gradient_bytes], 9.0)
    assert (fitted.codecs[-1] < 0) == bool(too_slow(slow * MBIT, slow * MBIT, need))


@pytest.mark.parametrize(("rate", "text"), [(0.0, "0"), (24 * MBIT, "24"), (5.126 * MBIT, "5.13"), (1e9, "8000"), (1e12, "8000000")])
def test_rates_are_short(rate: float, text: str) -> None:
    assert mbit(rate) == text


def test_the_longest_round_is_that_of_the_stage_whose_slowest_member_takes_longest() -> None:
    rates = [[2.5e6, 2.5e6], [5e6, 0.625e6, 5e6], [1.0]]
    assert rounds_s([64_000_000, 64_000_000, 10**12], rates, 1e5) == pytest.approx((1 + 1 / 3) * 64e6 / 0.625e6)
    assert rounds_s([64_000_000], [[2.5e6, 1.0]], 1e5) == pytest.approx(640.0), "whoever says that it is as slow is not waited for so long"
    assert rounds_s([64_000_000, 1], [[2.5e6], []], 1e5) == 0.0
