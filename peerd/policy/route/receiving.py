"""Which of several receivers gets the next chunk of an uplink, where training leaves little of it.

A receiver gives up a stream that is slower than `links.LEAST_BYTES_PER_S`. If all shared the little that is left, each might get less than
that, and none would ever have its state. So as many have a seat as the least share carries, those that came first, and others get what
these leave. Who gets nothing that way for as long as a chunk takes at a seat hears when to come back, and keeps its place until then.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from peerd.policy.route.yielding import LEAST_BYTES_PER_S, least_rate

LEAST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
"""Whoever is sent away comes back after so long: the line may be free again, and its copy of the state is kept for a life of a record."""


@dataclass(slots=True, eq=False)
class WaitingChunk:
    """A chunk that waits for its turn. Without a receiver it goes as if that had a seat."""

    num_bytes: int
    since_s: float
    receiver: Hashable | None


@dataclass(slots=True)
class _Place:
    streams: int = 0
    left_s: float | None = None
    """The time until the receiver has all, at its rate so far; None while that is not known."""
    kept_until_s: float = 0.0
    """So long it keeps its place without a stream."""


@dataclass(slots=True)
class Receivers:
    """Times are seconds on the caller's clock, rates bytes per second."""

    _places: dict[Hashable, _Place] = field(default_factory=dict)
    """In the order in which they came."""
    _waiting: list[WaitingChunk] = field(default_factory=list)
    """In the order in which they asked."""
    _is_short: bool = False
    """Somebody was sent away, and since then no chunk has left without a wait."""

    def begins(self, receiver: Hashable, now_s: float) -> None:
        """A receiver opens a stream. One that was sent away has its place again, if it is not much too late."""
        self._forget(now_s)
        self._places.setdefault(receiver, _Place()).streams += 1

    def ends(self, receiver: Hashable, now_s: float) -> None:
        self._places[receiver].streams -= 1
        self._forget(now_s)

    def asks(self, num_bytes: int, now_s: float, receiver: Hashable | None = None, left_s: float | None = None) -> WaitingChunk:
        """A chunk waits from now on, of a receiver that has begun. `left_s`: what it needs for all that it has yet to get."""
        if receiver is not None:
            self._places[receiver].left_s = left_s
        self._waiting.append(WaitingChunk(num_bytes, now_s, receiver))
        return self._waiting[-1]

    def leaves(self, chunk: WaitingChunk, *, at_once: bool) -> None:
        """A chunk waits no more, because its turn came or its stream ended. `at_once`: it did not have to wait."""
        self._waiting.remove(chunk)
        self._is_short = self._is_short and not at_once

    def next(self, rate: float) -> WaitingChunk | None:
        """The chunk whose turn it is once the line is free; None if none waits."""
        seated = self._seated(rate)
        return next((each for each in self._waiting if each.receiver is None or each.receiver in seated), next(iter(self._waiting), None))

    def put_off_in_s(self, chunk: WaitingChunk, rate: float, now_s: float) -> float | None:
        """The time until the receiver of a chunk is to be sent away; None: it has a seat and is not."""
        if chunk.receiver is None or chunk.receiver in self._seated(rate):
            return None
        return max(0.0, chunk.since_s + chunk.num_bytes / LEAST_BYTES_PER_S - now_s)

    def put_off(self, receiver: Hashable, rate: float, now_s: float) -> float:
        """Send a receiver away. Returns after how long it is to come back; until twice as long it keeps its place."""
        self._is_short = True
        left = [place.left_s for each in self._seated(rate) if (place := self._places[each]).left_s is not None]
        pause_s = min(max(min(left, default=LONGEST_PAUSE_S), LEAST_PAUSE_S), LONGEST_PAUSE_S)
        self._places[receiver].kept_until_s = now_s + 2 * pause_s
        return pause_s

    def has_no_seat(self, receiver: Hashable, rate: float) -> bool:
        """Whether a receiver that has begun would be sent away again: the line is as short as it was when somebody was."""
        return self._is_short and bool(self._waiting) and receiver not in self._seated(rate)

    def _seated(self, rate: float) -> set[Hashable]:
        others = sum(each.receiver is None for each in self._waiting)
        seats = max(1, int(least_rate(rate) / LEAST_BYTES_PER_S) - others)
        here = [receiver for receiver, place in self._places.items() if place.streams]
        return set(here[:seats])

    def _forget(self, now_s: float) -> None:
        for receiver in [each for each, place in self._places.items() if not place.streams and place.kept_until_s <= now_s]:
            del self._places[receiver]
