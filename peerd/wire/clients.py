"""The calling side of the services: one function for each RPC, with a deadline, peerd's values in and out, and RemoteError if it fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from peerd.background import start
from peerd.errors import BadMessageError, PeerGoneError, UnansweredError, UnheardError
from peerd.generated import (
    averaging_pb2,
    averaging_pb2_grpc,
    data_pb2,
    data_pb2_grpc,
    stage_pb2,
    stage_pb2_grpc,
)
from peerd.link.lanes import Lanes
from peerd.link.links import CHUNK_BYTES, Arrival, Bytes, Links, answer_of, ending, read_within, remote_errors
from peerd.link.traffic import PeerRole
from peerd.policy.step.roster import Roster
from peerd.served_time import served_timeout
from peerd.table.record import AverageId, PeerId, RawRecord, RunId
from peerd.timeline.spans import SpanKind, SpanRing
from peerd.wire import convert, rosters
from peerd.wire.chunk_streams import Offer, Source, header_of, offer
from peerd.wire.chunks import CALLS, REPLIES, ROUNDS, Chunk, Headed, Pieces, collected, digest_of
from peerd.wire.frames import LatestWord, count_sent, frames_of, messages_of, opening_of_round
from peerd.wire.messages import MOST_TOLD_BYTES, Average, Beat, Call, CallResult, Frame, ProposalAnswer, ToldMoves, Verified
from peerd.wire.receipts import signed_in, tell_above

AnyClient = TypeVar("AnyClient", bound="Client")
Given = ParamSpec("Given")
BACKPROPAGATE, GIVE, TAKE = "/peerd.Stage/Backpropagate", "/peerd.Averaging/Give", "/peerd.Averaging/Take"


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
        """Make a call with one request and one reply, and return the reply. `timeout_s` is in served time."""
        call = getattr(await self._stub_to_ask(peer), method)(question, **options)
        try:
            async with served_timeout(timeout_s):
                return await answer_of(call)
        except TimeoutError:
            raise UnansweredError(f"no answer within {timeout_s:.1f} s") from None


def _while_no_other_way(
    call: Callable[Concatenate[AnyClient, PeerId, Given], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[AnyClient, PeerId, Given], Coroutine[Any, Any, None]]:
    """End a call of a client once there is another way to its peer: what is missing then goes over that one."""

    @wraps(call)
    async def ended(client: AnyClient, peer: PeerId, /, *given: Given.args, **named: Given.kwargs) -> None:
        calling, widening = start(call(client, peer, *given, **named), expects=(Exception,)), start(client._links.until_other_way(peer))
        try:
            await asyncio.wait({calling, widening}, return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                calling.result()
        finally:
            for task in (calling, widening):
                task.cancel()
            await asyncio.gather(calling, widening, return_exceptions=True)

    return ended


class StageClient(Client):
    """Sends microbatches to peers of a stage."""

    stub_of = stage_pb2_grpc.StageStub

    def __init__(self, links: Links, run: RunId, spans: SpanRing | None = None) -> None:
        super().__init__(links, run)
        self._lanes = Lanes(links.traffic.waiting)
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
            tell_above(header, call.above)

            async def messages() -> AsyncIterator[stage_pb2.CallMessage | Headed | Pieces]:
                began_s = time.monotonic()
                traffic.uplink.sends(call.inputs.num_bytes + call.labels.num_bytes)
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
                        chunks = await read_chunks(rpc, expected.num_bytes, patience_s)
                    gradient = expected.with_chunks(chunks)
                    self._spans.add(SpanKind.RECEIVE_GRADIENT, began_s, call.step, call.index, peer, expected.num_bytes)
                    traffic.received_bytes += expected.num_bytes
                    traffic.received("activation_gradients", PeerRole.NEXT_STAGE, expected.num_bytes, expected.codec)
                if await read_within(rpc.__aiter__(), patience_s) is not None:
                    raise BadMessageError("the reply has more bytes than the gradient")
                traffic.told((peer, way), done.receive_rate, call.inputs.num_bytes)
                return replace(convert.result_from(done, gradient), signed=signed_in(done))

    async def cancel(self, peer: PeerId, call_id: bytes, timeout_s: float) -> None:
        await self._ask(peer, "Cancel", stage_pb2.CancelRequest(call_id=call_id), timeout_s)


class AveragingClient(Client):
    stub_of = averaging_pb2_grpc.AveragingStub

    def __init__(self, links: Links, run: RunId) -> None:
        super().__init__(links, run)
        self._marked: tuple[Roster, averaging_pb2.Proposal] | None = None
        """The roster that was proposed last, as it travels: all its members get the same."""

    async def propose(self, peer: PeerId, roster: Roster, timeout_s: float) -> ProposalAnswer:
        """Ask a member to join a round. It gets the names of all members only if it does not know them by their marks."""
        if self._marked is None or self._marked[0] is not roster:
            self._marked = roster, rosters.proposal_to(roster, self._run, marked=True)
        reply = await self._ask(peer, "Propose", self._marked[1], timeout_s)
        if reply.unnamed:
            reply = await self._ask(peer, "Propose", rosters.proposal_to(roster, self._run, marked=False), timeout_s)
        record = reply.record.body, reply.record.signature
        return ProposalAnswer(reply.joined, reply.reason[:200], record, reply.preparing and not reply.joined)

    @_while_no_other_way
    async def give(self, peer: PeerId, average_id: AverageId, frames: AsyncGenerator[Frame], told: Callable[[Verified], None]) -> None:
        """Send chunks of a round, until there are no more, or there is another way. `told` hears what the peer has verified."""
        channel, traffic = await self._links.channel_for_tensors(peer), self._links.traffic
        call = channel.stream_stream(GIVE, request_serializer=ROUNDS.serialize, response_deserializer=averaging_pb2.Verified.FromString)

        bugs: list[Exception] = []

        async def messages() -> AsyncIterator[Any]:
            yield opening_of_round(average_id)
            try:
                async with contextlib.aclosing(frames):
                    async for frame in frames:
                        for message in messages_of(frame):
                            yield message
                        count_sent(frame, traffic)
            except Exception as error:
                bugs.append(error)
                raise

        try:
            with ending(call(messages())) as rpc, remote_errors(), traffic.uplink.exchanging():
                async for message in rpc:
                    traffic.hear(peer)
                    told(convert.verified_from(message))
        except PeerGoneError:
            if bugs:  # gRPC ends the call and does not say why
                raise bugs[0] from None
            raise

    @_while_no_other_way
    async def take(
        self,
        peer: PeerId,
        average_id: AverageId,
        words: AsyncGenerator[Verified],
        size_of: Callable[[Frame], int],
        takes: Callable[[Frame], Awaitable[None]],
    ) -> None:
        """Ask for the chunks that the peer has for this member of a round, and tell it what has been verified. `takes` gets each chunk.

        Returns once there are no more, or there is another way.
        """
        channel = await self._links.channel_for_tensors(peer)
        call = channel.stream_stream(
            TAKE, request_serializer=averaging_pb2.Verified.SerializeToString, response_deserializer=ROUNDS.deserialize
        )

        word = LatestWord()

        async def hear() -> None:
            async with contextlib.aclosing(words):
                async for verified in words:
                    word.tell(verified)

        async def messages() -> AsyncIterator[averaging_pb2.Verified]:
            while (verified := await word.next()) is not None:
                yield convert.verified_to(verified, average_id)

        hearing = start(hear())
        try:
            with ending(call(messages())) as rpc, remote_errors():
                stream = rpc.__aiter__()
                async with contextlib.aclosing(frames_of(partial(anext, stream, None), size_of, self._links.traffic)) as frames:
                    async for frame in frames:
                        await takes(frame)
        finally:
            hearing.cancel()
            word.end()  # gRPC does not end what it sends with the call

    async def beat(self, peer: PeerId, beat: Beat, timeout_s: float) -> Beat:
        """Tell a member what is here of a round. Returns what is there."""
        return convert.beat_from(await self._ask(peer, "Beat", convert.beat_to(beat), timeout_s))

    async def abort(self, peer: PeerId, average_id: AverageId, left_out: str, reason: str, timeout_s: float) -> None:
        """Close a round. A judge names the member that it is ended without."""
        await self._ask(peer, "Abort", averaging_pb2.AbortRequest(average_id=average_id, left_out=left_out, reason=reason), timeout_s)

    @contextlib.asynccontextmanager
    async def open_average(
        self, peer: PeerId, stage: int, step: int, section: int | None, patience_s: float
    ) -> AsyncIterator[Offer[Average]]:
        """Open a mate's finished average, or a section of it. It is closed with the block. Raises RemoteError."""
        first = averaging_pb2.AverageRequest(run=self._run, stage=stage, step=step, section=section)
        source = Source(peer, "averages", PeerRole.STAGE_PEER, self._links.traffic, patience_s)
        async with offer((await self._stub(peer)).GetAverage, first, source, rosters.average_from) as opened:
            yield opened

    async def get_tied(self, peer: PeerId, step: int, wanted: AverageId, num_bytes: int, patience_s: float) -> tuple[bytes, ...]:
        """Fetch a tied weight's gradients as chunks of `num_bytes` together. Their hash is checked here."""
        request = averaging_pb2.TiedRequest(run=self._run, step=step, id=wanted)
        with ending((await self._stub(peer)).GetTied(request)) as rpc:
            untold = f"a tied weight's gradients without a header that says {num_bytes} bytes"
            header = await header_of(rpc, patience_s, untold)
            if header.num_bytes != num_bytes:
                raise BadMessageError(untold)
            chunks = await read_chunks(rpc, num_bytes, patience_s)
        self._links.traffic.took("averages", PeerRole.STAGE_PEER, num_bytes)
        if await asyncio.to_thread(digest_of, chunks) != header.blake3:
            raise BadMessageError("a tied weight's gradients do not match their hash")
        return chunks

    async def get_tied_hash(self, peer: PeerId, step: int, wanted: AverageId, patience_s: float) -> bytes:
        """Ask for the hash of a tied weight's gradients, and not for them. Raises RemoteError."""
        request = averaging_pb2.TiedRequest(run=self._run, step=step, id=wanted)
        with ending((await self._stub(peer)).GetTied(request)) as rpc:
            return bytes((await header_of(rpc, patience_s, "a tied weight's gradients without a header")).blake3)

    async def get_moves(self, peer: PeerId, incarnation: int, first: int, timeout_s: float) -> ToldMoves:
        """Fetch a part of a mate's log of its local steps, unchecked. Raises RemoteError, BadMessageError if it is too long."""
        request = averaging_pb2.MovesRequest(run=self._run, incarnation=incarnation, first=first)
        reply = await self._ask(peer, "GetMoves", request, timeout_s)
        if len(reply.lines) > MOST_TOLD_BYTES:
            raise BadMessageError("more moves at once than may be told")
        self._links.traffic.received("moves", PeerRole.STAGE_PEER, len(reply.lines))
        return ToldMoves(reply.incarnation, reply.first, reply.lines)


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
        header = await header_of(rpc, patience_s, "data without a header")
        hashes = tuple(header.chunk_blake3)
        if not convert.are_hashes(hashes):
            raise BadMessageError("data with a damaged header")
        return DataHeader(header.num_bytes, hashes), _chunks_of_stream(rpc, "data", self._links, patience_s)


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


async def read_chunks(rpc: Any, num_bytes: int, patience_s: float, begun: Bytes = b"") -> tuple[Any, ...]:
    """Read so many bytes of a call, including `begun`, in messages with chunks. Raises RemoteError."""
    return await collected(_reader(rpc, patience_s), num_bytes, begun)


def _reader(rpc: Any, patience_s: float) -> Callable[[int], Awaitable[Any]]:
    stream, arrival = rpc.__aiter__(), Arrival(patience_s)

    async def read(missing: int) -> Any:
        message = await read_within(stream, arrival.left_s(missing))
        arrival.came(len(message.chunk) if message is not None else 0)
        return message

    return read
