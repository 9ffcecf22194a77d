"""The calling side of a download: one stream to each peer that gives a file, on which this one asks for chunks of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from peerd.errors import BadMessageError, PeerGoneError
from peerd.link.links import Arrival, ending, read_within
from peerd.link.traffic import PeerRole, Traffic
from peerd.table.record import PeerId

Header = TypeVar("Header")
Offered = TypeVar("Offered", covariant=True)


class Offer(Protocol[Offered]):
    """A file that a peer gives, of which chunks can be asked for."""

    @property
    def header(self) -> Offered: ...

    def ask(self, number: int) -> None:
        """Ask for a chunk. Chunks come in the order in which they were asked for."""

    async def take(self, num_bytes: int) -> bytes:
        """The next chunk, of so many bytes. The caller has to check it. Raises RemoteError."""

    async def end(self) -> None:
        """Tell the peer that nothing more is wanted, after all that was asked for has come."""


@dataclass(frozen=True, slots=True)
class Source:
    """A peer and what it gives: for the counters, and for what is told of a broken message."""

    peer: PeerId
    what: str
    """As it is counted in `Traffic.tensors`."""
    role: PeerRole
    traffic: Traffic
    patience_s: float


@contextlib.asynccontextmanager
async def offer(
    method: Callable[[AsyncGenerator[Any]], Any], first: Any, source: Source, header_from: Callable[[Any], Header]
) -> AsyncIterator[Offer[Header]]:
    """Open a peer's file with this first request. It is closed with the block. Raises RemoteError."""
    asked = asyncio.Queue[int | None]()
    with ending(method(_requests(first, asked))) as rpc:
        try:
            header = header_from(await header_of(rpc, source.patience_s, f"a stream of {source.what} without a header"))
            yield _Open(header, rpc, asked, source)
        finally:
            asked.put_nowait(None)  # gRPC does not end what it sends with the call


class _Open(Generic[Header]):
    def __init__(self, header: Header, rpc: Any, asked: asyncio.Queue[int | None], source: Source) -> None:
        self.header = header
        self._rpc = rpc
        self._asked = asked
        self._source = source
        self._arrival = Arrival(source.patience_s)
        self._asked_s = list[float]()
        self._came_s = 0.0

    def ask(self, number: int) -> None:
        self._asked_s.append(time.monotonic())
        self._asked.put_nowait(number)

    async def take(self, num_bytes: int) -> bytes:
        source = self._source
        message = await read_within(self._rpc.__aiter__(), self._arrival.left_s(num_bytes))
        if message is None:
            raise PeerGoneError(f"the {source.what} ended early")
        chunk: bytes = message.chunk
        if len(chunk) != num_bytes:
            raise BadMessageError(f"a chunk of {len(chunk)} bytes of {source.what} where {num_bytes} are due")
        self._arrival.came(num_bytes)
        now_s, began_s = time.monotonic(), max(self._asked_s.pop(0), self._came_s)
        self._came_s = now_s
        source.traffic.took(source.what, source.role, num_bytes)
        source.traffic.line.received_from(source.peer, num_bytes, now_s - began_s)
        return chunk

    async def end(self) -> None:
        self._asked.put_nowait(None)
        await read_within(self._rpc.__aiter__(), self._source.patience_s)


async def header_of(rpc: Any, patience_s: float, untold: str) -> Any:
    """Return the header that begins a stream. Raises BadMessageError(untold) if the stream begins with anything else."""
    first = await read_within(rpc.__aiter__(), patience_s)
    if first is None:
        raise PeerGoneError("the stream ended before its first message")
    if first.WhichOneof("kind") != "header":
        raise BadMessageError(untold)
    return first.header


async def _requests(first: Any, asked: asyncio.Queue[int | None]) -> AsyncGenerator[Any]:
    yield first
    while (number := await asked.get()) is not None:
        yield type(first)(chunk=number)
