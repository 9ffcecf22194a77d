"""Holes in routers: which addresses are sent to, when one has closed, and who is asked from where packets come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.route.holes import IDLE_SILENT_S, MOST_ADDRESSES, SILENT_S, QuicCounts, Silence, targets_in


@pytest.mark.parametrize(
    ("told", "targets"),
    [
        ((), []),
        (("203.0.113.5:4000", "192.168.1.2:4000"), ["203.0.113.5:4000", "192.168.1.2:4000"]),
        (("203.0.113.5:4000", "203.0.113.5:4000"), ["203.0.113.5:4000"]),
        (("203.0.113.5", "203.0.113.5:0", "203.0.113.5:65536", "203.0.113.5:+9", "203.0.113.5:123456"), []),
        (("example.org:4000", "[::1]:4000", "1.2.3:4", ":", ""), []),
        (("224.0.0.1:4000", "255.255.255.255:4000", "0.0.0.0:4000", "169.254.169.254:80", "240.0.0.1:4"), []),
        (tuple(f"10.0.0.{number}:1" for number in range(1, 9)), [f"10.0.0.{number}:1" for number in range(1, 1 + MOST_ADDRESSES)]),
    ],
)
def test_packets_go_to_addresses_of_one_machine_each(told: tuple[str, ...], targets: list[str]) -> None:
    assert targets_in(told, loopback=False) == targets


def test_loopback_is_for_a_peer_that_listens_there() -> None:
    assert targets_in(["127.0.0.1:4000"], loopback=False) == []
    assert targets_in(["127.0.0.1:4000"], loopback=True) == ["127.0.0.1:4000"]


@pytest.mark.parametrize(
    ("outside", "targets"),
    [
        ("", ["203.0.113.9:4000", "192.168.1.2:4000"]),
        ("198.51.100.1", ["203.0.113.9:4000", "192.168.1.2:4000"]),
        ("8.8.8.8", ["9.9.9.9:4000"]),
        ("9.9.9.9", ["9.9.9.9:4000", "192.168.1.2:4000"]),
        ("10.0.0.7", ["9.9.9.9:4000", "192.168.1.2:4000"]),
    ],
)
def test_addresses_of_a_private_network_are_for_peers_in_it(outside: str, targets: list[str]) -> None:
    first = "203.0.113.9:4000" if "203.0.113.9:4000" in targets else "9.9.9.9:4000"
    assert targets_in([first, "192.168.1.2:4000"], loopback=False, outside=outside) == targets


LOOK_S, ROUND_TRIP_S, SIGN_OF_LIFE, SIGN_EACH_S = 0.2, 0.04, 60, 5.0


class Line:
    """A connection between two peers: data are acknowledged when they have come through the queue, and sent again while they are not."""

    def __init__(self, queue_s: Callable[[float], float]) -> None:
        """`queue_s`: how long what is sent at a time waits in the line's buffer."""
        self._queue_s = queue_s
        self._arrivals: list[float] = []
        self.silence, self.now_s, self.carried = Silence(), 0.0, QuicCounts(1200, 1200)
        self.closed_s = float("inf")
        self._sign_s = SIGN_EACH_S
        self._again_s: tuple[float, float] | None = None
        """When what is not acknowledged is sent again, and after which pause once more."""

    def send(self, num_bytes: int, written: int = 0) -> None:
        now = self.carried
        self.carried = QuicCounts(now.sent + num_bytes, now.received, now.written + written)
        if self.now_s < self.closed_s:
            self._arrivals.append(self.now_s + self._queue_s(self.now_s) + ROUND_TRIP_S)
        self._again_s = self._again_s or (self.now_s + 0.15, 0.15)
        self._sign_s = self.now_s + SIGN_EACH_S

    def look(self) -> bool:
        """Let time pass until the next look. Returns whether the hole counts as closed."""
        self.now_s += LOOK_S
        came = [at for at in self._arrivals if at <= self.now_s and self.now_s < self.closed_s]
        if came:
            self._arrivals = [at for at in self._arrivals if at > self.now_s]
            self.carried = QuicCounts(self.carried.sent, self.carried.received + 40 * len(came), self.carried.written)
            self._again_s = (self.now_s + 0.15, 0.15) if self._arrivals else None
        if self._again_s is not None and self._again_s[0] <= self.now_s:
            pause_s = 2 * self._again_s[1]
            self.send(2 * SIGN_OF_LIFE)
            self._again_s = self.now_s + pause_s, pause_s
        elif self.now_s >= self._sign_s:
            self.send(SIGN_OF_LIFE)
        return self.silence.is_closed(self.carried, ROUND_TRIP_S, self.now_s)

    def until_closed(self, most_s: float) -> float:
        """How long it took until the hole counts as closed."""
        began_s = self.now_s
        while not self.look():
            assert self.now_s - began_s < most_s
        return self.now_s - began_s


