"""The network part of a daemon alone: p2pd, tunnel, direct paths and endpoint, and a door for services."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.daemon.network import Network, allow_direct, open_network
from peerd.errors import PeerdError
from peerd.link.links import Links
from peerd.link.throttle import Throttles
from peerd.swarm.identity import Identity
from peerd.table.record import PeerId, RunId
from peerd.wire.door import Door
from scripts.benchmarks._sides import PATIENCE_S, TIMEOUT_S

RUN = RunId("b" * 32)


@dataclass(slots=True)
class OnNetwork:
    network: Network
    identity: Identity
    book: dict[str, tuple[str, ...]]
    door: Door

    @property
    def peer(self) -> PeerId:
        return self.identity.peer

    @property
    def links(self) -> Links:
        return self.network.links

    @property
    def hello(self) -> dict[str, Any]:
        return {"peer": self.peer, "addresses": list(self.network.addresses)}

    async def serve(self, servicers: Sequence[Any]) -> None:
        assert self.network.direct is not None
        await self.network.serve([*servicers, self.network.direct.servicer(self.door, lambda _peer: True)])

    async def meet(self, others: Sequence[dict[str, Any]]) -> None:
        """Learn all addresses, and wait for a direct path to each peer."""
        assert self.network.direct is not None
        self.book.update({other["peer"]: tuple(other["addresses"]) for other in others})
        deadline_s = time.monotonic() + TIMEOUT_S
        for peer in set(self.book) - {self.peer}:
            while self.network.direct.paths.channel(PeerId(peer)) is None:
                if time.monotonic() > deadline_s:
                    raise PeerdError(f"no direct path to {peer}")
                await asyncio.sleep(0.05)

    def use(self, direct: bool) -> None:
        """Send tensors directly from now on, or through the tunnel."""
        assert self.network.direct is not None
        self.links.direct = self.network.direct.paths if direct else None


@contextlib.asynccontextmanager
async def on_network(folder: str, rank: int) -> AsyncIterator[OnNetwork]:
    home = Home(Path(folder) / f"peer{rank}")
    home.folder.mkdir(mode=0o700)
    settings = Settings(home=str(home.folder), host="127.0.0.1", ephemeral=True)
    identity, throttles = Identity.load_or_create(home.identity), Throttles()
    book: dict[str, tuple[str, ...]] = {}
    network = await open_network(settings, home, (), lambda peer: book.get(peer, ()), throttles)
    try:
        allow_direct(network, identity, settings, lambda peer: book.get(peer, ()), throttles)
        assert network.direct is not None
        yield OnNetwork(network, identity, book, Door(RUN, PATIENCE_S, network.links.traffic, proven=network.direct.caller))
    finally:
        await network.stop_serving()
        await network.close()
