"""When a seat committed its steps: by the wall clock for those who look on, and by one that nobody sets for durations."""

from __future__ import annotations

import time
from collections import deque

MAX_TIMES = 100_000
NUM_RATED = 10
"""Number of steps over which a speed is measured."""


class Commits:
    """The last commits of one seat."""

    def __init__(self) -> None:
        self.times_s: dict[int, float] = {}
        """On the wall clock, by step."""
        self.recent: deque[tuple[int, float]] = deque(maxlen=NUM_RATED)
        """The last steps, each with its time on the monotonic clock."""

    def note(self, step: int) -> None:
        self.times_s[step] = time.time()
        self.times_s.pop(step - MAX_TIMES, None)
        self.recent.append((step, time.monotonic()))

    @property
    def last_step_s(self) -> float | None:
        """Duration of the last step; None before two are done."""
        return self.recent[-1][1] - self.recent[-2][1] if len(self.recent) > 1 else None
