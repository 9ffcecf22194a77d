"""Lets one pass of a text run at a time, in the askers' turns and as the share of the time that the owner allows permits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from peerd.errors import BusyError
from peerd.policy.inference.turns import TimeShare, Turns
from peerd.table.record import PeerId

MOST_WAIT_S = 30.0
"""An asker whose pass could not begin within this time is told so at once."""
MOST_WAITING = 64


@dataclass(slots=True)
class TextTurn:
    """One pass."""

    wait_s: float
    """After so many seconds it goes before training's work; until then it may begin where none of that waits."""
    began_s: float = 0.0
    """When the pass began (`time.monotonic`)."""
    took_s: float = 0.0
    held_up_s: float = 0.0
    """For how long training waited for it. Who runs the pass notes these three."""


class TextTurns:
    """It lives on the event loop."""

    def __init__(self, share: float) -> None:
        self.share = TimeShare(share, time.monotonic())
        self._turns = Turns()
        self._waiting: list[tuple[PeerId, asyncio.Future[None]]] = []
        self._is_taken = False
        self._timer: asyncio.TimerHandle | None = None

    def set_share(self, share: float) -> None:
        """Let passes take another share of the time from now on."""
        self.share.set_share(share, time.monotonic())
        self._next()

    def wait_s(self, *, is_busy: bool) -> float | None:
        """Seconds until a pass may begin, if training's work waits (`is_busy`) or not; None: the owner allows none."""
        return self.share.wait_s(time.monotonic(), is_busy=is_busy)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check(self) -> None:
        """Raises BusyError, with the time to wait if it is known, where the wait would be long or the owner allows no pass."""
        wait_s = self.wait_s(is_busy=False)
        if wait_s is None:
            raise BusyError("this machine's owner lets nobody ask the model here")
        if wait_s > MOST_WAIT_S or len(self._waiting) >= MOST_WAITING:
            raise BusyError("this peer has no time for questions now", wait_s)

    @asynccontextmanager
    async def turn(self, asker: PeerId) -> AsyncIterator[TextTurn]:
        """Wait for the asker's turn, and hold it until the block ends.

        Raises BusyError as `check` does.
        """
        self.check()
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((asker, mine))
        self._next()
        try:
            await mine
        except asyncio.CancelledError:
            if (asker, mine) in self._waiting:
                self._waiting.remove((asker, mine))
            elif mine.done() and not mine.cancelled():
                self._end(asker, TextTurn(0.0))
            raise
        turn = TextTurn(self.wait_s(is_busy=True) or 0.0)
        try:
            yield turn
        finally:
            self._end(asker, turn)

    def _end(self, asker: PeerId, turn: TextTurn) -> None:
        self.share.charge(turn.held_up_s, time.monotonic())
        self._turns.took(asker, turn.took_s)
        self._is_taken = False
        self._next()

    def _next(self) -> None:
        """Give the turn to one who waits, now or once the share allows it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting = [(asker, each) for asker, each in self._waiting if not each.done()]
        if self._is_taken or not self._waiting:
            return
        now_s = time.monotonic()
        wait_s = self.share.wait_s(now_s, is_busy=False)
        if wait_s is None:
            for _, each in self._waiting:
                each.set_exception(BusyError("this machine's owner lets nobody ask the model here"))
        elif wait_s > 0:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._next)
        else:
            chosen = self._turns.next_of([asker for asker, _ in self._waiting], now_s)
            entry = next(entry for entry in self._waiting if entry[0] == chosen)
            self._waiting.remove(entry)
            self._is_taken = True
            entry[1].set_result(None)
