"""The conversations that callers hold with this peer (`wire/conversations.py` holds the other end).

A caller that came anew, or from elsewhere, may have left streams behind that are silent for ever, and only keepalive finds that out. So
what a caller begins beyond its share ends the one that has been silent for longest, and is not refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from peerd.table.record import PeerId

MAX_CONVERSATIONS = 4
"""Of one caller: one by each way to here, and those that it is about to end."""
LONGEST_SILENCE_S = 120.0
"""A stream that nobody uses is not held."""


class Conversation:
    """One stream, from the side that answers."""

    def __init__(self, questions: AsyncIterator[Any]) -> None:
        self._questions = questions
        self._silence: asyncio.Timeout | None = None
        self._is_over = False
        self.heard_s = time.monotonic()
        """When it began, or its last question came."""

    async def question(self) -> Any:
        """The next one; None when the caller has ended the stream, was silent for too long, or has begun others in its place."""
        if self._is_over:
            return None
        try:
            async with asyncio.timeout(LONGEST_SILENCE_S) as self._silence:
                question = await anext(self._questions, None)
        except TimeoutError:
            return None
        finally:
            self._silence = None
        self.heard_s = time.monotonic()
        return question

    def end(self) -> None:
        """At once, or after the answer that is being given. A question that comes meanwhile is asked again on another stream."""
        self._is_over = True
        if self._silence is not None:
            self._silence.reschedule(asyncio.get_running_loop().time())


class Held:
    """All that callers hold here."""

    def __init__(self) -> None:
        self._of: dict[PeerId, set[Conversation]] = {}

    @contextmanager
    def by(self, caller: PeerId, questions: AsyncIterator[Any]) -> Iterator[Conversation]:
        """One more, in place of the longest silent one where the caller holds as many as it may."""
        held = self._of.setdefault(caller, set())
        if len(held) >= MAX_CONVERSATIONS:
            silent = min(held, key=lambda each: each.heard_s)
            held.discard(silent)
            silent.end()
        begun = Conversation(questions)
        held.add(begun)
        try:
            yield begun
        finally:
            held.discard(begun)
            if not held and self._of.get(caller) is held:
                del self._of[caller]
