"""How the slices of a round are cut into chunks, and which chunk a member sends next.

A slice is summed and returned chunk by chunk. All slices have the same number of chunks, so a *row*, the chunks of one number, is the same
share of each slice. Members send by chunk number first, the reducers rotating within it, and never more than `WINDOW` chunks ahead of the
slowest on a slice. A member that sent to one reducer after the other would wait at a full window while the next reducer waits for it: from
three members on such rounds stand still.

Members have numbers here: their places in the roster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_CHUNK_BYTES = 1 << 19
LEAST_CHUNK_BYTES, LEAST_SLOW_BYTES = 1 << 14, 1 << 10
"""A smaller chunk costs more in words about it than in bytes. Of a round that takes more than an averaging time it may be as small as the
second: it has to move in that time."""
ROW_S = 0.1
"""A row keeps an uplink busy for about so long. What is on its way delays the words about other chunks and small calls, and a longer
queue than the other's starves that one: its words come late."""
LOSSY_ROW_S = 0.5
"""The same where members lose packets on the way to each other: words take a second there, whatever is sent."""
WINDOW = 4
"""A reducer keeps so many chunks of each member's part that wait for those of others. Nothing else limits what a member has under way, so a
word about a chunk may take `WINDOW * ROW_S` seconds to come back and the uplink is never idle."""
ROWS = 8
"""At the rates assumed a member moves so many rows in an averaging time. So each flow moves several times in it, also where many take turns
on a link of half that rate."""
LEEWAY = 5.0
"""Chunks are cut so finely that each still moves in good time where a link is so many times slower than believed."""


AFTER_OWN = 1 << 40
"""Added to the turn of what a mate carries: a member sends its own first, so that nobody falls behind for helping."""


@dataclass(slots=True)
class Flow:
    """Chunks of one slice on their way to one member: another member's part for the reducer, or the reducer's sum."""

    to: int
    """The member that is to have them."""
    slice: int
    of: int
    """Whose they are: the part's author, or the reducer."""
    turn: int
    """Its place among the flows of one sender, within a chunk number."""
    hop: int
    """The member to send to: `to`, or a mate on the way; -1: there is no way."""
    next: int = 0
    """The number of the next chunk to send."""
    broke: int = 0
    """How often it broke since a chunk arrived. It lets so many rows of others pass, so that what never arrives holds up nothing else."""
    limit: int = 0
    """Chunks below this may be sent: they are there, and the window is open for them."""

    @property
    def is_sum(self) -> bool:
        return self.of == self.slice


def next_flow(flows: Iterable[Flow]) -> Flow | None:
    """The flow whose next chunk is sent now; None if nothing can be sent."""
    best, least = None, math.inf
    for flow in flows:
        number = flow.next
        if number < flow.limit and flow.hop >= 0:
            key = ((number + flow.broke) << 20) + flow.turn
            if key < least:
                best, least = flow, key
    return best


def part_limit(num_chunks: int, num_summed: int) -> int:
    """How far a member may send its part of a slice of which the reducer has summed so many chunks."""
    return min(num_chunks, num_summed + WINDOW)


def sum_limit(num_summed: int, num_arrived: int) -> int:
    """How far a reducer may send its sums to a member that has so many of them."""
    return min(num_summed, num_arrived + WINDOW)


def num_chunks(slice_bytes: Sequence[int], expected_s: float, averaging_s: float, is_lossy: bool = False) -> int:
    """The number of chunks of each slice, where the round takes `expected_s` at the rates believed."""
    largest, within_s = max(slice_bytes), LEEWAY * expected_s
    least = LEAST_CHUNK_BYTES if within_s <= averaging_s else LEAST_SLOW_BYTES
    num_rows = math.ceil(expected_s / (LOSSY_ROW_S if is_lossy else ROW_S))
    to_move = min(math.ceil(ROWS * within_s / averaging_s), num_rows, largest // least)
    to_flow = min(num_rows, largest // LEAST_CHUNK_BYTES)
    return max(to_move, to_flow, math.ceil(largest / MOST_CHUNK_BYTES), 1)


def most_chunks(num_bytes: int) -> int:
    """The most chunks of each slice in a round over `num_bytes`, whatever the lines."""
    return 1 + num_bytes // LEAST_SLOW_BYTES


def chunk_bytes(slice_bytes: int, num_chunks: int, number: int) -> int:
    """The size of one chunk of a slice."""
    return slice_bytes * (number + 1) // num_chunks - slice_bytes * number // num_chunks
