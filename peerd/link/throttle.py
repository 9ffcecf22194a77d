"""Keeps each direction of a daemon's traffic below a rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

BURST_S = 0.1
"""Size of a burst, in seconds of the rate."""
WINDOW_S = 10.0
"""In any window of this length no more bytes pass than the rate allows, bursts included."""
SMALLEST_CHUNK_BYTES = 2 * 1024
STEADY_SHARE = 1 - 2 * BURST_S / WINDOW_S
"""Two bursts: one of tensors, and one of small messages, which go ahead of them."""


class Throttle:
    """A token bucket that may go into debt and then waits. A rate of 0 lets everything pass; bytes are counted in any case."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.rate = 0.0
        """Bytes per second."""
        self.total = 0
        """Bytes that passed."""
        self._paid_s = float("-inf")
        """The time at which the bytes so far are paid for."""
        self._small_paid_s = float("-inf")
        """The same for those that go first alone."""

    def chunk(self, largest: int) -> int:
        """Return how many bytes to copy at once, so that small messages do not queue for long behind tensors."""
        return largest if not self.rate else max(SMALLEST_CHUNK_BYTES, min(largest, int(self.rate * BURST_S / 2)))

    async def let_pass(self, num_bytes: int, *, goes_first: bool = False) -> None:
        """Count the bytes and wait until they may be sent on. Those that go first wait for one another alone; the others pay for them."""
        self.total += num_bytes
        if not self.rate:
            return
        now_s, price_s = self._clock(), num_bytes / (self.rate * STEADY_SHARE)
        self._paid_s = until_s = max(self._paid_s, now_s - BURST_S) + price_s
        if goes_first:
            self._small_paid_s = until_s = max(self._small_paid_s, now_s - BURST_S) + price_s
        if until_s > now_s:
            await asyncio.sleep(until_s - now_s)


@dataclass(frozen=True, slots=True)
class Throttles:
    """The throttles of one daemon, one for each direction."""

    upload: Throttle = field(default_factory=Throttle)
    download: Throttle = field(default_factory=Throttle)

    @property
    def capped(self) -> bool:
        """True if either direction has a rate limit."""
        return bool(self.upload.rate or self.download.rate)
