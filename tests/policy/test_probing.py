"""When a peer probes its uplink, and what it believes of it then."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.round.probing import FIRST_BYTES, KEPT, LEAST_PAUSE_S, LINE_SHARE, MOST_BEYOND, MOST_PAUSES, Probes, told_rate

MBIT = 125_000.0
RATES = st.floats(1.0, 1e10)


def test_the_first_probe_is_due_at_once_and_the_next_one_after_a_pause_if_the_line_is_idle() -> None:
    probes = Probes()
    assert probes.rate is None
    assert probes.is_due(0.0, is_idle=True)
    probes.saw(20 * MBIT, 0.2, 0.0)
    assert not probes.is_due(LEAST_PAUSE_S - 1, is_idle=True)
    assert probes.is_due(LEAST_PAUSE_S, is_idle=True)
    assert not probes.is_due(LEAST_PAUSE_S, is_idle=False)
    assert probes.is_due(2 * LEAST_PAUSE_S, is_idle=False)


def test_probes_that_agree_become_rare_and_one_that_differs_makes_them_frequent_again() -> None:
    probes, now_s, pauses_s = Probes(), 0.0, list[float]()
    for rate in [20 * MBIT] * 10 + [5 * MBIT] * 2:
        probes.saw(rate, 0.2, now_s)
        due_s = next(later for later in range(100_000) if probes.is_due(now_s + later, is_idle=True))
        pauses_s.append(due_s)
        now_s += due_s
    assert pauses_s[:6] == [LEAST_PAUSE_S * times for times in (1, 2, 4, 8, 16, 16)]
    assert pauses_s[9:] == [LEAST_PAUSE_S * times for times in (MOST_PAUSES, 1, 1)]


@given(st.floats(0.0, 1e4), st.floats(0.0, 1e6))
def test_probes_take_a_small_share_of_the_lines_time(took_s: float, now_s: float) -> None:
    probes = Probes()
    probes.saw(MBIT, took_s, now_s)
    assert not probes.is_due(now_s + 0.99 * took_s / LINE_SHARE, is_idle=True)


@given(st.lists(RATES, min_size=2, max_size=3), RATES)
def test_one_liar_among_tellers_raises_nothing(honest: list[float], lie: float) -> None:
    probes = Probes()
    for rate in [*honest[: KEPT - 1], lie]:
        probes.saw(rate, 0.1, 0.0)
    assert probes.rate is not None
    assert probes.rate <= max(honest[: KEPT - 1])


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_rate_counts_as_a_probe_that_failed(rate: float) -> None:
    probes = Probes()
    probes.saw(rate, 1.0, 0.0)
    assert probes.rate is None
    assert not probes.is_due(LEAST_PAUSE_S - 1, is_idle=True)


def test_a_fast_line_is_filled_with_more_bytes_within_what_a_probe_may_take() -> None:
    probes, most = Probes(), 2 << 20
    assert probes.exact_bytes(1 * MBIT, most) == 0
    assert FIRST_BYTES < probes.exact_bytes(20 * MBIT, most) < most
    assert probes.exact_bytes(1000 * MBIT, most) == most


@given(st.integers(-1, 1 << 40), st.floats(), st.floats(0.001, 100.0))
def test_what_is_told_of_a_probe_is_bounded_by_the_own_clock(num_bytes: int, told_s: float, own_s: float) -> None:
    rate = told_rate(num_bytes, told_s, own_s)
    assert 0 <= rate <= max(0.0, MOST_BEYOND * num_bytes / own_s)
