"""Deadlines in served time: a starved process waits longer, one that is served waits as long as it says."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

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
