"""A chunk has the time that its bytes take on a slow link; silence without bytes to come has the patience alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest

from peerd.errors import PeerGoneError
from peerd.link.links import CHUNK_BYTES, HOME_BYTES_PER_S, LEAST_BYTES_PER_S, Arrival, Links, with_time_for
from peerd.link.traffic import Traffic
from peerd.wire.chunks import Chunk
from peerd.wire.clients import _chunks_of_stream, read_chunks
from peerd.wire.door import Door
from tests.wire.callee import RUN

PATIENCE_S, NUM_BYTES = 0.2, 16_000


async def coming(*delays_s: float) -> AsyncIterator[Chunk]:
    for delay_s in delays_s:
        await asyncio.sleep(delay_s)
        yield Chunk(memoryview(bytes(NUM_BYTES)))


async def test_a_caller_waits_for_a_chunk_as_long_as_a_slow_link_takes() -> None:
    assert len(await read_chunks(coming(0.5, 0.5), 2 * NUM_BYTES, PATIENCE_S)) == 2


async def test_a_callee_waits_for_a_chunk_as_long_as_a_slow_link_takes_and_no_longer() -> None:
    door = Door(RUN, PATIENCE_S, Traffic())
    assert len(await door.read_chunks(coming(0.5, 0.5), 2 * NUM_BYTES)) == 2
    with pytest.raises(PeerGoneError, match="no message"):
        await door.read_chunks(coming(0.0, 60.0), NUM_BYTES + 160)


async def test_a_caller_that_trickles_does_not_get_the_patience_for_each_byte() -> None:
    """A byte each 50 ms would take the whole tensor a quarter of an hour."""
    door, began_s = Door(RUN, PATIENCE_S, Traffic()), time.monotonic()
    trickle = _bytes_apart(0.05)
    with pytest.raises(PeerGoneError, match="no message"):
        await door.read_chunks(trickle, NUM_BYTES)
    assert time.monotonic() - began_s < PATIENCE_S + 3 * NUM_BYTES / LEAST_BYTES_PER_S


async def test_a_donor_that_trickles_does_not_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerd.wire.clients.CHUNK_BYTES", NUM_BYTES)

    class Trickle:
        cancelled = False

        def __init__(self) -> None:
            self._chunks = _bytes_apart(0.05)

        def __aiter__(self) -> AsyncIterator[Chunk]:
            return self._chunks

        def cancel(self) -> None:
            self.cancelled = True

    rpc, links, began_s = Trickle(), cast(Links, SimpleNamespace(traffic=Traffic())), time.monotonic()
    with pytest.raises(PeerGoneError, match="no message"):
        await _drained(_chunks_of_stream(rpc, "data", links, PATIENCE_S))
    assert time.monotonic() - began_s < PATIENCE_S + 3 * NUM_BYTES / LEAST_BYTES_PER_S
    assert rpc.cancelled


async def _drained(chunks: AsyncIterator[bytes]) -> None:
    async for _ in chunks:
        continue


async def _bytes_apart(pause_s: float) -> AsyncIterator[Chunk]:
    while True:
        await asyncio.sleep(pause_s)
        yield Chunk(memoryview(b"x"))


@pytest.mark.parametrize(("num_bytes", "num_streams"), [(64 << 20, 1), (64 << 20, 150)])
def test_the_chunks_of_a_homes_uplink_come_in_time_however_many_streams_share_it(num_bytes: int, num_streams: int) -> None:
    """Also where another second is lost in each chunk, up to the patience."""
    now_s, missing = 0.0, num_bytes
    arrival = Arrival(15.0, lambda: now_s)
    while missing:
        size = min(missing, CHUNK_BYTES)
        took_s = size / (HOME_BYTES_PER_S / num_streams) + (1.0 if num_bytes - missing < 12 << 20 else 0.0)
        assert took_s < arrival.left_s(missing)
        now_s += took_s
        arrival.came(size)
        missing -= size


def test_a_megabyte_may_take_a_minute_at_the_rate_that_150_streams_share() -> None:
    assert with_time_for(15.0, CHUNK_BYTES) > CHUNK_BYTES / (20e6 / 8 / 150)
    assert with_time_for(15.0, 1 << 40) == with_time_for(15.0, CHUNK_BYTES)
    assert with_time_for(15.0, 0) == 15.0
    assert LEAST_BYTES_PER_S < 20e6 / 8 / 150
