"""Network coordinates: what the round trip between any two peers is, from the round trips that each has measured to a few.

Vivaldi (Dabek et al. 2004, section 5.4) in two dimensions with heights. Every answer of a peer pulls this peer's point along the line
between both, towards where the round trip that was measured would be right. The height is what the access line adds to every path.

A round trip that was measured is believed; a coordinate is a peer's own word. So no answer moves the point further than answers that are
usual at present: a peer that lies pulls no harder than an honest one, and a minority of liars displaces the point by a part of its
error (as in Huber's estimate of a mean). What a peer says of its own error weighs no less than `LEAST_ERROR`. The round trip between two
others is bounded by what was measured to both, as far as it was: it is neither less than the difference nor more than the sum.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

from peerd.policy.hashing import digest
from peerd.table.record import MAX_ERROR, MAX_HEIGHT, MAX_OFFSET, Coordinate, PeerId, PeerRecord

TICK_S = 1e-4
"""The unit of points and heights in records."""
ERROR_UNIT = 1e-3
STEP = 0.5
"""Share of a misfit that is corrected at once where this peer knows nothing and the other one knows its place."""
LEAST_ERROR, MOST_ERROR = 0.05, MAX_ERROR * ERROR_UNIT
USUAL = 3.0
"""No answer pulls harder than one whose misfit is so many times the median one."""
LEAST_HEIGHT_S = TICK_S
RECENT = 8
"""Round trips of which the least counts: the others waited behind something."""
LATEST = 32
MOST_PEERS = 64
"""Peers whose round trips are remembered, the latest."""
MOST_ROUND_TRIP_S = 10.0
STALE = 0.1
"""Share of the usual round trip by which a point may move until the record says so: noise changes no record."""


@dataclass(frozen=True, slots=True)
class _Point:
    """Seconds."""

    x: float = 0.0
    y: float = 0.0
    height: float = LEAST_HEIGHT_S

    @classmethod
    def told(cls, coordinate: Coordinate) -> _Point:
        return cls(coordinate.x * TICK_S, coordinate.y * TICK_S, max(LEAST_HEIGHT_S, coordinate.height * TICK_S))

    def distance_s(self, other: _Point) -> float:
        return math.hypot(self.x - other.x, self.y - other.y)

    def round_trip_s(self, other: _Point) -> float:
        return self.distance_s(other) + self.height + other.height


@dataclass(slots=True)
class _Seen:
    round_trips_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    point: _Point | None = None
    """Where the peer said that it is."""

    @property
    def least_s(self) -> float:
        return min(self.round_trips_s)

    def misfit(self, mine: _Point) -> float:
        """Share of the round trip by which the prediction is off."""
        if self.point is None:
            return MOST_ERROR
        return abs(mine.round_trip_s(self.point) - self.least_s) / self.least_s


def predicted_s(one: Coordinate, other: Coordinate, here_s: float | None = None, there_s: float | None = None) -> float:
    """The round trip between two peers by their coordinates, s, within what is known of it.

    `here_s`, `there_s`: the round trip from a third peer to each of them; None: not known.
    """
    found_s = _Point.told(one).round_trip_s(_Point.told(other))
    if here_s is None or there_s is None:
        return found_s
    return min(max(found_s, abs(here_s - there_s)), here_s + there_s)


def coordinate_of(seconds: Sequence[float]) -> Coordinate:
    """The inverse of `seconds_of`."""
    x, y, height = (round(each / TICK_S) for each in seconds[:3])
    return Coordinate(x, y, height, round(seconds[3] / ERROR_UNIT))


def seconds_of(coordinate: Coordinate) -> list[float]:
    """x, y and height in seconds, and the error as a share of a round trip."""
    return [TICK_S * coordinate.x, TICK_S * coordinate.y, TICK_S * coordinate.height, ERROR_UNIT * coordinate.error]


class NetworkPosition:
    """Where this peer is, and how far away others are. Holds numbers only; the caller measures."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._point = _Point()
        self._seen: dict[PeerId, _Seen] = {}
        """Ordered by the last answer, latest last."""
        self._claimed: Coordinate | None = None

    def answered(self, peer: PeerId, round_trip_s: float, coordinate: Coordinate | None) -> None:
        """Count the answer to a small question. `coordinate`: what the peer's record says; None: nothing."""
        if not 0 < round_trip_s <= MOST_ROUND_TRIP_S:
            return
        seen = self._seen.pop(peer, None) or _Seen()
        seen.round_trips_s.append(round_trip_s)
        self._seen[peer] = seen
        if coordinate is not None:
            self._fit(peer, seen, coordinate)
        self._claimed = self._claimed or self._as_told()
        if len(self._seen) > MOST_PEERS:
            del self._seen[next(iter(self._seen))]

    @property
    def error(self) -> float:
        """Share of a round trip by which predictions are off, at the median of the last peers that answered."""
        latest = islice(reversed(self._seen.values()), LATEST)
        return min(MOST_ERROR, max(LEAST_ERROR, median([seen.misfit(self._point) for seen in latest] or [MOST_ERROR])))

    @property
    def coordinate(self) -> Coordinate | None:
        """What this peer's record says. It changes once the point has moved by more than noise. None: nobody has answered yet."""
        if self._claimed is None:
            return None
        now = self._as_told()
        moved_s = TICK_S * max(abs(now.x - self._claimed.x), abs(now.y - self._claimed.y), abs(now.height - self._claimed.height))
        if moved_s > STALE * self._usual_s() or not 0.5 <= now.error / self._claimed.error <= 2:
            self._claimed = now
        return self._claimed

    def measured_s(self, peer: PeerId) -> float | None:
        """The least of the last round trips to a peer, s; None: it has not answered."""
        seen = self._seen.get(peer)
        return seen.least_s if seen is not None else None

    def round_trip_s(self, record: PeerRecord) -> float | None:
        """The round trip to a peer, s: as measured, else as predicted. None: nothing is known."""
        measured_s = self.measured_s(record.peer)
        if measured_s is not None or record.coordinate is None or self._claimed is None:
            return measured_s
        return self._point.round_trip_s(_Point.told(record.coordinate))

    def _usual_s(self) -> float:
        """The median round trip."""
        return median(seen.least_s for seen in self._seen.values())

    def _fit(self, peer: PeerId, seen: _Seen, coordinate: Coordinate) -> None:
        """Move the point towards where this answer is right."""
        mine, theirs, measured_s = self._point, _Point.told(coordinate), seen.least_s
        seen.point = theirs
        found_s, own_error = mine.round_trip_s(theirs), self.error
        weight = own_error / (own_error + max(LEAST_ERROR, coordinate.error * ERROR_UNIT))
        most_s = USUAL * own_error * max(measured_s, self._usual_s())
        pull_s = STEP * weight * min(max(measured_s - found_s, -most_s), most_s)
        apart_s = mine.distance_s(theirs)
        if apart_s > TICK_S:
            along_x, along_y = (mine.x - theirs.x) / apart_s, (mine.y - theirs.y) / apart_s
        else:
            turn = 2 * math.pi * int.from_bytes(digest("coordinate", self._me, peer, size=4)) / 2**32
            along_x, along_y = math.cos(turn), math.sin(turn)
        most = MAX_OFFSET * TICK_S
        self._point = _Point(
            min(max(mine.x + pull_s * along_x, -most), most),
            min(max(mine.y + pull_s * along_y, -most), most),
            min(max(mine.height + pull_s * (mine.height + theirs.height) / found_s, LEAST_HEIGHT_S), MAX_HEIGHT * TICK_S),
        )

    def _as_told(self) -> Coordinate:
        x, y, height = (round(each / TICK_S) for each in (self._point.x, self._point.y, self._point.height))
        return Coordinate(x, y, height, round(self.error / ERROR_UNIT))
