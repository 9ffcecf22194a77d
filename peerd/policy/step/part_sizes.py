"""Which part of an average is too large for the microbatches of which it is the sum: rule 22 (size). Pure.

An optimizer such as AdamW hides a part that is a thousand times too large: the update looks as usual, and the moments are spoilt for
thousands of steps. So a reducer looks at its slice of all parts before anybody gets the last chunk of their sum. Nobody sees the part that
the reducer itself puts in, so each member looks at the sum beside its own part.

A part that looks odd beside the others, because it is hardly there or points away from them, may be right. So nobody leaves it out, but
it is audited more often (rule 20, audit).

The mean of few gradients is noisy, so the part of a peer that has done few microbatches may be larger for each of them, by the root of
how few. A slice may be one that hardly any microbatch has a gradient for, as the rows of rare tokens have. So it counts at least as what
the reducer's own part would have in it if it were spread evenly.

A gradient that is far larger than usual is nobody's fault. So the part of another peer, which has done the same microbatches once more, is
not looked at, and shows whether the gradients themselves are so large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from peerd.table.record import PeerId

TIMES = 4.0
"""A part is too large from so many times the median of the others on."""
OUTLIERS = 3.0
"""A few microbatches of a part may have far larger gradients than usual: it may be as large as if there were so many more of them."""
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
    num = max(1, part.num_microbatches)
    slack = TIMES * max(1.0, math.sqrt(usual.num_microbatches / num)) * (1.0 + OUTLIERS / num)
    return slack * max(usual.each, even) * num


def too_large(parts: Sequence[PartSize], me: int, even: float) -> list[int]:
    """The members whose parts are above what they may be, by their places, the one that is furthest above it first; this one may be among
    them, if its own gradients are so large.

    `parts`: of a slice, in the order of the roster, this reducer's at place `me`. `even`: as in `limit_of`.
    """
    found = list[tuple[float, int]]()
    for place, part in enumerate(parts):
        others = _others(parts, place)
        if len(others) < FEWEST_MEMBERS - 1:
            continue
        times = _times(part.norm, limit_of(part, others, even if place != me else 0.0))
        if times > 1.0:
            found.append((-times, place))
    return [place for _, place in sorted(found)]


def is_sum_too_large(total: PartSize, own: PartSize, even: float) -> bool:
    """Whether a slice of a sum is too large beside one member's own part of it: its reducer puts its own part in unseen.

    A sum of more microbatches is less noisy, so for each of them it is no larger, but for outliers. A member that has done none knows of
    nothing usual.
    """
    limit = TIMES * (1.0 + OUTLIERS / max(1, total.num_microbatches)) * max(own.each, even)
    return own.num_microbatches > 0 and not total.each <= limit


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


TELLERS = 2
"""If so many others have found a part too large, the gradients themselves may be: one could say it to have another one's part spared."""


@dataclass(slots=True)
class FoundLarge:
    """What one peer has found too large in a step, or has been told of, until another peer has done the same microbatches."""

    _step: int = -1
    _done: dict[PeerId, int] = field(default_factory=dict)
    """By peer, the bitmap of its microbatches."""
    _told: dict[PeerId, tuple[int, set[PeerId]]] = field(default_factory=dict)
    """The same of those that others have found, with who they are."""

    def note(self, step: int, peer: PeerId, done: int) -> None:
        """Note a peer whose part, or whose sum, was too large."""
        self._begin(step)
        self._done[peer] = done

    def told(self, step: int, peer: PeerId, done: int, teller: PeerId) -> None:
        """Note that another member says that it has found that."""
        self._begin(step)
        known, tellers = self._told.setdefault(peer, (done, set()))
        self._told[peer] = known | done, {*tellers, teller}

    def spared(self, step: int, peer: PeerId) -> int:
        """The bitmap of microbatches of which this peer's part may be as large as it is: those of other peers that were found."""
        if step != self._step:
            return 0
        told = {other: done for other, (done, tellers) in self._told.items() if len(tellers) >= TELLERS}
        found = 0
        for other, done in (*self._done.items(), *told.items()):
            found |= done if other != peer else 0
        return found

    def guilty(self, step: int, large: Iterable[int]) -> list[PeerId]:
        """The peers whose microbatches others have done in this step without such large gradients. Each is told once.

        `large`: the bitmaps of the parts, of a round that is done, that are too large all the same.
        """
        known, now = self._done if step == self._step else {}, list(large)
        found = [peer for peer, done in known.items() if not any(done & other for other in now)]
        self._done = {}
        return found

    def _begin(self, step: int) -> None:
        if step != self._step:
            self._step, self._done, self._told = step, {}, {}
