"""Enters the swarm: as a run's organiser, by an address, or back into the run that this home was last in."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import structlog

from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.daemon.address import Address, of_one_run, parse_address
from peerd.daemon.admission import access_for
from peerd.daemon.auditing import remember_cases
from peerd.daemon.clocks import compare_clocks
from peerd.daemon.doing import tell_doing
from peerd.daemon.line_probe import probe_line
from peerd.daemon.link_needs import needs
from peerd.daemon.network import Network, allow_direct, choose_run, open_network, visit_peer
from peerd.daemon.open_files import check_limit
from peerd.daemon.peer import Peer
from peerd.daemon.place import Entry, Place
from peerd.daemon.row import Row
from peerd.daemon.run_data import organise, start_for, text_for
from peerd.daemon.twin import refuse_own_address, refuse_twin
from peerd.data.progress import ByteProgress, Interrupted, ProgressLog, Report, TerminalBar
from peerd.errors import ClockError, PeerdError, PortTakenError, RemoteError, ShutOutError, UnreachableError, UnwelcomeError, UsageError
from peerd.link.links import with_time_for
from peerd.link.p2pd import check_port_free
from peerd.observe.archive import Archive
from peerd.owner.governor import Governor
from peerd.policy.round.needs import shortfall
from peerd.policy.route.holes import mirrors_in
from peerd.policy.swarm.checkup import TOO_SLOW
from peerd.policy.swarm.clocks import ClockOffset
from peerd.policy.swarm.dialling import DialRation
from peerd.policy.swarm.spreading import PAGE_BYTES
from peerd.swarm.access import RunAccess
from peerd.swarm.directory import Directory
from peerd.swarm.identity import Identity, LocalState
from peerd.swarm.membership import Membership
from peerd.swarm.signed import SignedManifest, pack, unpack_manifest
from peerd.table.circuit import direct, is_circuit
from peerd.table.record import MAX_STEP, PeerId, RunId
from peerd.table.view import TTL_PERIODS
from peerd.wire.swarm_client import SwarmClient

FIRST_LOOK_TIMEOUT_S = 10.0
OTHERS_S = 5.0
"""How much longer than the first peer the others at the given addresses may take to tell of the run's peers."""
MAX_BOOTSTRAP_PEERS = 4
LOG = structlog.get_logger()
Result = TypeVar("Result")
AddressBook = dict[PeerId, tuple[str, ...]]


