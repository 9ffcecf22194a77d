"""What joiners get of an uplink: all that training leaves, a small share where it leaves nothing, and training hardly notices."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from peerd.policy.route.yielding import IN_FLIGHT_BYTES, LEAST_SHARE, UplinkUse

RATE = 2_500_000.0
CHUNK = 1 << 18
ASKED = 3
"""Chunks that a joiner has asked for and not got."""


class Heedless(UplinkUse):
    """The check notices."""

    def wait_s(self, now_s: float) -> float:
        return 0.0


@dataclass
class Line:
    """An uplink that sends what it was given in order; a joiner that asks for the next chunk when one is here, and training's bursts."""

    use: UplinkUse
    believed: float = RATE
    now_s: float = 0.0
    free_s: float = 0.0
    chunks: int = 0
    waiting: int = ASKED
    longest_s: float = 0.0
    """Between a burst of training and its end at most."""
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    count: int = 0

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (when_s, self.count, act))

    def leaves(self, num_bytes: int) -> float:
        self.free_s = max(self.free_s, self.now_s) + num_bytes / RATE
        return self.free_s

    def burst(self, num_bytes: int, every_s: float) -> None:
        self.use.sends(num_bytes, self.believed, self.now_s)
        self.longest_s = max(self.longest_s, self.leaves(num_bytes) - self.now_s)
        self.at(self.now_s + every_s, lambda: self.burst(num_bytes, every_s))

    def look(self) -> None:
        while self.waiting:
            if wait_s := self.use.wait_s(self.now_s):
                self.at(self.now_s + wait_s + 1e-9, self.look)
                return
            self.use.gives(CHUNK, self.believed, self.now_s)
            self.waiting -= 1
            self.at(self.leaves(CHUNK), self.came)

    def came(self) -> None:
        self.chunks += 1
        self.waiting += 1
        self.look()

    def run(self, num_bytes: int, every_s: float, seconds: float = 100.0) -> Line:
        """Training sends so many bytes at once, again and again; with 0 it sends nothing."""
        if num_bytes:
            self.burst(num_bytes, every_s)
        self.look()
        while self.events and self.events[0][0] < seconds:
            self.now_s, _, act = heapq.heappop(self.events)
            act()
        return self

    @property
    def share(self) -> float:
        """The joiner's share of the line."""
        return self.chunks * CHUNK / RATE / self.now_s


def test_a_joiner_has_an_idle_line_for_itself() -> None:
    assert Line(UplinkUse()).run(0, 0.0).share == pytest.approx(1.0, abs=0.02)


def test_a_joiner_gets_what_training_leaves_and_a_burst_waits_for_few_chunks() -> None:
    line = Line(UplinkUse()).run(round(0.6 * RATE), 1.0)
    assert line.share > 0.37
    assert line.longest_s < 0.6 + (ASKED + 1) * CHUNK / RATE


@pytest.mark.parametrize(("use", "low", "high"), [(UplinkUse, 0.5 * LEAST_SHARE, 1.5 * LEAST_SHARE), (Heedless, 0.3, 1.0)])
def test_where_training_fills_the_line_a_joiner_still_gets_a_small_share(use: type[UplinkUse], low: float, high: float) -> None:
    """What training has to send next leaves when the last has left."""
    line = Line(use())

    def send() -> None:
        line.use.sends(CHUNK, RATE, line.now_s)
        line.at(line.leaves(CHUNK), send)

    send()
    send()  # one more, so that there is always something
    assert low < line.run(0, 0.0).share < high


def test_while_a_round_is_exchanged_a_joiner_gets_its_small_share_alone() -> None:
    """Whoever waits for a word of what has arrived sends nothing meanwhile."""
    line = Line(UplinkUse())
    line.use.num_exchanges = 1
    assert line.run(0, 0.0).share == pytest.approx(LEAST_SHARE, abs=0.02)
    line.use.num_exchanges = 0
    assert line.use.wait_s(line.now_s) == 0


def test_a_line_that_is_faster_than_believed_is_not_taken_for_full_for_long() -> None:
    use = UplinkUse()
    for _ in range(100):
        use.sends(IN_FLIGHT_BYTES, RATE, 0.0)
    use.gives(1 << 40, RATE, 0.0)
    assert use.wait_s(0.0) == pytest.approx(IN_FLIGHT_BYTES / RATE)


def test_a_joiner_of_a_very_slow_line_is_not_taken_for_dead() -> None:
    use = UplinkUse()
    use.gives(CHUNK, 1_000.0, 0.0)
    use.sends(IN_FLIGHT_BYTES, 1_000.0, 0.0)
    assert use.wait_s(0.0) < 10.0