@pytest.mark.parametrize(("num_bytes", "written"), [(500_000, 256_000), (500_000, 0), (900, 100)], ids=["a-tensor", "its-end", "a-message"])
def test_a_hole_that_closes_under_data_is_noticed_within_four_and_a_half_seconds(num_bytes: int, written: int) -> None:
    """Also if all of them went out before the look that finds the last packet of the peer: the rest that goes out is little."""
    line = Line(lambda _now_s: 0.0)
    for _ in range(10):
        line.send(num_bytes, written)
        assert not line.look()
    line.send(num_bytes, written)
    line.closed_s = line.now_s
    line._arrivals.clear()
    line.carried = QuicCounts(line.carried.sent, line.carried.received + 1, line.carried.written)
    assert SILENT_S < line.until_closed(60.0) <= SILENT_S + 1.0


def test_a_hole_that_closes_while_nothing_is_sent_is_noticed_later_and_at_once_when_data_go_out() -> None:
    for wakes in (False, True):
        line = Line(lambda _now_s: 0.0)
        for _ in range(40):
            assert not line.look()
        line.closed_s = line.now_s
        if wakes:
            line.send(500_000, 256_000)
        took_s = line.until_closed(60.0)
        assert took_s <= SILENT_S + 2 * LOOK_S if wakes else IDLE_SILENT_S < took_s <= SIGN_EACH_S + IDLE_SILENT_S + 1.0


@given(
    st.lists(st.tuples(st.sampled_from([0, 0, 100, 20_000, 500_000]), st.integers(1, 40)), max_size=12),
    st.lists(st.floats(0.0, 3.0), min_size=1, max_size=5),
)
def test_a_line_with_three_seconds_of_queue_is_never_taken_for_a_closed_hole(sends: list[tuple[int, int]], queues_s: list[float]) -> None:
    """The queue is other traffic's, too: it is there when the first byte is sent, and grows and goes at any time."""
    line = Line(lambda now_s: queues_s[int(now_s / 2.0) % len(queues_s)])
    for written, looks in sends:
        if written:
            line.send(written + 1000, written)
        for _ in range(looks):
            assert not line.look()


def test_longer_round_trips_are_waited_for() -> None:
    """A line that has 5 s of queue in each round trip, as measured, gets twice that."""
    silence = Silence()
    assert not silence.is_closed(QuicCounts(100, 100), 5.0, 0.0)
    assert not silence.is_closed(QuicCounts(9_000, 100, 8_000), 5.0, 1.0)
    assert not any(silence.is_closed(QuicCounts(9_000 + at, 100, 8_000), 5.0, 1.0 + at) for at in range(1, 10))
    assert silence.is_closed(QuicCounts(9_020, 100, 8_000), 5.0, 11.0)


def test_time_in_which_this_process_stood_still_says_nothing() -> None:
    silence = Silence()
    assert not silence.is_closed(QuicCounts(100, 100), 0.04, 0.0)
    assert not silence.is_closed(QuicCounts(9_000, 100, 8_000), 0.04, 0.2)
    assert not silence.is_closed(QuicCounts(9_000, 100, 8_000), 0.04, 60.0), "what came meanwhile is not read yet"
    assert not silence.is_closed(QuicCounts(9_000, 900, 8_000), 0.04, 60.2)
