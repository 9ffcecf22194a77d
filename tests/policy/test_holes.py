"""Holes in routers: which addresses are sent to, when one has closed, and who is asked from where packets come."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peerd.policy.route.holes import MOST_ADDRESSES, QUESTIONS, SILENT_S, UNASKED_SILENT_S, HoleState, QuicCounts, Silence, targets_in


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


LOOK_S, ROUND_TRIP_S, SIGN_EACH_S = 0.1, 0.04, 5.0
AGAIN_S, BURST_S = 0.2, (0.0, 0.1, 0.2)
"""When what is lost is first sent again; when the packets go out that a question brings."""
OUT, BACK = 0, 1
Queue = Callable[[float], float]
"""How long what joins a queue at a time waits in it."""


def empty(_at_s: float) -> float:
    return 0.0


class Line:
    """The line of two peers, which a hole and the tunnel share: each way has a queue, and loses packets."""

    def __init__(self, queues: tuple[Queue, Queue] = (empty, empty), is_lost: Callable[[float], bool] = lambda _at_s: False) -> None:
        self._queues, self._is_lost = queues, is_lost
        self._arrivals: list[float] = []
        self._answer_s = self.closed_s = float("inf")
        self.has_tunnel, self.is_tunnel_apart = True, False
        """Whether the tunnel answers, and whether it has a line without a queue."""
        self.silence, self.now_s, self.carried, self.num_asked = Silence(), 0.0, QuicCounts(1200, 1200), 0
        self.round_trip_s = ROUND_TRIP_S
        self._sign_s = SIGN_EACH_S
        self._again_s: tuple[float, float] | None = None
        """When what is not acknowledged is sent again, and after which pause once more."""

    def send(self, num_bytes: int) -> None:
        """Send through the hole, for the first time or again."""
        self.carried = QuicCounts(self.carried.sent + num_bytes, self.carried.received)
        came_s = self._passes(OUT, self.now_s) if self.now_s < self.closed_s else None
        if came_s is not None:
            self._return(came_s)
        pause_s = 2.0 * self._again_s[1] if self._again_s is not None else AGAIN_S + self.round_trip_s
        self._again_s = self.now_s + pause_s, pause_s
        self._sign_s = self.now_s + SIGN_EACH_S

    def look(self) -> HoleState:
        """Let time pass until the next look."""
        self.now_s += LOOK_S
        came = sum(at_s <= self.now_s for at_s in self._arrivals)
        if came:
            self._arrivals = [at_s for at_s in self._arrivals if at_s > self.now_s]
            self.carried = QuicCounts(self.carried.sent, self.carried.received + 40 * came)
            self._again_s = None
        if self._again_s is not None and self._again_s[0] <= self.now_s:
            self.send(120)
        elif self.now_s >= self._sign_s:
            self.send(60)
        if self._answer_s <= self.now_s:
            self._answer_s = float("inf")
            self.silence.answered()
        found = self.silence.look(self.carried, self.round_trip_s, self.now_s)
        if found is HoleState.DOUBTFUL:
            self._ask()
        return found

    def until_closed(self, most_s: float) -> float:
        """How long it took until the hole counts as closed."""
        began_s = self.now_s
        while self.look() is not HoleState.CLOSED:
            assert self.now_s - began_s < most_s
        return self.now_s - began_s

    def close(self) -> None:
        """What is under way is lost, too."""
        self.closed_s = self.now_s
        self._arrivals.clear()

    def _ask(self) -> None:
        """Ask the other end in the tunnel, in which what is lost is sent again."""
        assert self._answer_s == float("inf"), "one question at a time"
        self.num_asked += 1
        if self.has_tunnel:
            asked_s = self._passes_at_last(OUT, self.now_s)
            for after_s in BURST_S:
                self._return(asked_s + after_s)
            self._answer_s = self._passes_at_last(BACK, asked_s + BURST_S[-1])

    def _return(self, at_s: float) -> None:
        came_s = self._passes(BACK, at_s) if at_s < self.closed_s else None
        if came_s is not None:
            self._arrivals.append(came_s)

    def _passes(self, way: int, at_s: float) -> float | None:
        return None if self._is_lost(at_s) else at_s + self._queues[way](at_s) + ROUND_TRIP_S / 2.0

    def _passes_at_last(self, way: int, at_s: float) -> float:
        pause_s = AGAIN_S
        if self.is_tunnel_apart:
            return at_s + ROUND_TRIP_S / 2.0
        while (came_s := self._passes(way, at_s)) is None:
            at_s, pause_s = at_s + pause_s, 2.0 * pause_s
        return came_s


@pytest.mark.parametrize("round_trip_s", [0.04, 0.3, 1.0])
@pytest.mark.parametrize("num_bytes", [500_000, 900], ids=["a-tensor", "a-message"])
def test_a_hole_that_closes_under_data_is_noticed_within_four_and_a_half_seconds(num_bytes: int, round_trip_s: float) -> None:
    """Also if all of them went out before the look that finds the last packet of the peer: the rest that goes out is little."""
    line = Line()
    line.round_trip_s = round_trip_s
    for _ in range(10):
        line.send(num_bytes)
        assert line.look() is HoleState.OPEN
    line.send(num_bytes)
    line.close()
    line.carried = QuicCounts(line.carried.sent, line.carried.received + 1)
    assert SILENT_S < line.until_closed(60.0) <= 4.5
    assert line.num_asked == QUESTIONS


def test_a_hole_that_closes_while_nothing_is_sent_is_noticed_after_the_next_sign_of_life() -> None:
    line = Line()
    for _ in range(40):
        assert line.look() is HoleState.OPEN
    line.close()
    assert SILENT_S < line.until_closed(60.0) <= SIGN_EACH_S + 3.5


def test_without_answers_in_the_tunnel_a_hole_is_given_up_after_a_longer_time() -> None:
    for fails in (False, True):
        line = Line()
        line.has_tunnel = False
        line.look()
        line.close()
        line.send(500_000)
        while (found := line.look()) is not HoleState.CLOSED:
            if found is HoleState.DOUBTFUL and fails:
                line.silence.failed()
        assert UNASKED_SILENT_S <= line.now_s <= UNASKED_SILENT_S + 1.0
        assert line.num_asked == 1 or (fails and line.num_asked >= UNASKED_SILENT_S - 1.0)


def queue_of(levels_s: list[float]) -> Queue:
    """A queue that other traffic fills and leaves: it has these levels, two seconds apart, and none overtakes another in it."""

    def wait_s(at_s: float) -> float:
        place, share = divmod(at_s / 2.0, 1.0)
        before_s, after_s = (levels_s[(int(place) + step) % len(levels_s)] for step in (0, 1))
        return before_s + share * (after_s - before_s)

    return wait_s


LEVELS_S = st.lists(st.floats(0.0, 2.0), min_size=1, max_size=6)


@given(
    sends=st.lists(st.tuples(st.sampled_from([0, 100, 500_000]), st.integers(1, 60)), max_size=12),
    levels_s=st.tuples(LEVELS_S, LEVELS_S),
    full_s=st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(0.5, 1.5)), max_size=3),
    seed=st.integers(0, 1 << 30),
)
@example(sends=[(0, 39), (100, 300)], levels_s=([2.0], [0.0]), full_s=[(3.9, 1.5)], seed=0)
def test_a_full_line_is_never_taken_for_a_closed_hole(
    sends: list[tuple[int, int]], levels_s: tuple[list[float], list[float]], full_s: list[tuple[float, float]], seed: int
) -> None:
    """Other traffic has up to two seconds of queue each way, one packet in twenty is lost, and all while a buffer is full.

    The example is what happened: a transfer through the relay filled the line while little went through the hole.
    """
    chance = random.Random(seed)

    def is_lost(at_s: float) -> bool:
        return chance.random() < 0.05 or any(begin_s <= at_s < begin_s + length_s for begin_s, length_s in full_s)

    line = Line((queue_of(levels_s[OUT]), queue_of(levels_s[BACK])), is_lost)
    for num_bytes, looks in (*sends, (0, 50)):
        if num_bytes:
            line.send(num_bytes)
        for _ in range(looks):
            assert line.look() is not HoleState.CLOSED


@given(st.floats(0.0, 2.2))
def test_a_way_of_its_own_may_have_two_seconds_of_queue_that_the_tunnel_does_not_meet(queue_s: float) -> None:
    line = Line((lambda _at_s: queue_s, empty))
    line.is_tunnel_apart = True
    for _ in range(3):
        line.send(500_000)
        assert all(line.look() is not HoleState.CLOSED for _ in range(60))


def test_longer_round_trips_are_waited_for() -> None:
    """A line that has 5 s of queue in each round trip, as measured, gets twice that."""
    line = Line()
    line.round_trip_s = 5.0
    line.look()
    line.close()
    line.send(500_000)
    assert 10.0 < line.until_closed(60.0) < 11.0


def test_what_acknowledges_the_last_packets_of_the_peer_gets_no_answer() -> None:
    silence = Silence()
    for at, counts in enumerate([QuicCounts(100, 100), QuicCounts(140, 100), *[QuicCounts(140, 100)] * 40]):
        assert silence.look(counts, 0.04, at * LOOK_S) is HoleState.OPEN


def test_time_in_which_this_process_stood_still_says_nothing() -> None:
    silence = Silence()
    for now_s, counts in ((0.0, QuicCounts(100, 100)), (0.1, QuicCounts(100, 100)), (0.2, QuicCounts(9_000, 100))):
        assert silence.look(counts, 0.04, now_s) is HoleState.OPEN
    assert silence.look(QuicCounts(9_000, 100), 0.04, 60.0) is not HoleState.CLOSED, "what came meanwhile is not read yet"
    assert silence.look(QuicCounts(9_000, 900), 0.04, 60.2) is HoleState.OPEN
