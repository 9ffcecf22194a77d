"""Several joiners at one donor whose training fills its line: each gets its state, as none is served too slowly to be believed."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from peerd.link.links import Arrival
from peerd.policy.route.receiving import LONGEST_PAUSE_S, Receivers, WaitingChunk
from peerd.policy.route.yielding import LEAST_BYTES_PER_S, UplinkUse, least_rate

CHUNK, ASKED = 1 << 18, 2
PATIENCE_S = 15.0


class InTurn(Receivers):
    """All receivers share what there is, chunk by chunk. The check notices."""

    def put_off_in_s(self, chunk: WaitingChunk, rate: float, now_s: float) -> float | None:
        return None

    def next(self, rate: float) -> WaitingChunk | None:
        return next(iter(self._waiting), None)


@dataclass
class Joiner:
    donor: Donor
    number: int
    missing: int
    asked: int = 0
    """Chunks that the donor was asked for and has not sent."""
    gave_up: int = 0
    put_off: int = 0
    ended_s: float | None = None
    stream: int = 0
    """Counts its streams: what was to come of an earlier one does not."""
    chunk: WaitingChunk | None = None
    arrival: Arrival = field(init=False)

    def begin(self) -> None:
        donor = self.donor
        donor.receivers.begins(self.number, donor.now_s)
        self.stream += 1
        if donor.receivers.has_no_seat(self.number, donor.rate):
            self._sent_away()
            return
        self.arrival = Arrival(PATIENCE_S, lambda: donor.now_s)
        self._ask()

    def _ask(self) -> None:
        donor, stream = self.donor, self.stream
        self.chunk = donor.receivers.asks(CHUNK, donor.now_s, self.number)
        donor.at(donor.now_s + self.arrival.left_s(CHUNK), lambda: self._given_up(stream))
        self._look(stream)
        donor.look()

    def _look(self, stream: int) -> None:
        """The donor looks whether this joiner waits in vain."""
        if stream != self.stream or self.chunk is None:
            return
        put_off_s = self.donor.receivers.put_off_in_s(self.chunk, self.donor.rate, self.donor.now_s)
        if put_off_s is not None and put_off_s <= 0:
            self._sent_away()
        else:
            self.donor.at(self.donor.now_s + (1.0 if put_off_s is None else put_off_s), lambda: self._look(stream))

    def _sent_away(self) -> None:
        self.put_off += 1
        pause_s = self.donor.receivers.put_off(self.number, self.donor.rate, self.donor.now_s)
        assert pause_s <= LONGEST_PAUSE_S
        self._end()
        self.donor.at(self.donor.now_s + pause_s, self.begin)

    def _given_up(self, stream: int) -> None:
        if stream == self.stream:
            self.gave_up += 1
            self._end()
            self.donor.at(self.donor.now_s, self.begin)

    def _end(self) -> None:
        donor, self.stream = self.donor, self.stream + 1
        if self.chunk is not None:
            donor.receivers.leaves(self.chunk, at_once=False)
            self.chunk = None
        donor.receivers.ends(self.number, donor.now_s)
        donor.look()

    def came(self, stream: int) -> None:
        if stream != self.stream:
            return
        self.arrival.came(CHUNK)
        self.missing -= 1
        self.stream += 1
        if self.missing:
            self._ask()
        else:
            self.ended_s = self.donor.now_s
            self._end()


@dataclass
class Donor:
    """A line that training fills: what joiners get is the least share."""

    rate: float
    receivers: Receivers
    use: UplinkUse = field(default_factory=UplinkUse)
    now_s: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    count: int = 0
    joiners: list[Joiner] = field(default_factory=list)
    looks_at_s: float = -1.0

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (when_s, self.count, act))

    def look(self) -> None:
        chunk = self.receivers.next(self.rate)
        if chunk is None:
            return
        if (wait_s := self.use.wait_s(self.now_s)) > 0:
            if self.looks_at_s <= self.now_s:
                self.looks_at_s = self.now_s + wait_s + 1e-9
                self.at(self.looks_at_s, self.look)
            return
        self.use.gives(CHUNK, self.rate, self.now_s)
        joiner = next(each for each in self.joiners if each.chunk is chunk)
        self.receivers.leaves(chunk, at_once=False)
        joiner.chunk, stream = None, joiner.stream
        self.at(self.now_s + CHUNK / least_rate(self.rate), lambda: joiner.came(stream))
        self.look()

    def run(self, num_joiners: int, num_chunks: int, seconds: float) -> Donor:
        self.use.num_exchanges = 1
        self.joiners = [Joiner(self, number, num_chunks) for number in range(num_joiners)]
        for joiner in self.joiners:
            self.at(0.1 * joiner.number, joiner.begin)
        while self.events and self.events[0][0] < seconds and any(each.ended_s is None for each in self.joiners):
            self.now_s, _, act = heapq.heappop(self.events)
            act()
        return self


@pytest.mark.parametrize(("rate", "num_joiners"), [(100_000.0, 4), (625_000.0, 8), (2_500_000.0, 24)])
def test_hole_47_many_joiners_at_a_donor_whose_line_is_full_all_get_their_state(rate: float, num_joiners: int) -> None:
    num_chunks = 20
    bound_s = num_joiners * num_chunks * CHUNK / least_rate(rate)
    in_turn = Donor(rate, InTurn()).run(num_joiners, num_chunks, 1.5 * bound_s)
    assert sum(each.gave_up for each in in_turn.joiners) >= num_joiners
    donor = Donor(rate, Receivers()).run(num_joiners, num_chunks, 1.5 * bound_s)
    assert [each.gave_up for each in donor.joiners] == [0] * num_joiners
    ended_s = [each.ended_s for each in donor.joiners]
    assert None not in ended_s
    assert max(each for each in ended_s if each is not None) < 1.1 * bound_s + LONGEST_PAUSE_S
    assert ended_s[0] == min(each for each in ended_s if each is not None)
    assert donor.joiners[0].put_off == 0


def test_who_has_no_seat_gets_what_others_leave() -> None:
    """The first receiver's own line is slow: it has asked for nothing just now."""
    receivers = Receivers()
    for receiver in "ab":
        receivers.begins(receiver, 0.0)
    later = receivers.asks(CHUNK, 0.0, "b")
    assert receivers.next(LEAST_BYTES_PER_S) is later
    first = receivers.asks(CHUNK, 1.0, "a")
    assert receivers.next(LEAST_BYTES_PER_S) is first
    assert receivers.put_off_in_s(first, LEAST_BYTES_PER_S, 100.0) is None
    assert receivers.put_off_in_s(later, LEAST_BYTES_PER_S, 1.0) == pytest.approx(CHUNK / LEAST_BYTES_PER_S - 1.0)
    assert receivers.put_off_in_s(later, LEAST_BYTES_PER_S * 20, 1.0) is None, "a line that carries both"


