"""Which work of its mates a peer computes again, and what it says of the result: rule 20 (audit).

Nothing in an average tells a right gradient from a wrong one. So each peer computes some work of its mates again, while it still holds the
parameters that the work was done with. An item is one microbatch of one peer (its output and its gradient, from the inputs that it got), or
a peer's whole part of a step. A secret of the auditor's draws the items, so that nobody knows which of its work will be looked at.

An auditor is committed to a step's secret before the step (coins.py), and an item's id covers what the audited peer has signed. So the
auditor can show later that an audit was due, and could not have chosen whom it audits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from peerd.policy.hashing import digest
from peerd.table.record import PeerId

NEWCOMER_STEPS = 10
"""A peer is a newcomer until so many steps with its work have ended and nothing was found wrong."""
SETTLED_STEPS = 100
ACCUSE_TIMES = 4.0
"""A peer accuses if the deviation is so many times the tolerance, and a judge differs above the tolerance itself. So where one honest
machine accuses, another one of its kind differs, too."""
DUE_TIMES = 2.0
"""Peers know a little different numbers of auditors and clean steps. An audit counts as due up to so many times the chance that I know."""


class Precision(Enum):
    """The precision of a peer's computation: the least exact number format of a pass."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What decides how exactly two peers agree: the kind of device (cpu, cuda, mps) and its precision."""

    kind: str
    precision: Precision


NOISE: Mapping[Precision, float] = {
    Precision.FLOAT64: 1e-12,
    Precision.FLOAT32: 1e-4,
    Precision.FLOAT16: 1e-2,
    Precision.BFLOAT16: 5e-2,
}
"""The tolerance of each precision: how far two honest machines may be apart, as |a - b| / |b| over all elements."""
MOST_TOLERANCE = 0.1
MOST_DEVIATION = 1e6
"""Larger ones are alike: some machines overflow where others do not."""


def tolerance(one: DeviceKind, other: DeviceKind, quantum: float = 0.0) -> float:
    """How far the results of two honest devices may be apart, as |a - b| / |b| over all elements: the less exact device decides.

    `quantum`: the step of the codec by which the result travelled, relative to a usual value; the replay is encoded likewise before the two
    are compared. Noise moves the values near the boundary of two steps alone, so the deviation is the root of noise times step.
    """
    noise = max(NOISE[one.precision], NOISE[other.precision])
    return min(MOST_TOLERANCE, max(noise, math.sqrt(noise * max(0.0, quantum))))


@dataclass(frozen=True, slots=True)
class Item:
    """Work of one peer that can be computed again. `index`: the microbatch; None: the peer's whole part of the step.

    `signed`: the hash of what the peer has signed of it, its receipt or the root of its part.
    """

    audited: PeerId
    stage: int
    step: int
    index: int | None
    signed: bytes

    @property
    def id(self) -> bytes:
        """16 bytes that name this work and its result."""
        return digest("item", self.audited, self.stage, self.step, "share" if self.index is None else self.index, self.signed)


@dataclass(frozen=True, slots=True)
class Rates:
    """The share of a peer's work that all auditors together compute again: of its microbatches, and of its whole parts of a step.

    With 2.5 % of each a stage does 2.9 % of its work again: an audit of one microbatch needs no gradients of parameters, and one of a part
    only those of its chunk, and the backward pass down to them. A run may do with less after SETTLED_STEPS:
    `settled`. That is the same here, because a peer that lies only then would do more before it is found.
    """

    newcomer: float = 0.25
    usual: float = 0.025
    odd: float = 0.5
    """Of parts that look odd beside the others' (part_sizes.py): as many as judges accept, which is DUE_TIMES a newcomer's share."""
    settled: float = 0.025

    def rate(self, clean_steps: int, is_odd: bool = False, is_watched: bool = False) -> float:
        """The share for a peer. `is_watched`: an accusation of it, or by it, has come to no end."""
        known = self.settled if clean_steps >= SETTLED_STEPS else self.usual
        if is_watched or clean_steps < NEWCOMER_STEPS:
            known = self.newcomer
        return max(known, self.odd) if is_odd else known


def chance(rate: float, num_auditors: int) -> float:
    """The chance with which one of `num_auditors` peers computes an item again, so that together they do `rate` of all."""
    return min(1.0, rate / max(1, num_auditors))


def coin(secret: bytes, item: Item) -> float:
    """The auditor's coin for an item, from 0 to 1. Without the secret nobody can tell it."""
    return int.from_bytes(digest("coin", secret, item.id, size=8), "little") / 2.0**64


def most_audits(expected: float) -> int:
    """How many audits a peer makes of one step, or may ask the inputs for, where it expects `expected` of them."""
    return 1 + math.ceil(expected + 3.0 * math.sqrt(expected))


def due(secret: bytes, items: Iterable[tuple[Item, float]]) -> list[Item]:
    """The items that the auditor computes again, of those with their chances; the most surprising coin first.

    There are no more than a coin that is fair brings in all but one of a thousand steps.
    """
    drawn, expected = list[tuple[float, Item]](), 0.0
    for item, its_chance in items:
        expected += its_chance
        found = coin(secret, item)
        if found < its_chance:
            drawn.append((found / its_chance, item))
    return [item for _, item in sorted(drawn, key=lambda each: each[0])][: most_audits(expected)]


def was_due(secret: bytes, item: Item, its_chance: float) -> bool:
    """Whether an auditor with this secret had to audit this item, by the chance that this peer knows."""
    return coin(secret, item) < DUE_TIMES * its_chance


@dataclass(frozen=True, slots=True)
class AuditWord:
    """What one peer says of an item: how far its own result is from the audited peer's, and how far it may be, as |a - b| / |b|."""

    deviation: float
    tolerance: float

    @property
    def distance(self) -> float:
        """The deviation as far as it is counted. One that is no number is the largest."""
        return min(self.deviation, MOST_DEVIATION) if self.deviation >= 0.0 else MOST_DEVIATION

    @property
    def bound(self) -> float:
        """The tolerance, as far as a word may claim one: a larger one would excuse every contradiction."""
        return min(MOST_TOLERANCE, self.tolerance) if self.tolerance > 0.0 else 0.0

    @property
    def differs(self) -> bool:
        """Whether the result is wrong by this word."""
        return self.distance > self.bound

    @property
    def accuses(self) -> bool:
        """Whether its author may open a case."""
        return self.distance > ACCUSE_TIMES * self.bound

    def agrees_with(self, other: AuditWord) -> bool:
        """Whether both may be the words of honest peers on one item. What they conclude may differ, if one of them is less exact.

        What is a thousand times too large is measured a thousand times less exactly.
        """
        near = ACCUSE_TIMES * max(self.bound, other.bound) * max(1.0, min(self.distance, other.distance))
        return abs(self.distance - other.distance) <= near


RIGHT = AuditWord(0.0, 0.0)
"""The word of the audited peer itself: it has signed that its result is right."""
