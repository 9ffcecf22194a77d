"""Slices by uplink: no shares make a round shorter, and the bytes are those of a butterfly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.round.slices import bytes_each_way, exchange_s, least_exchange_s, shares_by_rate

MBIT = 1e6 / 8
rates = st.lists(st.floats(0.1, 1000.0), min_size=2, max_size=12)
weights = st.lists(st.floats(0.0, 1.0), min_size=12, max_size=12)
NEARLY = 1 + 1e-9


@given(rates)
def test_the_shares_are_of_one_whole(given_rates: list[float]) -> None:
    shares = shares_by_rate(given_rates)
    assert len(shares) == len(given_rates)
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1)


@given(rates, weights)
def test_no_other_shares_make_a_round_shorter(given_rates: list[float], drawn: list[float]) -> None:
    least_s, others = least_exchange_s(1.0, given_rates), drawn[: len(given_rates)]
    whole = sum(others)
    if whole > 0:
        assert exchange_s(1.0, given_rates, [weight / whole for weight in others]) * NEARLY >= least_s
    assert exchange_s(1.0, given_rates, [1 / len(given_rates)] * len(given_rates)) * NEARLY >= least_s


@given(rates)
def test_a_round_lasts_as_long_as_the_slowest_needs_for_its_parts_or_all_together_for_all_bytes(given_rates: list[float]) -> None:
    alone_s, together_s = 1 / min(given_rates), 2 * (len(given_rates) - 1) / sum(given_rates)
    assert least_exchange_s(1.0, given_rates) == pytest.approx(max(alone_s, together_s))


@given(st.lists(st.floats(0.1, 1000.0), min_size=3, max_size=12))
def test_all_that_reduce_are_done_at_one_moment_and_the_others_later(given_rates: list[float]) -> None:
    shares = shares_by_rate(given_rates)
    ends_s = [exchange_s(1.0, [rate] * len(shares), [share] * len(shares)) for rate, share in zip(given_rates, shares, strict=True)]
    with_slice = [end_s for end_s, share in zip(ends_s, shares, strict=True) if share > 1e-12]
    without = [end_s for end_s, share in zip(ends_s, shares, strict=True) if share <= 1e-12]
    assert max(with_slice) == pytest.approx(min(with_slice))
    assert min(without, default=max(with_slice)) * NEARLY >= min(with_slice)


@given(rates, weights)
def test_the_bytes_are_those_of_every_part_and_every_sum(given_rates: list[float], drawn: list[float]) -> None:
    """Counted transfer by transfer: a part of slice k from each to k, and its sum from k to each."""
    num_members, whole = len(given_rates), sum(drawn[: len(given_rates)])
    shares = [weight / whole for weight in drawn[:num_members]] if whole > 0 else list(shares_by_rate(given_rates))
    sent, received = [0.0] * num_members, [0.0] * num_members
    for reducer, share in enumerate(shares):
        for other in range(num_members):
            if other != reducer:
                for origin, target in ((other, reducer), (reducer, other)):
                    sent[origin] += share
                    received[target] += share
    told = [bytes_each_way(1.0, num_members, share) for share in shares]
    assert sent == pytest.approx(told)
    assert received == pytest.approx(told)


@given(st.integers(2, 64), st.floats(0.1, 1000.0))
def test_equal_links_share_alike(num_members: int, rate: float) -> None:
    assert shares_by_rate([rate] * num_members) == pytest.approx([1 / num_members] * num_members)
    assert least_exchange_s(1.0, [rate] * num_members) == pytest.approx(2 * (num_members - 1) / num_members / rate)


def test_four_unlike_uplinks_take_a_third_less_time_than_with_equal_slices() -> None:
    """5, 20, 20 and 100 Mbit/s: the slowest only sends its part."""
    uplinks, num_bytes = [5 * MBIT, 20 * MBIT, 20 * MBIT, 100 * MBIT], 64e6
    shares = shares_by_rate(uplinks)
    assert shares[0] == 0
    assert shares[1] == shares[2] < shares[3]
    assert exchange_s(num_bytes, uplinks, [0.25] * 4) == pytest.approx(0.30 * num_bytes / MBIT)
    assert least_exchange_s(num_bytes, uplinks) == pytest.approx(0.20 * num_bytes / MBIT)


def test_whoever_is_alone_sends_nothing() -> None:
    assert shares_by_rate([1.0]) == (1.0,)
    assert least_exchange_s(64e6, [1.0]) == 0
