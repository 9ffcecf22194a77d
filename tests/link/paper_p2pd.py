"""The part of p2pd that circuits need, over local sockets: who dials whom, who may be dialled, and streams that tell who opened them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from peerd.errors import UnreachableError
from peerd.link.p2pd import P2pd
from peerd.link.streams import Stream
from peerd.table.record import PeerId

Handler = Callable[[Any, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(slots=True)
class Internet:
    """All peers. Whoever is not `hidden` can be dialled; a connection serves both ends."""

    folder: Path
    hidden: set[PeerId] = field(default_factory=set)
    connected: set[frozenset[PeerId]] = field(default_factory=set)
    dialled_at: dict[PeerId, list[str]] = field(default_factory=dict)
    _servers: dict[tuple[PeerId, str], asyncio.Server] = field(default_factory=dict)
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _handlers: list[asyncio.Task[Any]] = field(default_factory=list)

    def p2pd_of(self, peer: PeerId) -> P2pd:
        return cast(P2pd, PaperP2pd(self, peer))

    async def listen(self, peer: PeerId, protocol: str, handler: Handler) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.append(writer)
            self._handlers.append(cast("asyncio.Task[Any]", asyncio.current_task()))
            caller = (await reader.readline()).decode().strip()
            await handler(SimpleNamespace(peer_id=SimpleNamespace(to_base58=lambda: caller)), reader, writer)

        self._servers[peer, protocol] = await asyncio.start_unix_server(accept, self._socket(peer, protocol))

    async def open(self, caller: PeerId, callee: PeerId, protocol: str) -> Stream:
        if frozenset((caller, callee)) not in self.connected or (callee, protocol) not in self._servers:
            raise OSError("no such stream")
        reader, writer = await asyncio.open_unix_connection(self._socket(callee, protocol))
        self._writers.append(writer)
        writer.write(f"{caller}\n".encode())
        return reader, writer

    async def close(self) -> None:
        """All streams end, then their handlers."""
        for server in self._servers.values():
            server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    def _socket(self, peer: PeerId, protocol: str) -> Path:
        return self.folder / f"{peer[-8:]}{protocol.replace('/', '-')}"


@dataclass(slots=True)
class PaperP2pd:
    internet: Internet
    me: PeerId

    @property
    def p2p(self) -> Any:
        return self

    async def add_binary_stream_handler(self, protocol: str, handler: Handler) -> None:
        await self.internet.listen(self.me, protocol, handler)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        if await self.is_connected(peer):
            return
        self.internet.dialled_at[peer] = list(addresses)
        if peer in self.internet.hidden:
            raise UnreachableError(f"{peer} does not answer")
        self.internet.connected.add(frozenset((self.me, peer)))

    async def is_connected(self, peer: PeerId) -> bool:
        return frozenset((self.me, peer)) in self.internet.connected

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        return await self.internet.open(self.me, peer, protocol)
