"""The calling side of the services: one function for each RPC, with a deadline, peerd's values in and out, and RemoteError if it fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from peerd.errors import BadMessageError, PeerGoneError, UnheardError
from peerd.generated import (
    averaging_pb2,
    averaging_pb2_grpc,
    data_pb2,
    data_pb2_grpc,
    stage_pb2,
    stage_pb2_grpc,
    state_pb2,
    state_pb2_grpc,
)
from peerd.link.lanes import Lanes
from peerd.link.links import CHUNK_BYTES, Arrival, Links, answer_of, ending, read_within
from peerd.link.traffic import PeerRole
from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId, PeerId, RawRecord, RunId
from peerd.timeline.spans import SpanKind, SpanRing
from peerd.wire import convert
from peerd.wire.chunks import CALLS, PARTS, REPLIES, SLICES, Chunk, Headed, Pieces, collected, digest_of
from peerd.wire.messages import Average, Call, CallResult, Part, Snapshot

BACKPROPAGATE, REDUCE = "/peerd.Stage/Backpropagate", "/peerd.Averaging/Reduce"


class Client:
    """The calling side of one service, for calls to any peer."""

    stub_of: ClassVar[Any]
    """The generated stub class of the service."""

    def __init__(self, links: Links, run: RunId) -> None:
        self._links = links
        self._run = run

    async def _stub(self, peer: PeerId) -> Any:
        """Return the stub for streams of tensors."""
        return self.stub_of(await self._links.channel_for_tensors(peer))

    async def _stub_to_ask(self, peer: PeerId) -> Any:
        """Return the stub for small messages, which do not wait behind tensors."""
        return self.stub_of(await self._links.quickest_channel(peer))

    async def _ask(self, peer: PeerId, method: str, question: Any, timeout_s: float, **options: Any) -> Any:
        """Make a call with one request and one reply, and return the reply."""
        return await answer_of(getattr(await self._stub_to_ask(peer), method)(question, timeout=timeout_s, **options))


class StageClient(Client):
    """Sends microbatches to peers of a stage."""

    stub_of = stage_pb2_grpc.StageStub

    def __init__(self, links: Links, run: RunId, spans: SpanRing | None = None) -> None:
        super().__init__(links, run)
        self._lanes = Lanes()
        self._spans = spans or SpanRing(0)

    async def backpropagate(
        self, peer: PeerId, call: Call, records: Sequence[RawRecord], patience_s: float, on_forwarded: Callable[[int, PeerId], None]
    ) -> CallResult:
        """Send a microbatch to `peer` and wait for the result. `patience_s` bounds the silence between two messages of the peer."""
        async with self._lanes.turn(peer) as turn:
            channel, way = await self._links.way_for_tensors(peer)
            method = channel.stream_stream(BACKPROPAGATE, request_serializer=CALLS.serialize, response_deserializer=REPLIES.deserialize)
            traffic = self._links.traffic
            traffic.take(peer, way)
            header = convert.call_to(call, self._run, records, traffic.rates(peer, way)[1])

            async def messages() -> AsyncIterator[stage_pb2.CallMessage | Headed | Pieces]:
                began_s = time.monotonic()
                for message in convert.call_messages(header, call):
                    yield message
                turn.end()
                sent = header.ByteSize() + call.inputs.num_bytes + call.labels.num_bytes
                self._spans.add(SpanKind.SEND, began_s, call.step, call.index, peer, sent)
                traffic.sent_bytes += sent
                if call.stage > 0:
                    traffic.boundary_crossings += 1
                    traffic.boundary_bytes += sent
                traffic.sent("activations" if call.stage else "tokens", PeerRole.NEXT_STAGE, call.inputs.num_bytes, call.inputs.codec)
                traffic.sent("tokens", PeerRole.NEXT_STAGE, call.labels.num_bytes)

            with ending(method(messages())) as rpc:
                done = await _wait_for_done(rpc, patience_s, partial(_forwarded, call.stage, on_forwarded), partial(traffic.hear, peer))
                gradient = None
                if done.HasField("gradient"):
                    began_s = time.monotonic()
                    expected = convert.tensor_from(done.gradient)
                    if not call.needs_gradient:
                        raise BadMessageError("a gradient that nobody asked for")
                    expected.check(call.inputs.dtype, call.inputs.shape)
                    with traffic.receiving((peer, way), expected.num_bytes):
                        chunks = await _read_chunks(rpc, expected.num_bytes, patience_s)
                    gradient = expected.with_chunks(chunks)
                    self._spans.add(SpanKind.RECEIVE_GRADIENT, began_s, call.step, call.index, peer, expected.num_bytes)
                    traffic.received_bytes += expected.num_bytes
                    traffic.received("activation_gradients", PeerRole.NEXT_STAGE, expected.num_bytes, expected.codec)
                if await read_within(rpc.__aiter__(), patience_s) is not None:
                    raise BadMessageError("the reply has more bytes than the gradient")
                traffic.told((peer, way), done.receive_rate, call.inputs.num_bytes)
                return convert.result_from(done, gradient)

    async def cancel(self, peer: PeerId, call_id: bytes, timeout_s: float) -> None:
        await self._ask(peer, "Cancel", stage_pb2.CancelRequest(call_id=call_id), timeout_s)


class AveragingClient(Client):
    stub_of = averaging_pb2_grpc.AveragingStub

    async def propose(self, peer: PeerId, roster: Roster, timeout_s: float) -> tuple[bool, str, RawRecord]:
        """Return whether the peer joined the round; if not, also its reason and its present record."""
        proposal = averaging_pb2.Proposal(run=self._run, roster=convert.roster_to(roster))
        reply = await self._ask(peer, "Propose", proposal, timeout_s)
        return reply.joined, reply.reason[:200], (reply.record.body, reply.record.signature)

    async def reduce(
        self,
        peer: PeerId,
        part: Part,
        chunks: Sequence[memoryview],
        patience_s: float,
        told: Callable[[int], None],
        num_streams: int = 1,
    ) -> tuple[memoryview, ...]:
        """Send this peer's part of the slice that `peer` reduces. Returns the reduced slice as chunks.

        `told` hears how many bytes have moved: those of all parts that the peer says it has, and then those of the slice as well.
        `num_streams` share the peer's uplink.
        """
        channel = await self._links.channel_for_tensors(peer)
        call = channel.stream_stream(REDUCE, request_serializer=PARTS.serialize, response_deserializer=SLICES.deserialize)

        async def messages() -> AsyncIterator[Headed | memoryview]:
            yield Headed(averaging_pb2.PartMessage(header=convert.part_to(part)), chunks[0] if chunks else b"")
            for chunk in chunks[1:]:
                yield chunk

        with ending(call(messages())) as rpc:
            stream, arrived = rpc.__aiter__(), 0
            arrival = Arrival(patience_s, num_streams)

            async def read(missing: int) -> Any:
                nonlocal arrived, arrival
                while True:
                    message = await read_within(stream, arrival.left_s(missing))
                    if message is None or message.chunk:
                        size = len(message.chunk) if message is not None else 0
                        arrival.came(size)
                        told(arrived + part.num_bytes - missing + size)
                        return message
                    arrived, arrival = max(arrived, message.arrived), Arrival(patience_s, num_streams)
                    told(arrived)

            slice_chunks = await collected(read, part.num_bytes)
        self._links.traffic.sent_bytes += part.num_bytes
        self._links.traffic.received_bytes += part.num_bytes
        return slice_chunks

    async def abort(self, peer: PeerId, average_id: AverageId, timeout_s: float) -> None:
        await self._ask(peer, "Abort", averaging_pb2.AbortRequest(average_id=average_id), timeout_s)

    async def get_average(
        self, peer: PeerId, stage: int, step: int, sizes: tuple[int, int], patience_s: float
    ) -> tuple[Average, bytes, tuple[bytes, ...]]:
        """Fetch a finished average: its header, hash and chunks. The caller has to check them, off the event loop.

        `sizes`: the bytes that an average of this stage and step has, without and with a tied weight's gradients. No other is read.
        """
        request = averaging_pb2.AverageRequest(run=self._run, stage=stage, step=step)
        with ending((await self._stub(peer)).GetAverage(request)) as rpc:
            header = await _header_of(rpc, patience_s, "an average without a header")
            due = sizes[bool(header.tied_sum)]
            if header.num_bytes != due:
                raise BadMessageError(f"an average of {header.num_bytes} bytes where {due} are due")
            chunks = await _read_chunks(rpc, header.num_bytes, patience_s)
        self._links.traffic.took("averages", PeerRole.STAGE_PEER, header.num_bytes)
        return convert.average_from(header), header.blake3, chunks

    async def get_tied(self, peer: PeerId, step: int, wanted: AverageId, num_bytes: int, patience_s: float) -> tuple[bytes, ...]:
        """Fetch a tied weight's gradients as chunks of `num_bytes` together. Their hash is checked here."""
        request = averaging_pb2.TiedRequest(run=self._run, step=step, id=wanted)
        with ending((await self._stub(peer)).GetTied(request)) as rpc:
            untold = f"a tied weight's gradients without a header that says {num_bytes} bytes"
            header = await _header_of(rpc, patience_s, untold)
            if header.num_bytes != num_bytes:
                raise BadMessageError(untold)
            chunks = await _read_chunks(rpc, num_bytes, patience_s)
        self._links.traffic.took("averages", PeerRole.STAGE_PEER, num_bytes)
        if await asyncio.to_thread(digest_of, chunks) != header.blake3:
            raise BadMessageError("a tied weight's gradients do not match their hash")
        return chunks


