"""Starts the network (p2pd, tunnel, gRPC server), and finds out which run is served at an address."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import structlog

from peerd import __version__
from peerd.config.access import RawList
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.control.protocol import DirectInfo, PathInfo
from peerd.daemon.address import Address, parse_address
from peerd.daemon.open_files import limit
from peerd.errors import AddressError, PortTakenError, RemoteError, UnreachableError
from peerd.link import run_folder
from peerd.link.bundle import Bundles
from peerd.link.certificate import make_certificate
from peerd.link.circuits import Circuits
from peerd.link.direct import DirectPaths, Showing, hosts_in
from peerd.link.links import Links
from peerd.link.local import Neighbours
from peerd.link.p2pd import P2pd, P2pdConfig, check_port_free, is_public, start_p2pd
from peerd.link.pins import Pins, caller_past_the_tunnel
from peerd.link.punching import Holes, Whereabouts
from peerd.link.relay import Relay, bans_nobody
from peerd.link.run_folder import RunFolder
from peerd.link.seal import Seal
from peerd.link.throttle import Throttles
from peerd.link.tunnel import Tunnel
from peerd.policy.swarm.clocks import ClockOffset
from peerd.policy.swarm.connections import water_marks
from peerd.policy.swarm.relaying import Bounds
from peerd.swarm.identity import Identity
from peerd.swarm.signed import SignedManifest, read_manifest
from peerd.table.circuit import direct, is_circuit
from peerd.table.record import PeerId, RunId
from peerd.wire.direct_service import DirectServicer
from peerd.wire.door import Door
from peerd.wire.grpc_server import DirectEndpoint, start_server
from peerd.wire.messages import Description
from peerd.wire.swarm_client import SwarmClient

DESCRIBE_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
STOP_GRACE_S = 0.2
LOG = structlog.get_logger()
AddressesOf = Callable[[PeerId], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Direct:
    """The parts of direct connections: outgoing paths, the endpoint, and the peers that it admits."""

    paths: DirectPaths
    endpoint: DirectEndpoint
    showing: Showing
    pins: Pins
    neighbours: Neighbours | None
    """None if the owner wants no local sockets."""
    bundles: Bundles
    holes: Holes | None
    """None if the owner wants no connections through routers."""

    def caller(self, context: Any) -> PeerId | None:
        """Return the peer that made a direct call."""
        return caller_past_the_tunnel(context, self.pins, self.neighbours)

    def told(self, why: str) -> DirectInfo:
        """Return what the daemon tells of them. `why`: the reason for having none; empty where they are allowed."""
        paths, holes = self.paths, self.holes
        return {
            "port": self.showing.port,
            "peers": paths.num_open,
            "local": paths.num_local,
            "why": why,
            "quic": paths.num_punched,
            "quic_why": holes.why if holes is not None else "switched off by --no-quic or --no-port-mapping",
            "seen_at": holes.seen_at if holes is not None else "",
        }

    def servicer(self, door: Door, is_known: Callable[[PeerId], bool]) -> DirectServicer:
        return DirectServicer(door, self.pins, self.showing, self.neighbours, is_known, self.bundles, self.holes)


@dataclass(slots=True)
class Network:
    """p2pd and the parts that are built on it."""

    home: Home
    p2pd: P2pd
    tunnel: Tunnel
    links: Links
    circuits: Circuits
    relay: Relay
    config: P2pdConfig
    folder: RunFolder
    addresses: tuple[str, ...]
    port: int
    """The TCP port at which p2pd listens; 0 if it reports none."""
    server: grpc.aio.Server | None = None
    direct: Direct | None = None
    """None if the owner wants no direct connections."""

    @property
    def outside_port(self) -> int:
        """The port at which others reach this peer: the one that the router forwards, if there is one."""
        return port_in(self.addresses[:1]) if self.addresses and is_public(self.addresses[0]) else self.port

    @property
    def is_open_to_all(self) -> bool:
        """Whether it listens at every address that this machine has, or gets."""
        return self.config.host == "0.0.0.0"  # noqa: S104

    async def look_at_addresses(self) -> bool:
        """Update the addresses and return True if they changed: a router may forward a port seconds after the start, or stop to."""
        before = self.addresses
        try:
            self.addresses = await self.p2pd.addresses()
        except Exception as error:  # hivemind does not document what it raises; the next look may succeed
            LOG.debug("addresses not known", error=repr(error))
        return self.addresses != before

    async def serve(self, servicers: Sequence[Any]) -> None:
        self.server = await start_server(str(grpc_socket(self.home)), servicers)
        await self.tunnel.start()
        await self.relay.attach(self.p2pd)
        if self.direct is not None:
            await self.direct.endpoint.open(servicers)

    def serves(self, run: RunId, is_banned: Callable[[PeerId], bool] = bans_nobody) -> None:
        """Set the run that this peer relays for and asks relays for. It relays for no peer that is banned."""
        self.circuits.run = run
        self.relay.serves(run, is_banned)

    def path_to(self, peer: PeerId) -> PathInfo:
        """Return how tensors travel to a peer now."""
        if self.direct is None or not self.direct.paths.leads_to(peer):
            return {"path": "relay" if self.circuits.leads_to(peer) else "tunnel"}
        widening = self.direct.paths.widening(peer)
        if widening is None:
            return {"path": "quic" if self.direct.paths.is_punched(peer) else "local"}
        return {"path": "direct", "connections": widening.num_connections, "resent": widening.parallel.resent}

    async def forget(self, peer: PeerId) -> None:
        """Drop connections to a peer that is gone for good."""
        await self.links.drop(peer)
        if self.direct is not None:
            self.direct.pins.release(peer)

    async def revive(self, bootstrap: tuple[str, ...]) -> None:
        """Start a new p2pd under the same identity and port. gRPC's channels and server stay as they are.

        It starts whether or not another peer answers, and then dials the `bootstrap` addresses.
        """
        await self.p2pd.discard()
        self.p2pd = await start_p2pd(replace(self.config, port=self.port, bootstrap=()))
        known = [parse_address(each) for each in bootstrap]
        await asyncio.gather(*(self.p2pd.connect(each.peer, [each.multiaddr]) for each in known), return_exceptions=True)
        self.addresses = await self.p2pd.addresses()
        self.port = port_in(self.addresses)
        await self.tunnel.attach(self.p2pd)
        await self.relay.attach(self.p2pd)

    async def stop_serving(self) -> None:
        if self.direct is not None:
            await self.direct.endpoint.close(STOP_GRACE_S)
            self.direct.bundles.close()
        if self.server is not None:
            await self.server.stop(STOP_GRACE_S)

    async def close(self) -> None:
        """Close every part, even if p2pd is dead and a part waits for its answer."""
        for part in (self.links, self.relay, self.circuits, self.tunnel):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await part.close()
        await self.p2pd.stop()
        self.folder.release()


async def open_network(
    settings: Settings,
    home: Home,
    bootstrap: tuple[str, ...],
    addresses_of: AddressesOf,
    throttles: Throttles | None = None,
) -> Network:
    """Start p2pd and the parts on it. Raises PortTakenError, DiskError and the like."""
    config = P2pdConfig(
        identity_file=home.identity,
        run_folder=home.run_folder,
        host=settings.host,
        port=settings.port,
        bootstrap=direct(bootstrap),
        water_marks=water_marks(limit()),
        map_port=settings.port_mapping and not settings.host.startswith("127."),
        remove=(home.folder,) if settings.ephemeral else (),
        prune=(home.folder.parent,) if settings.ephemeral else (),
    )
    await asyncio.to_thread(run_folder.sweep)
    folder = await asyncio.to_thread(run_folder.claim, home.run_folder)
    try:
        p2pd = await start_p2pd(config)
    except BaseException:
        shutil.rmtree(home.run_folder, ignore_errors=True)  # no keeper is running that would do it
        folder.release()
        raise
    identity, throttles = Identity.load_or_create(home.identity), throttles or Throttles()
    circuits = Circuits(p2pd, identity.peer, Seal(identity.peer, identity.sign, home.run_folder), addresses_of)
    relay = Relay(Bounds(rate=settings.relay_rate, daily=settings.relay_daily), throttles)
    tunnel = Tunnel(p2pd, home.run_folder, grpc_socket(home), addresses_of, throttles, circuits)
    addresses = await p2pd.addresses()
    return Network(home, p2pd, tunnel, Links(tunnel), circuits, relay, config, folder, addresses, port_in(addresses))


def allow_direct(
    network: Network,
    identity: Identity,
    settings: Settings,
    addresses_of: AddressesOf,
    throttles: Throttles,
    mirrors: Callable[[], Sequence[PeerId]] = tuple,
) -> None:
    """Allow tensors past the tunnel once the network serves. Raises PortTakenError if the chosen port is in use.

    `mirrors`: peers that can be dialled, and see from which address and port this machine's packets come.
    """
    try:
        check_port_free(settings.host, settings.direct_port)
    except PortTakenError as error:
        raise PortTakenError(error.message, "choose another one with --direct-port, or leave it out") from None
    certificate = make_certificate(identity.peer, identity.sign)
    showing, pins = Showing(certificate), Pins()
    neighbours = Neighbours(identity.peer, network.home.run_folder) if settings.local else None
    endpoint = DirectEndpoint(settings.host, settings.direct_port, showing, pins, throttles, neighbours)
    around = Whereabouts(mirrors, lambda: hosts_in(network.addresses), lambda: (_reached_here(settings.host), showing.port))
    folder = network.home.run_folder
    may_punch = settings.quic and settings.port_mapping  # the library also asks the router for a port, and has no switch for that
    holes = Holes(network.links, folder, settings.host, settings.quic_port, around) if may_punch else None
    paths = DirectPaths(network.links, certificate, addresses_of, throttles, neighbours, folder, holes)
    bundles = Bundles(network.tunnel.local_for)
    network.direct, network.links.direct = Direct(paths, endpoint, showing, pins, neighbours, bundles, holes), paths


def _reached_here(host: str) -> str:
    """The address at which this machine itself reaches what listens at `host`."""
    return "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104


@contextlib.asynccontextmanager
async def visitor(
    contacts: Sequence[Address], host: str = "", port: int = 0, *, map_port: bool = False
) -> AsyncIterator[tuple[Network, Identity, dict[PeerId, tuple[str, ...]]]]:
    """Open the network under a temporary identity. Yields it with the identity and the address book of the peers it can call."""
    home = Home(Path(tempfile.mkdtemp(prefix="peerd-visit-")))
    identity = Identity.load_or_create(home.identity)
    host = host or ("127.0.0.1" if all(each.is_loopback for each in contacts) else "0.0.0.0")  # noqa: S104 - answers may come in on any interface
    book: dict[PeerId, tuple[str, ...]] = {each.peer: (each.multiaddr,) for each in contacts}
    settings = Settings(home=str(home.folder), host=host, port=port, port_mapping=map_port, ephemeral=True)
    try:
        network = await open_network(settings, home, (), lambda peer: book.get(peer, ()))
        try:
            yield network, identity, book
        finally:
            await network.close()
    finally:
        shutil.rmtree(home.folder, ignore_errors=True)


def port_in(addresses: Sequence[str]) -> int:
    """Return the port of the last address, which no router forwards; 0 without addresses."""
    return int(addresses[-1].split("/")[4]) if addresses else 0


def grpc_socket(home: Home) -> Path:
    return home.run_folder / "grpc.sock"


@dataclass(frozen=True, slots=True)
class Visited:
    """The answer of a peer to a visit."""

    description: Description
    clock: ClockOffset


async def ask_for_run(network: Network, address: Address) -> SignedManifest:
    """Reach the peer at the address, and get the run it serves, verified against the address's run id if it has one."""
    return choose_run((await visit_peer(network, address)).description, address)


