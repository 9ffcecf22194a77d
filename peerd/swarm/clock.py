"""The clock by which records live and peers are fenced: rules T2 (alive) and T3 (fence)."""

from __future__ import annotations

import sys
import threading
import time

from peerd.policy.swarm.sleep import ClockReading, SleepClock

AT_ONCE_S = 0.05
"""Two clocks that are read further apart say nothing about each other: the process was kept from running in between."""


class SleeplessClock:
    """Monotonic seconds that go on while the machine sleeps. Any thread may ask."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._known = SleepClock(time.time() - _steady_s())

    def now_s(self) -> float:
        with self._guard:
            before_s, wall_s, after_s = _steady_s(), time.time(), _steady_s()
            if after_s - before_s < AT_ONCE_S:
                self._known = self._known.after(ClockReading(after_s, wall_s))
            return after_s + self._known.slept_s


def _steady_s() -> float:
    """The monotonic clock that goes on during sleep where the system has one: of Linux, or macOS."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.clock_gettime(time.CLOCK_MONOTONIC_RAW) if sys.platform == "darwin" else time.monotonic()


clock_s = SleeplessClock().now_s
