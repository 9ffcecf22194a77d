"""A curve drawn with braille characters of two by four dots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BRAILLE = 0x2800
ROUNDING = 1e-9
"""Relative difference below which values count as equal; otherwise the last bit of a mean would be drawn as a tower."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def drawn(values: Sequence[float], width: int, height: int, *, from_zero: bool = False) -> tuple[str, ...]:
    """The curve as `height` strings of `width` characters, from top to bottom. The first value is at the left end."""
    cells = [[0] * width for _ in range(height)]
    courses = resampled([value for value in values if math.isfinite(value)], 2 * width)
    if courses and height > 0:
        before: int | None = None
        for x, y in enumerate(levels(courses, 4 * height, from_zero=from_zero)):
            start = y if before is None else before
            for dot in range(min(start, y) + (start < y), max(start, y) + (start <= y)):
                row = 4 * height - 1 - dot
                cells[row // 4][x // 2] |= _DOTS[row % 4][x % 2]
            before = y
    return tuple("".join(chr(_BRAILLE + cell) if cell else " " for cell in row) for row in cells)


def resampled(values: Sequence[float], count: int) -> list[float]:
    """Resample a series to `count` values: means if it has more, linear interpolation if it has fewer."""
    known = len(values)
    if known == 0 or count <= 0:
        return []
    if known >= count:
        bounds = [index * known // count for index in range(count + 1)]
        return [math.fsum(values[low:high]) / (high - low) for low, high in itertools.pairwise(bounds)]
    if known == 1:
        return [values[0]] * count
    found = []
    for index in range(count):
        low, part = divmod(index * (known - 1), count - 1)
        share = part / (count - 1)
        found.append(values[low] * (1 - share) + values[min(low + 1, known - 1)] * share)
    return found


def levels(values: Sequence[float], count: int, *, from_zero: bool = False) -> list[int]:
    """The level of each value, from 0 (the smallest value, or zero) to count - 1 (the largest)."""
    low, high = min(values), max(values)
    if from_zero:
        low = min(0.0, low)
    if not high - low > ROUNDING * max(abs(low), abs(high)):
        return [count // 2] * len(values)
    half = high / 2 - low / 2  # halved, so that it cannot overflow
    return [min(count - 1, max(0, round((value / 2 - low / 2) / half * (count - 1)))) for value in values]
