"""The calling side of a download: one stream to each donor, on which a joiner asks for chunks of the donor's snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

from peerd.errors import BadMessageError, PeerGoneError
from peerd.generated import state_pb2, state_pb2_grpc
from peerd.link.links import Arrival, Links, ending, read_within
from peerd.link.traffic import PeerRole
from peerd.table.record import PeerId
from peerd.wire import convert
from peerd.wire.clients import Client, header_of
from peerd.wire.messages import Snapshot, StateRequest


class OpenSnapshot(Protocol):
    """A donor's snapshot, of which chunks can be asked for."""

    @property
    def header(self) -> Snapshot: ...

    def ask(self, number: int) -> None:
        """Ask for a chunk. Chunks come in the order in which they were asked for."""

    async def take(self, num_bytes: int) -> bytes:
        """The next chunk, of so many bytes. The caller has to check it. Raises RemoteError."""

    async def end(self) -> None:
        """Tell the donor that nothing more is wanted, after all that was asked for has come."""


class StateClient(Client):
    stub_of = state_pb2_grpc.StateStub

    @contextlib.asynccontextmanager
    async def open(self, peer: PeerId, request: StateRequest, patience_s: float) -> AsyncIterator[OpenSnapshot]:
        """Open a donor's snapshot. It is closed with the block. Raises RemoteError."""
        first = state_pb2.StateRequest(
            run=self._run, stage=request.stage, snapshot=request.snapshot, step=request.step, tied_only=request.tied_only
        )
        asked = asyncio.Queue[int | None]()
        with ending((await self._stub(peer)).GetState(_requests(first, asked))) as rpc:
            try:
                header = convert.snapshot_from(await header_of(rpc, patience_s, "a state without a header"))
                yield _Open(peer, header, rpc, asked, self._links, patience_s)
            finally:
                asked.put_nowait(None)  # gRPC does not end what it sends with the call


class _Open:
    def __init__(self, peer: PeerId, header: Snapshot, rpc: Any, asked: asyncio.Queue[int | None], links: Links, patience_s: float) -> None:
        self.header = header
        self._peer = peer
        self._rpc = rpc
        self._asked = asked
        self._links = links
        self._patience_s = patience_s
        self._arrival = Arrival(patience_s)
        self._asked_s = list[float]()
        self._came_s = 0.0

    def ask(self, number: int) -> None:
        self._asked_s.append(time.monotonic())
        self._asked.put_nowait(number)

    async def take(self, num_bytes: int) -> bytes:
        message = await read_within(self._rpc.__aiter__(), self._arrival.left_s(num_bytes))
        if message is None:
            raise PeerGoneError("the state ended early")
        chunk: bytes = message.chunk
        if len(chunk) != num_bytes:
            raise BadMessageError(f"a chunk of {len(chunk)} bytes of the state where {num_bytes} are due")
        self._arrival.came(num_bytes)
        now_s, began_s = time.monotonic(), max(self._asked_s.pop(0), self._came_s)
        self._came_s = now_s
        self._links.traffic.took("state", PeerRole.DONOR, num_bytes)
        self._links.traffic.line.received_from(self._peer, num_bytes, now_s - began_s)
        return chunk

    async def end(self) -> None:
        self._asked.put_nowait(None)
        await read_within(self._rpc.__aiter__(), self._patience_s)


async def _requests(first: state_pb2.StateRequest, asked: asyncio.Queue[int | None]) -> AsyncGenerator[state_pb2.StateRequest]:
    yield first
    while (number := await asked.get()) is not None:
        yield state_pb2.StateRequest(chunk=number)
