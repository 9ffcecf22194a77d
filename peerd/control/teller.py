"""Reports to a client what a long request does, so that the client knows that the daemon is still at it, however long that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from peerd.control.server import Say

REPEAT_PERIOD_S = 1.0
Result = TypeVar("Result")


class Teller:
    """Sends each change of the text at once, and the last text periodically."""

    def __init__(self, say: Say, text: str = "", look: Callable[[], str] | None = None) -> None:
        """`look` returns the text anew each time that it is sent."""
        self._say = say
        self._text = text
        self._look = look

    def __call__(self, text: str) -> None:
        if text != self._text:
            self._text = text
            self._say(text)

    async def through(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`. If the client is gone, `say` raises OSError and the work is cancelled."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=REPEAT_PERIOD_S))[0]:
                self._text = self._look() if self._look is not None else self._text
                self._say(self._text)
            return task.result()
        finally:
            task.cancel()
