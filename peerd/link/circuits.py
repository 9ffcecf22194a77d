"""This peer's ends of circuits: streams through a relay, to a peer that nobody can dial or from callers if this peer is one.

A caller asks a relay for a circuit only where it has no connection to the callee yet. The callee first tries to dial the caller.
If that succeeds, the two use that connection, and no byte of theirs passes through the relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from peerd.errors import BadMessageError, BusyError, PeerdError, UnreachableError
from peerd.generated import relay_pb2
from peerd.link.p2pd import P2pd
from peerd.link.peer_keys import public_key_of
from peerd.link.seal import Seal
from peerd.link.streams import Stream, StreamTasks, hear, say
from peerd.table.circuit import circuit_address, direct, is_circuit, relay_in
from peerd.table.record import PeerId, RunId

PROTOCOL = "/peerd/grpc/1"
"""The libp2p protocol name of streams that carry gRPC."""
RELAY_PROTOCOL, CIRCUIT_PROTOCOL = "/peerd/relay/1", "/peerd/circuit/1"
OPEN_TIMEOUT_S = 3.0
REVERSAL_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 8.0
SEAL_TIMEOUT_S = 8.0
FRUITLESS_S = 60.0
"""Pause before a caller that could not be dialled is dialled again."""
MAX_FRUITLESS = 1024
BEAT_S = 5.0
SILENCE_S = 3 * BEAT_S
"""A relay, or a peer with a reservation, that is silent for this long counts as gone."""


class Reservation:
    """A place at a relay. It lasts as long as the stream to the relay."""

    def __init__(self, relay_address: str, relay: PeerId, me: PeerId, stream: Stream) -> None:
        self.relay = relay
        self.address = circuit_address(relay_address, me)
        """The circuit address by which others reach this peer."""
        self._stream = stream

    async def held(self) -> str:
        """Answer the relay's heartbeats until the reservation ends. Returns what ended it."""
        reader, writer = self._stream
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    beat = await reader.read(1)
                if not beat:
                    break
                writer.write(beat)
                await writer.drain()
        except TimeoutError:
            return f"the relay was silent for {SILENCE_S:.0f} s"
        except OSError:
            pass  # counts as the end of the stream
        finally:
            self.give_up()
        return "the relay ended the reservation"

    def give_up(self) -> None:
        with contextlib.suppress(OSError):
            self._stream[1].close()


