"""Which trainer owns which microbatches of a step: each one a range of them.

The microbatches of a step lie on a ring at equal distances, in the order of their indices, and each trainer has a point on it that is drawn
for the step. The trainers own a microbatch in the order of their distance to it. So each of them first owns the range around its point,
half the way to the trainer on either side. If one comes or goes, its own range changes hands and nothing else: its two neighbours share it.
Shares differ (of two trainers each owns half, of many the largest share is a few times the mean), and in each step they are other ones.

The cost is that of sorting the trainers once for a step, whatever the number of microbatches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from peerd.policy.hashing import digest
from peerd.policy.step.ledger import full
from peerd.table.record import PeerId

BITS = 64
"""The ring is so many bits long."""
POINTS_REMEMBERED, RINGS_REMEMBERED = 1 << 12, 16


@dataclass(frozen=True, slots=True)
class Ring:
    """Some trainers and their points on the ring, both in the order of the points. No trainer is in it twice."""

    trainers: tuple[PeerId, ...]
    points: tuple[int, ...]
    places: Mapping[PeerId, int]
    """By trainer, its place in that order."""

    def owned(self, place: int, ranks: int, num_microbatches: int) -> int:
        """The bitmap of the microbatches to which the trainer at `place` is one of the `ranks` nearest.

        Fewer than `ranks` others are nearer up to half the way to the trainer that many places further, on either side. Between two
        trainers at equal distances the one with the lower index comes first, so each microbatch has exactly `ranks` such owners.
        """
        if ranks >= len(self.trainers):
            return full(num_microbatches)
        last_before, last = (self.last(at, ranks, num_microbatches) for at in (place - ranks, place))
        run = full(last - last_before) << (last_before + 1) % num_microbatches
        return (run | run >> num_microbatches) & full(num_microbatches)

    def first_owner(self, index: int, num_microbatches: int) -> PeerId:
        first = 1 + self.last(-1, 1, num_microbatches)
        onwards = first + (index - first) % num_microbatches
        return self.trainers[bisect_left(range(len(self.trainers)), onwards, key=lambda place: self.last(place, 1, num_microbatches))]

    def last(self, place: int, ranks: int, num_microbatches: int) -> int:
        """The last microbatch on the first half of the way from the trainer at `place` to the one `ranks` places further.

        Places and microbatches are counted on around the ring: number -1 is the last one.
        """
        return (self._point(place) + self._point(place + ranks)) * num_microbatches >> BITS + 1

    def _point(self, place: int) -> int:
        turns, place = divmod(place, len(self.points))
        return self.points[place] + (turns << BITS)


@lru_cache(maxsize=POINTS_REMEMBERED)
def _point(trainer: PeerId, step: int) -> int:
    return int.from_bytes(digest("owner", trainer, step, size=BITS // 8), "little")


@lru_cache(maxsize=RINGS_REMEMBERED)
def ring_of(trainers: tuple[PeerId, ...], step: int) -> Ring:
    """Remembered: the trainers hardly ever change, and this is asked at every change of the table."""
    by_point = sorted((_point(trainer, step), trainer) for trainer in set(trainers))
    names = tuple(trainer for _, trainer in by_point)
    return Ring(names, tuple(point for point, _ in by_point), {trainer: place for place, trainer in enumerate(names)})


def owned_among_first(trainers: tuple[PeerId, ...], peer: PeerId, step: int, num_microbatches: int, ranks: int = 1) -> int:
    """The bitmap of the microbatches of a step of which `peer` is among the first `ranks` owners."""
    ring = ring_of(trainers, step)
    place = ring.places.get(peer)
    return 0 if place is None else ring.owned(place, ranks, num_microbatches)


def first_owners(trainers: tuple[PeerId, ...], step: int, bitmap: int, num_microbatches: int) -> Iterator[PeerId]:
    """The trainers that own these microbatches first, each of them once."""
    ring, left = ring_of(trainers, step), bitmap & full(num_microbatches) if trainers else 0
    while left:
        owner = ring.first_owner((left & -left).bit_length() - 1, num_microbatches)
        yield owner
        left &= ~ring.owned(ring.places[owner], 1, num_microbatches)
