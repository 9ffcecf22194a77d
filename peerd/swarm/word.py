"""What others must hear of this peer before its next announcement."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Word:
    """Why others must hear of this peer before its next announcement."""

    tell: bool
    """This peer suspects another one, or is suspected itself. Its next version states or ends the suspicion."""
    superseded_by: int
    """The highest incarnation that another daemon showed under this peer's id, rule T1 (order); 0 if there was none."""


class OwedWord:
    """The word that this peer owes others, if any."""

    def __init__(self) -> None:
        self.highest_seen = 0
        """The highest incarnation that anybody ever showed under this peer's id: one that it had before, or that of another daemon."""
        self._tell, self._superseded_by, self._event = False, 0, asyncio.Event()

    def owe(self, *, tell: bool = False, superseded_by: int = 0) -> None:
        self._tell |= tell
        self._superseded_by = max(self._superseded_by, superseded_by)
        self.highest_seen = max(self.highest_seen, superseded_by)
        self._event.set()

    async def due(self) -> Word:
        """Wait until others must hear of this peer, and return why."""
        await self._event.wait()
        word = Word(self._tell, self._superseded_by)
        self._tell, self._superseded_by = False, 0
        self._event.clear()
        return word
