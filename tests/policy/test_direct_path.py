"""The choice between two ways to a peer: only what was measured over both counts, and only a clear difference."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.route.direct_path import MUCH_SLOWER, tunnel_is_faster

rates = st.floats(1e3, 1e10)
known_or_not = st.tuples(st.none() | rates, st.none() | rates)


@given(known_or_not)
def test_what_was_not_measured_over_both_says_nothing(measured: tuple[float | None, float | None]) -> None:
    assert not tunnel_is_faster(measured, (None, None))
    assert not tunnel_is_faster((None, None), measured)
    assert not tunnel_is_faster((measured[0], None), (None, measured[1]))


@given(known_or_not, st.floats(0.51, 10.0))
def test_noise_leaves_the_direct_way(tunnel: tuple[float | None, float | None], factor: float) -> None:
    direct = tuple(rate and factor * rate for rate in tunnel)
    assert not tunnel_is_faster(direct, tunnel)


@given(rates, rates, st.floats(0.001, 0.49))
def test_a_way_that_is_much_slower_both_ways_is_left(forth: float, back: float, factor: float) -> None:
    assert tunnel_is_faster((factor * forth, factor * back), (forth, back))
    assert tunnel_is_faster((factor * forth, None), (forth, back))


def test_it_is_the_time_there_and_back_that_counts() -> None:
    assert not tunnel_is_faster((1e6, 1e9), (MUCH_SLOWER * 1e6, 1e3))
    assert tunnel_is_faster((1e5, 1e6), (1e6, 1e6))
