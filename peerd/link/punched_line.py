"""One QUIC connection through the routers of both ends: it carries streams in both directions, and notices when the way has closed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import structlog

from peerd.link.quic import QuicConnection
from peerd.link.streams import Stream, StreamTasks, splice
from peerd.link.throttle import Throttles
from peerd.policy.route.holes import HoleState, QuicCounts, Silence
from peerd.table.record import PeerId

WATCH_S = 0.1
NEW_S = 5.0
"""So long a connection on which no stream has begun is still being made: both ends find out how large packets may be."""
NUM_SIGNS = 3
"""Packets that a question brings, so many `WATCH_S` apart: a buffer that is full loses several in a row."""
MOST_STREAMS = 32
"""Streams that one peer has open here."""
LOG = structlog.get_logger()


class PunchedLine:
    """A QUIC connection with a peer, for streams in both directions."""

    def __init__(
        self, peer: PeerId, connection: QuicConnection, tls: Callable[[], tuple[str, int]], ask: Callable[[PeerId], Awaitable[bool]]
    ) -> None:
        """`tls`: where streams of the other end lead. `ask`: let the other end send signs of life; returns whether it has answered."""
        self.peer, self.connection = peer, connection
        self._tls, self._ask = tls, ask
        self._signs: asyncio.Task[None] | None = None
        self._streams = StreamTasks()
        self._num_taken = self.num_open = 0
        """Streams of the other end, and of both."""
        self._began_s = time.monotonic()
        self._making = self._used = _total(connection.carried)
        """Bytes that it took to make the connection, and those carried until the end of the last stream."""
        self._is_new = True
        self.is_silent = False
        """Whether nothing came back through the hole any more."""

    @property
    def is_open(self) -> bool:
        return self.connection.is_open

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began_s

    async def run(self) -> None:
        """Serve the streams of the other end until the connection breaks, nothing comes back through the hole, or nothing uses it.

        Nothing does when the signs of life without a stream have taken as many bytes as making the connection again would.
        """
        works = [self._streams.start(work, expects=(OSError,)) for work in (self._take(), self._watch(), self.connection.closed())]
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.connection.close()
            await self._streams.close()

    async def carry(self, local: Stream) -> None:
        """Carry a local connection to the other end, over a stream of its own, until either ends. Raises OSError if there is none."""
        await self._splice(local, await self.connection.open())

    async def send_signs(self) -> None:
        """Send signs of life, some time apart. Who asks meanwhile gets the same ones."""
        if self._signs is None or self._signs.done():
            self._signs = self._streams.start(self._send_signs())
        await asyncio.wait({self._signs})

    async def _send_signs(self) -> None:
        self.connection.send_sign()
        for _ in range(NUM_SIGNS - 1):
            await asyncio.sleep(WATCH_S)
            self.connection.send_sign()

    async def _take(self) -> None:
        async for stream in self.connection.streams():
            if self._num_taken >= MOST_STREAMS:
                return  # an honest peer has a few
            self._streams.start(self._serve(stream), expects=(OSError, TimeoutError))

    async def _serve(self, stream: Stream) -> None:
        (host, port), writer = self._tls(), cast(Any, stream[1])
        self._num_taken += 1
        try:
            if port:
                await self._splice(await asyncio.open_connection(host, port), stream)
        finally:
            self._num_taken -= 1
            await writer.finish()  # also where nothing takes connections at that port

    async def _splice(self, local: Stream, remote: Stream) -> None:
        writer: Any = remote[1]
        self.num_open += 1
        try:
            with contextlib.closing(local[1]):
                await splice(local, remote, Throttles())
        finally:
            self.num_open -= 1
            await writer.finish()

    async def _watch(self) -> None:
        silence = Silence()
        while True:
            await asyncio.sleep(WATCH_S)
            carried = self.connection.carried
            state = silence.look(carried, self.connection.round_trip_s, time.monotonic())
            if state is HoleState.DOUBTFUL:
                LOG.debug("nothing has come back through the routers for a while", peer=self.peer)
                self._streams.start(self._ask_about(silence))
            if state is HoleState.CLOSED:
                LOG.info("nothing comes back through the routers any more", peer=self.peer)
                self.is_silent = True
                return
            self._is_new = self._is_new and not self.num_open and self.age_s < NEW_S
            if self._is_new:
                self._making = self._used = _total(carried)
            elif self.num_open:
                self._used = _total(carried)
            elif _total(carried) - self._used >= self._making:
                return

    async def _ask_about(self, silence: Silence) -> None:
        if await self._ask(self.peer):
            silence.answered()
        else:
            silence.failed()


def _total(carried: QuicCounts) -> int:
    return carried.sent + carried.received
