"""Deadlines in served time: a starved process waits longer, one that is served waits as long as it says."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.served_time import TICK_S, served_s, served_timeout


async def starve(each_s: float) -> None:
    """Block the event loop again and again, as a machine does that has no core for it."""
    while True:
        time.sleep(each_s)  # noqa: ASYNC251 - that is what a starved loop sees
        await asyncio.sleep(0)


async def test_a_served_process_waits_as_long_as_it_says() -> None:
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with served_timeout(0.3):
            await asyncio.Event().wait()
    assert time.monotonic() - began_s >= 0.29


async def test_what_comes_late_in_a_starved_process_comes_in_time() -> None:
    """The answer takes three times the deadline, while the loop is kept from running half a second at a time."""
    starving = asyncio.ensure_future(starve(0.5))
    try:
        async with served_timeout(0.5):
            await asyncio.sleep(1.5)
    finally:
        starving.cancel()


async def test_one_stall_of_the_machine_is_no_deadline() -> None:
    async with served_timeout(0.4):
        time.sleep(0.8)  # noqa: ASYNC251
        await asyncio.sleep(0.1)


async def test_the_deadline_comes_also_in_a_starved_process() -> None:
    starving = asyncio.ensure_future(starve(0.2))
    try:
        with pytest.raises(TimeoutError):
            async with served_timeout(0.1):
                await asyncio.Event().wait()
    finally:
        starving.cancel()


async def test_all_deadlines_of_a_loop_share_one_clock_which_rests_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each had one of its own, so many would look at the time ten times a second."""
    loop, number = asyncio.get_running_loop(), 100
    delays_s: list[float] = []
    call_later = loop.call_later

    def counted(delay_s: float, *rest: Any) -> asyncio.TimerHandle:
        delays_s.append(delay_s)
        return call_later(delay_s, *rest)

    async def wait() -> None:
        async with served_timeout(100.0):
            await asyncio.Event().wait()

    monkeypatch.setattr(loop, "call_later", counted)
    waiting = [asyncio.ensure_future(wait()) for _ in range(number)]
    try:
        await asyncio.sleep(0)
        assert delays_s == [TICK_S, *[100.0] * number]
        await asyncio.sleep(3.5 * TICK_S)
        assert 1 < delays_s.count(TICK_S) <= 4
    finally:
        for each in waiting:
            each.cancel()
    await asyncio.sleep(1.5 * TICK_S)
    ticks = delays_s.count(TICK_S)
    await asyncio.sleep(1.5 * TICK_S)
    assert delays_s.count(TICK_S) == ticks


async def test_a_deadline_counts_from_its_own_beginning_whoever_waited_before() -> None:
    async def wait(seconds: float) -> float:
        began_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with served_timeout(seconds):
                await asyncio.Event().wait()
        return time.monotonic() - began_s

    first = asyncio.ensure_future(wait(0.5))
    await asyncio.sleep(0.25)
    assert await wait(0.5) >= 0.49
    assert await first >= 0.49


async def test_nothing_of_a_task_that_is_over_stays_in_memory() -> None:
    class Large:
        pass

    async def make() -> Large:
        async with served_timeout(10.0):
            await asyncio.sleep(1.5 * TICK_S)
        return Large()

    gc.disable()
    try:
        held = weakref.ref(await asyncio.create_task(make()))
        await asyncio.sleep(0)  # the loop has handed it over
        assert held() is None
    finally:
        gc.enable()


@given(st.floats(0, 1e4))
def test_no_more_counts_than_the_time_that_passed(took_s: float) -> None:
    assert 0 <= served_s(took_s) <= took_s
    assert took_s > TICK_S or served_s(took_s) == took_s
