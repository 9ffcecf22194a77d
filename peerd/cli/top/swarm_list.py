"""The list of stages and peers. Only visible rows are drawn, so that a thousand peers cost no more than twenty."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from peerd.cli.top.ink import Line
from peerd.cli.top.picture import Picture, StageRow
from peerd.cli.top.rows import Key, Row, key_of, row_line, rows_of
from peerd.cli.top.views import changed, strip_of

SCROLLBAR_WIDTH = 1


class SwarmList(ScrollView, can_focus=True):
    """Keeps its cursor on the same stage or peer while the swarm changes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "go(-1)", "choose", key_display="up/down"),
        Binding("down,j", "go(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "go(-1000000)", show=False),
        Binding("end,G", "go(1000000)", show=False),
        Binding("enter,space", "open", "details", key_display="enter"),
        Binding("f", "fold_all", "fold all"),
        Binding("m", "mine", "mine"),
    ]

    class Opened(Message):
        """The user opened a peer."""

        def __init__(self, peer: str) -> None:
            super().__init__()
            self.peer = peer

    def __init__(self, picture: Picture) -> None:
        super().__init__(id="swarm")
        self._picture = picture
        self._folded = picture.folded_at_first()
        self._rows: tuple[Row, ...] = rows_of(picture, self._folded)
        self._cursor = 0
        self._drawn: list[tuple[Line, bool]] = []

    @property
    def chosen(self) -> Key | None:
        return key_of(self._rows[self._cursor]) if self._rows else None

    def on_mount(self) -> None:
        if self._picture.my_stage in self._folded:
            self._choose(next((index for index, row in enumerate(self._rows) if key_of(row) == (self._picture.my_stage, "")), 0))
        else:
            self.action_mine()

    def on_resize(self) -> None:
        self.virtual_size = Size(self._width, len(self._rows))
        self._repaint()
        self._bring_into_sight()

    def show(self, picture: Picture) -> None:
        self._picture = picture
        self._lay_out()

    def action_go(self, by: int) -> None:
        self._choose(self._cursor + by)

    def action_page(self, by: int) -> None:
        self._choose(self._cursor + by * max(1, self.size.height - 1))

    def action_mine(self) -> None:
        self._folded -= {self._picture.my_stage}
        self._lay_out()
        for index, row in enumerate(self._rows):
            if not isinstance(row, StageRow) and row.mine:
                self._choose(index)
                return

    def action_fold_all(self) -> None:
        """Fold all stages, or unfold them if all are folded."""
        stages = frozenset(part.row.stage for part in self._picture.stages)
        self._folded = frozenset() if self._folded >= stages else stages
        self._lay_out()

    def action_open(self) -> None:
        """Fold or unfold the chosen stage, or open the chosen peer."""
        if not self._rows:
            return
        row = self._rows[self._cursor]
        if isinstance(row, StageRow):
            self._folded ^= {row.stage}
            self._lay_out()
        else:
            self.post_message(self.Opened(row.peer["id"]))

    def on_click(self, event: Click) -> None:
        index = event.y + self.scroll_offset.y
        if index < len(self._rows):
            again = index == self._cursor
            self._choose(index)
            if again:
                self.action_open()

    def render_line(self, y: int) -> Strip:
        index = y + self.scroll_offset.y
        if index >= len(self._rows):
            return Strip.blank(self._width)
        line, chosen = self._line(index)
        return strip_of(line, self._width, chosen=chosen)

    @property
    def _width(self) -> int:
        """Width of a row. One column is reserved for the scrollbar, even if it is hidden."""
        return max(0, self.outer_size.width - SCROLLBAR_WIDTH)

    def _line(self, index: int) -> tuple[Line, bool]:
        row = self._rows[index]
        folded = isinstance(row, StageRow) and row.stage in self._folded
        return row_line(row, self._picture, self._width, folded=folded), index == self._cursor

    def _lay_out(self) -> None:
        before, in_sight = self.chosen, self._sees(self._cursor)
        self._rows = rows_of(self._picture, self._folded)
        self._cursor = self._whereabouts(before)
        self.virtual_size = Size(self._width, len(self._rows))
        self._repaint()
        if in_sight:  # a user who has scrolled away stays there
            self.call_after_refresh(self._bring_into_sight)

    def _sees(self, index: int) -> bool:
        top = self.scroll_offset.y
        return top <= index < top + max(1, self.size.height)

    def _whereabouts(self, wanted: Key | None) -> int:
        """New index of the chosen row: of its peer, else of its stage, else the same index."""
        found = {key_of(row): index for index, row in reversed(list(enumerate(self._rows)))}
        if wanted is not None:
            for key in (wanted, (wanted[0], "")):
                if key in found and (key == wanted or wanted[0] in self._folded):
                    return found[key]
        return max(0, min(self._cursor, len(self._rows) - 1))

    def _choose(self, index: int) -> None:
        self._cursor = max(0, min(index, len(self._rows) - 1))
        self._repaint()
        self._bring_into_sight()

    def _bring_into_sight(self) -> None:
        if not self._sees(self._cursor):
            top, height = self.scroll_offset.y, max(1, self.size.height)
            target = self._cursor if self._cursor < top else self._cursor - height + 1
            self.scroll_to(y=target, animate=False, immediate=True)

    def _repaint(self) -> None:
        """Repaint the visible rows that have changed."""
        top = self.scroll_offset.y
        drawn = [self._line(index) for index in range(top, min(top + self.size.height, len(self._rows)))]
        regions = changed(self._drawn, drawn, self._width)
        self._drawn = drawn
        if regions:
            self.refresh(*regions)