async def enter(settings: Settings, home: Home, stack: contextlib.AsyncExitStack, governor: Governor) -> Peer:
    """Enter the swarm. The returned peer serves no stage yet. `stack` closes what was opened."""
    identity, local = Identity.load_or_create(home.identity), LocalState(home)
    contacts = of_one_run(parse_address(each) for each in settings.join.split())
    place = None if contacts else await _with_progress(lambda report: _known_run(settings, local, report))
    book = _address_book(local, place.signed if place else None, contacts)
    local.remember_names(settings.nickname, settings.team, settings.unlisted)
    row = Row(settings.stays_s, local.nickname, local.team, local.unlisted)
    membership: Membership | None = None
    ration = DialRation()
    refuse_own_address([each.peer for each in contacts], identity.peer, home)

    def addresses_of(peer: PeerId) -> tuple[str, ...]:
        known = ration.among(peer, membership.addresses_of(peer), time.monotonic()) if membership is not None else ()
        return known or book.get(peer, ())

    admission = partial(access_for, settings, home, identity.peer)
    settings = replace(settings, host=settings.host or _host(settings, contacts, book), port=settings.port or _free_port(settings, local))
    met = _met_before(local, contacts)
    tell_doing("starting the networking process")
    bootstrap = () if met else tuple(each.multiaddr for each in contacts)  # without an answer p2pd would not start
    network = await open_network(settings, home, bootstrap, addresses_of, governor.throttles)
    stack.push_async_callback(network.close)
    if settings.direct:
        mirrors = partial(_mirrors, lambda: membership)
        allow_direct(network, identity, settings, addresses_of, governor.throttles, mirrors)
    if place is None:
        tell_doing("asking the peer at the address for the run")
        contact, signed, membership = await _first_to_answer(network, identity, contacts, met, book, row, admission)
        if local.pin(signed.run, signed.organiser_key):
            LOG.info("organiser pinned", run=signed.run, organiser=signed.organiser_key.hex())
        manifest = signed.manifest
        remembered = local.data if local.run == signed.run else ""
        corpus, source = await _with_progress(lambda report: text_for(manifest, settings, remembered, report))
        place = Place(signed=signed, data_source=source, corpus=corpus, start=None)
        tell_doing(f"run {manifest.name}: measuring the upload with 2 MB")
        others = await _measure_and_look(network, membership, contact, contacts)
        await _foretell(network, place, membership, governor)
        reached = (contact.multiaddr, *others, *membership.bootstrap(MAX_BOOTSTRAP_PEERS))
        must_answer = bool(direct(reached))
    else:
        signed = place.signed
        tell_doing(f"run {signed.manifest.name}: looking for its peers")
        membership = membership_for(identity, signed, book, row, admission(signed))
        reached, must_answer = await _look_around(network, membership, book), False
        membership.access.check_own()
    check_limit(len(membership.live().records))
    await refuse_twin(network.links, membership, network.addresses, home)
    tell_doing("entering the directory of peers")
    directory = await Directory.join(network.p2pd.p2p, signed, direct(reached), must_answer=must_answer)
    stack.push_async_callback(directory.close)
    directory.store_manifest_soon(signed)
    local.remember(signed.run, pack(signed), network.port, start=place.start_path, data=place.data_source)
    archive = Archive(home.history(signed.run))
    stack.push_async_callback(archive.close)
    peer = Peer(settings, place, network, Entry(membership, row, local, directory), governor, archive)
    await remember_cases(peer)
    return peer


async def come_back(peer: Peer) -> None:
    """Read the table again after a rest, from peers met before."""
    peer.membership.clear_liveness()
    peer.notes.begin_anew()
    await _look_around(peer.network, peer.membership, _address_book(peer.local, peer.place.signed, ()))


def _mirrors(membership: Callable[[], Membership | None]) -> tuple[PeerId, ...]:
    """Peers that see from where this one's packets come; none before it is in the swarm."""
    found = membership()
    return mirrors_in(found.live()) if found is not None else ()


async def _with_progress(work: Callable[[Report], Result]) -> Result:
    """Run `work` in a thread and show its progress on a terminal, or periodically in the log. Cancelling interrupts it."""
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


def _known_run(settings: Settings, local: LocalState, report: Report) -> Place:
    """Return the run to start, or the one that this home was last in."""
    if settings.run_file:
        return organise(settings, report)
    if local.manifest is None:
        raise UsageError("this home has not been in a run yet", "give the address to join")
    signed = unpack_manifest(local.manifest)
    corpus, source = text_for(signed.manifest, settings, local.data, report)
    return Place(signed=signed, data_source=source, corpus=corpus, start=start_for(signed.manifest, local.start))


def membership_for(
    identity: Identity, signed: SignedManifest, book: AddressBook, row: Row | None = None, access: RunAccess | None = None
) -> Membership:
    """Return an empty table of the run. Without `access` all peers that the organiser has not banned are shown."""
    train = signed.manifest.train
    ttl_s = TTL_PERIODS * signed.manifest.swarm.announce_period_s
    access = access or RunAccess(identity.peer, signed.run, signed.organiser_key)
    membership = Membership(identity, signed.run, ttl_s, row, train.num_stages, train.steps or MAX_STEP, access)
    membership.view.group_size = signed.manifest.swarm.group_size
    membership.book = book
    return membership


