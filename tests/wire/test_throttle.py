"""A throttle keeps its rate over any stretch longer than its burst, and lets everything pass without one."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.wire.throttle import BURST_S, SMALLEST_CHUNK_BYTES, Throttle


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
    assert took_s == pytest.approx(max(0.0, total / rate - BURST_S), rel=1e-6, abs=1e-3)


def test_without_a_rate_nothing_waits() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(passed_after(0.0, [[10**12]])) == (0.0, 10**12)


@given(st.floats(1e3, 1e9))
def test_a_chunk_holds_the_line_for_no_longer_than_the_burst(rate: float) -> None:
    throttle = Throttle()
    throttle.rate = rate
    assert throttle.chunk(256 * 1024) <= max(SMALLEST_CHUNK_BYTES, rate * BURST_S)
