"""By how much the event loop is late: what blocks it delays everybody who asks this peer for anything."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from peerd.observe.quantiles import quantile

PERIOD_S = 0.1
KEPT_S = 300.0
QUANTILES = (0.5, 0.99, 0.999, 1.0)


class LoopLag:
    """Asks to be called ten times a second and sees how much too late it is."""

    def __init__(self) -> None:
        self._lags_s: deque[float] = deque(maxlen=round(KEPT_S / PERIOD_S))

    async def run(self) -> None:
        self._ask()
        try:
            await asyncio.Event().wait()
        finally:
            self._timer.cancel()

    def _ask(self) -> None:
        self._due_s = time.monotonic() + PERIOD_S  # finer than the loop's own clock
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._called)

    def _called(self) -> None:
        self.note(max(0.0, time.monotonic() - self._due_s))
        self._ask()

    def note(self, lag_s: float) -> None:
        self._lags_s.append(lag_s)

    def worst_s(self, last_s: float) -> float:
        """Of the last so many seconds."""
        recent = list(self._lags_s)[-round(last_s / PERIOD_S) :]
        return max(recent, default=0.0)

    def quantiles(self) -> dict[str | tuple[str, ...], float]:
        """Of the last five minutes, by the share of calls that were no later."""
        ordered = sorted(self._lags_s)
        return {f"{share:g}": quantile(ordered, share) for share in QUANTILES}
