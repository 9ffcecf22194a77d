"""By how much the event loop is late: what blocks it delays everybody who asks this peer for anything."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

from peerd.observe.quantiles import quantile

PERIOD_S, IDLE_PERIOD_S = 0.1, 1.0
"""While there is work, and otherwise: ten calls a second take 0.14 % of a core."""
KEPT_S = 300.0
QUANTILES = (0.5, 0.99, 0.999, 1.0)


class Worker(Protocol):
    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to be late for."""


class LoopLag:
    """Asks to be called again and again and sees how much too late it is."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lags_s: deque[tuple[float, float]] = deque(maxlen=round(KEPT_S / PERIOD_S))
        """When it was called, and by how much that was too late."""

    async def run(self) -> None:
        self._ask()
        try:
            await asyncio.Event().wait()
        finally:
            self._timer.cancel()

    def _ask(self) -> None:
        period_s = IDLE_PERIOD_S if self._worker.is_idle else PERIOD_S
        self._due_s = time.monotonic() + period_s  # finer than the loop's own clock
        self._timer = asyncio.get_running_loop().call_later(period_s, self._called)

    def _called(self) -> None:
        now_s = time.monotonic()
        self.note(max(0.0, now_s - self._due_s), now_s)
        self._ask()

    def note(self, lag_s: float, now_s: float) -> None:
        self._lags_s.append((now_s, lag_s))

    def worst_s(self, last_s: float, now_s: float) -> float:
        """The largest lag in the last `last_s` seconds."""
        return max(self._since(now_s - last_s), default=0.0)

    def quantiles(self, now_s: float) -> dict[str | tuple[str, ...], float]:
        """The lags of the last five minutes by quantile: that share of the calls was no later."""
        ordered = sorted(self._since(now_s - KEPT_S))
        return {f"{share:g}": quantile(ordered, share) for share in QUANTILES}

    def _since(self, since_s: float) -> list[float]:
        return [lag_s for called_s, lag_s in self._lags_s if called_s > since_s]
