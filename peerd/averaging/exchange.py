"""The data of one open round at one member: which elements each member reduces, the received parts, and their sum."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field

from torch import Tensor

from peerd.averaging.compression import Compression, Slice
from peerd.errors import BusyError
from peerd.link.links import CHUNK_BYTES
from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId


@dataclass(frozen=True, slots=True)
class Reduced:
    """The sum of a slice, and the encoded bytes that the other members receive."""

    total: Tensor
    chunks: tuple[memoryview, ...]


@dataclass(slots=True)
class Round:
    """One open round at this member."""

    roster: Roster
    mine: int
    """The number of the slice that this peer reduces; -1: none."""
    accumulator: Tensor
    """This round's own copy. In the end its slices are overwritten with their averages."""
    slices_of: list[Slice]
    """The elements that each reducer of the roster reduces."""
    ledger: int = 0
    """This peer's ledger as the roster names it."""
    parts: dict[PeerId, Tensor] = field(default_factory=dict)
    complete: bool = False
    """True once every member's part has arrived. Used only by the thread that computes the sums."""
    slices: dict[int, Tensor] = field(default_factory=dict)
    silent: list[PeerId] = field(default_factory=list)
    """Members that did not answer the proposal."""
    refused: bool = False
    reduced: asyncio.Future[Reduced] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    opened_s: float = 0.0
    progress_s: float = 0.0
    """When something of the round last moved: a chunk that arrived here or at a reducer, or a whole part."""
    arrived: int = 0
    """Bytes of the parts of this peer's slice that have arrived."""
    _begun: set[PeerId] = field(default_factory=set)

    @property
    def heard(self) -> Set[PeerId]:
        """Members whose parts have arrived, or arrive now."""
        return self._begun

    @contextlib.contextmanager
    def takes_part_of(self, peer: PeerId) -> Iterator[None]:
        """A part is taken once in the block, and may be sent again if that fails. Raises BusyError if it came before."""
        if peer in self._begun:
            raise BusyError("this part came before")
        self._begun.add(peer)
        try:
            yield
        except BaseException:
            self._begun.discard(peer)
            raise

    @property
    def num_streams(self) -> int:
        """How many streams share a member's uplink: a part for each other member, and each of them its slice."""
        return 2 * len(self.roster.entries)

    def hears(self, num_bytes: int, size: int, now_s: float) -> None:
        """Count bytes of a part of this `size` as progress, and of those that are sent again no more than there can be."""
        before = self.arrived
        self.arrived = min(before + num_bytes, size * len(self.roster.entries))
        if self.arrived > before:
            self.progress_s = now_s

    def made(self, reduced: Reduced) -> None:
        """Publish the sum of this peer's slice, unless the round was closed meanwhile."""
        if not self.reduced.done():
            self.reduced.set_result(reduced)


@dataclass(slots=True)
class Moving:
    """What one reducer says of an exchange with it. It counts as progress for whole chunks, and up to what there is to move."""

    current: Round
    size: int
    clock: Callable[[], float]
    _known: int = 0

    def told(self, num_bytes: int) -> None:
        most = self.size * (len(self.current.roster.entries) + 1)
        if self._known < num_bytes <= most and (num_bytes - self._known >= CHUNK_BYTES or num_bytes == most):
            self._known, self.current.progress_s = num_bytes, self.clock()


def elements_of(current: Round, number: int) -> tuple[Slice, Tensor]:
    where = current.slices_of[number]
    return where, current.accumulator[where.start : where.end]


def whole_of(current: Round) -> Tensor:
    """Return the averaged slices as one vector; slices that lie elsewhere in memory are copied into it."""
    for number, values in current.slices.items():
        _, place = elements_of(current, number)
        if values.data_ptr() != place.data_ptr():
            place.copy_(values)
            current.slices[number] = place
    return current.accumulator


def sum_in_order(current: Round) -> Tensor:
    """Add the parts in the roster's order, so that the bits do not depend on the order of arrival. Overwrites the first part."""
    total, *rest = (current.parts[peer] for peer in current.roster.peers)
    for part in rest:
        total += part
    current.parts.clear()
    return total


def own_part(current: Round, compression: Compression) -> Tensor:
    """Return this peer's part of the slice that it reduces."""
    where, values = elements_of(current, current.mine)
    return compression.kept(compression.parts, current.roster.average_id, where, values)


def part_for(current: Round, number: int, compression: Compression) -> tuple[memoryview, ...]:
    """Return this peer's part of another member's slice, encoded."""
    where, values = elements_of(current, number)
    return compression.sent(compression.parts, current.roster.average_id, where, values)[1]


def reduce(current: Round, compression: Compression) -> Reduced:
    """Sum this peer's slice. Every part of it must have arrived."""
    where, average_id, total = current.slices_of[current.mine], current.roster.average_id, sum_in_order(current)
    if len(current.roster.entries) == 1:
        return Reduced(compression.kept(compression.sums, average_id, where, total), ())
    return Reduced(*compression.sent(compression.sums, average_id, where, total))
