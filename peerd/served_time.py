"""Deadlines in the time for which the machine serves this process.

A process that waits for a core cannot tell one that hangs from one that waits as it does. Seconds in which the event loop itself was late
hardly count: a deadline of 3 s takes 12 s where each tenth of a second takes two, and 5 min where it takes ten.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

TICK_S = 0.1


def served_s(took_s: float) -> float:
    """What counts, in seconds, of a tick that took so long; a tick on time counts in full."""
    return took_s * min(1.0, TICK_S / took_s) ** 2 if took_s > 0 else 0.0


@contextlib.asynccontextmanager
async def served_timeout(seconds: float) -> AsyncIterator[None]:
    """Cancel the block and raise TimeoutError, as asyncio.timeout does, after so many seconds of served time."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    timer: asyncio.TimerHandle
    async with asyncio.timeout(seconds) as deadline:

        def tick() -> None:
            nonlocal began_s, timer
            took_s, began_s = loop.time() - began_s, loop.time()
            when_s = deadline.when()
            if when_s is not None and not deadline.expired():
                deadline.reschedule(when_s + took_s - served_s(took_s))
                timer = loop.call_later(TICK_S, tick)

        timer = loop.call_later(TICK_S, tick)
        try:
            yield
        finally:
            timer.cancel()
