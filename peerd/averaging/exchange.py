"""One open round at one member: which elements each reduces, what has come in, and the sums over it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from torch import Tensor

from peerd.averaging.compression import Compression, Slice
from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId


@dataclass(frozen=True, slots=True)
class Reduced:
    """The sum of a slice, and the bytes that tell it to others."""

    total: Tensor
    chunks: tuple[memoryview, ...]


@dataclass(slots=True)
class Round:
    """One open round at this member."""

    roster: Roster
    mine: int
    """My index in the roster, and the slice I reduce."""
    accumulator: Tensor
    """A copy that is this round's own; a slice of it becomes the average once that is here."""
    slices_of: list[Slice]
    """By index in the roster: which elements each member reduces."""
    parts: dict[PeerId, Tensor] = field(default_factory=dict)
    complete: bool = False
    """Every member's part is here. For the thread that sums."""
    slices: dict[int, Tensor] = field(default_factory=dict)
    silent: list[PeerId] = field(default_factory=list)
    """Members that did not answer the proposal."""
    refused: bool = False
    reduced: asyncio.Future[Reduced] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    progress_s: float = 0.0

    def made(self, reduced: Reduced) -> None:
        """My slice is summed; nobody waits for it where the round was closed meanwhile."""
        if not self.reduced.done():
            self.reduced.set_result(reduced)


def elements_of(current: Round, number: int) -> tuple[Slice, Tensor]:
    where = current.slices_of[number]
    return where, current.accumulator[where.start : where.end]


def whole_of(current: Round) -> Tensor:
    """The slices as one vector: those that lie elsewhere are copied to where they belong."""
    for number, values in current.slices.items():
        _, place = elements_of(current, number)
        if values.data_ptr() != place.data_ptr():
            place.copy_(values)
            current.slices[number] = place
    return current.accumulator


def sum_in_order(current: Round) -> Tensor:
    """Parts added in the roster's order, so that the bits do not depend on who came first. The first one's memory takes the sum."""
    total, *rest = (current.parts[peer] for peer in current.roster.peers)
    for part in rest:
        total += part
    current.parts.clear()
    return total


def own_part(current: Round, compression: Compression) -> Tensor:
    """My part of the slice that I reduce."""
    where, values = elements_of(current, current.mine)
    return compression.kept(compression.parts, current.roster.average_id, where, values)


def part_for(current: Round, number: int, compression: Compression) -> tuple[memoryview, ...]:
    """My part of another's slice, as it travels."""
    where, values = elements_of(current, number)
    return compression.sent(compression.parts, current.roster.average_id, where, values)[1]


def reduce(current: Round, compression: Compression) -> Reduced:
    """My slice, once every part of it is here."""
    where, average_id, total = current.slices_of[current.mine], current.roster.average_id, sum_in_order(current)
    if len(current.roster.entries) == 1:
        return Reduced(compression.kept(compression.sums, average_id, where, total), ())
    return Reduced(*compression.sent(compression.sums, average_id, where, total))
