"""When a peer probes its uplink, and what it believes of it then."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.round.probing import (
    CONTRADICTED,
    FIRST_BYTES,
    KEPT,
    LEAST_PAUSE_S,
    LINE_SHARE,
    MOST_BEYOND,
    MOST_PAUSES,
    SOON_S,
    Probes,
    more_bytes,
    told_rate,
)

MBIT = 125_000.0
RATES = st.floats(1.0, 1e10)


def wait_s(probes: Probes, now_s: float, shown: float | None = None, *, is_idle: bool = True) -> float:
    """After how many seconds the next probe is due."""
    if shown is not None:
        probes.show(shown)
    return next(later for later in range(100_000) if probes.is_due(now_s + later, is_idle))


def test_the_first_probe_is_due_at_once_and_the_next_one_after_a_pause_if_the_line_is_idle() -> None:
    probes = Probes()
    assert probes.rate is None
    assert wait_s(probes, 0.0) == 0
    probes.saw(20 * MBIT, 0.2, 0.0)
    assert wait_s(probes, 0.0) == LEAST_PAUSE_S
    assert wait_s(probes, 0.0, is_idle=False) == 2 * LEAST_PAUSE_S


def test_probes_that_agree_become_rare() -> None:
    probes, now_s, pauses_s = Probes(), 0.0, list[float]()
    for _ in range(8):
        probes.saw(20 * MBIT, 0.2, now_s)
        pauses_s.append(wait_s(probes, now_s))
        now_s += pauses_s[-1]
    assert pauses_s == [LEAST_PAUSE_S * times for times in (1, 2, 4, 8, MOST_PAUSES, MOST_PAUSES, MOST_PAUSES, MOST_PAUSES)]


def test_a_probe_that_shows_another_line_is_repeated_soon_and_two_of_them_are_believed() -> None:
    probes, now_s = Probes(), 0.0
    for _ in range(4):
        probes.saw(100 * MBIT, 0.2, now_s)
    probes.saw(5 * MBIT, 0.5, now_s)
    assert probes.rate == 100 * MBIT
    assert wait_s(probes, now_s) == SOON_S
    probes.saw(5 * MBIT, 0.5, now_s)
    assert probes.rate == 5 * MBIT


def test_a_line_whose_probes_never_agree_is_not_probed_without_a_pause() -> None:
    probes, pauses_s = Probes(), list[float]()
    for number in range(9):
        probes.saw(4.0**number * MBIT, 0.2, 0.0)
        pauses_s.append(wait_s(probes, 0.0))
    assert pauses_s.count(SOON_S) <= 2 * pauses_s.count(LEAST_PAUSE_S)


def probed(rate: float) -> Probes:
    """After four probes that agree, 100 s between them; the last one at 0 s."""
    probes = Probes()
    for number in range(4):
        probes.saw(rate, 0.2, 100.0 * (number - 3))
    return probes


def test_a_line_that_tensors_begin_to_contradict_is_probed_soon_and_a_member_that_waits_for_others_no_more_often_than_usual() -> None:
    probes = probed(20 * MBIT)
    assert wait_s(probes, 0.0, 15 * MBIT) == 8 * LEAST_PAUSE_S
    probes.saw(20 * MBIT, 0.2, 480.0)
    soon_s = wait_s(probes, 480.0, 3 * MBIT)
    assert soon_s == CONTRADICTED * LEAST_PAUSE_S
    probes.saw(20 * MBIT, 0.2, 480.0 + soon_s)
    assert wait_s(probes, 480.0 + soon_s, 3 * MBIT) == MOST_PAUSES * LEAST_PAUSE_S


def test_a_line_that_becomes_slower_after_tensors_showed_more_is_contradicted_again() -> None:
    probes = probed(20 * MBIT)
    probes.show(18 * MBIT)
    assert not probes.is_due(100.0, is_idle=True)
    probes.show(5 * MBIT)
    assert probes.is_due(110.0, is_idle=True)


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
    most = 2 << 20
    assert more_bytes(1 * MBIT, 2.0, 2.1, most) == 0
    assert FIRST_BYTES < more_bytes(50 * MBIT, 0.04, 0.05, most) < most
    assert more_bytes(1000 * MBIT, 0.002, 0.003, most) == most


def test_a_probe_that_lasts_for_a_few_round_trips_is_followed_by_another() -> None:
    """20 Mbit/s over 100 ms: the first bytes take five round trips, in which TCP begins."""
    assert more_bytes(4 * MBIT, 0.5, 0.62, 2 << 20) == FIRST_BYTES
    assert more_bytes(5 * MBIT, 0.4, 0.43, 2 << 20) == 0


@given(st.integers(-1, 1 << 40), st.floats(), st.floats(0.001, 100.0))
def test_what_is_told_of_a_probe_is_bounded_by_the_own_clock(num_bytes: int, told_s: float, own_s: float) -> None:
    rate = told_rate(num_bytes, told_s, own_s)
    assert 0 <= rate <= max(0.0, MOST_BEYOND * num_bytes / own_s)