class StateClient(Client):
    stub_of = state_pb2_grpc.StateStub

    async def get_state(self, peer: PeerId, request: StateRequest, patience_s: float) -> tuple[Snapshot, AsyncGenerator[bytes]]:
        """Return the header of a donor's snapshot and its chunks from `first_chunk` on. The caller has to check them."""
        rpc = (await self._stub(peer)).GetState(state_pb2.StateRequest(run=self._run, **asdict(request)))
        header = await _header_of(rpc, patience_s, "a state without a header")
        return convert.snapshot_from(header), _chunks_of_stream(rpc, "state", self._links, patience_s)

    async def get_header(self, peer: PeerId, request: StateRequest, patience_s: float) -> Snapshot:
        """Return the header of a donor's snapshot, and read none of its chunks."""
        rpc = (await self._stub(peer)).GetState(state_pb2.StateRequest(run=self._run, **asdict(request)))
        try:
            return convert.snapshot_from(await _header_of(rpc, patience_s, "a state without a header"))
        finally:
            rpc.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRequest:
    stage: int
    first_chunk: int = 0
    snapshot: bytes = b""
    tied_only: bool = False


@dataclass(frozen=True, slots=True)
class DataHeader:
    """A donor's description of the file whose bytes follow."""

    num_bytes: int
    chunk_hashes: tuple[bytes, ...]


