"""Wakes tasks that wait for a change of the table."""

from __future__ import annotations

import asyncio


class Waiters:
    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[bool]] = set()

    async def wait(self, timeout_s: float, changes_in_s: float) -> bool:
        """Wait up to `timeout_s` to be woken. A change that comes by itself does that, too. Returns False on timeout."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters.add(waiter)
        timer = loop.call_later(max(0.0, min(timeout_s, changes_in_s)), _answer, waiter, changes_in_s <= timeout_s)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    def wake(self) -> None:
        for waiter in self._waiters:
            _answer(waiter, True)


def _answer(waiter: asyncio.Future[bool], has_changed: bool) -> None:
    if not waiter.done():
        waiter.set_result(has_changed)
