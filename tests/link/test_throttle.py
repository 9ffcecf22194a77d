"""A throttle keeps its rate over any stretch longer than its burst, and lets everything pass without one."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.link.throttle import BURST_S, SMALLEST_CHUNK_BYTES, STEADY_SHARE, WINDOW_S, Throttle


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when nothing is left to do: waiting for an hour takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


async def passed_after(rate: float, senders: list[list[int]]) -> tuple[float, int]:
    loop = asyncio.get_running_loop()
    throttle = Throttle(loop.time)
    throttle.rate = rate
    began_s = loop.time()

    async def send(sizes: list[int]) -> None:
        for size in sizes:
            await throttle.let_pass(size)

    await asyncio.gather(*(send(sizes) for sizes in senders))
    return loop.time() - began_s, throttle.total


@given(st.floats(1e3, 1e9), st.lists(st.lists(st.integers(1, 300_000), max_size=20), min_size=1, max_size=5))
def test_no_more_passes_than_the_rate_allows(rate: float, senders: list[list[int]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        took_s, total = runner.run(passed_after(rate, senders))
    assert total == sum(map(sum, senders))
    steady = rate * STEADY_SHARE
    assert took_s == pytest.approx(max(0.0, total / steady - BURST_S), rel=1e-6, abs=1e-3)


@given(st.floats(5e4, 1e9), st.floats(0.3, 5.0), st.lists(st.tuples(st.floats(0.0, 6.0), st.integers(1, 100)), min_size=1, max_size=30))
def test_no_window_of_ten_seconds_holds_more_than_ten_seconds_of_the_rate(
    rate: float, every_s: float, sent: list[tuple[float, int]]
) -> None:
    """Whenever it begins: what a pause saved up is in it. Chunks are as large as the throttle asks for."""
    passed: list[tuple[float, int]] = []

    async def send() -> None:
        loop = asyncio.get_running_loop()
        throttle = Throttle(loop.time)
        throttle.rate = rate
        asking = asyncio.ensure_future(ask(throttle))
        await tensors(throttle)
        asking.cancel()

    async def ask(throttle: Throttle) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await throttle.let_pass(1000, goes_first=True)
            passed.append((loop.time(), 1000))
            await asyncio.sleep(every_s)

    async def tensors(throttle: Throttle) -> None:
        loop = asyncio.get_running_loop()
        for pause_s, chunks in sent:
            await asyncio.sleep(pause_s)
            for _ in range(chunks):
                await throttle.let_pass(size := throttle.chunk(1 << 18))
                passed.append((loop.time(), size))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(send())
    for began_s, _ in passed:
        within = sum(size for at_s, size in passed if began_s <= at_s < began_s + WINDOW_S)
        assert within <= rate * WINDOW_S


def test_small_messages_pass_ahead_of_all_that_wait_and_those_pay_for_them() -> None:
    async def both() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        throttle, began_s = Throttle(loop.time), loop.time()
        throttle.rate = 1e5
        tensors = [asyncio.ensure_future(throttle.let_pass(50_000)) for _ in range(8)]
        await asyncio.sleep(1.0)
        await throttle.let_pass(1000, goes_first=True)
        asked_s = loop.time() - began_s
        await asyncio.wait(tensors)
        await throttle.let_pass(1)
        return asked_s, loop.time() - began_s

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        asked_s, all_s = runner.run(both())
    assert asked_s == pytest.approx(1.0)
    assert all_s == pytest.approx(401_001 / (1e5 * STEADY_SHARE) - BURST_S)


def test_without_a_rate_nothing_waits() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(passed_after(0.0, [[10**12]])) == (0.0, 10**12)


@given(st.floats(1e3, 1e9))
def test_a_chunk_holds_the_line_for_no_longer_than_the_burst(rate: float) -> None:
    throttle = Throttle()
    throttle.rate = rate
    assert throttle.chunk(256 * 1024) <= max(SMALLEST_CHUNK_BYTES, rate * BURST_S)
