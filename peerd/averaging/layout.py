"""Which elements of the accumulator each chunk of a round is: slices of its section by the members' shares, cut into as many chunks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

from peerd.averaging.compression import Compression, Elements
from peerd.config.codec import Codec
from peerd.policy.step.parts import even_cuts, slice_bounds
from peerd.policy.step.roster import WHOLE, Roster


class RoundLayout:
    """The chunks of one round. Members are numbered by their places in the roster; member k reduces slice k."""

    def __init__(self, roster: Roster, length: int, compression: Compression, codecs: Sequence[Codec], room: int = 0) -> None:
        """`length`: elements of a member's part, the last `room` of them for parameters; `codecs`: of what each member sends."""
        self.num_members = len(roster.entries)
        self.num_chunks = roster.num_chunks
        self.codecs = tuple(codecs)
        self.length, self.room = length, room
        self._compression = compression
        bounds = slice_bounds(roster, length, room)
        borders = compression.borders if any(codec.rank for codec in codecs) else ()
        self._cuts = [_cuts(start, end, roster.num_chunks, borders) for start, end in bounds]

    def is_empty(self, member: int) -> bool:
        """Whether this member reduces nothing."""
        return self._cuts[member][0] == self._cuts[member][-1]

    def chunks_of(self, member: int) -> int:
        """The number of chunks of its slice."""
        return 0 if self.is_empty(member) else self.num_chunks

    def piece(self, slice_number: int, number: int, sender: int) -> Elements:
        """The elements of one chunk, as this member sends them."""
        start, end = self._cuts[slice_number][number : number + 2]
        return self._compression.piece(self.length, start, end, self.codecs[sender])

    def num_bytes(self, slice_number: int, number: int, sender: int) -> int:
        """The encoded size of one chunk."""
        return self._compression.num_bytes(self.piece(slice_number, number, sender))

    @cached_property
    def slice_bytes(self) -> list[int]:
        """The size of each slice, as its reducer sends it."""
        return [sum(self.num_bytes(k, number, k) for number in range(self.chunks_of(k))) for k in range(self.num_members)]


def _cuts(start: int, end: int, num_chunks: int, borders: Sequence[int]) -> list[int]:
    """The bounds of chunks of about the same size; each lies where a parameter ends, if one ends within half a chunk."""
    even = even_cuts(start, end, num_chunks)
    reach = (end - start) / num_chunks / 2
    return [start, *(_nearest(cut, borders, reach) for cut in even[1:-1]), end] if borders else even


def _nearest(cut: int, borders: Sequence[int], reach: float) -> int:
    place = bisect_left(borders, cut)
    near = [border for border in borders[max(0, place - 1) : place + 1] if abs(border - cut) < reach]
    return min(near, key=lambda border: abs(border - cut), default=cut)


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Shares of `WHOLE` in proportion to these weights, which sum to 1; what rounding leaves over goes to the largest."""
    shares = [int(WHOLE * weight) for weight in weights]
    shares[max(range(len(shares)), key=weights.__getitem__)] += WHOLE - sum(shares)
    return tuple(shares)
