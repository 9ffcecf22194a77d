"""Entering the swarm: as a run's organiser, by an address, or back into the run this home was last in."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import structlog

from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.daemon.address import Address, parse_address
from peerd.daemon.device import choose_device
from peerd.daemon.network import Network, allow_direct, ask_for_run, open_network
from peerd.daemon.peer import Peer
from peerd.daemon.place import Entry, Place
from peerd.daemon.row import Row
from peerd.daemon.run_data import Run, organise, start_for, text_for
from peerd.data.progress import ByteProgress, Interrupted, ProgressLog, Report, TerminalBar
from peerd.errors import AddressError, PeerdError, PortTakenError, RemoteError, UnreachableError, UsageError
from peerd.link.p2pd import check_port_free
from peerd.observe.archive import Archive
from peerd.owner.governor import Governor
from peerd.swarm.directory import Directory
from peerd.swarm.identity import Identity, LocalState
from peerd.swarm.membership import Membership
from peerd.swarm.signed import SignedManifest, pack_manifest, unpack_manifest
from peerd.table.circuit import direct, is_circuit
from peerd.table.record import HIDDEN, PeerId, RunId
from peerd.table.view import TTL_PERIODS
from peerd.wire.swarm_client import SwarmClient

FIRST_LOOK_TIMEOUT_S = 10.0
MAX_BOOTSTRAP_PEERS = 4
LOG = structlog.get_logger()
Result = TypeVar("Result")


async def enter(settings: Settings, home: Home, stack: contextlib.AsyncExitStack, governor: Governor) -> Peer:
    """A peer that is in the DHT and serves no stage yet. What it opened is closed by `stack`."""
    identity, local = Identity.load_or_create(home.identity), LocalState(home)
    device = choose_device(settings.device)
    contacts = tuple(parse_address(each) for each in settings.join.split())
    run = None if contacts else await _with_progress(lambda report: _known_run(settings, local, report))
    book = _address_book(local, run.signed if run else None, contacts)
    row = Row()
    membership: Membership | None = None

    def addresses_of(peer: PeerId) -> tuple[str, ...]:
        known = membership.addresses_of(peer) if membership is not None else ()
        return known or book.get(peer, ())

    settings = replace(settings, host=settings.host or _host(settings, contacts, book), port=settings.port or _free_port(settings, local))
    met = _met_before(local, contacts)
    bootstrap = () if met else tuple(each.multiaddr for each in contacts)  # without an answer p2pd would not start
    network = await open_network(settings, home, bootstrap, addresses_of, governor.throttles)
    stack.push_async_callback(network.close)
    if settings.direct:
        allow_direct(network, identity, settings, addresses_of, governor.throttles)
    if contacts:
        contact, signed, membership = await _first_to_answer(network, identity, contacts, met, book, row)
        if local.pin(signed.run, signed.organiser_key):
            LOG.info("organiser pinned", run=signed.run, organiser=signed.organiser_key.hex())
        manifest = signed.manifest
        run = Run(signed, await _with_progress(lambda report: text_for(manifest, settings, report)))
        await _look_again(network, membership, signed, contact)
        reached = (contact.multiaddr, *_addresses_in(membership))
    else:
        assert run is not None
        signed = run.signed
        membership = _membership(identity, signed, book, row)
        reached = await _reach(network, book)
        await _look_around(network, membership, signed, reached)
    directory = await Directory.join(network.p2pd.p2p, signed, direct(reached), must_answer=bool(contacts) and bool(direct(reached)))
    stack.push_async_callback(directory.close)
    directory.store_manifest_soon(signed)
    local.remember(signed.run, pack_manifest(signed), network.port, start=str(run.start.path) if run.start else "")
    archive = Archive(home.history(signed.run))
    stack.push_async_callback(archive.close)
    place = Place(signed=signed, device=device, data_source=run.text.source, corpus=run.text.corpus, start=run.start)
    return Peer(settings, place, network, Entry(membership, row, local, directory), governor, archive)


async def come_back(peer: Peer) -> None:
    """After a rest: the table as it is now, from peers met before."""
    peer.membership.clear_liveness()
    reached = await _reach(peer.network, _address_book(peer.local, peer.place.signed, ()))
    await _look_around(peer.network, peer.membership, peer.place.signed, reached)


async def _with_progress(work: Callable[[Report], Result]) -> Result:
    """Work that may take long, in a thread: shown on a terminal, now and then in the log elsewhere; cancelling interrupts it."""
    stop, bar = threading.Event(), TerminalBar() if sys.stderr.isatty() else None
    show = bar or ProgressLog(lambda text: LOG.info("preparing the data", progress=text))

    def report(progress: ByteProgress) -> None:
        if stop.is_set():
            raise Interrupted
        show(progress)

    try:
        return await asyncio.to_thread(work, report)
    finally:
        stop.set()
        if bar is not None:
            bar.clear()


def _known_run(settings: Settings, local: LocalState, report: Report) -> Run:
    """The run to start, or the one that this home was last in."""
    if settings.run_file:
        return organise(settings, report)
    if local.manifest is None:
        raise UsageError("this home has not been in a run yet", "give the address to join")
    signed = unpack_manifest(local.manifest)
    return Run(signed, text_for(signed.manifest, settings, report), start_for(signed.manifest, local.start))


def _membership(identity: Identity, signed: SignedManifest, book: dict[PeerId, tuple[str, ...]], row: Row) -> Membership:
    membership = Membership(identity, signed.run, TTL_PERIODS * signed.manifest.swarm.announce_period_s, row)
    membership.book = book
    return membership


async def _first_to_answer(
    network: Network, identity: Identity, contacts: Sequence[Address], met: Sequence[Address], book: dict[PeerId, tuple[str, ...]], row: Row
) -> tuple[Address, SignedManifest, Membership]:
    """Who told the run and its table: one of the contacts, else of those `met` before. Raises as the first contact failed where none does.

    A contact that vanishes between the two answers is one that does not answer.
    """

    async def ask(contact: Address) -> tuple[Address, SignedManifest, Membership]:
        signed = await ask_for_run(network, contact)
        membership = _membership(identity, signed, book, row)
        await first_look(network, membership, signed, contact.peer)
        return contact, signed, membership

    failures: list[PeerdError] = []
    for contact in contacts:
        try:
            return await ask(contact)
        except UnreachableError as error:
            failures.append(error)
    for contact in await _answering(network, met):
        book.setdefault(contact.peer, (contact.multiaddr,))
        with contextlib.suppress(UnreachableError, AddressError):  # it may serve another run by now
            found = await ask(contact)
            LOG.warning("nobody answers at the addresses given; a peer met before does", peer=contact.peer)
            return found
    raise failures[0]


def _met_before(local: LocalState, contacts: Sequence[Address]) -> tuple[Address, ...]:
    """Those this home met when it was last in the run that the contacts are of."""
    if not contacts or not local.run:
        return ()
    remembered = [replace(parse_address(each), run=RunId(local.run)) for each in local.peers]
    known = {each.peer for each in remembered}
    is_same_run = any(each.run == local.run or (each.run is None and each.peer in known) for each in contacts)
    given = {each.multiaddr for each in contacts}
    return tuple(each for each in remembered if each.multiaddr not in given) if is_same_run else ()


async def _answering(network: Network, addresses: Sequence[Address]) -> list[Address]:
    """Those that can be connected to now, and then those behind relays, which only asking tells of."""

    async def answers(address: Address) -> bool:
        try:
            await network.p2pd.connect(address.peer, [address.multiaddr])
        except UnreachableError:
            return False
        return True

    plain = [each for each in addresses if not is_circuit(each.multiaddr)]
    found = await asyncio.gather(*map(answers, plain))
    relayed = [each for each in addresses if is_circuit(each.multiaddr)]
    return [each for each, there in zip(plain, found, strict=True) if there] + relayed


async def _look_again(network: Network, membership: Membership, signed: SignedManifest, contact: Address) -> None:
    """Getting the text may have taken minutes: the table as it is now, from the contact or whoever else was there."""
    others = [peer for peer in membership.view.sightings if peer not in (membership.me, contact.peer)]
    for peer in (contact.peer, *others[:MAX_BOOTSTRAP_PEERS]):
        try:
            return await first_look(network, membership, signed, peer)
        except UnreachableError as error:
            last = error
    raise last


def _addresses_in(membership: Membership) -> tuple[str, ...]:
    """A few peers' addresses beside the contact's, which may be gone the next moment."""
    others = [direct(r.addresses) for r in membership.live().records if r.peer != membership.me and r.reach not in HIDDEN]
    return tuple(addresses[0] for addresses in others if addresses)[:MAX_BOOTSTRAP_PEERS]


def _address_book(local: LocalState, signed: SignedManifest | None, contacts: Sequence[Address]) -> dict[PeerId, tuple[str, ...]]:
    """Peers to try: those at the addresses, else those this home met when it was last in the run."""
    if not contacts and (signed is None or local.run != signed.run):
        return {}
    book: dict[PeerId, tuple[str, ...]] = {}
    for each in contacts or map(parse_address, local.peers):
        book[each.peer] = (*book.get(each.peer, ()), each.multiaddr)
    return book


def _host(settings: Settings, contacts: Sequence[Address], book: dict[PeerId, tuple[str, ...]]) -> str:
    """Loopback when starting or where the others are on it too; otherwise everywhere, for volunteers serve others."""
    others = [each.multiaddr for each in contacts] or [each for addresses in book.values() for each in addresses]
    open_to_all = bool(others) and not all(each.startswith("/ip4/127.") for each in others)
    return "0.0.0.0" if open_to_all and not settings.run_file else "127.0.0.1"  # noqa: S104


def _free_port(settings: Settings, local: LocalState) -> int:
    """The port of last time, so that addresses others remember stay right; any where it is taken."""
    try:
        check_port_free(settings.host or "127.0.0.1", local.port)
    except PortTakenError:
        return 0
    return local.port


async def _reach(network: Network, book: dict[PeerId, tuple[str, ...]]) -> tuple[str, ...]:
    """The addresses of the book that answer now; those behind relays, which may, come last."""

    async def answers(peer: PeerId, addresses: tuple[str, ...]) -> bool:
        try:
            await network.p2pd.connect(peer, addresses)
        except UnreachableError:
            return False
        return True

    plain = {peer: direct(addresses) for peer, addresses in book.items() if direct(addresses)}
    found = await asyncio.gather(*(answers(peer, addresses) for peer, addresses in plain.items()))
    there = [addresses[0] for addresses, there in zip(plain.values(), found, strict=True) if there]
    return (*there, *(addresses[0] for peer, addresses in book.items() if peer not in plain))


async def _look_around(network: Network, membership: Membership, signed: SignedManifest, reached: tuple[str, ...]) -> None:
    """What the peers of the address book know; those still starting up will be heard later."""
    for address in reached:
        with contextlib.suppress(UnreachableError):
            await first_look(network, membership, signed, PeerId(address.rpartition("/")[2]))


async def first_look(network: Network, membership: Membership, signed: SignedManifest, peer: PeerId) -> None:
    """The whole table, from the peer at the address."""
    request = SwarmClient(network.links, signed.run).gossip(peer, [], FIRST_LOOK_TIMEOUT_S, want_all=True)
    try:
        await membership.absorb_quietly(await request)
    except RemoteError as error:
        raise UnreachableError(f"{peer} does not tell who is in the swarm: {error.message}", "try again, or join at another peer") from None
