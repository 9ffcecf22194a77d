"""Calls of a round that come before its proposal: nothing of their chunks is read until the roster says how many there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from peerd.errors import BusyError, WrongStateError
from peerd.link.few_each import FewEach
from peerd.table.record import PeerId

MOST_EACH = 2
"""Calls of one member that wait: it may have given one round up already, and begun the next."""
MOST_STRANGERS = 4
"""Calls that wait of peers of which this peer has not heard that they serve its stage; a new mate may be among them."""
Found = TypeVar("Found")


class EarlyCalls:
    """Lets calls wait for their rounds, for `patience_s` at most."""

    def __init__(self, patience_s: float, is_mate: Callable[[PeerId], bool]) -> None:
        self._patience_s = patience_s
        self._opened = asyncio.Event()
        self._waiting = FewEach(is_mate)

    def opened(self) -> None:
        """A round has opened: whoever waits looks whether it is theirs."""
        opened, self._opened = self._opened, asyncio.Event()
        opened.set()

    async def find(self, caller: PeerId, find: Callable[[], Found | None]) -> Found:
        """Return what `find` returns, at once or after a round has opened. Raises WrongStateError if there is nothing in time."""
        found = find()
        if found is not None:
            return found
        with self._waiting.by(caller, MOST_EACH, MOST_STRANGERS) as may_wait:
            if not may_wait:
                raise BusyError("other calls wait for their rounds here")
            try:
                async with asyncio.timeout(self._patience_s):
                    while (found := find()) is None:
                        await self._opened.wait()
            except TimeoutError:
                raise WrongStateError("no such round is open") from None
        return found
