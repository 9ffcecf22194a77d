"""A daemon far from all others: bytes through its tunnels arrive later, in order, at an unlimited rate.

`python -m scripts.benchmarks._distant SETTINGS` is otherwise the same as `python -m peerd.daemon SETTINGS`. Each copy takes half the
one-way delay, and a message passes two copies, one at each end: a round trip takes twice the delay. Opening a connection is not delayed.
Direct paths are off, because they bypass the tunnel.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from peerd.config.settings import Settings
from peerd.daemon.__main__ import main
from peerd.link import streams
from peerd.link.throttle import Throttle

ONE_WAY_MS = "PEERD_BENCH_ONE_WAY_MS"
MOST_WAITING = 256
"""Chunks under way: a long link holds its delay times its rate."""


async def delayed_copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, throttle: Throttle, heard: Callable[[], None]) -> None:
    """Replaces the tunnel's copy."""
    delay_s = float(os.environ[ONE_WAY_MS]) / 2000
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_WAITING)

    async def deliver() -> None:
        while True:
            due_s, data = await under_way.get()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if not data:
                return
            sink.write(data)
            await sink.drain()

    delivering = asyncio.ensure_future(deliver())
    try:
        while data := await source.read(throttle.chunk(streams.CHUNK_BYTES)):
            heard()
            await throttle.let_pass(len(data), goes_first=len(data) < streams.SMALL_BYTES)
            await under_way.put((time.monotonic() + delay_s, data))
        await under_way.put((time.monotonic() + delay_s, b""))
        await delivering
    finally:
        delivering.cancel()


if __name__ == "__main__":
    streams._copy = delayed_copy
    settings = Settings.from_json(sys.argv[1])
    sys.exit(main([replace(settings, direct=False).to_json()]))
