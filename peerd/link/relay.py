"""The relay service: a volunteering peer keeps streams open to peers that nobody can dial, and copies bytes between them and callers.

The two ends encrypt what it copies (seal.py). p2pd's own relay is not used: it has no rate limit and no counters, and a peer that changes
its relay, or a relay that stops, would have to restart p2pd and lose every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from peerd.errors import PeerdError
from peerd.generated import relay_pb2
from peerd.link.circuits import ANSWER_TIMEOUT_S, BEAT_S, CIRCUIT_PROTOCOL, RELAY_PROTOCOL, SILENCE_S
from peerd.link.few_each import FewEach
from peerd.link.p2pd import P2pd
from peerd.link.streams import Stream, StreamTasks, hear, say, splice
from peerd.link.throttle import Throttle, Throttles
from peerd.policy.swarm.relaying import Bounds, why_not_connect, why_not_reserve
from peerd.table.record import PeerId, RunId

NOT_ASKED = "this peer does not volunteer"
BANNED = "the run's organiser has banned a peer that it would connect"
MORE_ASKED = 8
"""Streams on which one peer may ask at once, beside those of its circuits."""


def bans_nobody(_peer: PeerId) -> bool:
    return False


class RelayedBytes(Throttle):
    """The throttle of relayed bytes: below the relay's own rate. Each byte counts as downloaded and as uploaded."""

    def __init__(self, rate: float, whole: Throttles) -> None:
        super().__init__()
        self.rate = rate
        self._whole = whole

    async def let_pass(self, num_bytes: int, *, goes_first: bool = False) -> None:
        for direction in (self._whole.download, self._whole.upload):
            direction.total += num_bytes
        await super().let_pass(num_bytes, goes_first=goes_first)


class Relay:
    """The relay of one daemon. It refuses everybody until `off` is empty."""

    def __init__(self, bounds: Bounds, whole: Throttles) -> None:
        self.bounds = bounds
        self.off = NOT_ASKED
        """Why it does not relay now; empty while it does."""
        self.run = RunId("")
        self.carried = RelayedBytes(bounds.rate, whole)
        self._is_banned: Callable[[PeerId], bool] = bans_nobody
        """Whether the run's organiser has banned a peer: T9 (access)."""
        self._p2pd: P2pd
        self._streams = StreamTasks()
        self._asking = FewEach()
        self._reserved: dict[PeerId, Stream] = {}
        self._circuits: dict[asyncio.StreamWriter, tuple[PeerId, PeerId]] = {}
        """The caller and the callee of each circuit, by the stream to the caller."""

    def serves(self, run: RunId, is_banned: Callable[[PeerId], bool]) -> None:
        """Relay for peers of this run, and for none that is banned."""
        self.run, self._is_banned = run, is_banned

    @property
    def reserved(self) -> tuple[PeerId, ...]:
        """The peers that hold a reservation."""
        return tuple(self._reserved)

    @property
    def circuits(self) -> list[tuple[PeerId, PeerId]]:
        """The caller and the callee of each open circuit."""
        return list(self._circuits.values())

    async def attach(self, p2pd: P2pd) -> None:
        self._p2pd = p2pd
        await p2pd.p2p.add_binary_stream_handler(RELAY_PROTOCOL, self._asked)

    async def switch(self, off: str) -> None:
        """Set the reason `off`. If it is not empty, all reservations and circuits end, and their peers look for another relay."""
        self.off = off
        if off:
            await self._streams.close()

    def drop_banned(self) -> None:
        """End the reservations and the circuits of peers that the organiser has banned since they began."""
        held = [stream[1] for peer, stream in self._reserved.items() if self._is_banned(peer)]
        for writer in (*held, *(writer for writer, ends in self._circuits.items() if any(map(self._is_banned, ends)))):
            writer.transport.abort()

    async def close(self) -> None:
        await self._streams.close()

    async def _asked(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._streams.track(self._answer(PeerId(info.peer_id.to_base58()), (reader, writer)))

    async def _answer(self, caller: PeerId, stream: Stream) -> None:
        reader, writer = stream
        with contextlib.closing(writer), self._asking.by(caller, self.bounds.circuits_each + MORE_ASKED) as may_ask:
            if not may_ask:
                return
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                request = await hear(reader, relay_pb2.RelayRequest)
            callee = PeerId(request.to)
            refusal = self.off or (BANNED if self._is_banned(caller) or self._is_banned(callee) else "")
            refusal = refusal or (self._why_not_connect(caller, callee) if callee else self._why_not_reserve(caller, request.run))
            if refusal:
                say(writer, relay_pb2.RelayReply(reason=refusal))
            elif callee:
                await self._connect(caller, callee, stream)
            else:
                await self._hold(caller, stream)

    def _why_not_reserve(self, caller: PeerId, run: str) -> str:
        return "the relay serves another run" if run != self.run else why_not_reserve(self.bounds, self._reserved, caller)

    def _why_not_connect(self, caller: PeerId, callee: PeerId) -> str:
        if callee not in self._reserved:
            return "that peer holds no reservation here"
        return why_not_connect(self.bounds, self.circuits, caller, callee)

    async def _hold(self, caller: PeerId, stream: Stream) -> None:
        """Keep a reservation until its stream ends or falls silent. It replaces an older one of the same peer."""
        reader, writer = stream
        before = self._reserved.pop(caller, None)
        if before is not None:
            before[1].close()
        self._reserved[caller] = stream
        try:
            say(writer, relay_pb2.RelayReply(accepted=True))
            while True:
                writer.write(b"\0")
                await writer.drain()
                async with asyncio.timeout(SILENCE_S):
                    if not await reader.read(1):
                        return
                await asyncio.sleep(BEAT_S)
        finally:
            if self._reserved.get(caller) is stream:
                del self._reserved[caller]

    async def _connect(self, caller: PeerId, callee: PeerId, stream: Stream) -> None:
        """Offer the circuit to the callee, pass its reply to the caller, then copy both ways until either side ends."""
        self._circuits[stream[1]] = caller, callee
        try:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    far = await self._p2pd.open_stream(callee, CIRCUIT_PROTOCOL)
            except (PeerdError, OSError, TimeoutError):
                say(stream[1], relay_pb2.RelayReply(reason="that peer does not answer"))
                return
            with contextlib.closing(far[1]):
                say(far[1], relay_pb2.CircuitOffer(caller=caller))
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    reply = await hear(far[0], relay_pb2.RelayReply)
                say(stream[1], relay_pb2.RelayReply(accepted=reply.accepted, direct=reply.direct, reason=reply.reason[:200]))
                if reply.accepted and not reply.direct:
                    await splice(stream, far, Throttles(self.carried, self.carried))
        finally:
            del self._circuits[stream[1]]