async def visit_peer(network: Network, address: Address) -> Visited:
    """Ask the peer for its description. Raises UnreachableError if nothing answers under its id."""
    try:
        if not is_circuit(address.multiaddr):
            await network.p2pd.connect(address.peer, [address.multiaddr])
        asked_s = time.monotonic()
        description = await SwarmClient(network.links, RunId("")).describe(address.peer, DESCRIBE_TIMEOUT_S)
    except (UnreachableError, RemoteError):
        raise UnreachableError(
            f"nobody answers as {address.peer} at {address.multiaddr.rpartition('/p2p/')[0]}",
            "check the address, that its daemon is running, and your network",
        ) from None
    return Visited(description, ClockOffset.told(address.peer, description.clock_s, time.time(), time.monotonic() - asked_s))


def choose_run(description: Description, address: Address) -> SignedManifest:
    """Return the run that the address names. Raises AddressError if the peer does not serve it, SignatureError if it is not signed."""
    runs = [read_manifest(*raw) for raw in description.manifests]
    matching = [run for run in runs if address.run in (None, run.run)]
    if not matching:
        served = ", ".join(f"#{run.run} ({run.manifest.name})" for run in runs) or "none"
        raise AddressError(f"that peer does not serve run {address.run}; it serves {served}", "ask the organiser for the right address")
    if len(matching) > 1:
        served = ", ".join(f"#{run.run} ({run.manifest.name})" for run in matching)
        raise AddressError(f"that peer serves several runs: {served}", "put the one you want after the address")
    return matching[0]


def describe_self(manifests: Sequence[SignedManifest], access: RawList | None = None) -> Description:
    return Description(tuple(signed.raw for signed in manifests), __version__, time.time(), access)
