"""Two classic problems that placing devices comes down to: bottleneck matchings, and open paths over all points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

Matrix = Sequence[Sequence[float]]

MOST_EXACT = 12
"""Points up to which the shortest open path is found exactly: Held-Karp takes n^2 2^n steps."""


class Bottleneck(NamedTuple):
    """A perfect matching whose longest edge is as short as can be."""

    longest: float
    mean: float
    """Mean of the lengths at which the matching grew by an edge; moves where the longest edge alone stays the same."""
    partners: tuple[int, ...]
    """The column of each row."""


def bottleneck_matching(rows: Matrix) -> Bottleneck:
    """Match the rows of a square matrix with its columns. Edges join in order of length, and the matching grows whenever it can.

    An edge that joins lets it grow by one at most, and only if the edge leads from what unmatched rows reach to what they do not.
    """
    size = len(rows)
    near = [0] * size
    row_of, column_of = [-1] * size, [-1] * size
    reached: int | None = None
    """The columns that alternating paths from unmatched rows lead to, while that is known."""
    num_free, total = size, 0.0
    for length, row, column in sorted([(length, row, column) for row, lengths in enumerate(rows) for column, length in enumerate(lengths)]):
        near[row] |= 1 << column
        mine = column_of[row]
        if mine < 0 and row_of[column] < 0:
            column_of[row], row_of[column] = column, row
        else:
            if reached is not None and (reached >> column & 1 or (mine >= 0 and not reached >> mine & 1)):
                continue
            reached = _augmented(near, column_of, row_of)
            if reached is not None:
                continue
        reached = None
        total += length
        num_free -= 1
        if not num_free:
            break
    return Bottleneck(length, total / size, tuple(column_of))


def _augmented(near: list[int], column_of: list[int], row_of: list[int]) -> int | None:
    """Make the matching one edge larger, by a path that begins at an unmatched row; where there is none, the columns that were reached."""
    everything = unseen = (1 << len(near)) - 1
    for start, column in enumerate(column_of):
        if column >= 0:
            continue
        trail: list[tuple[int, int]] = []
        row = start
        while True:
            options = near[row] & unseen
            if not options:
                if not trail:
                    break
                row, _ = trail.pop()
                continue
            bit = options & -options
            unseen ^= bit
            found = bit.bit_length() - 1
            trail.append((row, found))
            if row_of[found] < 0:
                for each, taken in trail:
                    column_of[each], row_of[taken] = taken, each
                return None
            row = row_of[found]
    return everything ^ unseen


def open_path(lengths: Matrix) -> tuple[float, tuple[int, ...]]:
    """The shortest path that visits each point once, and its length. Exact up to `MOST_EXACT` points."""
    size = len(lengths)
    order = _exact_path(lengths) if size <= MOST_EXACT else _improved_path(lengths, _nearest_neighbours(lengths))
    return path_length(lengths, order), order


def path_length(lengths: Matrix, order: Sequence[int]) -> float:
    return sum(lengths[a][b] for a, b in pairwise(order))


def quick_path(lengths: Matrix, order: Sequence[int]) -> tuple[int, ...]:
    """A path that is at most as long as `order`: exact where that takes milliseconds."""
    return _exact_path(lengths) if len(lengths) <= MOST_EXACT - 4 else _improved_path(lengths, order)


def _exact_path(lengths: Matrix) -> tuple[int, ...]:
    """Held-Karp: the best way to end at each point after each set of points, by the sizes of the sets."""
    size = len(lengths)
    best: dict[tuple[int, int], float] = {(1 << end, end): 0.0 for end in range(size)}
    came: dict[tuple[int, int], int] = {}
    for visited in range(1, 1 << size):
        ends = [(end, best[visited, end]) for end in range(size) if visited >> end & 1]
        for new in range(size):
            if visited >> new & 1:
                continue
            row = lengths[new]
            value, last = min([(sofar + row[end], end) for end, sofar in ends])
            best[visited | 1 << new, new] = value
            came[visited | 1 << new, new] = last
    visited = (1 << size) - 1
    end = min(range(size), key=lambda each: best[visited, each])
    order = [end]
    while len(order) < size:
        before = came[visited, end]
        visited ^= 1 << end
        end = before
        order.append(end)
    return tuple(order)


def _nearest_neighbours(lengths: Matrix) -> tuple[int, ...]:
    """Extends the shortest edge at the end that is nearer to an unvisited point."""
    size = len(lengths)
    _, first, second = min((lengths[a][b], a, b) for a in range(size) for b in range(size) if a != b)
    order, left = [first, second], set(range(size)) - {first, second}
    while left:
        _, at_front, point = min((lengths[order[-at_end]][point], at_end, point) for point in left for at_end in (0, 1))
        order.insert(len(order) if at_front else 0, point)
        left.remove(point)
    return tuple(order)


def _improved_path(lengths: Matrix, order: Sequence[int]) -> tuple[int, ...]:
    """Reverses stretches, and moves stretches of up to three points, while that makes the path shorter."""
    best, size = list(order), len(order)
    length, improves = path_length(lengths, best), True
    while improves:
        improves = False
        for start in range(size - 1):
            for end in range(start + 2, size + 1):
                stretch, rest = best[start:end], best[:start] + best[end:]
                found = [best[:start] + stretch[::-1] + best[end:]]
                if len(stretch) <= 3 and rest:
                    found += [rest[:at] + stretch + rest[at:] for at in range(len(rest) + 1)]
                for candidate in found:
                    new = path_length(lengths, candidate)
                    if new < length - 1e-12 * (1 + length):
                        best, length, improves = candidate, new, True
    return tuple(best)
