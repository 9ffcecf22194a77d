"""Both sides of the checkup service: dial-backs, and measurements of a link's speed. Both are bounded and rationed, as anybody may ask."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from peerd.errors import BadMessageError, BusyError, WrongStateError
from peerd.generated import checkup_pb2, checkup_pb2_grpc
from peerd.link.dialling import answers_as
from peerd.link.links import answer_of, ending, remote_errors
from peerd.policy.owner.rate_limit import Ration
from peerd.table.circuit import host_in
from peerd.table.record import PeerId
from peerd.wire.clients import Client
from peerd.wire.door import Door
from peerd.wire.messages import DialBack, Speed
from peerd.wire.services import BehindDoor

MAX_PROBE_BYTES = 2 << 20
PROBE_TIMEOUT_S = 15.0
DIAL_BACK_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
_PIECE_BYTES = 64 * 1024
SeenAt = Callable[[str], str | None]
"""Returns the multiaddr that a gRPC connection came from (`Tunnel.seen_at`)."""


class CheckupServicer(BehindDoor, checkup_pb2_grpc.CheckupServicer):
    register = staticmethod(checkup_pb2_grpc.add_CheckupServicer_to_server)

    def __init__(self, door: Door, seen_at: SeenAt) -> None:
        self._door = door
        self._seen_at = seen_at
        self._dials = Ration(each=4, total=30)
        self._sources = Ration(each=2, total=2)  # enough for one `peerd doctor`; endless requests get 0.6 Mbit/s
        self._sinks = Ration(each=4, total=16)  # and for those who join besides: what comes costs this peer's upload nothing
        self._busy_until_s = 0.0
        """When the present measurement ends at the latest. Two at once would disturb each other."""

    async def DialBack(self, request: checkup_pb2.DialBackRequest, context: Any) -> checkup_pb2.DialBackReply:
        async with self._door.answering(context, request.run) as caller:
            if not 0 < request.port < 65536:
                raise BadMessageError("a port is between 1 and 65535")
            _take(self._dials, caller)
        host = host_in(self._seen_at(context.peer()))
        reached = bool(host) and await answers_as(caller, host, request.port, DIAL_BACK_TIMEOUT_S, direct=request.direct)
        return checkup_pb2.DialBackReply(observed=host, reached=reached, direct=request.direct)

    async def Sink(self, messages: AsyncIterator[checkup_pb2.Chunk], context: Any) -> checkup_pb2.SinkReply:
        async with self._door.answering(context) as caller:
            with self._measuring(caller, self._sinks):
                speed = await _measure(self._pieces_from(messages))
        self._door.traffic.received_bytes += speed.num_bytes
        return checkup_pb2.SinkReply(num_bytes=speed.num_bytes, took_s=speed.took_s)

    async def Source(self, request: checkup_pb2.SourceRequest, context: Any) -> AsyncIterator[checkup_pb2.Chunk]:
        async with self._door.answering(context, request.run) as caller:
            if request.num_bytes > MAX_PROBE_BYTES:
                raise BadMessageError(f"at most {MAX_PROBE_BYTES} bytes are sent to measure a connection")
            with self._measuring(caller, self._sources):
                for piece in _pieces(request.num_bytes):
                    yield piece
                    self._door.traffic.sent_bytes += len(piece.data)

    @contextlib.contextmanager
    def _measuring(self, caller: PeerId, ration: Ration) -> Any:
        if self._busy_until_s > time.monotonic():
            raise BusyError("another connection is being measured")
        _take(ration, caller)
        until_s = self._busy_until_s = time.monotonic() + PROBE_TIMEOUT_S
        try:
            yield
        finally:
            if self._busy_until_s == until_s:
                self._busy_until_s = 0.0

    async def _pieces_from(self, messages: AsyncIterator[checkup_pb2.Chunk]) -> AsyncIterator[int]:
        total = 0
        while (message := await self._door.read(messages)) is not None:
            total += len(message.data)
            if total > MAX_PROBE_BYTES:
                raise BadMessageError("more bytes than a measurement may take")
            yield len(message.data)


class CheckupClient(Client):
    """Asks other peers whether they reach this one and how fast the link is."""

    stub_of = checkup_pb2_grpc.CheckupStub

    async def _stub(self, peer: PeerId) -> Any:
        return self.stub_of(await self._links.channel(peer))

    _stub_to_ask = _stub

    async def _stub_for(self, peer: PeerId, as_tensors: bool) -> Any:
        return self.stub_of(await self._links.channel_for_tensors(peer)) if as_tensors else await self._stub(peer)

    async def dial_back(self, peer: PeerId, port: int, *, direct: bool = False) -> DialBack:
        """Ask `peer` to dial this peer, at the address that it sees and at `port`: p2pd's, or that of `direct` connections.

        Raises RemoteError if it gives no answer.
        """
        request = checkup_pb2.DialBackRequest(run=self._run, port=port, direct=direct)
        reply = await self._ask(peer, "DialBack", request, DIAL_BACK_TIMEOUT_S + ANSWER_TIMEOUT_S)
        if reply.direct != direct:
            raise WrongStateError("the peer does not know direct connections")
        return DialBack(reply.observed[:64], reply.reached)

    async def upload(self, peer: PeerId, num_bytes: int, *, as_tensors: bool = False) -> Speed:
        """Return the speed of an upload, as the peer measured it. Raises RemoteError if it gives no answer.

        `as_tensors`: on the way that tensors take, so that no news waits behind it.
        """
        stub = await self._stub_for(peer, as_tensors)
        reply = await answer_of(stub.Sink(_pieces(num_bytes), timeout=PROBE_TIMEOUT_S + ANSWER_TIMEOUT_S))
        return Speed(int(reply.num_bytes), float(reply.took_s))

    async def download(self, peer: PeerId, num_bytes: int, *, as_tensors: bool = False) -> Speed:
        """Return the speed of a download, as measured here. Raises RemoteError if the peer does not send. `as_tensors` as for `upload`."""
        stub, request = await self._stub_for(peer, as_tensors), checkup_pb2.SourceRequest(run=self._run, num_bytes=num_bytes)
        with remote_errors(), ending(stub.Source(request, timeout=PROBE_TIMEOUT_S + ANSWER_TIMEOUT_S)) as rpc:
            return await _measure(len(message.data) async for message in rpc)


async def _measure(pieces: AsyncIterator[int]) -> Speed:
    """Measure until the pieces or `PROBE_TIMEOUT_S` end. The first piece starts the clock and is not counted, so latency is left out."""
    first_s = last_s = 0.0
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            async for piece in pieces:
                last_s = time.monotonic()
                num_bytes += piece if first_s else 0
                first_s = first_s or last_s
    return Speed(num_bytes, last_s - first_s)


def _take(ration: Ration, caller: PeerId) -> None:
    if refusal := ration.take(caller, time.monotonic()):
        raise BusyError(refusal)


def _pieces(num_bytes: int) -> list[checkup_pb2.Chunk]:
    whole, rest = divmod(num_bytes, _PIECE_BYTES)
    piece = checkup_pb2.Chunk(data=bytes(_PIECE_BYTES))
    return [piece] * whole + ([checkup_pb2.Chunk(data=bytes(rest))] if rest else [])
