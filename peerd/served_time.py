"""Deadlines in the time for which the machine serves this process.

A process that waits for a core cannot tell one that hangs from one that waits as it does. Seconds in which the event loop itself was late
hardly count: a deadline of 3 s takes 12 s where each tenth of a second takes two, and 5 min where it takes ten.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

TICK_S = 0.1


def served_s(took_s: float) -> float:
    """What counts, in seconds, of a tick that took so long; a tick on time counts in full."""
    return took_s * min(1.0, TICK_S / took_s) ** 2 if took_s > 0 else 0.0


class ServedTimeout:
    """An asyncio.timeout in served time. It refers to nothing of what has run in it once that is over: a task may hold megabytes."""

    def __init__(self, seconds: float) -> None:
        self._deadline = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._deadline.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._looks()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        deadline = self._deadline
        del self._deadline, self._timer
        await deadline.__aexit__(kind, error, trace)

    def _looks(self) -> None:
        self._began_s = self._loop.time()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        took_s, when_s = self._loop.time() - self._began_s, self._deadline.when()
        if when_s is not None and not self._deadline.expired():
            self._deadline.reschedule(when_s + took_s - served_s(took_s))
            self._looks()


def served_timeout(seconds: float) -> ServedTimeout:
    """Cancel the block and raise TimeoutError, as asyncio.timeout does, after so many seconds of served time."""
    return ServedTimeout(seconds)
