"""The clock that records live by, read from many threads while the wall clock is set."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from peerd.swarm.clock import SleeplessClock


def test_sleep_that_only_the_wall_clock_shows_is_counted_once_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, right = SleeplessClock(), time.time
    ahead_s = 0.0
    monkeypatch.setattr(time, "time", lambda: right() + ahead_s)
    began_s = clock.now_s()
    with ThreadPoolExecutor(4) as pool:
        looks = [pool.submit(lambda: [clock.now_s() for _ in range(2000)]) for _ in range(4)]
        ahead_s = 3600.0
        for look in looks:
            readings = look.result()
            assert readings == sorted(readings)
    assert 3600.0 <= clock.now_s() - began_s < 3700.0
    ahead_s = 0.0
    assert 3600.0 <= clock.now_s() - began_s < 3700.0, "a clock that is set back takes nothing away"
