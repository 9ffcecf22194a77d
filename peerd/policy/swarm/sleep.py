"""Time that goes on while the machine sleeps, from two clocks of which neither tells it alone. Pure: others read the clocks.

The steady clock stands still during sleep on some systems (WSL 2, and macOS without its continuous clock); the wall clock goes on, but is
also set and slewed. So a jump of the wall clock ahead of the steady one is taken for sleep. If it was the clock that was set, a
peer is fenced without need: that costs one ledger.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_SLEEP_S = 2.0
"""Smaller jumps are NTP's steps: it slews by at most half a millisecond a second."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Both clocks at one moment."""

    steady_s: float
    wall_s: float

    @property
    def apart_s(self) -> float:
        return self.wall_s - self.steady_s


@dataclass(frozen=True, slots=True)
class SleepClock:
    """What is known after a reading."""

    apart_s: float
    """How far the wall clock was ahead of the steady one."""
    slept_s: float = 0.0
    """Sleep that the steady clock did not count, in all."""

    def after(self, reading: ClockReading) -> SleepClock:
        jump_s = reading.apart_s - self.apart_s
        return SleepClock(reading.apart_s, self.slept_s + (jump_s if jump_s >= LEAST_SLEEP_S else 0.0))
