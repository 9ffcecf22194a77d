"""A daemon's direct endpoint beside the socket to which its tunnel leads, and callers that look for a path to it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from peerd.generated import checkup_pb2, checkup_pb2_grpc, direct_pb2, direct_pb2_grpc
from peerd.link.bundle import Bundles
from peerd.link.certificate import SERVER_NAME, Certificate, make_certificate
from peerd.link.direct import DirectPaths, Showing
from peerd.link.links import Links
from peerd.link.local import Neighbours
from peerd.link.pins import Pins, caller_past_the_tunnel
from peerd.link.punching import Holes, Whereabouts
from peerd.link.quic import is_installed
from peerd.link.throttle import Throttles
from peerd.link.traffic import Traffic
from peerd.swarm.identity import Identity
from peerd.table.record import PeerId
from peerd.wire.checkup import CheckupServicer
from peerd.wire.direct_service import DirectServicer
from peerd.wire.door import Door
from peerd.wire.grpc_server import DirectEndpoint
from tests.link.local_peers import Served, serving
from tests.wire.callee import RUN, new_identity

WITHIN_S = 20.0
TCP, QUIC = "tcp", "quic"
WAYS = [TCP, pytest.param(QUIC, marks=pytest.mark.skipif(not is_installed(), reason="needs the package iroh, of the extra nat"))]
"""How a caller reaches an endpoint: at its TCP port, or through routers."""


class Callers(CheckupServicer):
    """Answers a dial-back with who asks, once that is let through."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    async def DialBack(self, request: checkup_pb2.DialBackRequest, context: Any) -> checkup_pb2.DialBackReply:
        self.asked.set()
        await self.may_answer.wait()
        return checkup_pb2.DialBackReply(observed=await self._door.caller(context))


@dataclass(slots=True)
class Endpoint:
    """A daemon's, beside the socket to which its tunnel leads."""

    owner: Identity
    served: Served
    door: Door
    pins: Pins
    showing: Showing
    endpoint: DirectEndpoint
    throttles: Throttles
    neighbours: Neighbours | None
    callers: Callers
    bundles: Bundles
    holes: Holes
    way: str = TCP
    known: set[PeerId] | None = None
    """The peers in its table; None: all."""

    @property
    def peer(self) -> PeerId:
        return self.owner.peer

    def paths_of(
        self, caller: Identity, throttles: Throttles | None = None, host: str = "127.0.0.1", key: bytes | None = None
    ) -> tuple[Links, DirectPaths]:
        """`key`: what the caller takes for its machine's; None: it wants no local sockets."""
        if self.way == QUIC:
            return self.paths_through_routers(caller, throttles)[:2]
        links = self.served.links_of(caller.peer)
        certificate = make_certificate(caller.peer, caller.sign)
        beside = Neighbours(caller.peer, self.served.folder, lambda: key) if key is not None else None
        paths = DirectPaths(links, certificate, lambda _peer: (f"/ip4/{host}/tcp/1",), throttles or Throttles(), beside)
        links.direct = paths
        return links, paths

    def holes_of(self, caller: Identity, mirrors: Sequence[PeerId] = ()) -> Holes:
        """A caller's own, whose machine has the address of loopback alone."""
        return _holes(self.served, caller.peer, lambda: ("127.0.0.1", 0), mirrors)

    def paths_through_routers(self, caller: Identity, throttles: Throttles | None = None) -> tuple[Links, DirectPaths, Holes]:
        """A caller that knows no address of the callee."""
        links, holes = self.served.links_of(caller.peer), self.holes_of(caller)
        certificate = make_certificate(caller.peer, caller.sign)
        paths = DirectPaths(links, certificate, lambda _peer: (), throttles or Throttles(), _holes=holes)
        links.direct = paths
        return links, paths, holes

    async def show(self, caller: Identity, certificate: Certificate) -> Any:
        stub = await self.served.stub(direct_pb2_grpc.DirectStub, caller.peer)
        return await stub.Show(direct_pb2.ShowRequest(certificate=certificate.der), timeout=WITHIN_S)

    async def call(self, certificate: Certificate, root: bytes | None = None) -> str:
        """Whom the endpoint takes for the caller, who presents this certificate and never was in the tunnel."""
        credentials = grpc.ssl_channel_credentials(root or self.showing.certificate.pem, certificate.key_pem, certificate.pem)
        options = (("grpc.ssl_target_name_override", SERVER_NAME),)
        async with contextlib.AsyncExitStack() as stack:
            target = f"ipv4:127.0.0.1:{self.showing.port}"
            if self.way == QUIC:
                stack.push_async_callback((holes := self.holes_of(new_identity())).close)
                target = await holes.target(self.peer)
            channel = await stack.enter_async_context(grpc.aio.secure_channel(target, credentials, options=options))
            return await caller_through(channel)


