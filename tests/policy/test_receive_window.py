"""What may be under way over a connection fills the line, shows a faster one, and leaves the buffers before lines short."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.route.receive_window import (
    BEYOND,
    FULL,
    LEAST_BYTES,
    LEAST_RATE,
    LEAST_SENT_BYTES,
    MOST_BYTES,
    TRIED,
    WayRoundTrip,
    receive_window,
    send_room,
)

BUFFER_S = 1.0
"""Of a modem, as scripts/benchmarks/_switch.py has it."""
rates, round_trips_s = st.floats(1e5, 1e9), st.floats(1e-4, 2.0)


@given(rates, round_trips_s)
def test_a_connection_may_carry_more_than_the_line_is_known_to_carry(rate: float, round_trip_s: float) -> None:
    window = receive_window(rate, round_trip_s)
    assert window + 1 >= BEYOND * rate * round_trip_s or window == MOST_BYTES


@pytest.mark.parametrize(("mbit", "round_trip_s"), [(20 / 3, 0.3), (20, 0.06), (20, 0.1), (20, 0.6), (100, 0.03), (100, 0.3)])
def test_two_connections_fit_into_the_buffer_before_their_line(mbit: float, round_trip_s: float) -> None:
    rate = mbit * 125e3
    assert 2 * receive_window(rate, round_trip_s) <= rate * (round_trip_s + BUFFER_S)


@pytest.mark.parametrize(("round_trip_s", "num_bytes"), [(0.3, 300_000), (0.6, 262_144)])
def test_a_tensor_that_came_slowly_as_the_connection_was_new_may_be_under_way_whole(round_trip_s: float, num_bytes: int) -> None:
    began_slowly = num_bytes / (4 * round_trip_s)
    assert receive_window(began_slowly, round_trip_s) >= num_bytes


def test_windows_are_never_of_a_few_segments_nor_larger_than_the_kernel_takes() -> None:
    assert receive_window(0.0, 0.1) == receive_window(5e-324, 5e-324) == LEAST_BYTES
    assert receive_window(0.0, 0.5) == 0.5 * LEAST_RATE
    assert receive_window(math.inf, 0.3) == receive_window(1e300, 1e9) == MOST_BYTES


ONE_THIRD_FREE = 2 / 3
"""Of its room a connection still has so much to send when its kernel asks for more."""


@given(rates, round_trips_s)
def test_a_connection_never_runs_dry_before_its_kernel_asks_for_more(rate: float, round_trip_s: float) -> None:
    room = send_room(rate, round_trip_s)
    assert ONE_THIRD_FREE * (room + 1) >= rate * round_trip_s or room == MOST_BYTES


@pytest.mark.parametrize(("mbit", "round_trip_s"), [(5 / 3, 0.15), (20 / 3, 0.3), (20, 0.06), (20, 0.3), (100, 0.03)])
def test_what_two_connections_send_fits_into_the_buffer_before_their_line(mbit: float, round_trip_s: float) -> None:
    rate = mbit * 125e3
    assert 2 * send_room(rate, round_trip_s) <= rate * (round_trip_s + BUFFER_S)


def test_room_is_never_for_a_few_segments_nor_larger_than_the_kernel_takes() -> None:
    assert send_room(0.0, 0.1) == LEAST_SENT_BYTES
    assert send_room(math.inf, 0.3) == send_room(1e300, 1e9) == MOST_BYTES


class Line:
    """An uplink on which one connection always has more to send, and whose rate this peer believes to be `believed`."""

    def __init__(self, rate: float, believed: float, least_s: float, way_s: float) -> None:
        self.rate, self.believed, self.least_s, self.way_s = rate, believed, least_s, way_s
        self.known = WayRoundTrip()
        self.carried = 0.0

    def look(self, busy: float = 1.0) -> None:
        """`busy`: for which share of the time it has something to send."""
        under_way = send_room(self.believed, self.known.round_trip_s or self.least_s)
        self.carried = min(self.rate, under_way / self.way_s)
        now_s = max(self.way_s, under_way / self.rate)
        self.known = self.known.next(self.least_s, now_s, busy, self.carried / self.believed if busy else math.inf)


@given(rates, round_trips_s, round_trips_s)
def test_a_way_that_became_longer_than_the_least_round_trip_of_late_fills_the_line_again(rate: float, least_s: float, way_s: float) -> None:
    line = Line(rate, rate, min(least_s, way_s), way_s)
    for _ in range(4):
        line.look()
    for _ in range(20):
        line.look()
        assert line.carried >= FULL * rate or send_room(rate, way_s) == MOST_BYTES


@given(rates, round_trips_s, st.lists(st.sampled_from([0.0, 0.3, 0.6, 1.0]), min_size=20, max_size=20))
def test_a_line_that_its_own_queue_fills_gets_no_more_room_for_it(rate: float, way_s: float, bursts: list[float]) -> None:
    """Nor where it is idle between bursts."""
    line = Line(rate, rate, way_s, way_s)
    for busy in bursts:
        line.look(busy)
        assert line.known.round_trip_s == way_s or send_room(rate, way_s) == MOST_BYTES


@given(rates, round_trips_s, st.floats(1.4, 10.0))
def test_a_line_that_is_slower_than_believed_soon_gets_no_more_room_than_before(rate: float, way_s: float, times: float) -> None:
    """Else each look would make its queue longer."""
    line = Line(rate, times * rate, way_s, way_s)
    for _ in range(TRIED + 1):
        line.look()
    for _ in range(20):
        line.look()
        assert line.known.round_trip_s == way_s
