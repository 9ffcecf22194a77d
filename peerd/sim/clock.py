"""Virtual time: a heap of calls, each at its moment."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Calls of equal moments are made in the order in which they were asked for, so a simulation depends on its seed alone."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, at_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._calls, (at_s, self._number, call, arguments))

    def after(self, wait_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now_s + wait_s, call, *arguments)

    def run(self) -> None:
        """Until no call is left."""
        calls = self._calls
        while calls:
            self.now_s, _, call, arguments = heapq.heappop(calls)
            call(*arguments)
