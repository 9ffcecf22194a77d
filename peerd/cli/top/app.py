"""The screen of `peerd top`: layout, keys, and the display of a daemon that ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.widgets import Footer

from peerd.cli.top.curve import drawn
from peerd.cli.top.dialogs import LeaveQuestion, PeerDetails
from peerd.cli.top.feed import Feed
from peerd.cli.top.ink import Ink, Line, duration, line_fitted
from peerd.cli.top.notes import heading, loss_title, notes, speed_title
from peerd.cli.top.picture import Picture
from peerd.cli.top.rows import head_line
from peerd.cli.top.swarm_list import SCROLLBAR_WIDTH, SwarmList
from peerd.cli.top.views import LinesView
from peerd.errors import PeerdError

CSS = """
Screen { background: ansi_default; color: ansi_default; overflow: hidden; padding: 0 1; }
#heading { height: 2; }
#trouble { height: 1; display: none; }
.-troubled #trouble { display: block; }
#body { height: 1fr; }
#curves { height: 4; layout: horizontal; }
#loss { width: 3fr; margin-right: 2; }
#speed { width: 2fr; }
#table { height: 1fr; margin-top: 1; }
#head { height: 1; }
#swarm { height: 1fr; background: ansi_default; scrollbar-size-vertical: 1; overflow-x: hidden;
    scrollbar-color: ansi_bright_black; scrollbar-background: ansi_default; scrollbar-color-hover: ansi_white;
    scrollbar-color-active: ansi_white; scrollbar-background-hover: ansi_default; scrollbar-background-active: ansi_default; }
