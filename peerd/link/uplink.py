"""This peer's uplink: who sends what others wait for says so, and what can wait asks for its turn (`policy/route/yielding.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterator
from typing import NoReturn

from peerd.errors import BusyError
from peerd.policy.route.receiving import Receivers
from peerd.policy.route.yielding import UplinkUse


class Uplink:
    """The line that all links of this peer share."""

    def __init__(self, rate: Callable[[], float | None], clock: Callable[[], float] = time.monotonic) -> None:
        """`rate`: bytes per second as far as they were measured. While nothing is known of the line, nothing waits."""
        self._rate = rate
        self._clock = clock
        self._use = UplinkUse()
        self._receivers = Receivers()
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, when another chunk may have its turn."""

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
            self._tell_change()

    @property
    def is_idle(self) -> bool:
        """Whether nothing of training leaves now, as far as the line's rate is known."""
        return not self._use.num_exchanges and self._use.wait_s(self._clock()) <= 0

    @property
    def empty_at_s(self) -> float:
        """When all that was given to the line so far will have left, as far as its rate is known."""
        return self._use.idle_s

    @contextlib.contextmanager
    def receiving(self, receiver: Hashable) -> Iterator[None]:
        """Somebody receives a file chunk by chunk while the block runs. Raises BusyError where the line has no room for one more."""
        self._receivers.begins(receiver, self._clock())
        self._tell_change()  # it may have come before those that wait
        try:
            rate = self._rate()
            if rate is not None and self._receivers.has_no_seat(receiver, rate):
                self._put_off(receiver, rate)
            yield
        finally:
            self._receivers.ends(receiver, self._clock())
            self._tell_change()

    async def turn(self, num_bytes: int, receiver: Hashable | None = None, left_s: float | None = None) -> None:
        """Wait until a chunk that can wait may leave. Chunks leave one at a time, as `policy/route/receiving.py` orders them.

        `receiver`: one that is `receiving`; `left_s`: the time that it needs for all that it has yet to get, if known. Raises BusyError
        where others leave it too little of the line.
        """
        chunk, at_once = self._receivers.asks(num_bytes, self._clock(), receiver, left_s), True
        try:
            while (rate := self._rate()) is not None:
                now_s = self._clock()
                wait_s = self._use.wait_s(now_s) if self._receivers.next(rate) is chunk else math.inf
                if wait_s <= 0:
                    self._use.gives(num_bytes, rate, now_s)
                    return
                left_s = self._receivers.put_off_in_s(chunk, rate, now_s)
                if left_s is not None and left_s <= 0:
                    self._put_off(receiver, rate)
                at_once = False
                await self._change(min(wait_s, math.inf if left_s is None else left_s))
        finally:
            self._receivers.leaves(chunk, at_once=at_once)
            self._tell_change()

    def _put_off(self, receiver: Hashable, rate: float) -> NoReturn:
        pause_s = self._receivers.put_off(receiver, rate, self._clock())
        raise BusyError("this peer's line has no room for one more download now", pause_s)

    async def _change(self, timeout_s: float) -> None:
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if timeout_s == math.inf else timeout_s):
                await changed.wait()

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