class DataClient(Client):
    stub_of = data_pb2_grpc.DataStub

    async def get_data(self, peer: PeerId, digest: bytes, first_chunk: int, patience_s: float) -> tuple[DataHeader, AsyncGenerator[bytes]]:
        """Return the header of a donor's file and its bytes from `first_chunk` on. The caller has to check them."""
        rpc = (await self._stub(peer)).GetData(data_pb2.DataRequest(run=self._run, blake3=digest, first_chunk=first_chunk))
        header = await _header_of(rpc, patience_s, "data without a header")
        hashes = tuple(header.chunk_blake3)
        if not convert.are_hashes(hashes):
            raise BadMessageError("data with a damaged header")
        return DataHeader(header.num_bytes, hashes), _chunks_of_stream(rpc, "data", self._links, patience_s)


async def _header_of(rpc: Any, patience_s: float, untold: str) -> Any:
    """Return the header that begins a stream. Raises BadMessageError(untold) if the stream begins with anything else."""
    first = await read_within(rpc.__aiter__(), patience_s)
    if first is None:
        raise PeerGoneError("the stream ended before its first message")
    if first.WhichOneof("kind") != "header":
        raise BadMessageError(untold)
    return first.header


async def _chunks_of_stream(rpc: Any, what: str, links: Links, patience_s: float) -> AsyncGenerator[bytes]:
    arrival = Arrival(patience_s)
    with ending(rpc):
        while (message := await read_within(rpc.__aiter__(), arrival.left_s(CHUNK_BYTES))) is not None:
            arrival.came(len(message.chunk))
            links.traffic.took(what, PeerRole.DONOR, len(message.chunk))
            yield message.chunk


def _forwarded(stage: int, tell: Callable[[int, PeerId], None], told: stage_pb2.Forwarded) -> None:
    if not stage < told.stage < convert.MAX_STAGES or len(told.peer) > convert.MAX_PEER_CHARS:
        raise BadMessageError("a microbatch that went on to no peer of a later stage")
    tell(told.stage, PeerId(told.peer))


async def _wait_for_done(
    rpc: Any, patience_s: float, on_forwarded: Callable[[stage_pb2.Forwarded], None], heard: Callable[[], None]
) -> stage_pb2.Done:
    stream = rpc.__aiter__()
    try:
        message = await read_within(stream, patience_s)
    except PeerGoneError as error:
        raise UnheardError(error.message) from None
    while message is not None:
        heard()
        kind = "chunk" if isinstance(message, Chunk) else message.WhichOneof("kind")
        if kind == "done":
            done: stage_pb2.Done = message.done
            return done
        if kind == "forwarded":
            on_forwarded(message.forwarded)
        elif kind == "chunk":
            raise BadMessageError("a chunk of the gradient came before the result")
        message = await read_within(stream, patience_s)
    raise PeerGoneError("the call ended without a result")


async def _read_chunks(rpc: Any, num_bytes: int, patience_s: float) -> tuple[Any, ...]:
    stream, arrival = rpc.__aiter__(), Arrival(patience_s)

    async def read(missing: int) -> Any:
        message = await read_within(stream, arrival.left_s(missing))
        arrival.came(len(message.chunk) if message is not None else 0)
        return message

    return await collected(read, num_bytes)
