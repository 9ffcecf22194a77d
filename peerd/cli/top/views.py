"""Widgets that show lines and repaint only those that changed. They use the terminal's own colours, so that its theme applies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from peerd.cli.top.ink import Ink, Line
from peerd.cli.top.picture import Picture

STYLES = {
    Ink.PLAIN: Style(),
    Ink.QUIET: Style(dim=True),
    Ink.STRONG: Style(bold=True),
    Ink.ACCENT: Style(color="cyan"),
    Ink.WARNING: Style(color="yellow"),
    Ink.PROBLEM: Style(color="red", bold=True),
}


CHOSEN = Style(reverse=True)


def strip_of(line: Line, width: int, *, chosen: bool = False) -> Strip:
    """A line in its inks, or reversed if it is the chosen one."""
    segments = [Segment(text, CHOSEN if chosen else STYLES[ink]) for text, ink in line if text]
    return Strip(segments).adjust_cell_length(width, CHOSEN if chosen else None)


def changed(before: Sequence[object], now: Sequence[object], width: int) -> list[Region]:
    """The regions of the lines that differ."""
    rows = range(max(len(before), len(now)))
    return [Region(0, y, width, 1) for y in rows if before[y : y + 1] != now[y : y + 1]]


Draw = Callable[[Picture, int, int], Sequence[Line]]


class LinesView(Widget):
    """A widget whose lines a function draws from the picture, for the widget's width and height."""

    def __init__(self, draw: Draw, picture: Picture, *, id: str | None = None) -> None:  # noqa: A002 - textual's own name
        super().__init__(id=id)
        self._draw = draw
        self._picture = picture
        self._lines: tuple[Line, ...] = ()

    def show(self, picture: Picture) -> None:
        self._picture = picture
        self.redraw()

    def redraw(self) -> None:
        lines = tuple(self._draw(self._picture, self.size.width, self.size.height)) if self.size.width else ()
        regions = changed(self._lines, lines, self.size.width)
        self._lines = lines
        if regions:
            self.refresh(*regions)

    def on_resize(self) -> None:
        self.redraw()

    def render_line(self, y: int) -> Strip:
        return strip_of(self._lines[y] if y < len(self._lines) else (), self.size.width)
