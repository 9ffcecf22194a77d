"""The chunks of a round as messages, the same at both ends: the sender calls (Give), or the receiver does (Take)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

from peerd.errors import BadMessageError
from peerd.generated import averaging_pb2
from peerd.link.links import CHUNK_BYTES
from peerd.link.traffic import PeerRole, Traffic
from peerd.table.record import AverageId
from peerd.wire import convert
from peerd.wire.chunks import Headed, collected, opening
from peerd.wire.messages import Frame, Verified

UNHEADED = "a chunk of a round without a header"


def opening_of_round(average_id: AverageId) -> averaging_pb2.ChunkMessage:
    """The first message of a stream of chunks that its sender opens."""
    return averaging_pb2.ChunkMessage(header=averaging_pb2.ChunkHeader(average_id=average_id))


def messages_of(frame: Frame) -> Iterator[Headed | memoryview]:
    """Yield the messages of one chunk: the header with the first piece, and the other pieces."""
    pieces = [piece for chunk in frame.chunks for piece in _pieces(memoryview(chunk))]
    yield Headed(averaging_pb2.ChunkMessage(header=convert.frame_to(frame)), pieces[0] if pieces else b"")
    yield from pieces[1:]


def _pieces(chunk: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(chunk), CHUNK_BYTES):
        yield chunk[start : start + CHUNK_BYTES]


async def frames_of(read: Callable[[], Awaitable[Any]], size_of: Callable[[Frame], int], traffic: Traffic) -> AsyncGenerator[Frame]:
    """Yield the chunks that come in messages, until `read` returns None. Raises BadMessageError where `size_of` does."""
    while (message := await read()) is not None:
        header, begun = opening(message, averaging_pb2.ChunkMessage, UNHEADED)
        frame = convert.frame_from(header)
        chunks = await collected(lambda _missing: read(), size_of(frame), begun)
        if begun and not chunks:
            raise BadMessageError("a chunk with more bytes than it has")
        received = replace(frame, chunks=chunks)
        traffic.took("sums" if frame.is_sum else "parts", PeerRole.STAGE_PEER, received.num_bytes)
        yield received


def count_sent(frame: Frame, traffic: Traffic) -> None:
    traffic.uplink.sends(frame.num_bytes)
    traffic.gave("sums" if frame.is_sum else "parts", PeerRole.STAGE_PEER, frame.num_bytes)


class LatestWord:
    """What a receiver has verified, on its way to the sender: only the latest word counts."""

    def __init__(self) -> None:
        self._latest: Verified | None = None
        self._is_over = False
        self._news = asyncio.Event()

    def tell(self, held: Verified) -> None:
        self._latest = held
        self._news.set()

    def end(self) -> None:
        self._is_over = True
        self._news.set()

    async def next(self) -> Verified | None:
        """Return the latest word that was not told yet; None at the end."""
        if not self._is_over:
            await self._news.wait()
        held, self._latest = self._latest, None
        if not self._is_over:
            self._news.clear()
        return held
