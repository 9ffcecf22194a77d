"""A chunk has the time that its bytes take on a slow link; silence without bytes to come has the patience alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from peerd.errors import PeerGoneError
from peerd.link.links import CHUNK_BYTES, LEAST_BYTES_PER_S, with_time_for
from peerd.link.traffic import Traffic
from peerd.wire.chunks import Chunk
from peerd.wire.clients import _read_chunks
from peerd.wire.services import Door
from tests.wire.callee import RUN

PATIENCE_S, NUM_BYTES = 0.2, 16_000


async def coming(*delays_s: float) -> AsyncIterator[Chunk]:
    for delay_s in delays_s:
        await asyncio.sleep(delay_s)
        yield Chunk(memoryview(bytes(NUM_BYTES)))


async def test_a_caller_waits_for_a_chunk_as_long_as_a_slow_link_takes() -> None:
    assert len(await _read_chunks(coming(0.5, 0.5), 2 * NUM_BYTES, PATIENCE_S)) == 2


async def test_a_callee_waits_for_a_chunk_as_long_as_a_slow_link_takes_and_no_longer() -> None:
    door = Door(RUN, PATIENCE_S, Traffic())
    assert len(await door.read_chunks(coming(0.5, 0.5), 2 * NUM_BYTES)) == 2
    with pytest.raises(PeerGoneError, match="no message"):
        await door.read_chunks(coming(0.0, 60.0), NUM_BYTES + 160)


def test_a_megabyte_may_take_a_minute_at_the_rate_that_150_streams_share() -> None:
    assert with_time_for(15.0, CHUNK_BYTES) > CHUNK_BYTES / (20e6 / 8 / 150)
    assert with_time_for(15.0, 1 << 40) == with_time_for(15.0, CHUNK_BYTES)
    assert with_time_for(15.0, 0) == 15.0
    assert LEAST_BYTES_PER_S < 20e6 / 8 / 150
