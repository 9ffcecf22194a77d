"""Copying between byte streams."""

from __future__ import annotations

import asyncio
import socket

import uvloop

from peerd.link.streams import _copy, unheard
from peerd.link.throttle import Throttle


class Closing(Throttle):
    """While bytes wait for their turn, the sink is closed."""

    def __init__(self, sink: asyncio.StreamWriter) -> None:
        super().__init__()
        self._sink = sink

    async def let_pass(self, num_bytes: int, *, goes_first: bool = False) -> None:
        await super().let_pass(num_bytes, goes_first=goes_first)
        self._sink.close()
        await self._sink.wait_closed()


def test_a_sink_that_is_closed_while_bytes_wait_for_their_turn_ends_the_copy() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(_copy_to_a_closed_sink(), 10))


async def _copy_to_a_closed_sink() -> None:
    (near, far), (here, there) = socket.socketpair(), socket.socketpair()
    with there:
        _, source = await asyncio.open_unix_connection(sock=near)
        reader, back = await asyncio.open_unix_connection(sock=far)
        _, sink = await asyncio.open_unix_connection(sock=here)
        source.write(b"bytes")
        await _copy(reader, sink, Closing(sink), unheard)
        source.close()
        back.close()
