"""Long work at a daemon's start: in a thread, and interrupted when the start is."""

from __future__ import annotations

import asyncio
import threading

import pytest

from peerd.daemon.enter import _with_progress
from peerd.data.progress import ByteProgress, Interrupted, ProgressLog, Report


async def test_cancelling_interrupts_the_work_at_its_next_report() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work(report: Report) -> None:
        try:
            while True:
                report(ByteProgress("tokenizing", 1, 2))
                begun.set()
        except Interrupted:
            ended.set()
            raise

    waiting = asyncio.ensure_future(_with_progress(work))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(ended.wait, 10)


def test_a_log_gets_a_line_now_and_then_and_no_more() -> None:
    said: list[str] = []
    often, seldom = ProgressLog(said.append, every_s=0.0), ProgressLog(said.append, every_s=1000.0)
    for done in (10_000_000, 20_000_000):
        often(ByteProgress("tokenizing", done, 40_000_000))
        seldom(ByteProgress("tokenizing", done, 40_000_000))
    assert said == ["tokenizing: 10.0 of 40.0 MB, 25%", "tokenizing: 20.0 of 40.0 MB, 50%"]
