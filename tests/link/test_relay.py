"""Relay and circuits: bytes come through sealed, and from whom they say; what cannot be is refused with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from peerd.errors import BusyError, UnreachableError
from peerd.generated import relay_pb2
from peerd.link import circuits
from peerd.link.circuits import CIRCUIT_PROTOCOL, PROTOCOL, RELAY_PROTOCOL, Circuits
from peerd.link.relay import MORE_ASKED, Relay
from peerd.link.seal import Seal
from peerd.link.streams import Stream, hear, say
from peerd.link.throttle import Throttles
from peerd.policy.swarm.relaying import Bounds
from peerd.swarm.identity import Identity
from peerd.table.record import PeerId, RunId
from tests.link.paper_p2pd import Internet
from tests.wire.callee import RUN, new_identity

BOUNDS = Bounds(reservations=2, circuits=3, circuits_each=2)
TIMEOUT_S = 60.0


@dataclass(slots=True)
class Peer:
    """One that may call and be called; what callers send comes back in capitals."""

    identity: Identity
    circuits: Circuits
    callers: list[tuple[PeerId, str]] = field(default_factory=list)

    @property
    def id(self) -> PeerId:
        return self.identity.peer

    async def serve(self, caller: PeerId, origin: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.callers.append((caller, origin))
        while data := await reader.read(65536):
            writer.write(data.upper())
            await writer.drain()

    async def serve_directly(self, info: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await self.serve(PeerId(info.peer_id.to_base58()), "directly", reader, writer)  # type: ignore[attr-defined]


@dataclass(slots=True)
class World:
    """A relay that volunteers, and peers."""

    internet: Internet
    relay_id: PeerId
    relay: Relay
    whole: Throttles
    addresses: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)

    @property
    def relay_address(self) -> str:
        return f"/ip4/1.2.3.4/tcp/5/p2p/{self.relay_id}"

    async def peer(self, *, hidden: bool = False) -> Peer:
        identity = new_identity()
        folder = self.internet.folder / identity.peer[-6:]
        folder.mkdir()
        p2pd = self.internet.p2pd_of(identity.peer)
        ends = Circuits(p2pd, identity.peer, Seal(identity.peer, identity.sign, folder), lambda peer: self.addresses.get(peer, ()))
        peer, ends.run = Peer(identity, ends), RUN
        await ends.attach(p2pd, peer.serve)
        await self.internet.listen(identity.peer, PROTOCOL, peer.serve_directly)
        if hidden:
            self.internet.hidden.add(identity.peer)
        return peer

    async def behind_the_relay(self) -> Peer:
        peer = await self.peer(hidden=True)
        self.addresses[peer.id] = ((await peer.circuits.reserve(self.relay_id, self.relay_address)).address,)
        return peer


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="peerd-t-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        internet, relay_id, whole = Internet(Path(folder)), new_identity().peer, Throttles()
        relay = Relay(BOUNDS, whole)
        relay.off, relay.run = "", RUN
        await relay.attach(internet.p2pd_of(relay_id))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                yield World(internet, relay_id, relay, whole)
        finally:
            await relay.close()
            await internet.close()


async def echo(stream: Stream, data: bytes) -> bytes:
    stream[1].write(data)
    return await stream[0].readexactly(len(data))


async def test_two_hidden_peers_talk_through_the_relay_and_know_each_other() -> None:
    async with world() as its:
        callee, caller = await its.behind_the_relay(), await its.behind_the_relay()
        stream = await caller.circuits.dial(callee.id, its.addresses[callee.id])
        text = b"activations " * 100_000
        assert await echo(stream, text) == text.upper()
        assert callee.callers == [(caller.id, f"/p2p/{its.relay_id}/p2p-circuit")]
        assert its.relay.circuits == [(caller.id, callee.id)]
        assert (caller.circuits.leads_to(callee.id), callee.circuits.leads_to(caller.id)) == (True, False)
        assert its.relay.carried.total > 2 * len(text)
        assert its.whole.upload.total == its.whole.download.total == its.relay.carried.total
        stream[1].close()
        assert not caller.circuits.leads_to(callee.id)
        await its.relay.switch("enough")
        assert its.relay.circuits == []


async def test_a_relay_is_dialled_where_its_own_record_says_and_not_where_another_peer_says_that_it_is() -> None:
    async with world() as its:
        callee, caller = await its.behind_the_relay(), await its.peer()
        its.addresses[its.relay_id] = ("/ip4/9.9.9.9/tcp/1",)
        await caller.circuits.dial(callee.id, its.addresses[callee.id])
        assert its.internet.dialled_at[its.relay_id] == ["/ip4/9.9.9.9/tcp/1"]


async def test_whom_the_callee_can_dial_it_dials_and_the_relay_carries_nothing() -> None:
    async with world() as its:
        callee, caller = await its.behind_the_relay(), await its.peer()
        its.addresses[caller.id] = ("/ip4/5.6.7.8/tcp/9/p2p/x",)
        stream = await caller.circuits.dial(callee.id, its.addresses[callee.id])
        assert await echo(stream, b"text") == b"TEXT"
        assert (callee.callers, its.relay.carried.total) == ([(caller.id, "directly")], 0)
        assert not caller.circuits.leads_to(callee.id)
        again = await caller.circuits.dial(callee.id, ())  # they are connected now: nobody is asked
        assert await echo(again, b"more") == b"MORE"


async def test_the_relay_cannot_pass_itself_off_as_either_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as its:
        callee, caller = await its.behind_the_relay(), await its.peer()
        liar, claimed = new_identity(), new_identity().peer
        folder = its.internet.folder / "liar"
        folder.mkdir()
        seal = Seal(liar.peer, liar.sign, folder)
        # As the caller: it opens a circuit in somebody's name, whose signature it cannot make.
        far = await its.internet.open(its.relay_id, callee.id, CIRCUIT_PROTOCOL)
        say(far[1], relay_pb2.CircuitOffer(caller=claimed))
        assert (await hear(far[0], relay_pb2.RelayReply)).accepted
        await seal.call(callee.id, far)
        with contextlib.suppress(OSError):
            assert await far[0].read() == b""
        assert callee.callers == []

        # As the callee: it answers the caller itself, with its own certificate.
        async def answer(_relay: Relay, _caller: PeerId, _callee: PeerId, stream: Stream) -> None:
            say(stream[1], relay_pb2.RelayReply(accepted=True))
            await seal.answer(caller.id, stream)

        monkeypatch.setattr(Relay, "_connect", answer)
        with pytest.raises(UnreachableError, match="is not at the other end"):
            await caller.circuits.dial(callee.id, its.addresses[callee.id])


async def test_what_cannot_be_is_refused_with_its_reason() -> None:
    async with world() as its:
        one, two = await its.behind_the_relay(), await its.behind_the_relay()
        with pytest.raises(BusyError, match="all 2 places are taken"):
            await its.behind_the_relay()
        stranger = await its.peer(hidden=True)
        with pytest.raises(UnreachableError, match="holds no reservation"):
            await one.circuits.dial(stranger.id, [f"{its.relay_address}/p2p-circuit/p2p/{stranger.id}"])
        for _ in range(2):
            await one.circuits.dial(two.id, its.addresses[two.id])
        with pytest.raises(UnreachableError, match="carries 2 circuits of"):
            await one.circuits.dial(two.id, its.addresses[two.id])
        with pytest.raises(UnreachableError, match="has no relay"):
            await one.circuits.dial(stranger.id, ())
        other = await its.peer()
        other.circuits.run = RunId("b" * 32)
        with pytest.raises(BusyError, match="another run"):
            await other.circuits.reserve(its.relay_id, its.relay_address)


async def test_an_offer_from_where_no_reservation_is_held_is_refused() -> None:
    async with world() as its:
        peer, stranger = await its.peer(), await its.peer()
        its.internet.connected.add(frozenset((peer.id, stranger.id)))
        stream = await its.internet.open(stranger.id, peer.id, CIRCUIT_PROTOCOL)
        say(stream[1], relay_pb2.CircuitOffer(caller=stranger.id))
        reply = await hear(stream[0], relay_pb2.RelayReply)
        assert (reply.accepted, reply.reason) == (False, "the callee holds no reservation at this relay")


@pytest.mark.parametrize("opening", [b"", b"\xff\xff", b"\x00\x04\xff\xff\xff\xff", b"\x00\x08\x0a"])
async def test_whatever_else_opens_a_stream_ends_it_and_harms_nobody(opening: bytes) -> None:
    async with world() as its:
        peer = await its.behind_the_relay()
        for callee, protocol in ((its.relay_id, RELAY_PROTOCOL), (peer.id, CIRCUIT_PROTOCOL)):
            reader, writer = await its.internet.open(its.relay_id if callee == peer.id else peer.id, callee, protocol)
            writer.write(opening)
            writer.write_eof()
            assert await reader.read() == b""
        assert its.relay.reserved == (peer.id,)


async def test_a_relay_that_stops_ends_all_and_says_why_to_who_asks_next() -> None:
    async with world() as its:
        callee, caller = await its.behind_the_relay(), await its.behind_the_relay()
        stream = await caller.circuits.dial(callee.id, its.addresses[callee.id])
        held = await callee.circuits.reserve(its.relay_id, its.relay_address)
        await its.relay.switch("this peer is paused: for a reason")
        assert await held.held() == "the relay ended the reservation"
        with contextlib.suppress(OSError):
            assert await stream[0].read() == b""
        assert (its.relay.reserved, its.relay.circuits) == ((), [])
        with pytest.raises(BusyError, match="paused: for a reason"):
            await callee.circuits.reserve(its.relay_id, its.relay_address)


async def test_a_relay_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuits, "SILENCE_S", 0.05)
    async with world() as its:
        peer = await its.peer(hidden=True)
        held = await peer.circuits.reserve(its.relay_id, its.relay_address)
        assert "was silent" in await held.held()


async def test_one_peer_asks_on_few_streams_at_once_and_an_offer_of_no_relay_of_this_peer_is_not_even_read() -> None:
    async with world() as its:
        silent, other = await its.peer(), await its.behind_the_relay()
        its.internet.connected |= {frozenset((silent.id, its.relay_id)), frozenset((silent.id, other.id))}
        streams = [await its.internet.open(silent.id, its.relay_id, RELAY_PROTOCOL) for _ in range(2 * (BOUNDS.circuits_each + MORE_ASKED))]
        ends = [asyncio.ensure_future(reader.read()) for reader, _ in streams]
        while sum(end.done() for end in ends) < BOUNDS.circuits_each + MORE_ASKED:
            await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
        await its.behind_the_relay()  # there is room for others
        for _, writer in streams:
            writer.close()
        offer, _ = await its.internet.open(silent.id, other.id, CIRCUIT_PROTOCOL)
        assert "holds no reservation" in (await hear(offer, relay_pb2.RelayReply)).reason


async def test_a_banned_peer_holds_no_place_at_a_relay_and_is_connected_with_nobody() -> None:
    banned: set[PeerId] = set()
    async with world() as its:
        its.relay.serves(its.relay.run, banned.__contains__)
        one, two = await its.behind_the_relay(), await its.behind_the_relay()
        held = await two.circuits.reserve(its.relay_id, its.relay_address)
        streams = [await end.circuits.dial(other.id, its.addresses[other.id]) for end, other in ((one, two), (two, one))]
        banned.add(two.id)
        its.relay.drop_banned()
        assert "ended the reservation" in await held.held()
        for reader, _ in streams:
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
        while its.relay.circuits or its.relay.reserved != (one.id,):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
        with pytest.raises(BusyError, match="has banned"):
            await two.circuits.reserve(its.relay_id, its.relay_address)
        for caller, callee in ((one, two), (two, one)):
            with pytest.raises(UnreachableError, match="has banned"):
                await caller.circuits.dial(callee.id, its.addresses[callee.id])
