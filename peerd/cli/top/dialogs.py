"""Dialogs over the table: the details of a peer, and the question before leaving."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import ModalScreen

from peerd.cli.top.ink import Ink, Line, line_fitted
from peerd.cli.top.notes import entry
from peerd.cli.top.picture import Picture, details_of
from peerd.cli.top.views import LinesView

GONE: Line = (("this peer is not in the swarm any more", Ink.WARNING),)


class PeerDetails(ModalScreen[None]):
    """The record of one peer, updated while the dialog is open."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,space,q", "dismiss", "close", key_display="esc")]

    def __init__(self, peer: str, picture: Picture) -> None:
        super().__init__()
        self._peer = peer
        self._picture = picture
        self._known = picture.peer(peer)

    def compose(self) -> ComposeResult:
        box = Container(LinesView(self._draw, self._picture, id="text"), id="box")
        box.border_title = "peer"
        box.border_subtitle = "esc close"
        yield box

    def show(self, picture: Picture) -> None:
        for view in self.query(LinesView):  # empty while the app is quitting
            view.show(picture)

    def _draw(self, picture: Picture, width: int, _height: int) -> tuple[Line, ...]:
        found = picture.peer(self._peer)
        self._known = found or self._known
        if self._known is None:
            return (GONE,)
        lines = [line for name, value in details_of(self._known, picture.num_microbatches) for line in entry(name, value, width, most=3)]
        return tuple(lines) if found else (*lines, line_fitted((), width), GONE)


QUESTION = (
    (("Shall your daemon leave the swarm?", Ink.STRONG),),
    (),
    (("It takes nothing new, finishes what it holds, hands on its share", Ink.PLAIN),),
    (("of the step and ends. That takes up to a step; no work is lost.", Ink.PLAIN),),
    (),
    (("y", Ink.STRONG), ("  leave       ", Ink.PLAIN), ("n", Ink.STRONG), ("  stay", Ink.PLAIN)),
)


class LeaveQuestion(ModalScreen[bool]):
    """Asks for confirmation before the daemon leaves."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "leave"),
        Binding("n,escape,q", "answer(False)", "stay", key_display="n"),
    ]

    def __init__(self, picture: Picture) -> None:
        super().__init__()
        self._picture = picture

    def compose(self) -> ComposeResult:
        box = Container(LinesView(_question, self._picture, id="text"), id="box")
        box.border_title = "leave"
        yield box

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


def _question(_picture: Picture, width: int, _height: int) -> list[Line]:
    return [line_fitted(line, width) for line in QUESTION]