def test_who_was_sent_away_has_its_place_before_newcomers_and_hears_at_once_while_the_line_is_short() -> None:
    receivers = Receivers()
    for receiver in "ab":
        receivers.begins(receiver, 0.0)
    chunk = receivers.asks(CHUNK, 0.0, "a", left_s=5.0)
    assert not receivers.has_no_seat("b", LEAST_BYTES_PER_S), "nothing shows yet that the line is short"
    assert receivers.put_off("b", LEAST_BYTES_PER_S, 0.0) == 5.0
    receivers.ends("b", 0.0)
    receivers.begins("c", 4.0)
    receivers.begins("b", 5.0)
    assert receivers.has_no_seat("b", LEAST_BYTES_PER_S)
    receivers.leaves(chunk, at_once=False)
    receivers.ends("a", 5.0)
    receivers.asks(CHUNK, 5.0, "c")
    assert not receivers.has_no_seat("b", LEAST_BYTES_PER_S)
    assert receivers.has_no_seat("c", LEAST_BYTES_PER_S)


def test_a_line_that_is_free_again_takes_everybody() -> None:
    receivers = Receivers()
    for receiver in "ab":
        receivers.begins(receiver, 0.0)
    receivers.put_off("b", LEAST_BYTES_PER_S, 0.0)
    receivers.leaves(receivers.asks(CHUNK, 1.0, "a"), at_once=True)
    receivers.asks(CHUNK, 1.0, "a")
    assert not receivers.has_no_seat("b", LEAST_BYTES_PER_S)


def test_nobody_keeps_a_place_for_ever() -> None:
    receivers = Receivers()
    receivers.begins("a", 0.0)
    receivers.put_off("a", LEAST_BYTES_PER_S, 0.0)
    receivers.ends("a", 0.0)
    receivers.begins("b", 2 * LONGEST_PAUSE_S)
    assert [*receivers._places] == ["b"]