async def _first_to_answer(
    network: Network,
    identity: Identity,
    contacts: Sequence[Address],
    met: Sequence[Address],
    book: AddressBook,
    row: Row,
    admission: Callable[[SignedManifest], RunAccess],
) -> tuple[Address, SignedManifest, Membership]:
    """Ask the contacts, then the peers `met` before, for the run and its table, until one lets this peer join.

    None decides alone: its clock may be off, it may serve another run by now, or vanish between its two answers.
    """
    clocks: list[ClockOffset] = []

    async def ask(contact: Address) -> tuple[Address, SignedManifest, Membership]:
        visited = await visit_peer(network, contact)
        signed = choose_run(visited.description, contact)
        membership = membership_for(identity, signed, book, row, admission(signed))
        if visited.description.access is not None:
            membership.access.take(visited.description.access)
        membership.access.check_own()
        await first_look(network, membership, contact.peer)
        clocks.append(visited.clock)
        if visited.clock.is_off:
            book.update({r.peer: r.addresses for r in membership.live().records if r.addresses and r.peer not in book})
        await compare_clocks(network.links, clocks, membership)
        return contact, signed, membership

    async def known() -> AsyncIterator[Address]:
        for contact in contacts:
            yield contact
        for contact in await _answering(network, met):
            book.setdefault(contact.peer, (contact.multiaddr,))
            yield contact

    failures: list[PeerdError] = []
    async for contact in known():
        if failures:
            LOG.warning("asking another peer", why=failures[-1].message, peer=contact.peer)
        try:
            return await ask(contact)
        except PeerdError as error:
            failures.append(error)
    raise _most_telling(failures)


async def _measure_and_look(network: Network, membership: Membership, contact: Address, contacts: Sequence[Address]) -> tuple[str, ...]:
    """Measure the upload, and read the tables of all given addresses. Returns the addresses besides `contact` that answered."""
    asking = asyncio.create_task(_ask_the_others(network, membership, [each for each in contacts if each != contact]))
    try:
        await _measure_upload(network, membership, contact)
        await _look_again(network, membership, contact)
        return await _within(OTHERS_S, asking) or ()
    finally:
        asking.cancel()


async def _ask_the_others(network: Network, membership: Membership, contacts: Sequence[Address]) -> tuple[str, ...]:
    """Read the table of the other peers at the given addresses, too: the first one may hide peers. Returns the addresses that answered."""

    async def answers(contact: Address) -> bool:
        try:
            choose_run((await visit_peer(network, contact)).description, replace(contact, run=membership.run))
            await first_look(network, membership, contact.peer)
        except PeerdError as error:
            LOG.info("another of the given addresses does not help", why=error.message, peer=contact.peer)
            return False
        return True

    found = await asyncio.gather(*map(answers, contacts))
    return tuple(each.multiaddr for each, there in zip(contacts, found, strict=True) if there)


async def _within(most_s: float, task: asyncio.Task[Result]) -> Result | None:
    """What a task returns if it ends within so many seconds; else it is cancelled."""
    try:
        return await asyncio.wait_for(task, most_s)
    except TimeoutError:
        return None


def _most_telling(failures: Sequence[PeerdError]) -> PeerdError:
    """What the organiser says goes first. The last word on the clocks knows those of most peers. Of the rest, what may pass by itself lets
    a service try again."""
    shut_out = [each for each in failures if isinstance(each, ShutOutError)]
    about_clocks = [each for each in failures if isinstance(each, ClockError)]
    may_pass = [each for each in failures if isinstance(each, UnreachableError)]
    return (shut_out or about_clocks[-1:] or may_pass or failures)[0]


def _met_before(local: LocalState, contacts: Sequence[Address]) -> tuple[Address, ...]:
    """Return addresses of peers that this home met in its last run, if the contacts are of that run."""
    if not contacts or not local.run:
        return ()
    remembered = [replace(parse_address(each), run=RunId(local.run)) for each in local.peers]
    known = {each.peer for each in remembered}
    is_same_run = any(each.run == local.run or (each.run is None and each.peer in known) for each in contacts)
    given = {each.multiaddr for each in contacts}
    return tuple(each for each in remembered if each.multiaddr not in given) if is_same_run else ()


async def _answering(network: Network, addresses: Sequence[Address]) -> list[Address]:
    """Return the addresses that can be dialled now, then those behind relays, which only a call can test."""

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


