"""This peer's uplink: who sends what others wait for says so, and what can wait asks for its turn (`policy/route/yielding.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from peerd.policy.route.yielding import UplinkUse


class Uplink:
    """The line that all links of this peer share."""

    def __init__(self, rate: Callable[[], float | None], clock: Callable[[], float] = time.monotonic) -> None:
        """`rate`: bytes per second as far as they were measured. While nothing is known of the line, nothing waits."""
        self._rate = rate
        self._clock = clock
        self._use = UplinkUse()
        self._turns = asyncio.Lock()
        self._is_freed = asyncio.Event()

    def sends(self, num_bytes: int) -> None:
        """Note bytes of training that leave now."""
        rate = self._rate()
        if rate is not None:
            self._use.sends(num_bytes, rate, self._clock())

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """A round is exchanged with somebody while the block runs."""
        self._use.num_exchanges += 1
        try:
            yield
        finally:
            self._use.num_exchanges -= 1
            self._is_freed.set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing of training leaves now, as far as the line's rate is known."""
        return not self._use.num_exchanges and self._use.wait_s(self._clock()) <= 0

    async def turn(self, num_bytes: int) -> None:
        """Wait until a chunk that can wait may leave. Chunks leave in the order in which they asked, one at a time."""
        async with self._turns:
            while (wait_s := self._use.wait_s(self._clock())) > 0:
                self._is_freed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._is_freed.wait()
            rate = self._rate()
            if rate is not None:
                self._use.gives(num_bytes, rate, self._clock())
