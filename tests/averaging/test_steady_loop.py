"""The clock of these tests: it depends on what is waited for alone, and not on the machine."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.steady_loop import PoolJobs


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def test_a_wait_lasts_as_long_as_it_says_and_takes_no_time() -> None:
    began_s, really_began_s = now_s(), time.monotonic()
    await asyncio.sleep(1e5)
    assert now_s() - began_s == pytest.approx(1e5)
    assert time.monotonic() - really_began_s < 1e4


async def test_no_time_passes_while_a_thread_computes() -> None:
    ends, began_s = threading.Event(), now_s()
    threading.Timer(0.1, ends.set).start()
    async with asyncio.timeout(0.01):
        await asyncio.to_thread(ends.wait)
    assert now_s() - began_s < 0.01


async def test_no_time_passes_before_a_thread_that_ends_has_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slow to tell: a loaded machine may let it wait there."""
    loop, began_s = asyncio.get_running_loop(), now_s()
    tell = loop.call_soon_threadsafe

    def late(*arguments: Any, **named: Any) -> asyncio.Handle:
        time.sleep(0.1)
        return tell(*arguments, **named)

    monkeypatch.setattr(loop, "call_soon_threadsafe", late)
    async with asyncio.timeout(0.01):
        await asyncio.to_thread(time.sleep, 0.01)
    assert now_s() - began_s < 0.01


async def test_time_passes_while_a_pool_waits_for_the_loop(steady_clock: PoolJobs) -> None:
    ends = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        steady_clock.blocked = {pool}
        jobs = [asyncio.get_running_loop().run_in_executor(pool, ends.wait) for _ in range(2)]
        await asyncio.sleep(1e5)
        ends.set()
        assert all(await asyncio.gather(*jobs))
