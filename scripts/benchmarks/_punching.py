"""One peer's network, without a daemon around it, for `punching.py`. It obeys JSON lines on standard input, and answers each with one.

`python -m scripts.benchmarks._punching FOLDER RELAY` begins with a line about itself; `RELAY` is a relay's address, or empty for the relay.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from peerd.background import start
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.daemon.address import parse_address
from peerd.daemon.network import Network, allow_direct, open_network
from peerd.errors import PeerdError
from peerd.link.throttle import Throttles
from peerd.policy.owner.rate_limit import Ration
from peerd.swarm.identity import Identity
from peerd.table.record import PeerId, RunId
from peerd.wire import checkup
from peerd.wire.checkup import CheckupClient, CheckupServicer
from peerd.wire.door import Door
from peerd.wire.messages import Speed

RUN = RunId("bench")
PATIENCE_S = 60.0
AGAIN_S = 0.05
"""Pause before an upload that failed is tried again."""


@dataclass(slots=True)
class Peer:
    """The network, and the peers that it knows."""

    network: Network
    book: dict[PeerId, tuple[str, ...]]

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        match order:
            case {"meet": peer, "at": addresses}:
                self.book[PeerId(peer)] = tuple(addresses)
                return {}
            case {"await": path, "to": peer}:
                return await self._until(path, PeerId(peer))
            case {"send": num_bytes, "to": peer, "through": way}:
                direct = self.network.links.direct
                self.network.links.direct = None if way == "relay" else direct
                try:
                    return await self._until_done(PeerId(peer), partial(CheckupClient.upload, num_bytes=num_bytes, as_tensors=True))
                finally:
                    self.network.links.direct = direct
            case {"fetch": num_bytes, "to": peer}:
                return await self._until_done(PeerId(peer), partial(CheckupClient.download, num_bytes=num_bytes, as_tensors=True))
        raise ValueError(f"unknown order: {order}")

    async def _until(self, path: str, peer: PeerId) -> dict[str, Any]:
        """Wait until tensors to the peer take the path; `took_s` is how long that was."""
        began_s = time.monotonic()
        async with asyncio.timeout(PATIENCE_S):
            while self.network.path_to(peer)["path"] != path:
                await self.network.links.channel_for_tensors(peer)
                await asyncio.sleep(AGAIN_S)
        return {"took_s": time.monotonic() - began_s}

    async def _until_done(self, peer: PeerId, carry: Callable[..., Awaitable[Speed]]) -> dict[str, Any]:
        """Upload or download until it has arrived; what fails begins anew, over whatever way there is then."""
        client, failures, began_s, spent_s = CheckupClient(self.network.links, RUN), 0, time.monotonic(), time.process_time()
        while True:
            path = self.network.path_to(peer)["path"] if self.network.links.direct is not None else "relay"
            try:
                speed = await carry(client, peer)
            except PeerdError as error:
                failures += 1
                print(error.message, file=sys.stderr)
                await asyncio.sleep(AGAIN_S)
                continue
            ended_s = time.monotonic()
            rate = speed.num_bytes / speed.took_s if speed.took_s else 0.0
            spent_s = time.process_time() - spent_s
            return {"rate": rate, "path": path, "failures": failures, "took_s": ended_s - began_s, "ended": time.time(), "spent_s": spent_s}


async def run(folder: Path, relay: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # answers alone go to standard output
    checkup.MAX_PROBE_BYTES, checkup.PROBE_TIMEOUT_S = 1 << 30, 120.0
    home, throttles = Home(folder), Throttles()
    settings = Settings(home=str(folder), host="0.0.0.0", local=False)  # noqa: S104
    identity = Identity.load_or_create(home.identity)
    book: dict[PeerId, tuple[str, ...]] = {}
    through = parse_address(relay) if relay else None
    if through is not None:
        book[through.peer] = (through.multiaddr,)
    network = await open_network(settings, home, (), lambda peer: book.get(peer, ()), throttles)
    mirrors = (through.peer,) if through is not None else ()
    allow_direct(network, identity, settings, lambda peer: book.get(peer, ()), throttles, lambda: mirrors)
    assert network.direct is not None
    door = Door(RUN, PATIENCE_S, network.links.traffic, proven=network.direct.caller)
    sink = CheckupServicer(door, network.tunnel.seen_at)
    sink._sinks = sink._sources = Ration(each=1 << 20, total=1 << 20)
    await network.serve([sink, network.direct.servicer(door, lambda _peer: True)])
    network.serves(RUN)
    try:
        addresses = network.addresses
        if through is None:
            await network.relay.switch("")
        else:
            reservation = await network.circuits.reserve(through.peer, through.multiaddr)
            start(reservation.held())
            addresses = (reservation.address,)
        peer = Peer(network, book)
        print(json.dumps({"peer": identity.peer, "addresses": addresses}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await peer.obey(json.loads(line))), flush=True)
    finally:
        await network.stop_serving()
        await network.close()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2]))