Opens = Callable[..., contextlib.AbstractAsyncContextManager[Endpoint]]
"""Opens an endpoint whose callers reach it in one of the ways."""


@contextlib.asynccontextmanager
async def endpoint(voucher: Identity | None = None, key: bytes | None = None, way: str = TCP) -> AsyncIterator[Endpoint]:
    """With a `voucher` the certificate it answers with is that one's; with a `key`, its machine's, it takes neighbours' calls, too.

    `way`: how its callers reach it.
    """
    owner, throttles, pins = new_identity(), Throttles(), Pins()
    showing = Showing(certificate_of(voucher or owner))
    with tempfile.TemporaryDirectory(prefix="peerd-t-", dir="/tmp") as folder:
        neighbours = Neighbours(owner.peer, Path(folder), lambda: key) if key is not None else None
        door = Door(RUN, 5.0, Traffic(), proven=partial(caller_past_the_tunnel, pins=pins, neighbours=neighbours))
        listening = DirectEndpoint("127.0.0.1", 0, showing, pins, throttles, neighbours)
        bundles = Bundles(lambda peer: served.tunnel_of(peer).local_for(peer))
        shows = DirectServicer(door, pins, showing, neighbours, lambda peer: there.known is None or peer in there.known, bundles)
        servicers = [shows, callers := Callers(door)]
        async with serving(servicers) as served:
            shows._holes = holes = _holes(served, owner.peer, lambda: ("127.0.0.1", showing.port))
            there = Endpoint(owner, served, door, pins, showing, listening, throttles, neighbours, callers, bundles, holes, way)
            await listening.open(servicers)
            try:
                yield there
            finally:
                await holes.close()
                await served.close()
                await listening.close()


def _holes(served: Served, peer: PeerId, tls: Callable[[], tuple[str, int]], mirrors: Sequence[PeerId] = ()) -> Holes:
    around = Whereabouts(lambda: mirrors, lambda: ["127.0.0.1"], tls)
    folder = Path(tempfile.mkdtemp(dir=served.folder))
    return Holes(served.links_of(peer), folder, "127.0.0.1", 0, around)


def certificate_of(identity: Identity) -> Certificate:
    return make_certificate(identity.peer, identity.sign)


async def caller_through(channel: Any) -> str:
    stub: Any = checkup_pb2_grpc.CheckupStub(channel)
    return str((await stub.DialBack(checkup_pb2.DialBackRequest(), timeout=WITHIN_S)).observed)


async def given_up(paths: DirectPaths, peer: PeerId) -> None:
    """Until the path there is no more."""
    async with asyncio.timeout(WITHIN_S):
        while work := paths._paths[peer].work:
            await asyncio.wait({work})


async def tried(paths: DirectPaths, peer: PeerId) -> Any:
    """The direct channel, None where it could not be had."""
    paths.channel(peer)
    path = paths._paths[peer]
    async with asyncio.timeout(WITHIN_S):
        while path.work is not None and path.channel is None:
            await asyncio.wait({path.work}, timeout=0.02)
    return path.channel
