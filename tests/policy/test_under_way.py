"""How much two members have under way that send to each other: both uplinks are full, and what waits in them stays little."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.round.chunks import ROW_S, WINDOW
from peerd.policy.round.under_way import LATE_S, LEAST, UnderWay

HOME = 2_500_000.0
WORD_BYTES = 200


class AsMuchAsWindowsAllow(UnderWay):
    """The check notices."""

    @property
    def may_grow(self) -> bool:
        return True


@dataclass(eq=False)
class End:
    """One of two members, and its uplink."""

    rate: float
    under_way: UnderWay
    free_s: float = 0.0
    sent: int = 0
    verified: int = 0
    here: int = 0
    """Chunks of the other that are here."""
    longest_s: float = 0.0
    """What waited on the uplink at most."""


@dataclass
class Pair:
    """Two members with a part and a sum for each other. Words about chunks wait on the uplinks behind other chunks."""

    ends: tuple[End, End]
    chunk_bytes: int
    delay_s: float
    now_s: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    count: int = 0

    def put(self, end: End, num_bytes: int, act: Callable[[], None]) -> None:
        end.longest_s = max(end.longest_s, end.free_s - self.now_s)
        end.free_s = max(end.free_s, self.now_s) + num_bytes / end.rate
        self.count += 1
        heapq.heappush(self.events, (end.free_s + self.delay_s, self.count, act))

    def look(self, number: int) -> None:
        end = self.ends[number]
        while end.sent - end.verified < 2 * WINDOW and end.under_way.may_grow:
            end.under_way.sent(self.chunk_bytes, self.now_s)
            end.sent += 1
            self.put(end, self.chunk_bytes, lambda: self.arrives(1 - number))

    def arrives(self, number: int) -> None:
        end = self.ends[number]
        end.here += 1
        here = end.here
        self.put(end, WORD_BYTES, lambda: self.told(1 - number, here))

    def told(self, number: int, verified: int) -> None:
        end = self.ends[number]
        num_new, end.verified = verified - end.verified, verified
        end.under_way.verified(num_new, self.now_s)
        self.look(number)

    def run(self, until_s: float) -> None:
        self.look(0)
        self.look(1)
        while self.events[0][0] < until_s:
            self.now_s, _, act = heapq.heappop(self.events)
            act()


def pair(rates: tuple[float, float], chunk_bytes: float, delay_s: float, kind: type[UnderWay] = UnderWay) -> Pair:
    one, other = (End(rate, kind()) for rate in rates)
    return Pair((one, other), round(chunk_bytes), delay_s)


@pytest.mark.parametrize("delay_s", [0.001, 0.03])
@pytest.mark.parametrize("chunk_s", [ROW_S / 2, 4 * ROW_S])
@pytest.mark.parametrize("other", [1.0, 5.0])
def test_both_uplinks_are_full_whether_chunks_are_as_small_as_they_should_be_or_not(delay_s: float, chunk_s: float, other: float) -> None:
    both = pair((HOME, other * HOME), HOME * chunk_s, delay_s)
    both.run(60.0)
    slow, fast = both.ends
    assert slow.verified * both.chunk_bytes >= 0.85 * 60.0 * HOME
    assert fast.verified * both.chunk_bytes >= 0.85 * 60.0 * HOME


def test_on_a_link_much_slower_than_believed_little_waits_and_much_would_with_the_windows_alone() -> None:
    longest_s = []
    for kind in (UnderWay, AsMuchAsWindowsAllow):
        both = pair((HOME, HOME), HOME * 8 * ROW_S, 0.03, kind)
        both.run(60.0)
        longest_s.append(max(end.longest_s for end in both.ends))
    assert longest_s[0] <= 0.5 * longest_s[1]


def test_a_line_on_which_words_come_in_time_is_bounded_by_the_windows_of_the_round_only() -> None:
    both = pair((HOME, HOME), HOME * ROW_S / 2, 0.03)
    both.run(10.0)
    assert all(end.sent - end.verified >= 2 * WINDOW - 1 for end in both.ends)


@given(st.lists(st.tuples(st.sampled_from(["send", "verify", "break"]), st.floats(0, 3 * LATE_S)), max_size=60))
def test_two_chunks_may_be_under_way_whatever_came_before(acts: list[tuple[str, float]]) -> None:
    under_way, now_s, num_sent = UnderWay(), 0.0, 0
    for act, after_s in acts:
        now_s += after_s
        match act:
            case "send":
                under_way.sent(1000, now_s)
                num_sent += 1
            case "verify":
                num_bytes, took_s = under_way.verified(1, now_s)
                assert (num_bytes > 0) == (num_sent > 0)
                assert took_s >= 0
                num_sent = max(0, num_sent - 1)
            case "break":
                under_way.broke()
                num_sent = 0
        assert under_way.may_grow or num_sent >= LEAST