#notes { height: 8; margin-top: 1; }
.-tall #curves { height: 9; }
.-tall #notes { height: 14; }
.-wide #body { layout: grid; grid-size: 2 2; grid-columns: 2fr 3fr; grid-rows: 2fr 3fr; grid-gutter: 0 2; }
.-wide #curves { layout: vertical; height: 100%; margin-top: 1; }
.-wide #loss, .-wide #speed { width: 100%; height: 1fr; margin: 0 0 1 0; }
.-wide #table { row-span: 2; height: 100%; margin-top: 1; }
.-wide #notes { height: 100%; margin: 0; }
ModalScreen { align: center middle; background: transparent; padding: 0; }
#box { width: 72; max-width: 100%; height: auto; max-height: 100%; border: round ansi_default; padding: 1 2; background: ansi_default; }
PeerDetails #box { height: 20; }
LeaveQuestion #box { height: 10; }
Footer { background: ansi_default; color: ansi_default; }
FooterKey, FooterKey:hover { background: ansi_default; color: ansi_default; }
FooterKey .footer-key--key { padding: 0 1 0 0; background: ansi_default; color: ansi_default; text-style: bold; }
FooterKey .footer-key--description { padding: 0 2 0 0; background: ansi_default; color: ansi_default; text-style: dim; }
"""
REFUSAL_SHOWN_S = 10.0
EXITS = (signal.SIGTERM, signal.SIGHUP)


def _head(picture: Picture, width: int, _height: int) -> tuple[Line, ...]:
    return (head_line(width - SCROLLBAR_WIDTH, has_names=picture.has_names),)


class TopApp(App[None]):
    """Shows the pictures of the feed until the user quits."""

    CSS = CSS
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (130, "-wide")]  # noqa: RUF012 - textual declares it so
    VERTICAL_BREAKPOINTS = [(0, "-short"), (36, "-tall")]  # noqa: RUF012 - textual declares it so
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False),
        Binding("p", "pause", "pause"),
        Binding("l", "leave", "leave"),
    ]

    def __init__(self, feed: Feed, first: Picture) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self._feed = feed
        self._picture = first
        self._heard_s = time.monotonic()
        self._trouble: PeerdError | None = None
        self._refusal, self._refused_s = "", 0.0
        self._leaving = ""

    def compose(self) -> ComposeResult:
        first = self._picture
        yield LinesView(lambda picture, width, _height: heading(picture, self._state(), width), first, id="heading")
        yield LinesView(lambda _picture, width, _height: self._trouble_lines(width), first, id="trouble")
        with Container(id="body"):
            with Container(id="curves"):
                yield LinesView(_loss, first, id="loss")
                yield LinesView(_speed, first, id="speed")
            with Container(id="table"):
                yield LinesView(_head, first, id="head")
                yield SwarmList(first)
            yield LinesView(notes, first, id="notes")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(SwarmList).focus()
        self.set_interval(1.0, self._tell_time)
        self.app_resume_signal.subscribe(self, lambda _app: self._paint_all())
        for number in EXITS:
            asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self._feed.start(partial(self.call_later, self.heard))

    def on_unmount(self) -> None:
        self._feed.stop()
        for number in EXITS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def heard(self, found: Picture | PeerdError) -> None:
        """The feed has a new picture, or the reason why it has none."""
        if isinstance(found, PeerdError):
            self._trouble = found
        else:
            if found.pid != self._picture.pid:
                self._leaving = ""
            self._trouble, self._picture, self._heard_s = None, found, time.monotonic()
        self._show()

    def on_swarm_list_opened(self, message: SwarmList.Opened) -> None:
        self.push_screen(PeerDetails(message.peer, self._picture))

    def action_pause(self) -> None:
        verb = "resume" if self._picture.paused else "pause"
        self._feed.pause(verb == "pause", partial(self.call_later, self._told, verb))

    def action_leave(self) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self._leaving = "leaving"
                self._show()
                self._feed.leave(partial(self.call_later, self._told, "leave"))

        self.push_screen(LeaveQuestion(self._picture), answered)

    def _told(self, verb: str, trouble: PeerdError | None) -> None:
        """The daemon has answered a key's request, or refused it. A daemon that has left has ended."""
        if trouble is not None:
            self._refusal, self._refused_s = f"it does not {verb}: {trouble.message}", time.monotonic()
        if verb == "leave":
            self._leaving = "" if trouble is not None else "left"
        self._show()

    def _fatal_error(self) -> None:
        """Close without textual's own report of a bug. `run` raises the exception once the terminal is restored."""
        self._close_messages_no_wait()

    def _paint_all(self) -> None:
        """Redraw everything after Ctrl-Z and `fg`, which leave the terminal empty."""
        for screen in self.screen_stack:
            for widget in screen.query("*"):
                widget.refresh()
        self.refresh(layout=True)

    def _show(self) -> None:
        if not self.screen_stack:  # the app is quitting
            return
        root = self.screen_stack[0]
        if time.monotonic() - self._refused_s > REFUSAL_SHOWN_S:
            self._refusal = ""
        root.set_class(self._trouble is not None or bool(self._refusal), "-troubled")
        for view in root.query(LinesView):
            view.show(self._picture)
        for peers in root.query(SwarmList):  # empty while the app is quitting
            peers.show(self._picture)
        if isinstance(self.screen, PeerDetails):
            self.screen.show(self._picture)

    def _tell_time(self) -> None:
        if self._trouble is not None or self._refusal:
            self._show()

    def _state(self) -> str:
        if self._trouble is not None:
            return f"last heard {duration(time.monotonic() - self._heard_s)} ago"
        return f"{self._leaving or ('paused' if self._picture.paused else 'live')}, up {self._picture.uptime}"

    def _trouble_lines(self, width: int) -> Sequence[Line]:
        if self._trouble is None:
            text = self._refusal
        elif self._leaving == "left":
            text = "your daemon has left the swarm; q quits"
        else:
            text = f"{self._trouble.message}: this is what was last seen, asking on"
        return (line_fitted((("! ", Ink.PROBLEM), (text, Ink.PROBLEM)), width),)


def _loss(picture: Picture, width: int, height: int) -> Sequence[Line]:
    return (loss_title(picture, width), *_dots(picture.losses, width, height - 1))


def _speed(picture: Picture, width: int, height: int) -> Sequence[Line]:
    return (speed_title(picture, width), *_dots(picture.speeds, width, height - 1, from_zero=True))


def _dots(values: Sequence[float], width: int, height: int, *, from_zero: bool = False) -> Sequence[Line]:
    return [((row, Ink.ACCENT),) for row in drawn(values, width, height, from_zero=from_zero)]


def run(feed: Feed) -> int:
    """Show one daemon until the user quits. PeerdError if the daemon does not answer at the start."""
    app = TopApp(feed, feed.ask())
    with contextlib.suppress(KeyboardInterrupt):
        app.run()
    if app._exception is not None:
        raise app._exception
    return app.return_code or 0
