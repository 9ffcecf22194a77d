"""Deadlines in the time for which the machine serves this process.

A process that waits for a core cannot tell one that hangs from one that waits as it does. Seconds in which the event loop itself was late
hardly count: a deadline of 3 s takes 12 s where each tenth of a second takes two, and 5 min where it takes ten.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

TICK_S = 0.1


def served_s(took_s: float) -> float:
    """What counts, in seconds, of a tick that took so long; a tick on time counts in full."""
    return took_s * min(1.0, TICK_S / took_s) ** 2 if took_s > 0 else 0.0


class _ServedClock:
    """The served time of an event loop. One for all who wait there: each for itself would look ten times a second."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._num_waiting = 0
        self._before_s = 0.0
        self._tick_began_s = loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def now_s(self) -> float:
        return self._before_s + served_s(self.loop.time() - self._tick_began_s)

    def begin(self) -> None:
        """Tick until as many calls of `end` have come."""
        self._num_waiting += 1
        if self._timer is None:
            self._tick_began_s = self.loop.time()
            self._timer = self.loop.call_later(TICK_S, self._tick)

    def end(self) -> None:
        self._num_waiting -= 1

    def _tick(self) -> None:
        now_s = self.loop.time()
        self._before_s += served_s(now_s - self._tick_began_s)
        self._tick_began_s = now_s
        self._timer = self.loop.call_later(TICK_S, self._tick) if self._num_waiting else None


class _Clocks(threading.local):
    """Each thread's, of the loop that runs there now."""

    known: _ServedClock | None = None

    def here(self) -> _ServedClock:
        loop = asyncio.get_running_loop()
        if self.known is None or self.known.loop is not loop:
            self.known = _ServedClock(loop)
        return self.known


_CLOCKS = _Clocks()


class ServedTimeout:
    """An asyncio.timeout in served time. It refers to nothing of what has run in it once that is over: a task may hold megabytes."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._deadline.__aenter__()
        self._clock = _CLOCKS.here()
        self._clock.begin()
        self._until_s = self._clock.now_s() + self._seconds
        self._timer = self._clock.loop.call_later(self._seconds, self._look)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        self._clock.end()
        deadline = self._deadline
        del self._deadline, self._timer
        await deadline.__aexit__(kind, error, trace)

    def _look(self) -> None:
        left_s = self._until_s - self._clock.now_s()
        if left_s > 0:
            self._timer = self._clock.loop.call_later(left_s, self._look)
        else:
            self._deadline.reschedule(self._clock.loop.time())


def served_timeout(seconds: float) -> ServedTimeout:
    """Cancel the block and raise TimeoutError, as asyncio.timeout does, after so many seconds of served time."""
    return ServedTimeout(seconds)
