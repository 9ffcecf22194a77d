"""Asks the daemon again and again, on its own thread, and passes on the pictures. It keeps asking after the daemon has ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from peerd.cli.top.picture import Picture, picture_of
from peerd.cli.top.recall import KEPT_STEPS, Poll, Recall
from peerd.control.client import ControlClient
from peerd.control.protocol import SCHEMA, HistoryReply, PeersReply, StatusReply
from peerd.errors import NoDaemonError, PeerdError

PERIOD_S = 1.0
LONGEST_PAUSE_S = 3.0
REST = 4
"""Ratio of the pause between polls to the duration of a poll, so that watching costs a busy daemon little."""
SILENCE_S = 3.0
HISTORY_PERIOD_S = 3.0
LEAVE_SILENCE_S = 120.0


class Feed:
    """A series of pictures of one daemon, and of the daemons beside it on other devices. What the user orders goes to all of them."""

    def __init__(self, client: ControlClient, further: Mapping[str, ControlClient] | None = None) -> None:
        """`further`: clients of the daemons of this home's other devices, by device."""
        self._client = client
        self._further = further or {}
        self._recall = Recall(began_s=time.time())
        self._stopped = threading.Event()
        self._told: tuple[object, ...] = ()
        self._asked_s = float("-inf")
        """Time of the last request for the history. `_told` is the state of the table at that time."""

    def ask(self) -> Picture:
        """The current picture. PeerdError if the daemon does not answer, or the answer cannot be understood."""
        try:
            poll = self._poll()
            recall = self._recall.after(poll)
            picture = picture_of(poll, recall)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            problem = f"the daemon's reply cannot be understood ({type(error).__name__}: {error})"
            raise PeerdError(problem, "client and daemon may differ in version: restart the daemon") from None
        self._recall = recall
        return picture

    def start(self, tell: Callable[[Picture | PeerdError], object]) -> None:
        """Start the thread, which calls `tell` with each picture. It ends at `stop`, or with the process."""
        threading.Thread(target=self._run, args=(tell,), name="top-feed", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def leave(self, tell: Callable[[PeerdError | None], object]) -> None:
        """Ask the daemon to drain and end. A thread calls `tell` with None when it has ended, or with the reason why not."""

        self._order("leave", tell, now=False, silence_s=LEAVE_SILENCE_S)

    def pause(self, yes: bool, tell: Callable[[PeerdError | None], object]) -> None:
        """Ask the daemon to pause or to resume; the next picture shows the effect. A thread calls `tell` as `leave` does."""
        self._order("pause" if yes else "resume", tell, silence_s=SILENCE_S, wait=False)

    def _order(self, verb: str, tell: Callable[[PeerdError | None], object], **arguments: Any) -> None:
        def request() -> None:
            errors = list(filter(None, [_refusal(client, verb, arguments) for client in (self._client, *self._further.values())]))
            others = [error for error in errors if not isinstance(error, NoDaemonError)]
            tell(others[0] if others else errors[0] if len(errors) > len(self._further) else None)

        threading.Thread(target=request, name=f"top-{verb}", daemon=True).start()

    def _run(self, tell: Callable[[Picture | PeerdError], object]) -> None:
        pause_s = PERIOD_S
        while not self._stopped.wait(pause_s):
            began_s = time.monotonic()
            found: Picture | PeerdError
            try:
                found = self.ask()
            except PeerdError as error:
                found = error
            pause_s = min(LONGEST_PAUSE_S, max(PERIOD_S, REST * (time.monotonic() - began_s)))
            if not self._stopped.is_set():
                tell(found)

    def _poll(self) -> Poll:
        status = cast("StatusReply", self._client.request("status", silence_s=SILENCE_S))
        peers = cast("PeersReply", self._client.request("peers", silence_s=SILENCE_S))
        news = self._news(status, peers)
        return Poll(
            at_s=time.monotonic(),
            status=status,
            further=self._others(),
            peers=peers,
            steps=tuple(news["steps"]),
            evaluations=tuple(news.get("evaluations", ())),
            events=tuple(news["events"]),
        )

    def _others(self) -> dict[str, StatusReply | None]:
        """The status of the other devices' daemons; None for one that does not answer."""
        found: dict[str, StatusReply | None] = dict.fromkeys(self._further)
        for device, client in self._further.items():
            with contextlib.suppress(PeerdError):
                found[device] = cast("StatusReply", client.request("status", silence_s=SILENCE_S))
        return found

    def _news(self, status: StatusReply, peers: PeersReply) -> HistoryReply:
        """What is new since the last request. The daemon reads it from disk, so it is requested less often than the rest."""
        told = (status["pid"], status["peer"]["step"], peers["work_step"], peers["last_loss"])
        if told == self._told and time.monotonic() - self._asked_s < HISTORY_PERIOD_S:
            return HistoryReply(schema=SCHEMA, steps=[], evaluations=[], events=[])
        known = self._recall.of_daemon(status["pid"])
        since = max(known.ask_since, status["peer"]["step"] - KEPT_STEPS)
        asked = self._client.request("history", since=since, events=True, after=known.last_event, silence_s=SILENCE_S)
        reply = cast("HistoryReply", asked)
        self._told, self._asked_s = told, time.monotonic()
        return reply


def _refusal(client: ControlClient, verb: str, arguments: Mapping[str, Any]) -> PeerdError | None:
    """Tell a daemon what to do. Returns the reason why it does not."""
    try:
        client.request(verb, **arguments)
    except PeerdError as error:
        return error
    return None
