"""Quantiles, and the event loop's lag in quantiles."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from peerd.daemon.watching.loop_lag import KEPT_S, PERIOD_S, LoopLag
from peerd.observe.quantiles import quantile


@dataclass(frozen=True)
class Worker:
    is_idle: bool


IDLE, WORKING = Worker(is_idle=True), Worker(is_idle=False)


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 1))
def test_so_many_are_no_larger_and_one_less_would_be_too_few(values: list[float], share: float) -> None:
    found = quantile(sorted(values), share)
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_one_late_wake_in_a_thousand_is_beyond_the_99th_and_within_the_999th() -> None:
    lag = LoopLag(WORKING)
    for number in range(1000):
        lag.note(0.5 if number == 10 else 0.001, number * PERIOD_S)
    assert lag.quantiles(100) == {"0.5": 0.001, "0.99": 0.001, "0.999": 0.001, "1": 0.5}
    lag.note(0.4, 100)
    assert lag.quantiles(100)["0.999"] == 0.4


def test_the_worst_of_the_last_minute_forgets_what_was_before_it() -> None:
    lag = LoopLag(WORKING)
    assert lag.worst_s(60, 0) == 0
    lag.note(3.0, 0)
    lag.note(0.0, 59)
    assert lag.worst_s(60, 59) == 3.0
    assert lag.worst_s(60, 60) == 0.0
    assert lag.quantiles(60)["1"] == 3.0
    assert lag.quantiles(KEPT_S)["1"] == 0.0
    assert lag.quantiles(2 * KEPT_S)["1"] == 0.0


async def test_an_idle_loop_is_asked_seldom_and_one_with_work_often() -> None:
    idle, working = LoopLag(IDLE), LoopLag(WORKING)
    measuring = [asyncio.create_task(lag.run()) for lag in (idle, working)]
    await asyncio.sleep(5 * PERIOD_S)
    assert not idle._lags_s
    assert len(working._lags_s) >= 2
    for task in measuring:
        task.cancel()


async def test_a_loop_that_is_blocked_is_seen_to_be_late() -> None:
    lag = LoopLag(WORKING)
    measuring = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    time.sleep(PERIOD_S + 0.2)  # noqa: ASYNC251 - what is measured
    await asyncio.sleep(PERIOD_S)  # the timer that is late comes first
    assert lag.worst_s(60, time.monotonic()) >= 0.15
    measuring.cancel()
