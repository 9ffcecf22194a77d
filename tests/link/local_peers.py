"""Peers in one process that talk over the real gRPC services and the tunnel's local sockets, with no p2pd between them.

Each peer here has a tunnel that leads to the served daemon's gRPC socket whomever it calls, so a call arrives there under the
peer's own name, as if libp2p had authenticated it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from peerd.link.links import Links
from peerd.link.p2pd import P2pd
from peerd.link.streams import Stream
from peerd.link.throttle import Throttles
from peerd.link.tunnel import Tunnel
from peerd.table.record import PeerId
from peerd.wire.grpc_server import start_server


class _LocalTunnel(Tunnel):
    async def _dial(self, peer: PeerId) -> Stream:
        return await self._connect_as(self._new_name(self._me))

    async def hang_up(self, peer: PeerId) -> None:
        """There is no p2pd that has a connection."""


@dataclass(slots=True)
class Served:
    """A gRPC server as a daemon runs it, and whoever calls it."""

    folder: Path
    _links: list[Links] = field(default_factory=list)
    _tunnels: list[Tunnel] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.folder / "grpc.sock"

    def links_of(self, caller: str, throttles: Throttles | None = None) -> Links:
        """Channels on which `caller` reaches the server, whatever id it calls it by."""
        tunnel = self.tunnel_of(caller, throttles)
        links = Links(tunnel)
        self._links.append(links)
        return links

    def tunnel_of(self, caller: str, throttles: Throttles | None = None) -> Tunnel:
        folder = self.folder / f"p{len(self._tunnels)}"
        folder.mkdir()
        nobody = cast(P2pd, SimpleNamespace(p2p=SimpleNamespace(peer_id=SimpleNamespace(to_base58=lambda: caller))))
        self._tunnels.append(tunnel := _LocalTunnel(nobody, folder, self.socket, lambda _peer: (), throttles))
        return tunnel

    async def stub(self, kind: Any, caller: str) -> Any:
        """A generated stub whose calls come from `caller`, for messages that our own clients would never send."""
        return kind(await self.links_of(caller).channel(PeerId(caller)))

    async def close(self) -> None:
        for links in self._links:
            await links.close()
        for tunnel in self._tunnels:
            await tunnel.close()


@contextlib.asynccontextmanager
async def serving(servicers: Sequence[Any]) -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory(prefix="peerd-t-", dir="/tmp") as folder:
        served = Served(Path(folder))
        server = await start_server(str(served.socket), servicers)
        try:
            yield served
        finally:
            await served.close()
            await server.stop(0)
