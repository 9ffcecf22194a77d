"""What `peerd doctor` finds on the network, asked under an identity of its own that is thrown away, without joining."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from peerd import __version__
from peerd.checkup.here import Order
from peerd.daemon.address import Address
from peerd.daemon.clocks import ask_clocks
from peerd.daemon.enter import first_look, membership_for
from peerd.daemon.line_probe import probe_line
from peerd.daemon.link_needs import needs
from peerd.daemon.network import Network, choose_run, visit_peer
from peerd.errors import PeerdError, UnreachableError
from peerd.link.certificate import make_certificate
from peerd.link.direct import Showing
from peerd.link.links import Links
from peerd.link.pins import Pins
from peerd.link.punching import NOT_INSTALLED
from peerd.link.quic import is_installed
from peerd.link.throttle import Throttles
from peerd.models.stages import estimate_stage_memory
from peerd.planner.memory import Placing, least_on_device
from peerd.policy.owner.governor import Limits
from peerd.policy.swarm.checkup import (
    CAPPED,
    Finding,
    Verdict,
    of_clocks,
    of_dial_backs,
    of_direct,
    of_line,
    of_no_direct,
    of_relay,
    of_software,
    of_speed,
    ok,
    problem,
    warning,
    with_relay,
)
from peerd.policy.swarm.clocks import MOST_ASKED, ClockOffset
from peerd.policy.swarm.relaying import relays_to_ask
from peerd.swarm.directory import round_trip
from peerd.swarm.identity import Identity
from peerd.swarm.membership import Membership
from peerd.swarm.signed import SignedManifest
from peerd.table.circuit import direct
from peerd.table.record import PeerId
from peerd.wire.dial_back import MAX_DIALLERS, dial_backs
from peerd.wire.grpc_server import DirectEndpoint

MAX_RELAYS = 3
MAPPED_WITHIN_S, LOOK_AGAIN_S = 12.0, 0.5


@dataclass(frozen=True, slots=True)
class Contact:
    """The peer that answered, the run that it serves, and who else is in it."""

    address: Address
    signed: SignedManifest
    membership: Membership
    clock: ClockOffset

    @property
    def others(self) -> list[PeerId]:
        live = self.membership.live().records
        return [record.peer for record in live if record.peer != self.address.peer and record.addresses]

    @property
    def peers(self) -> list[PeerId]:
        return [self.address.peer, *self.others]

    def stage_memory_bytes(self, has_own_memory: bool) -> list[int]:
        """What each of the run's stages takes at least, of a device with memory of its own or of one that shares the machine's."""
        manifest = self.signed.manifest
        placing = least_on_device(manifest) if has_own_memory else Placing.TOGETHER
        return [estimate_stage_memory(manifest, stage, manifest.slots, placing).device for stage in range(manifest.train.num_stages)]


async def reach(network: Network, identity: Identity, contacts: Sequence[Address]) -> tuple[Contact | None, list[Finding]]:
    """The first of the contacts that answers, and what is to be said about all that were asked."""
    findings: list[Finding] = []
    for address in contacts:
        try:
            visited = await visit_peer(network, address)
        except UnreachableError as error:
            findings.append(problem("reach", error.message, error.remedy))
            continue
        findings = [warning(each.code, each.title, "that peer may be gone; another one answered") for each in findings]
        findings.append(ok("reach", f"{address.peer} answers in {visited.clock.round_trip_s * 1000:.0f} ms"))
        findings.append(of_software(__version__, visited.description.software[:40]))
        try:
            signed = choose_run(visited.description, address)
            membership = membership_for(identity, signed, {})
            await first_look(network, membership, address.peer)
        except PeerdError as error:
            return None, [*findings, of_clocks([visited.clock]), problem("run", error.message, error.remedy)]
        contact = Contact(address, signed, membership, visited.clock)
        findings.append(ok("run", f"run {signed.manifest.name}, signed by its organiser, {len(contact.others) + 1} peers"))
        return contact, findings
    return None, findings


async def clocks(network: Network, contact: Contact) -> Finding:
    """Whether this machine's clock agrees with the contact's; with those of others, too, where it does not."""
    others = await ask_clocks(network.links, contact.others[:MOST_ASKED]) if contact.clock.is_off else []
    return of_clocks([contact.clock, *others])


async def _mapped(network: Network) -> bool:
    """Whether the router forwards another port in time; it is asked as soon as p2pd starts."""
    deadline_s = time.monotonic() + MAPPED_WITHIN_S
    while network.outside_port == network.port and time.monotonic() < deadline_s:
        await asyncio.sleep(LOOK_AGAIN_S)
        await network.look_at_addresses()
    return network.outside_port != network.port


async def speeds(links: Links, contact: Contact, limits: Limits) -> list[Finding]:
    """Measure upload and download with the first peer that takes part, and compare them with what the run needs."""
    rates = await probe_line(links, contact.signed.run, contact.peers)
    up, down = (8 * rate if rate is not None else None for rate in rates)
    needed = await asyncio.to_thread(needs, contact.signed.manifest, contact.membership.live(), num_joining=1)
    return [*of_speed(up, down, limits), *of_line(up, down, limits, needed)]


async def _relays_refusals(network: Network, contact: Contact) -> list[str]:
    """For each volunteer that was asked for a place, the reason of its refusal; empty if it gave one, which is given up again."""
    network.serves(contact.signed.run)
    refusals = []
    for record in relays_to_ask(contact.membership.live(), (), ())[:MAX_RELAYS]:
        try:
            network.circuits.give_up(await network.circuits.reserve(record.peer, direct(record.addresses)[0]))
        except (PeerdError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            refusals.append(str(error) or "it does not answer")
        else:
            refusals.append("")
    return refusals


async def ways_in(network: Network, identity: Identity, contact: Contact, order: Order, limits: Limits) -> AsyncIterator[Finding]:
    """Whether a daemon here could be reached: dialled, through a relay, and past the tunnel."""
    run, port = contact.signed.run, network.port
    dialled = await dial_backs(network.links, run, contact.peers, port)
    if network.config.map_port and not any(answer.reached for answer in dialled) and await _mapped(network):
        port = network.outside_port
        dialled = await dial_backs(network.links, run, contact.peers, port)
    dial_back = of_dial_backs(dialled, port)
    relay = of_relay(dial_back, [] if dial_back.verdict is Verdict.OK else await _relays_refusals(network, contact))
    yield with_relay(dial_back, relay)
    yield relay
    if limits.upload or limits.download:
        yield of_no_direct(CAPPED)
        return
    async with _taking_direct(network.config.host, order.direct_port, identity) as direct_port:
        if direct_port:
            answers = await dial_backs(network.links, run, contact.peers, direct_port, direct=True)
            yield of_direct(answers, direct_port, "" if is_installed() else NOT_INSTALLED)
        else:
            yield of_no_direct("")


@contextlib.asynccontextmanager
async def _taking_direct(host: str, port: int, identity: Identity) -> AsyncIterator[int]:
    """An endpoint like a daemon's that serves nothing. Its port; 0 where none was free."""
    showing = Showing(make_certificate(identity.peer, identity.sign))
    endpoint = DirectEndpoint(host, port, showing, Pins(), Throttles())
    await endpoint.open(())
    try:
        yield showing.port
    finally:
        await endpoint.close()


async def examine(network: Network, contact: Contact, limits: Limits) -> AsyncIterator[Finding]:
    """How fast bytes go, and whether the DHT works, with the contact and the peers it knows."""
    for finding in await speeds(network.links, contact, limits):
        yield finding
    live = contact.membership.live().records
    known = [contact.address.multiaddr, *(address for r in live if r.peer in contact.others[:MAX_DIALLERS] for address in r.addresses[:1])]
    bootstrap = direct(known)
    failure = await round_trip(network.p2pd.p2p, contact.signed.run, bootstrap)
    if failure and contact.clock.is_off:
        yield warning("dht", f"the swarm's DHT: {failure}", "it works only between clocks that agree: see to the clock first")
    elif failure:
        yield problem("dht", f"the swarm's DHT: {failure}", "check your network; a firewall may cut long connections")
    else:
        yield ok("dht", "the swarm's DHT takes a value and gives it back")