async def _look_again(network: Network, membership: Membership, contact: Address) -> None:
    """Read the table again from the contact, or another peer if it is gone: fetching the text and measuring may have taken minutes."""
    others = [peer for peer in membership.view.sightings if peer not in (membership.me, contact.peer)]
    for peer in (contact.peer, *others[:MAX_BOOTSTRAP_PEERS]):
        try:
            return await first_look(network, membership, peer)
        except UnreachableError as error:
            last = error
    raise last


async def _measure_upload(network: Network, membership: Membership, contact: Address) -> None:
    """Measure the upload with a few megabytes, which may take longer than records live. Another peer is asked where the contact refuses."""
    others = [peer for peer in membership.view.sightings if peer not in (membership.me, contact.peer)]
    began_s = time.monotonic()
    up, _ = await probe_line(network.links, membership.run, (contact.peer, *others[:1]), downwards=False)
    ended_s = time.monotonic()
    network.links.traffic.line.probes.saw(up or 0.0, ended_s - began_s, ended_s)


async def _foretell(network: Network, place: Place, membership: Membership, governor: Governor) -> None:
    """Say before anything begins if this machine's upload is too slow for the run's averages."""
    needed = min(need.rounds for need in await asyncio.to_thread(needs, place.manifest, membership.live(), num_joining=1))
    short = shortfall(*network.links.traffic.line.claims(governor.limits), needed)
    if short:
        LOG.warning(f"this run {short}; {TOO_SLOW}")


def _address_book(local: LocalState, signed: SignedManifest | None, contacts: Sequence[Address]) -> AddressBook:
    """Return the peers to try: those at the addresses, otherwise those that this home met when it was last in the run."""
    if not contacts and (signed is None or local.run != signed.run):
        return {}
    book: AddressBook = {}
    for each in contacts or map(parse_address, local.peers):
        book[each.peer] = (*book.get(each.peer, ()), each.multiaddr)
    return book


def _host(settings: Settings, contacts: Sequence[Address], book: AddressBook) -> str:
    """Return the host to listen on: loopback for an organiser or if the other peers use it, otherwise all interfaces."""
    others = [each.multiaddr for each in contacts] or [each for addresses in book.values() for each in addresses]
    open_to_all = bool(others) and not all(each.startswith("/ip4/127.") for each in others)
    return "0.0.0.0" if open_to_all and not settings.run_file else "127.0.0.1"  # noqa: S104


def _free_port(settings: Settings, local: LocalState) -> int:
    """Return the last port, so that addresses remembered by others stay valid; 0 (any) if it is taken."""
    try:
        check_port_free(settings.host or "127.0.0.1", local.port)
    except PortTakenError:
        return 0
    return local.port


async def _look_around(network: Network, membership: Membership, book: AddressBook) -> tuple[str, ...]:
    """Ask the peers of the address book for the table. Returns the addresses that answer; peers that still start are heard later."""
    answering = await _answering(network, [Address(each, peer, None) for peer, addresses in book.items() for each in addresses])
    for peer in dict.fromkeys(each.peer for each in answering):
        with contextlib.suppress(UnreachableError):
            await first_look(network, membership, peer)
    return tuple(each.multiaddr for each in answering)


async def first_look(network: Network, membership: Membership, peer: PeerId) -> None:
    """Read the whole table from a peer. Raises ShutOutError if it refuses that because this peer may not take part."""
    client = SwarmClient(network.links, membership.run, membership.access)
    try:
        async for records in client.table(peer, with_time_for(FIRST_LOOK_TIMEOUT_S, PAGE_BYTES)):
            await membership.absorb_quietly(records, peer)
        membership.reached(peer)
    except RemoteError as error:
        if isinstance(error, UnwelcomeError):
            with contextlib.suppress(RemoteError):
                await client.learn_list(peer, FIRST_LOOK_TIMEOUT_S)
            membership.access.check_own()
        raise UnreachableError(f"{peer} does not give the swarm's table: {error.message}", "try again, or join at another peer") from None
