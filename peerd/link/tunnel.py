"""Carries gRPC's byte streams over libp2p streams, which are encrypted, authenticated and addressed by peer id.

Outward, each peer has a local socket to which its gRPC channel connects, and every connection becomes one libp2p stream.
Inward, every libp2p stream becomes a connection to the local gRPC server. The name of its socket contains the caller's
authenticated peer id, from which the server's handlers learn the caller: `caller_of(context.peer())`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peerd.errors import PeerdError
from peerd.link.circuits import PROTOCOL, Circuits
from peerd.link.few_each import FewEach
from peerd.link.p2pd import P2pd
from peerd.link.streams import Stream, StreamTasks, splice
from peerd.link.throttle import Throttles
from peerd.served_time import served_timeout
from peerd.table.circuit import is_circuit
from peerd.table.record import PeerId

DIAL_TIMEOUT_S = 10.0
REFUSED = "connection refused"
"""What p2pd says where the machine of a peer answers, and nobody listens there."""
LOCAL_TIMEOUT_S = 5.0
MOST_BROKEN = 1024
"""Size of the queue of broken connections."""
MOST_INWARD = 32
"""Streams from one peer: one for tensors and one for small messages, and those before them on connections that have died unnoticed."""
_CALLER_PREFIX = "from-"


class Tunnel:
    """Both ends of the tunnel of one daemon."""

    def __init__(
        self,
        p2pd: P2pd,
        folder: Path,
        grpc_socket: Path,
        addresses_of: Callable[[PeerId], tuple[str, ...]],
        throttles: Throttles | None = None,
        circuits: Circuits | None = None,
    ) -> None:
        self._p2pd = p2pd
        self.circuits = circuits
        """Reaches peers that cannot be dialled; None where no peer is behind a relay."""
        self._folder = folder
        self._grpc_socket = grpc_socket
        self._addresses_of = addresses_of
        self._throttles = throttles or Throttles()
        self._me = PeerId(p2pd.p2p.peer_id.to_base58())
        self._servers: dict[PeerId, asyncio.Server] = {}
        self._numbers = itertools.count()
        self._streams = StreamTasks()
        self._inwards = FewEach()
        self._origins: dict[str, str] = {}
        """Origins of the inward connections, by socket name."""
        self.heard_s: dict[PeerId, float] = {}
        """When bytes last came from each peer (`time.monotonic`). libp2p proves that they are its own."""
        self.answered_s: dict[PeerId, float] = {}
        """When bytes last came from each peer over a stream that this peer opened."""
        self.refused_s: dict[PeerId, float] = {}
        """When the machine of a peer last said that nobody listens where the peer's record says it is."""
        self.broken: asyncio.Queue[PeerId] = asyncio.Queue(MOST_BROKEN)
        """Peers that ended an open stream, for the part of the daemon that re-dials them."""

    async def start(self) -> None:
        await self._p2pd.p2p.add_binary_stream_handler(PROTOCOL, self._inward)
        if self.circuits is not None:
            await self.circuits.attach(self._p2pd, self.serve_inward)

    async def attach(self, p2pd: P2pd) -> None:
        """Continue over a new p2pd. Channels stay and dial again."""
        self._p2pd = p2pd
        await self.start()

    async def target(self, peer: PeerId) -> str:
        """Return the gRPC target whose connections reach `peer`."""
        path = self._folder / f"to-{peer[-16:]}"
        if peer not in self._servers:
            path.unlink(missing_ok=True)
            self._servers[peer] = await asyncio.start_unix_server(lambda r, w: self._streams.track(self._outward(peer, r, w)), path)
        return f"unix:{path}"

    async def hang_up(self, peer: PeerId) -> None:
        """End all streams to and from a peer whose connection seems dead. Calls after that dial it anew, where its record says it is."""
        await self._p2pd.disconnect(peer)

    async def close_target(self, peer: PeerId) -> None:
        self.answered_s.pop(peer, None)
        self.refused_s.pop(peer, None)
        server = self._servers.pop(peer, None)
        if server is not None:
            server.close()
            (self._folder / f"to-{peer[-16:]}").unlink(missing_ok=True)

    async def close(self) -> None:
        for peer in list(self._servers):
            await self.close_target(peer)
        await self._streams.close()

    async def _outward(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                async with served_timeout(DIAL_TIMEOUT_S):
                    remote = await self._dial(peer)
            except (PeerdError, TimeoutError, OSError):
                return
            with contextlib.closing(remote[1]):
                throttles = Throttles() if peer == self._me else self._throttles
                ended_by_remote = await splice((reader, writer), remote, throttles, self._hears(peer, self.answered_s))
        if ended_by_remote:
            with contextlib.suppress(asyncio.QueueFull):  # nothing reads the queue now
                self.broken.put_nowait(peer)

    async def _dial(self, peer: PeerId) -> Stream:
        if peer == self._me:  # libp2p refuses to dial itself
            return await self.local_for(peer)
        addresses = self._addresses_of(peer)
        if self.circuits is not None and any(is_circuit(address) for address in addresses):
            return await self.circuits.dial(peer, addresses)
        if addresses:
            try:
                await self._p2pd.connect(peer, addresses)
            except PeerdError as error:
                if REFUSED in error.message:
                    self.refused_s[peer] = time.monotonic()
                raise
        return await self._p2pd.open_stream(peer, PROTOCOL)

    async def _inward(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._streams.track(self.serve_inward(PeerId(info.peer_id.to_base58()), str(info.addr), reader, writer))

    def seen_at(self, grpc_peer: str) -> str | None:
        """Return the multiaddr that the connection behind a call comes from, by gRPC's name of it; None if unknown."""
        return self._origins.get(grpc_peer.rpartition("/")[2])

    async def serve_inward(self, peer: PeerId, origin: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a stream from the authenticated `peer` to the gRPC server."""
        name = self._new_name(peer)
        self._origins[name] = origin
        try:
            with contextlib.closing(writer), self._inwards.by(peer, MOST_INWARD) as may_come:
                if not may_come:
                    return
                async with served_timeout(LOCAL_TIMEOUT_S):
                    local = await self._connect_as(name)
                with contextlib.closing(local[1]):
                    await splice(local, (reader, writer), self._throttles, self._hears(peer))
        finally:
            self._origins.pop(name, None)

    async def local_for(self, peer: PeerId) -> Stream:
        """A connection to the gRPC server on which calls count as those of the authenticated `peer`."""
        return await self._connect_as(self._new_name(peer))

    def _hears(self, peer: PeerId, *also: dict[PeerId, float]) -> Callable[[], None]:
        def heard() -> None:
            now_s = time.monotonic()
            for times in (self.heard_s, *also):
                times[peer] = now_s

        return heard

    def _new_name(self, peer: PeerId) -> str:
        return f"{_CALLER_PREFIX}{peer}.{next(self._numbers) % 100_000}"  # config/paths.py counts its characters

    async def _connect_as(self, caller: str) -> Stream:
        name = self._folder / caller
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            local.setblocking(False)
            local.bind(str(name))
            await asyncio.get_running_loop().sock_connect(local, str(self._grpc_socket))
            return await asyncio.open_unix_connection(sock=local)
        except BaseException:
            local.close()
            raise
        finally:
            name.unlink(missing_ok=True)


def caller_of(grpc_peer: str) -> PeerId | None:
    """Return the authenticated peer behind a call, from gRPC's name of the connection; None for other connections."""
    name = grpc_peer.rpartition("/")[2]
    if not grpc_peer.startswith("unix:") or not name.startswith(_CALLER_PREFIX):
        return None
    return PeerId(name.removeprefix(_CALLER_PREFIX).partition(".")[0])
