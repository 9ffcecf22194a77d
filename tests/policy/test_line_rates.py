"""The rates of lines: what is measured while something is under way, what a record says, and what others believe."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.round.line_rates import KEPT_S, LEAST_BYTES, OTHER_LINE_S, RATE_STEP, LineMeter, RateSamples, claims, line_rate
from peerd.table.record import MAX_RATE

MBIT = 125_000.0
rates = st.floats(1.0, 1e10)


def full(meter: LineMeter, rate: float, seconds: float, at_s: float = 0.0, chunk_s: float = 0.1) -> float:
    """Chunks one after another at a rate; returns when the last one ends."""
    for _ in range(round(seconds / chunk_s)):
        meter.passed(rate * chunk_s, at_s, at_s + chunk_s)
        at_s += chunk_s
    return at_s


def test_nothing_is_known_of_a_line_before_it_was_busy() -> None:
    meter = LineMeter()
    assert meter.rate is None
    meter.passed(10_000, 0.0, 0.01)
    assert meter.rate is None
    meter.passed(LEAST_BYTES, 1.0, 1.01)
    assert meter.rate is not None


def test_a_few_kilobytes_that_travel_alone_tell_the_round_trip_and_not_the_line() -> None:
    meter, at_s = LineMeter(), 0.0
    for _ in range(100):  # gradients of 90 KB each step: a part and a sum
        for num_round_trips in (3, 1):
            at_s += 0.2 * num_round_trips
            meter.passed(90e3, at_s - 0.2 * num_round_trips, at_s)
        at_s += 10
    assert meter.rate is None
    full(meter, 20 * MBIT, 3.0, at_s)
    assert meter.rate == pytest.approx(20 * MBIT, rel=0.1)


def test_a_round_trip_that_has_become_long_does_not_make_few_kilobytes_a_burst() -> None:
    meter = LineMeter()
    for number in range(30):
        meter.passed(90e3, number, number + 0.001)
    for number in range(30, 60):
        meter.passed(90e3, number, number + 0.2)
    assert meter.rate is None


def test_an_idle_line_tells_nothing() -> None:
    meter, at_s = LineMeter(), 0.0
    for _ in range(20):
        at_s = 60 + full(meter, 20 * MBIT, 0.5, at_s)
    assert meter.rate == pytest.approx(20 * MBIT)


def test_transfers_side_by_side_share_the_line() -> None:
    meter = LineMeter()
    for number in range(30):
        for _ in range(3):
            meter.passed(20 * MBIT / 3, number, number + 1)
    assert meter.rate == pytest.approx(20 * MBIT)


def test_acknowledgements_in_bursts_do_not_make_a_line_look_faster() -> None:
    """Every two seconds 1.2 MB leave: half of them are acknowledged after 0.5 s, and half at the end."""
    meter = LineMeter()
    for number in range(60):
        for began_s, ended_s in ((0.0, 0.5), (0.5, 2.0)):
            for _ in range(3):
                meter.passed(200e3, 2 * number + began_s, 2 * number + ended_s)
    assert meter.rate == pytest.approx(600e3, rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 100)), min_size=1, max_size=50))
def test_transfers_that_overlap_at_any_times_never_show_more_than_the_line_can_do(spans: list[tuple[float, float]]) -> None:
    """Each takes its whole time at the same share of the line, so that all together never exceed it."""
    meter, share = LineMeter(), 1e7 / len(spans)
    for ended_s, began_s in sorted((began_s + took_s, began_s) for began_s, took_s in spans):
        meter.passed(share * (ended_s - began_s), began_s, ended_s)
    assert meter.rate is None or meter.rate <= 1e7 * (1 + 1e-6)


def test_an_uplink_that_got_much_slower_is_known_after_some_seconds_and_one_whose_other_end_is_slow_for_a_moment_is_not_slower() -> None:
    meter = LineMeter()
    at_s = full(meter, 100 * MBIT, 40.0)
    at_s = full(meter, 5 * MBIT, 4.0, at_s)
    assert meter.rate == pytest.approx(100 * MBIT)
    at_s = full(meter, 5 * MBIT, OTHER_LINE_S, at_s)
    assert meter.rate == pytest.approx(5 * MBIT)
    full(meter, 100 * MBIT, 4.0, at_s)
    assert meter.rate == pytest.approx(100 * MBIT)


def test_slow_senders_make_no_downlink_slow() -> None:
    meter = LineMeter(is_up=False)
    full(meter, 5 * MBIT, 2 * OTHER_LINE_S, full(meter, 100 * MBIT, 20.0))
    assert meter.rate == pytest.approx(100 * MBIT)


def test_the_best_tenth_counts_since_the_other_end_may_have_been_slow() -> None:
    meter = LineMeter()
    at_s = full(meter, 5 * MBIT, 40)
    full(meter, 20 * MBIT, 8, at_s)
    assert meter.rate == pytest.approx(20 * MBIT, rel=0.05)


def test_a_line_that_got_slower_shows_after_a_minute_of_being_busy() -> None:
    meter = LineMeter()
    at_s = full(meter, 100 * MBIT, 300)
    full(meter, 5 * MBIT, KEPT_S + 1, at_s)
    assert meter.rate == pytest.approx(5 * MBIT)


def test_a_transfer_longer_than_all_that_is_kept_counts() -> None:
    meter = LineMeter()
    meter.passed(MBIT * 500, 0.0, 500.0)
    assert meter.rate == pytest.approx(MBIT)


def test_transfers_side_by_side_that_are_longer_than_a_slot_share_the_line_too() -> None:
    meter = LineMeter()
    for number in range(40):
        meter.passed(20 * MBIT * 3.2 / 8, 0.4 * number, 0.4 * number + 3.2)
    assert meter.rate == pytest.approx(20 * MBIT, rel=0.01)


def test_of_samples_the_last_minute_counts() -> None:
    samples = RateSamples()
    samples.saw(1e9, 30.0)
    for _ in range(61):
        samples.saw(1e6, 1.0)
    assert samples.rate == 1e6


@pytest.mark.parametrize(("rate", "busy_s"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, math.nan)])
def test_what_is_no_rate_is_not_taken(rate: float, busy_s: float) -> None:
    samples = RateSamples()
    samples.saw(rate, busy_s)
    assert samples.rate is None


@given(rates, rates)
def test_a_record_says_a_rate_to_within_a_step_and_never_more_than_was_measured(up: float, down: float) -> None:
    told_up, told_down = claims(up, down)
    assert up / RATE_STEP - 1 <= told_up <= up
    assert told_down >= told_up
    assert claims(told_up + 0.5, None) in ((told_up, told_up), claims(told_up, None))
    assert max(told_up, told_down) <= MAX_RATE


def test_a_record_says_nothing_of_what_was_not_measured_and_noise_does_not_change_it() -> None:
    assert claims(None, None) == (0, 0)
    assert claims(None, 1e6) == (0, claims(1e6, None)[0])
    assert claims(0.1, None) == (0, 0)
    assert claims(2_450_000, 1e6) == claims(2_460_000, 1.1e6)
    assert claims(1e30, 1e30) == (claims(MAX_RATE, None)[0],) * 2


def test_a_downlink_is_taken_for_no_slower_than_the_uplink_unless_its_owner_says_so() -> None:
    up, down = claims(100 * MBIT, 5 * MBIT)
    assert up == down
    assert claims(100 * MBIT, 5 * MBIT, download_limit=10 * MBIT)[1] <= 10 * MBIT


def test_a_record_says_no_more_than_its_owner_allows() -> None:
    up, down = claims(100 * MBIT, 100 * MBIT, upload_limit=5 * MBIT, download_limit=50 * MBIT)
    assert 0.9 * 5 * MBIT < up <= 5 * MBIT
    assert 0.9 * 50 * MBIT < down <= 50 * MBIT


def test_a_claim_is_believed_as_far_as_it_was_measured() -> None:
    assert line_rate(100 * MBIT, 5 * MBIT, 100 * MBIT) == 5 * MBIT
    assert line_rate(5 * MBIT, 100 * MBIT, 200 * MBIT) == 5 * MBIT
    assert line_rate(5 * MBIT, None, None) == 5 * MBIT
    assert line_rate(0, 5 * MBIT, None) == 5 * MBIT
    assert line_rate(0, None, 5 * MBIT) is None


def test_a_peer_with_a_slow_line_of_its_own_does_not_take_all_others_for_slow() -> None:
    assert line_rate(100 * MBIT, 5 * MBIT, 5.1 * MBIT) == 100 * MBIT