Serve = Callable[[PeerId, str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves a stream: the authenticated caller, the address that the stream comes from, and its reader and writer."""


class Circuits:
    """Opens and takes streams through relays. `addresses_of` gives the addresses of a peer from the table."""

    def __init__(self, p2pd: P2pd, me: PeerId, seal: Seal, addresses_of: Callable[[PeerId], tuple[str, ...]]) -> None:
        self._p2pd = p2pd
        self._me = me
        self._seal = seal
        self._addresses_of = addresses_of
        self._streams = StreamTasks()
        self._relays: dict[PeerId, Reservation] = {}
        self._fruitless_until_s: dict[PeerId, float] = {}
        self._through_relays: dict[PeerId, asyncio.StreamWriter] = {}
        """The last stream of this peer to each peer through a relay."""
        self._serve: Serve
        self.run = RunId("")
        """The run that requests to relays name; a relay serves one run only."""

    async def attach(self, p2pd: P2pd, serve: Serve) -> None:
        """Take the streams that reach this p2pd through relays, and pass them to `serve`."""
        self._p2pd, self._serve = p2pd, serve
        await p2pd.p2p.add_binary_stream_handler(CIRCUIT_PROTOCOL, self._offered)

    async def close(self) -> None:
        for reservation in self._relays.values():
            reservation.give_up()
        await self._streams.close()

    # To others

    async def dial(self, peer: PeerId, addresses: Sequence[str]) -> Stream:
        """Open a stream to a peer that has circuit addresses: over an existing connection, otherwise through one of its relays."""
        problem: Exception = UnreachableError(f"{peer} has no relay that this peer can ask")
        if await self._p2pd.is_connected(peer):
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    return await self._p2pd.open_stream(peer, PROTOCOL)
            except (OSError, TimeoutError) as error:
                problem = error
        for address in filter(is_circuit, addresses):
            relay_address, relay = relay_in(address)
            if relay == self._me:
                continue
            try:
                return await self._dial_through(PeerId(relay), relay_address, peer)
            except (PeerdError, OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
                problem = error
        raise UnreachableError(f"{peer} cannot be reached through its relays: {str(problem) or type(problem).__name__}")

    def leads_to(self, peer: PeerId) -> bool:
        """True while a relay carries the stream to `peer`."""
        writer = self._through_relays.get(peer)
        if writer is not None and writer.is_closing():
            del self._through_relays[peer]
            return False
        return writer is not None

    async def _dial_through(self, relay: PeerId, relay_address: str, peer: PeerId) -> Stream:
        stream, reply = await self._ask(relay, relay_address, to=peer)
        try:
            if reply.direct:
                stream[1].close()
                return await self._p2pd.open_stream(peer, PROTOCOL)
            async with asyncio.timeout(SEAL_TIMEOUT_S):
                await self._seal.call(peer, stream)
        except BaseException:
            stream[1].close()
            raise
        self._through_relays[peer] = stream[1]
        return stream

    async def reserve(self, relay: PeerId, relay_address: str) -> Reservation:
        """Get a place at a relay. Raises BusyError with the relay's reason if it refuses, UnreachableError or OSError if it is silent."""
        stream, _ = await self._ask(relay, relay_address, to="")
        known = self._relays.pop(relay, None)
        if known is not None:
            known.give_up()
        reservation = self._relays[relay] = Reservation(relay_address, relay, self._me, stream)
        return reservation

    def give_up(self, reservation: Reservation) -> None:
        reservation.give_up()
        if self._relays.get(reservation.relay) is reservation:
            del self._relays[reservation.relay]

    async def _ask(self, relay: PeerId, relay_address: str, to: str) -> tuple[Stream, relay_pb2.RelayReply]:
        await self._p2pd.connect(relay, direct(self._addresses_of(relay)) or [relay_address])
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            stream = await self._p2pd.open_stream(relay, RELAY_PROTOCOL)
            try:
                say(stream[1], relay_pb2.RelayRequest(run=self.run, to=to))
                reply = await hear(stream[0], relay_pb2.RelayReply)
                if not reply.accepted:
                    raise BusyError(f"the relay refuses: {reply.reason[:200]}")
            except BaseException:
                stream[1].close()
                raise
        return stream, reply

    # To this peer

    async def _offered(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._streams.track(self._take(PeerId(info.peer_id.to_base58()), (reader, writer)))

    async def _take(self, relay: PeerId, stream: Stream) -> None:
        """Answer a relay that offers a circuit from a caller. Offers of relays without a reservation of this peer are refused."""
        reader, writer = stream
        with contextlib.closing(writer):
            if relay not in self._relays:  # its offer is not even read
                say(writer, relay_pb2.RelayReply(reason="the callee holds no reservation at this relay"))
                return
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                offer = await hear(reader, relay_pb2.CircuitOffer)
            caller = _peer_in(offer.caller)
            if await self._reaches(caller):
                say(writer, relay_pb2.RelayReply(accepted=True, direct=True))
                return
            say(writer, relay_pb2.RelayReply(accepted=True))
            async with asyncio.timeout(SEAL_TIMEOUT_S):
                await self._seal.answer(caller, stream)
            await self._serve(caller, f"/p2p/{relay}/p2p-circuit", reader, writer)

    async def _reaches(self, caller: PeerId) -> bool:
        """Try to dial the caller at its addresses in the table. Returns whether there is a connection."""
        addresses, now_s = self._addresses_of(caller), time.monotonic()
        if not addresses or direct(addresses) != addresses or self._fruitless_until_s.get(caller, 0.0) > now_s:
            return False
        try:
            async with asyncio.timeout(REVERSAL_TIMEOUT_S):
                await self._p2pd.connect(caller, addresses)
        except (UnreachableError, TimeoutError):
            if len(self._fruitless_until_s) >= MAX_FRUITLESS:
                self._fruitless_until_s.clear()
            self._fruitless_until_s[caller] = now_s + FRUITLESS_S
            return False
        return True


def _peer_in(text: str) -> PeerId:
    try:
        public_key_of(text)
    except ValueError:
        raise BadMessageError("the circuit offer names no valid caller") from None
    return PeerId(text)
