"""The called side of conversations (`wire/conversations.py` is the calling side).

A caller that restarted or changed its address may have left dead streams behind, which only keepalive detects. So a caller that begins
more conversations than it may have is not refused: its longest silent one is ended instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from peerd.table.record import PeerId

MAX_CONVERSATIONS = 4
"""Conversations of one caller: one on each way to this peer, and those that it is about to end."""
LONGEST_SILENCE_S = 120.0
"""A stream that is silent for this long is ended."""


class Conversation:
    """One stream at the called side."""

    def __init__(self, questions: AsyncIterator[Any]) -> None:
        self._questions = questions
        self._silence: asyncio.Timeout | None = None
        self._is_over = False
        self.heard_s = time.monotonic()
        """The time of its last question, or of its begin."""

    async def question(self) -> Any:
        """Return the next question; None if the caller ended the stream or was silent for too long, or if `end` was called."""
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
        """End the stream, after the present answer if there is one. The caller asks a question that crosses this on another stream."""
        self._is_over = True
        if self._silence is not None:
            self._silence.reschedule(asyncio.get_running_loop().time())


class Held:
    """All open conversations at this peer."""

    def __init__(self) -> None:
        self._of: dict[PeerId, set[Conversation]] = {}

    @contextmanager
    def by(self, caller: PeerId, questions: AsyncIterator[Any]) -> Iterator[Conversation]:
        """Open a conversation for the block. Ends the caller's longest silent one if it has `MAX_CONVERSATIONS` already."""
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
