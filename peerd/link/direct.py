"""Direct connections for tensors and pushed records: gRPC with mutual TLS to a peer's own TCP port, which is faster than the tunnel.
A neighbour (another daemon of this user on this machine) is reached over a local socket instead (local.py).

The two ends authenticate each other in the tunnel, where libp2p proves their peer ids: the caller shows its certificate, the callee
replies with its own, and each checks that the other's peer key has signed it. From then on TLS accepts exactly these two certificates.
While a path is tried, the tunnel carries the calls, so a path that fails delays nothing. Calls return to the tunnel when a path breaks,
when tensors travel over it much more slowly (direct_path.py), or none do. Liveness and checkups always use the tunnel. Where segments are
lost, tensors take several connections at once (wide.py), and what is small the one beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import structlog

from peerd.background import start
from peerd.errors import BadMessageError, PeerGoneError, RemoteError, WrongStateError
from peerd.generated import direct_pb2, direct_pb2_grpc
from peerd.link.certificate import MAX_CERTIFICATE_BYTES, Certificate, checked_pem
from peerd.link.closing import ClosingChannels
from peerd.link.connecting import broken, connected, pause_s
from peerd.link.links import LONGEST_CALL_S, Links, answer_of
from peerd.link.local import NeighbourChannel, Neighbours, checked_target
from peerd.link.metered import CountedChannel
from peerd.link.punching import Holes
from peerd.link.segments import SegmentCounts
from peerd.link.throttle import Throttles
from peerd.link.traffic import Way
from peerd.link.wide import Widening, count_losses
from peerd.policy.route.direct_path import tunnel_is_faster
from peerd.policy.swarm.checkup import CAPPED
from peerd.table.circuit import host_in
from peerd.table.record import PeerId

MAX_HOSTS = 4
SHOW_TIMEOUT_S = 10.0
SHOW_AGAIN_S = 60.0
"""Period at which this peer shows its certificate again: a callee may forget the certificate of a peer that it does not hear from."""
UNUSED_S = 600.0
"""A path that no tensors took for so long is closed: of hundreds of peers each is needed now and then, and few at a time."""
LOG = structlog.get_logger()
Channel = CountedChannel | NeighbourChannel | grpc.aio.Channel
Told = tuple[object, object]


@dataclass(slots=True)
class Showing:
    """What this daemon tells others about its own endpoint."""

    certificate: Certificate
    port: int = 0
    """The TCP port for direct connections; 0 while it takes none."""
    socket: str = ""
    """The path of the local socket for neighbours."""


@dataclass(slots=True)
class _Path:
    channel: Channel | None = None
    connection: grpc.aio.Channel | None = None
    """What the channel sends over."""
    work: asyncio.Task[None] | None = None
    """The task that opens the path and then watches it."""
    failures: int = 0
    retry_s: float = 0.0
    """When to try again; `used_s` is when tensors were last to go over it: on the monotonic clock."""
    used_s: float = 0.0
    is_punched: bool = False
    """Whether it leads through the routers of both ends (punching.py)."""
    was_capped: bool = False
    """Whether a cap was set when the path was last given up."""
    grace_s: float | None = LONGEST_CALL_S
    """Time that the calls on it have to finish when it is given up."""
    widening: Widening = field(default_factory=Widening)

    @property
    def is_local(self) -> bool:
        return isinstance(self.channel, NeighbourChannel)

    @property
    def is_by_tcp(self) -> bool:
        return not self.is_local and not self.is_punched

    @property
    def is_open(self) -> bool:
        """False as soon as the connection is broken: a call would wait for it to be made anew, where nothing may answer."""
        return self.channel is not None and self.connection is not None and self.connection.get_state() is grpc.ChannelConnectivity.READY


@dataclass(eq=False)
class DirectPaths:
    """Direct channels to peers that have an endpoint. While a cap is set only neighbours get one, because the tunnel enforces caps."""

    _links: Links
    _certificate: Certificate
    _addresses_of: Callable[[PeerId], tuple[str, ...]]
    _throttles: Throttles
    _neighbours: Neighbours | None = None
    _folder: Path | None = None
    """Where sockets for several connections at once lie; None: each path has one connection."""
    _holes: Holes | None = None
    """Connections through routers; None: none are made."""
    segments: SegmentCounts = field(default_factory=SegmentCounts)
    _counting: asyncio.Task[None] | None = None
    _paths: dict[PeerId, _Path] = field(default_factory=dict)
    _closing: ClosingChannels = field(default_factory=ClosingChannels)

    def channel(self, peer: PeerId) -> Channel | None:
        """Return the open direct channel to a peer, or None. Starts a task that opens one when a try is due."""
        if self._throttles.capped and self._neighbours is None:
            return None
        path = self._paths.setdefault(peer, _Path())
        path.used_s = time.monotonic()
        is_due = time.monotonic() >= path.retry_s or (path.was_capped and not self._throttles.capped)
        if path.work is None and is_due:
            path.work = start(self._follow(peer, path))
        if not self.leads_to(peer):
            return None
        return path.widening.channel or path.channel

    def open_channel(self, peer: PeerId) -> Channel | None:
        """Return the channel of the one connection to a peer, where it is open: nothing large is before what is sent there."""
        return self._paths[peer].channel if self.leads_to(peer) else None

    def _open_widenings(self) -> list[Widening]:
        return [path.widening for path in self._paths.values() if path.is_open and path.is_by_tcp]

    @property
    def num_connections(self) -> int:
        """TCP connections of all paths."""
        return sum(each.num_connections for each in self._open_widenings())

    def _num_wide(self) -> int:
        return sum(path.widening.channel is not None for path in self._paths.values())

    def is_wide(self, peer: PeerId) -> bool:
        """Return whether the path to a peer has several connections."""
        found = self.widening(peer)
        return found is not None and found.channel is not None

    def widening(self, peer: PeerId) -> Widening | None:
        """Return what lets the open path to a peer have several connections; None where it is no path by TCP."""
        return self._paths[peer].widening if self.leads_to(peer) and self._paths[peer].is_by_tcp else None

    async def until_other_way(self, peer: PeerId) -> None:
        """Wait until the path to a peer has several connections in place of one, or the other way round."""
        await self._paths.setdefault(peer, _Path()).widening.until_other_way()

    def leads_to(self, peer: PeerId) -> bool:
        path = self._paths.get(peer)
        return path is not None and path.is_open and (path.is_local or not self._throttles.capped)

    def is_local(self, peer: PeerId) -> bool:
        """Return whether the path to the peer is open and is a local socket."""
        return self.leads_to(peer) and self._paths[peer].is_local

    def is_punched(self, peer: PeerId) -> bool:
        """Return whether the path to the peer is open and leads through the routers of both ends."""
        return self.leads_to(peer) and self._paths[peer].is_punched

    @property
    def num_open(self) -> int:
        return sum(map(self.leads_to, self._paths))

    @property
    def num_local(self) -> int:
        return sum(map(self.is_local, self._paths))

    @property
    def num_punched(self) -> int:
        return sum(map(self.is_punched, self._paths))

    def drop(self, peer: PeerId) -> None:
        """Close the path to a peer that is gone for good."""
        path = self._paths.pop(peer, None)
        if path is not None and path.work is not None:
            path.work.cancel()

    def cut(self, peer: PeerId) -> None:
        """Close the path to a peer at once, with the calls on it. A new one is opened when it is asked for."""
        if peer in self._paths:
            self._paths[peer].grace_s = None
            self.drop(peer)
        if self._holes is not None:
            self._holes.cut(peer)

    def cut_all(self) -> None:
        for peer in list(self._paths):
            self.cut(peer)
        if self._holes is not None:
            self._holes.cut_all()

    async def close(self) -> None:
        works = [path.work for path in self._paths.values() if path.work is not None]
        works += [self._counting] if self._counting is not None else []
        for task in works:
            task.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        await self._closing.now()
        if self._holes is not None:
            await self._holes.close()

    async def _follow(self, peer: PeerId, path: _Path) -> None:
        """Open the path and keep it until it breaks. Then set when it may be tried again."""
        try:
            offer = await self._show(peer)
            path.connection, path.channel = await self._open_local(peer, offer) or await self._open_any(peer, path, offer)
            channel = path.connection
            LOG.debug("direct path", to=peer, local=path.is_local)
            try:
                path.failures = path.failures + 1 if await self._hold(peer, path, channel, offer) else 0
            finally:
                path.channel = path.connection = None
                self._closing.soon(channel, path.grace_s)
                if self._holes is not None:
                    self._holes.close_target(peer)
        except (RemoteError, OSError) as error:
            path.failures += 1
            LOG.debug("no direct path", to=peer, reason=str(error))
        finally:
            path.retry_s, path.was_capped = time.monotonic() + pause_s(path.failures), self._throttles.capped
            path.work = None

    async def _hold(self, peer: PeerId, path: _Path, channel: grpc.aio.Channel, offer: direct_pb2.ShowReply) -> bool:
        """Return when the channel breaks, nothing uses it, the callee's offer changes, or, with True, when the tunnel is much faster."""
        breaking, told = start(broken(channel)), _told_of(path, offer)
        widening = start(self._widen(peer, path, offer), expects=(OSError,))
        try:
            while not breaking.done() and time.monotonic() - path.used_s <= UNUSED_S:
                await asyncio.wait({breaking}, timeout=SHOW_AGAIN_S)
                if not breaking.done():
                    if self._is_outrun(peer):
                        return True
                    with contextlib.suppress(RemoteError):  # a failure of the tunnel says nothing about this path
                        if _told_of(path, await self._show(peer)) != told:
                            return False
            return False
        finally:
            breaking.cancel()
            widening.cancel()
            await asyncio.gather(widening, return_exceptions=True)

    async def _widen(self, peer: PeerId, path: _Path, offer: direct_pb2.ShowReply) -> None:
        """Let the path have several connections while that pays, until cancelled."""
        if self._folder is not None and path.is_by_tcp:
            if self._counting is None:
                self._counting = start(count_losses(self.segments, self._open_widenings, self._links.traffic.line))
            path.widening.hosts = hosts_in(self._addresses_of(peer))
            await path.widening.run(self._folder / f"by-{peer[-16:]}", partial(self._open, peer, offer), self._num_wide)

    def _is_outrun(self, peer: PeerId) -> bool:
        """Return whether the tunnel was much faster when last used. If so, forget the direct rates, so that the next try starts afresh."""
        traffic = self._links.traffic
        rates = traffic.rates(peer, Way.DIRECT), traffic.rates(peer, Way.TUNNEL)
        outrun = tunnel_is_faster(*rates)
        if outrun:
            LOG.info("the tunnel is faster than the direct path", to=peer, direct=rates[0], tunnel=rates[1])
            traffic.forget_way(peer, Way.DIRECT)
        return outrun

    async def _open_local(self, peer: PeerId, offer: direct_pb2.ShowReply) -> tuple[grpc.aio.Channel, Channel] | None:
        """Open a channel to a neighbour's socket and check that it accepts its token; None if the peer is no neighbour or that fails."""
        if self._neighbours is None or not offer.socket:
            return None
        try:
            channel = await connected(checked_target(offer.socket))
            try:
                neighbour = NeighbourChannel(channel, offer.token)
                if await self._show(peer, neighbour) != offer:
                    raise WrongStateError("the neighbour's offers over the local socket and through the tunnel differ")
            except BaseException:
                await channel.close(None)
                raise
        except RemoteError as error:
            LOG.debug("no local path", to=peer, reason=error.message)
            return None
        return channel, neighbour

    async def _open_any(self, peer: PeerId, path: _Path, offer: direct_pb2.ShowReply) -> tuple[grpc.aio.Channel, Channel]:
        """Open a channel with TLS: to the peer's TCP port, otherwise through the routers. Raises RemoteError with the reason."""
        path.is_punched = False
        try:
            return await self._open(peer, offer)
        except PeerGoneError as error:
            if self._holes is None or self._holes.why or self._throttles.capped or not offer.port:
                raise
            LOG.debug("no direct path by TCP", to=peer, reason=error.message)
        target = await self._holes.target(peer)
        try:
            opened = await self._open_at(target, peer, offer)
        except BaseException:
            self._holes.close_target(peer)
            raise
        path.is_punched = True
        return opened

    async def _open(self, peer: PeerId, offer: direct_pb2.ShowReply) -> tuple[grpc.aio.Channel, Channel]:
        """Open a channel with TLS to the peer's TCP port. Raises RemoteError with the reason if that fails."""
        if self._throttles.capped:
            raise PeerGoneError(CAPPED)
        hosts = hosts_in(self._addresses_of(peer))
        if not offer.port or not hosts:
            raise PeerGoneError("the peer takes no direct connections")
        if offer.port > 65535:
            raise BadMessageError("the port is above 65535")
        return await self._open_at("ipv4:" + ",".join(f"{host}:{offer.port}" for host in hosts), peer, offer)

    async def _open_at(self, target: str, peer: PeerId, offer: direct_pb2.ShowReply) -> tuple[grpc.aio.Channel, Channel]:
        if len(offer.certificate) > MAX_CERTIFICATE_BYTES:
            raise BadMessageError("the certificate is too long")
        mine = self._certificate
        credentials = grpc.ssl_channel_credentials(checked_pem(offer.certificate, peer), mine.key_pem, mine.pem)
        channel = await connected(target, credentials)
        return channel, CountedChannel(channel, self._throttles)

    async def _show(self, peer: PeerId, channel: Any = None) -> direct_pb2.ShowReply:
        """Show this peer's certificate and return the callee's offer; through the tunnel unless `channel` is given."""
        stub: Any = direct_pb2_grpc.DirectStub(channel or await self._links.channel(peer))
        request = direct_pb2.ShowRequest(certificate=self._certificate.der)
        if self._neighbours is not None:
            request.neighbour = self._neighbours.proof_for(peer)
        reply: direct_pb2.ShowReply = await answer_of(stub.Show(request, timeout=SHOW_TIMEOUT_S))
        return reply


def hosts_in(addresses: tuple[str, ...]) -> list[str]:
    """Return the IPv4 addresses at which a peer may be dialled directly; loopback addresses only if it has no others."""
    hosts = list(dict.fromkeys(filter(None, map(host_in, addresses))))
    return ([host for host in hosts if not host.startswith("127.")] or hosts)[:MAX_HOSTS]


def _told_of(path: _Path, offer: direct_pb2.ShowReply) -> Told:
    """Return the part of an offer that a path depends on. A local path does not depend on the port, which changes with caps."""
    return (offer.socket, offer.token) if path.is_local else (offer.port, offer.certificate)
