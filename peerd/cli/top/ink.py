"""Lines of text in a few inks, fitted to a terminal's columns. views.py maps inks to colours.

No meaning depends on an ink alone: words or signs say the same.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size

from peerd.cli import render

ELLIPSIS = "\u2026"
NONE = "-"
_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
_FULL = "\u2588"


class Ink(enum.Enum):
    PLAIN = "plain"
    QUIET = "quiet"
    STRONG = "strong"
    ACCENT = "accent"
    WARNING = "warning"
    PROBLEM = "problem"


Span = tuple[str, Ink]
Line = tuple[Span, ...]


def width_of(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def fitted(text: str, width: int, *, right: bool = False) -> str:
    """The text in exactly `width` columns: padded, or cut with an ellipsis."""
    found = cell_len(text)
    if found > width:
        return set_cell_size(text, width - 1) + ELLIPSIS if width > 0 else ""
    padding = " " * (width - found)
    return padding + text if right else text + padding


def line_fitted(line: Iterable[Span], width: int) -> Line:
    """The spans in exactly `width` columns."""
    spans: list[Span] = []
    left = width
    for text, ink in line:
        found = cell_len(text)
        if found > left:
            spans.append((fitted(text, left), ink))
            return tuple(spans)
        spans.append((text, ink))
        left -= found
    return (*spans, (" " * left, Ink.PLAIN)) if left else tuple(spans)


def bar(share: float, width: int) -> str:
    """A bar of at most `width` columns, precise to an eighth of a column. Any positive share is visible."""
    if not share > 0 or width <= 0:
        return ""
    eighths = max(1, round(min(1.0, share) * width * 8))
    whole, rest = divmod(eighths, 8)
    return _FULL * whole + (_EIGHTHS[rest] if rest else "")


def amount(value: float) -> str:
    return render.amount(value) if math.isfinite(value) and abs(value) < 1e24 else NONE


def duration(seconds: float) -> str:
    return render.duration(seconds) if 0 <= seconds < 1e10 else NONE


def fixed(value: float | None) -> str:
    """A loss with four decimals, or in scientific notation if it has diverged."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.3g}"
