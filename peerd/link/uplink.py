"""This peer's uplink: who sends what others wait for says so, and what can wait asks for its turn (`policy/route/yielding.py`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from peerd.policy.route.yielding import UplinkUse


class Uplink:
    """The line that all links of this peer share."""

    def __init__(self, rate: Callable[[], float | None], clock: Callable[[], float] = time.monotonic) -> None:
        """`rate`: bytes per second as far as they were measured. While nothing is known of the line, nothing waits."""
        self._rate = rate
        self._clock = clock
        self._use = UplinkUse()
        self._turns = asyncio.Lock()

    def sends(self, num_bytes: int) -> None:
        """Note bytes of training that leave now."""
        rate = self._rate()
        if rate is not None:
            self._use.sends(num_bytes, rate, self._clock())

    async def turn(self, num_bytes: int) -> None:
        """Wait until a chunk that can wait may leave. Chunks leave in the order in which they asked, one at a time."""
        async with self._turns:
            while (wait_s := self._use.wait_s(self._clock())) > 0:  # noqa: ASYNC110 - training may send more meanwhile
                await asyncio.sleep(wait_s)
            rate = self._rate()
            if rate is not None:
                self._use.gives(num_bytes, rate, self._clock())
