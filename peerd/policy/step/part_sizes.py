"""Which part of an average is too large for the microbatches of which it is the sum: rule 22 (size). Pure.

An optimizer such as AdamW hides a part that is a thousand times too large: the update looks as usual, and the moments are spoilt for
thousands of steps. So a reducer looks at its slice of all parts before anybody gets the last chunk of their sum. Nobody sees the part that
the reducer itself puts in, so each member looks at the sum beside its own part.

A part that looks odd beside the others, because it is hardly there or points away from them, may be right. So nobody leaves it out, but
it is audited more often (rule 20, audit).

The mean of few gradients is noisy, so the part of a peer that has done few microbatches may be larger for each of them, by the root of how
few. A slice may be one that hardly any microbatch has a gradient for, as the rows of rare tokens have. So it counts at least as what the
reducer's own part would have in it if it were spread evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TIMES = 4.0
"""A part is too large from so many times the median of the others on."""
WHY_TOO_LARGE = "a member's part is too large for its microbatches"
FEWEST_MEMBERS = 3
"""A reducer knows its own part to be right. Beside it there has to be another one than the one that it looks at."""
AGAINST = -0.25
"""A part looks odd if its cosine with the sum of the others is less. Parts of noise are at right angles; those with a signal agree."""


@dataclass(frozen=True, slots=True)
class PartSize:
    """One member's part of a slice."""

    norm: float
    num_microbatches: int
    along: float = 0.0
    """Its cosine with the sum of all others' parts."""

    @property
    def each(self) -> float:
        """The norm for each microbatch. A part of none may hold what a codec has left out of the one before."""
        return self.norm / max(1, self.num_microbatches)


def even_share(norm: float, num_microbatches: int, elements: int, length: int) -> float:
    """The norm for each microbatch that a slice of so many elements has of a part of this length and norm, if it is spread evenly."""
    return norm / max(1, num_microbatches) * math.sqrt(elements / max(1, length))


def _usual(others: Sequence[PartSize]) -> PartSize:
    """The one in the middle, and of two the larger one."""
    return sorted(others, key=lambda each: each.each)[len(others) // 2]


def limit_of(part: PartSize, others: Sequence[PartSize], even: float) -> float:
    """The largest norm that a part may have beside the others. `even`: the least that a microbatch counts as in this slice."""
    usual = _usual(others)
    slack = TIMES * max(1.0, math.sqrt(usual.num_microbatches / max(1, part.num_microbatches)))
    return slack * max(usual.each, even) * max(1, part.num_microbatches)


def too_large(parts: Sequence[PartSize], me: int, even: float) -> int | None:
    """The member whose part is the furthest above what it may be, by its place; None if none is.

    `parts`: of a slice, in the order of the roster, this reducer's at place `me`. `even`: as in `limit_of`.
    """
    if len(parts) < FEWEST_MEMBERS:
        return None
    found, most = None, 1.0
    for place, part in enumerate(parts):
        others = _others(parts, place)
        if place == me or len(others) < FEWEST_MEMBERS - 1:
            continue
        times = _times(part.norm, limit_of(part, others, even))
        if times > most:
            found, most = place, times
    return found


def is_sum_too_large(total: PartSize, own: PartSize, even: float) -> bool:
    """Whether a slice of a sum is too large beside one member's own part of it: its reducer puts its own part in unseen.

    A sum of more microbatches is less noisy, so for each of them it is no larger. A member that has done none knows of nothing usual.
    """
    return own.num_microbatches > 0 and not total.each <= TIMES * max(own.each, even)


def _others(parts: Sequence[PartSize], place: int) -> list[PartSize]:
    """Those beside which a part is looked at."""
    return [each for other, each in enumerate(parts) if other != place and each.num_microbatches > 0 and math.isfinite(each.norm)]


def odd_ones(parts: Sequence[PartSize], me: int, even: float) -> list[int]:
    """The places of members whose parts look odd. In a slice that is hardly anybody's a part may be small; a sum of many is less noisy.

    The arguments are those of `too_large`.
    """
    found = []
    for place, part in enumerate(parts):
        others = _others(parts, place)
        if place == me or len(others) < FEWEST_MEMBERS - 1 or not part.num_microbatches:
            continue
        usual = _usual(others)
        least = usual.each / (TIMES * max(1.0, math.sqrt(part.num_microbatches / usual.num_microbatches)))
        if part.along < AGAINST or (usual.each >= even and part.each < least):
            found.append(place)
    return found


def _times(norm: float, limit: float) -> float:
    """How many times the limit a norm is. What is no number is the largest."""
    if norm == 0.0:
        return 0.0
    return norm / limit if limit > 0.0 and math.isfinite(norm) else math.inf
