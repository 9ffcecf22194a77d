"""The norms of all members' parts of the slice that this member reduces: what rule 22 (size) looks at."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from peerd.averaging.layout import RoundLayout
from peerd.policy.step.part_sizes import FEWEST_MEMBERS, PartSize, even_share, is_sum_too_large, odd_ones, too_large
from peerd.policy.step.parts import slice_bounds
from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId


class SliceNorms:
    """It measures the parts of one round. The thread that computes uses it."""

    def __init__(
        self, roster: Roster, me: int, layout: RoundLayout, spared: Collection[PeerId] = (), *, with_directions: bool = True
    ) -> None:
        """`spared`: members with microbatches that may be as large as they are: another peer's part with them was left out for that.

        `with_directions`: whether somebody asks for parts that look odd, which takes as much time again.
        """
        self._with_directions = with_directions
        self._done = [entry.done for entry in roster.entries]
        self._numbers = [done.bit_count() for done in self._done]
        self._spared = [entry.peer in spared for entry in roster.entries]
        self._large: set[int] = set()
        """Members whose parts or sums are too large, spared or not."""
        self._me = me
        self._end = layout.length - layout.room
        """Behind it come parameters, and no gradients."""
        self._squares = [0.0 for _ in roster.entries]
        self._along = [0.0 for _ in roster.entries]
        """By member, the product of its part and the sum of all parts."""
        self._elements = 0
        self._covered = [[0.0, 0.0, 0.0] for _ in roster.entries]
        """By reducer, the squares of this member's own part of its slice and of its sum, and how many elements these are."""
        self._own: float | None = None
        """The norm of this member's whole part."""

    def note_own(self, part: Tensor) -> None:
        """Measure this member's whole part, before sums are written over it."""
        if self._own is None:
            self._own = _norm(part[: self._end])

    def covers(self, reducer: int, start: int, own: Tensor) -> None:
        """Note a chunk of this member's own part, which a chunk of another's sum is about to cover."""
        here = own[: max(0, self._end - start)]
        self._covered[reducer][0] += _norm(here) ** 2
        self._covered[reducer][2] += len(here)

    def sum_is_too_large(self, reducer: int, start: int, values: Tensor, *, is_last: bool) -> bool:
        """Add a chunk of another's sum. Returns whether all of its slice is too large beside this member's own part of it."""
        self._covered[reducer][1] += _norm(values[: max(0, self._end - start)]) ** 2
        if not is_last:
            return False
        own_square, square, elements = self._covered[reducer]
        own, mine = self._own or 0.0, self._numbers[self._me]
        part, even = PartSize(own_square**0.5, mine), even_share(own, mine, int(elements), self._end)
        if not is_sum_too_large(PartSize(square**0.5, sum(self._numbers)), part, even):
            return False
        self._large |= {reducer, *(place for place, is_spared in enumerate(self._spared) if is_spared)}
        return not any(self._spared)

    def add(self, start: int, parts: dict[int, Tensor]) -> None:
        """Add a chunk of every member's part, whose elements begin at `start`."""
        here = max(0, self._end - start)
        self._elements += min(here, len(parts[self._me]))
        for author, part in parts.items():
            self._squares[author] += _norm(part[:here]) ** 2
        if self._with_directions:
            total = torch.zeros_like(parts[self._me][:here], dtype=torch.float32)
            for part in parts.values():
                total += part[:here]
            for author, part in parts.items():
                self._along[author] += float(torch.dot(part[:here].float(), total))

    @property
    def _whole(self) -> tuple[list[PartSize], int, float]:
        own = 0.0 if self._own is None else self._own
        even = even_share(own, self._numbers[self._me], self._elements, self._end)
        whole = sum(self._along)  # the square of the sum
        parts = []
        for square, along, number in zip(self._squares, self._along, self._numbers, strict=True):
            rest = max(0.0, whole - 2 * along + square)
            cosine = (along - square) / (square * rest) ** 0.5 if square * rest > 0.0 else 0.0
            parts.append(PartSize(square**0.5, number, cosine))
        return parts, self._me, even

    def too_large(self) -> int | None:
        """The member whose part of the slice is too large, once all chunks of it are added; None if none is, but for those spared."""
        found = too_large(*self._whole)
        self._large |= set(found)
        return next((place for place in found if place != self._me and not self._spared[place]), None)

    @property
    def large(self) -> list[int]:
        """The bitmaps of the parts that are too large, and of those of reducers whose sums are, in a round that is done all the same."""
        return [self._done[place] for place in sorted(self._large)]

    def odd_ones(self) -> list[int]:
        """The members whose parts of the slice look odd, once all chunks of it are added."""
        return odd_ones(*self._whole)


def is_sum_out_of_bounds(roster: Roster, total: Tensor, own: Tensor, me: PeerId, room: int) -> bool:
    """Whether a slice of a round's sum is too large beside this peer's own part of it, `own`: it was in that round, or knows nothing of it.

    The last `room` elements are for parameters.
    """
    entry = roster.entry_of(me)
    if len(roster.entries) < FEWEST_MEMBERS or entry is None:
        return False
    num, mine, end = sum(each.done.bit_count() for each in roster.entries), entry.done.bit_count(), len(total) - room
    norm = _norm(own[:end])
    for start, stop in slice_bounds(roster, len(total), room):
        start, stop = min(start, end), min(stop, end)
        part, even = PartSize(_norm(own[start:stop]), mine), even_share(norm, mine, stop - start, end)
        if stop > start and is_sum_too_large(PartSize(_norm(total[start:stop]), num), part, even):
            return True
    return False


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))
