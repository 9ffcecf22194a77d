"""The called side of the services: checks each message, and has it answered by another room. `door.py` lets callers in.

Each servicer checks and converts a message, then calls a handler from another room. A broken message is counted as refused
and ends the call. Nothing that a peer sends raises an error beyond these two files.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import structlog

from peerd.errors import BadMessageError, BusyError, PeerdError, PeerGoneError
from peerd.generated import (
    averaging_pb2,
    averaging_pb2_grpc,
    stage_pb2,
    stage_pb2_grpc,
    state_pb2,
    state_pb2_grpc,
    swarm_pb2,
    swarm_pb2_grpc,
)
from peerd.link.few_each import FewEach
from peerd.link.lanes import Lanes, Turn
from peerd.link.traffic import Link, PeerRole, Way
from peerd.link.tunnel import caller_of
from peerd.table.record import AverageId, PeerId, RawRecord
from peerd.timeline.spans import MAX_SPANS, SpanKind
from peerd.wire import accounts, convert, rosters, timelines
from peerd.wire.budgets import most_arriving
from peerd.wire.chunks import Chunk, Headed, opening
from peerd.wire.deliveries import Delivery, Lending
from peerd.wire.door import Door
from peerd.wire.frames import UNHEADED, LatestWord, count_sent, frames_of, messages_of
from peerd.wire.handlers import AveragingHandler, Described, StageHandler, StateHandler, SwarmHandler
from peerd.wire.messages import SKETCH_SEED_BYTES, Call, CallResult, ProposalAnswer, StateRequest, Verified
from peerd.wire.open_conversations import Held
from peerd.wire.receipts import above_in, tell_signed
from peerd.wire.replies import Replies
from peerd.wire.section_slots import SectionSlots

LOG = structlog.get_logger()
Handler = TypeVar("Handler")


def _nothing() -> asyncio.Future[Any]:
    """A task that is over."""
    over: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    over.set_result(None)
    return over


async def given_up(work: asyncio.Future[Any]) -> None:
    """End a task whose call is over."""
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError, PeerdError):
        await work


class BehindDoor:
    """The called side of one service. Every servicer has a `register`, the generated function that adds its methods to a server."""

    _door: Door

    @property
    def door(self) -> Door:
        """What lets callers in, before a message of theirs is read."""
        return self._door


class Servicer(BehindDoor, Generic[Handler]):
    """A service whose calls, once they have passed the checks, are answered by `handler`."""

    def __init__(self, door: Door, handler: Handler) -> None:
        self._door = door
        self._handler = handler


class SwarmServicer(Servicer[SwarmHandler], swarm_pb2_grpc.SwarmServicer):
    register = staticmethod(swarm_pb2_grpc.add_SwarmServicer_to_server)

    def __init__(self, door: Door, handler: SwarmHandler, described: Described) -> None:
        super().__init__(door, handler)
        self._described = described
        self._held = Held()
        self._telling = asyncio.Lock()
        """One answer at a time is made from much that this peer keeps, so that questions take one thread at most."""

    async def Gossip(self, request: swarm_pb2.GossipRequest, context: Any) -> swarm_pb2.GossipReply:
        return await self._answer(request, context)

    async def Converse(self, requests: AsyncIterator[swarm_pb2.GossipRequest], context: Any) -> AsyncIterator[swarm_pb2.GossipReply]:
        caller = await self._door.caller(context)
        with self._held.by(caller, requests) as conversation:
            while (request := await conversation.question()) is not None:
                if request.want_all or request.want_news or request.reach:
                    await self._door.refuse(context, caller, BadMessageError("a conversation is for pushed records only"))
                yield await self._answer(request, context)

    async def _answer(self, request: swarm_pb2.GossipRequest, context: Any) -> swarm_pb2.GossipReply:
        last, reached = "", False
        answer: Sequence[RawRecord]
        async with self._door.answering(context, request.run) as caller:
            self._admit(caller, request)
            if request.reach:
                reached, answer = await self._handler.reaches(caller, PeerId(request.reach)), ()
            elif request.want_news:
                answer = self._handler.news(caller, convert.tags_from(request.known))
            elif request.want_all:
                answer, last = self._handler.table(caller, PeerId(request.after))
            elif request.records or not request.HasField("access"):
                answer = self._handler.gossip(caller, convert.records_from(request.records))
                self._door.admission.check(caller)  # its record may have shown its invitation
            else:
                answer = ()
        access = convert.access_to(self._door.admission.newer_than(request.listed))
        reply = swarm_pb2.GossipReply(records=convert.records_to(answer), next=last, reached=reached, access=access)
        return self._door.traffic.answered(request, reply)

    def _admit(self, caller: PeerId, request: swarm_pb2.GossipRequest) -> None:
        """Take the list that a caller brings, and look at its invitation. Raises UnwelcomeError for what only peers of the run get."""
        admission = self._door.admission
        if (told := convert.access_from(request)) is not None:
            admission.take(told)
        if request.invitation:
            admission.show(caller, request.invitation)
        admission.check(caller, is_to_show=not (request.reach or request.want_news or request.want_all))

    async def Describe(self, request: swarm_pb2.DescribeRequest, context: Any) -> swarm_pb2.DescribeReply:
        return convert.description_to(self._described.describe())

    async def Contributions(self, request: swarm_pb2.ContributionsRequest, context: Any) -> swarm_pb2.ContributionsReply:
        async with self._door.answering(context, request.run), self._telling:
            tallies = await self._described.tallies()
        reply = swarm_pb2.ContributionsReply(stages=convert.tallies_to(tallies))
        self._door.traffic.sent_bytes += reply.ByteSize()
        return reply

    async def Accounts(self, request: swarm_pb2.AccountsRequest, context: Any) -> swarm_pb2.AccountsReply:
        async with self._door.answering(context, request.run), self._telling:
            told = await self._described.accounts(accounts.wanted_from(request))
            reply = await asyncio.to_thread(accounts.told_to, told)
        self._door.traffic.sent_bytes += reply.ByteSize()
        return reply

    async def Timeline(self, request: swarm_pb2.TimelineRequest, context: Any) -> swarm_pb2.TimelineReply:
        def told() -> swarm_pb2.TimelineReply:
            return timelines.spans_to(*self._door.spans.of_steps(request.first_step, request.last_step, min(request.most, MAX_SPANS)))

        async with self._door.answering(context, request.run):
            reply = swarm_pb2.TimelineReply()
            if request.most:
                async with self._telling:
                    reply = await asyncio.to_thread(told)
        reply.clock_s = time.monotonic()
        self._door.traffic.sent_bytes += reply.ByteSize()
        return reply


class StageServicer(Servicer[StageHandler], stage_pb2_grpc.StageServicer):
    register = staticmethod(stage_pb2_grpc.add_StageServicer_to_server)

    def __init__(self, door: Door, handler: StageHandler) -> None:
        super().__init__(door, handler)
        self._lanes = Lanes(door.traffic.waiting)
        self._arriving = FewEach(door.knows)

    async def Backpropagate(self, messages: AsyncIterator[stage_pb2.CallMessage | Headed | Chunk], context: Any) -> AsyncIterator[Any]:
        """Serve a microbatch. Takes and yields chunks without copying them (`ChunkCoder`)."""
        caller = await self._door.caller(context)
        link = caller, Way.TUNNEL if caller_of(context.peer()) else Way.DIRECT
        turn, replies = self._lanes.turn(link), Replies()
        work: asyncio.Future[tuple[Call, CallResult]] = asyncio.ensure_future(self._work(link, messages, replies, turn))
        work.add_done_callback(lambda _task: replies.end())
        try:
            while (reply := await replies.next(self._door.patience_s / 4)) is not None:
                yield reply
            call, result = await work
            began_s, work = time.monotonic(), _nothing()  # the task holds the gradient, too
            done, chunks = convert.result_to(result, self._door.traffic.incoming[link].rate)
            tell_signed(done.done, result.signed)
            result = replace(result, gradient=result.gradient and result.gradient.with_chunks(()))
            self._door.traffic.uplink.sends(result.gradient.num_bytes if result.gradient else 0)
            with Delivery(chunks, self._door.patience_s, turn.end) as delivery:
                del chunks
                yield done
                for chunk in delivery:
                    yield chunk
            await self._door.check_taken(context, caller, delivery)
            if result.gradient is not None:
                self._door.spans.add(SpanKind.SEND_GRADIENT, began_s, call.step, call.index, caller, result.gradient.num_bytes)
        except PeerdError as error:
            await self._door.refuse(context, caller, error)
        finally:
            await given_up(work)
            turn.end()
        self._count(result)

    async def _work(self, link: Link, messages: AsyncIterator[Any], replies: Replies, turn: Turn) -> tuple[Call, CallResult]:
        """Compute a call and wait for the turn to send the result. Until then the caller gets WORKING messages."""
        header, begun = opening(await self._door.read(messages), stage_pb2.CallMessage, "a call without a header")
        self._door.check_run(header.run)
        call = replace(convert.call_from(header), above=above_in(header))
        self._handler.absorb(link[0], convert.records_from(header.records))
        if self._door.knows(link[0]):
            self._door.traffic.told(link, header.receive_rate, call.inputs.num_bytes)

        async def receive() -> tuple[memoryview, ...]:
            num_bytes = call.inputs.num_bytes + call.labels.num_bytes
            with self._arriving.by(link[0], most_arriving(self._door.slots())) as may_arrive:
                if not may_arrive:
                    raise BusyError("your tensors of other microbatches still arrive")
                replies.accept()
                with self._door.traffic.receiving(link, num_bytes - len(begun)):
                    chunks = await self._door.read_chunks(messages, num_bytes, begun)
            what, role = ("activations", PeerRole.PREVIOUS_STAGE) if call.stage else ("tokens", PeerRole.TRAINER)
            self._door.traffic.received(what, role, call.inputs.num_bytes, call.inputs.codec)
            self._door.traffic.received("tokens", role, call.labels.num_bytes)
            return chunks

        result = await self._handler.backpropagate(link[0], call, receive, replies.forward)
        await turn.begin()
        return call, result

    def _count(self, result: CallResult) -> None:
        if result.gradient is not None:
            traffic = self._door.traffic
            traffic.sent_bytes += result.gradient.num_bytes
            traffic.sent("activation_gradients", PeerRole.PREVIOUS_STAGE, result.gradient.num_bytes, result.gradient.codec)
            traffic.boundary_crossings += 1
            traffic.boundary_bytes += result.gradient.num_bytes + sum(len(body) + len(sign) for body, sign in result.records)

    async def Cancel(self, request: stage_pb2.CancelRequest, context: Any) -> stage_pb2.CancelReply:
        caller = await self._door.caller(context)
        self._handler.cancel(caller, request.call_id)
        await self._door.slow_down(caller)
        return stage_pb2.CancelReply()


class AveragingServicer(Servicer[AveragingHandler], averaging_pb2_grpc.AveragingServicer):
    register = staticmethod(averaging_pb2_grpc.add_AveragingServicer_to_server)

    def __init__(self, door: Door, handler: AveragingHandler) -> None:
        super().__init__(door, handler)
        self._sections = SectionSlots(lambda: frozenset(handler.mates()))

    async def Propose(self, request: averaging_pb2.Proposal, context: Any) -> averaging_pb2.ProposalReply:
        async with self._door.answering(context, request.run) as caller:
            roster = rosters.proposal_from(request, self._handler.mates)
            answer = await self._handler.propose(caller, roster) if roster is not None else ProposalAnswer(False)
        joined, reason, (body, signature), preparing = answer
        if not (joined or preparing):
            await self._door.slow_down(caller)
        record = swarm_pb2.SignedRecord(body=body, signature=signature)
        return averaging_pb2.ProposalReply(joined=joined, reason=reason, record=record, preparing=preparing, unnamed=roster is None)

    async def Give(self, messages: AsyncIterator[averaging_pb2.ChunkMessage | Headed | Chunk], context: Any) -> AsyncIterator[Any]:
        """Take a member's chunks of a round, without copying them (`ChunkCoder`), and yield what has been verified."""
        async with self._door.answering(context) as caller:
            header, _ = opening(await self._door.read(messages), averaging_pb2.ChunkMessage, UNHEADED)
            frames, word = partial(frames_of, partial(anext, messages, None), traffic=self._door.traffic), LatestWord()
            work = asyncio.ensure_future(self._handler.give(caller, convert.id_from(header.average_id), frames, word.tell))
            work.add_done_callback(lambda _task: word.end())
            try:
                while (held := await word.next()) is not None:
                    yield convert.verified_to(held)
                await work
            finally:
                await given_up(work)

    async def Take(self, messages: AsyncIterator[averaging_pb2.Verified], context: Any) -> AsyncIterator[Any]:
        """Yield this peer's chunks of a round for a member that it cannot call."""
        async with self._door.answering(context) as caller:
            first = await self._door.read(messages)
            if first is None:
                raise PeerGoneError("the stream ended before its first message")
            words = _words(first, messages)
            traffic = self._door.traffic
            async with contextlib.aclosing(self._handler.take(caller, convert.id_from(first.average_id), words)) as frames:
                with traffic.uplink.exchanging():
                    async for frame in frames:
                        for message in messages_of(frame):
                            yield message
                        count_sent(frame, traffic)

    async def Beat(self, request: averaging_pb2.RoundBeat, context: Any) -> averaging_pb2.RoundBeat:
        async with self._door.answering(context) as caller:
            return convert.beat_to(self._handler.beat(caller, convert.beat_from(request)))

    async def Abort(self, request: averaging_pb2.AbortRequest, context: Any) -> averaging_pb2.AbortReply:
        caller = await self._door.caller(context)
        left_out, reason = PeerId(request.left_out[: convert.MAX_PEER_CHARS]), request.reason[:200]
        self._handler.abort(caller, AverageId(request.average_id), left_out, reason)
        await self._door.slow_down(caller)
        return averaging_pb2.AbortReply()

    async def GetAverage(
        self, requests: AsyncIterator[averaging_pb2.AverageRequest], context: Any
    ) -> AsyncIterator[averaging_pb2.AverageMessage]:
        async with self._door.answering(context) as caller:
            request = await self._door.first_of_run(requests)
            section, uplink = request.section if request.HasField("section") else None, self._door.traffic.uplink
            with self._sections.by(caller) if section is not None else contextlib.nullcontext() as slot:
                average, file, is_urgent = await self._handler.get_average(request.stage, request.step, section)
                with Lending(file, self._door.patience_s) as lending:
                    del file
                    if slot is not None:
                        slot.lending = lending
                    yield averaging_pb2.AverageMessage(header=rosters.average_to(average))
                    while (chunk := await lending.next(requests)) is not None:
                        if is_urgent:
                            uplink.sends(len(chunk))
                        else:
                            await uplink.turn(len(chunk))
                        lending.leaves_by(uplink.empty_at_s)
                        yield averaging_pb2.AverageMessage(chunk=chunk)
                        self._door.traffic.gave("averages", PeerRole.STAGE_PEER, len(chunk))

    async def GetTied(self, request: averaging_pb2.TiedRequest, context: Any) -> AsyncIterator[averaging_pb2.TiedMessage]:
        async with self._door.answering(context, request.run) as caller:
            checksum, file = await self._handler.get_tied(request.step, AverageId(request.id))
            num_bytes = file.num_bytes
            with Delivery(file.chunks(), self._door.patience_s) as delivery:
                del file
                yield averaging_pb2.TiedMessage(header=averaging_pb2.TiedHeader(num_bytes=num_bytes, blake3=checksum))
                for chunk in delivery:
                    yield averaging_pb2.TiedMessage(chunk=bytes(chunk))
            await self._door.check_taken(context, caller, delivery)
        self._door.traffic.gave("averages", PeerRole.STAGE_PEER, num_bytes)

    async def GetMoves(self, request: averaging_pb2.MovesRequest, context: Any) -> averaging_pb2.MovesReply:
        async with self._door.answering(context, request.run) as caller:
            told = await self._handler.get_moves(request.incarnation, request.first)
        await self._door.slow_down(caller)
        self._door.traffic.sent("moves", PeerRole.STAGE_PEER, len(told.lines))
        return averaging_pb2.MovesReply(incarnation=told.incarnation, first=told.first, lines=told.lines)


async def _words(first: averaging_pb2.Verified, messages: AsyncIterator[averaging_pb2.Verified]) -> AsyncGenerator[Verified]:
    yield convert.verified_from(first)
    async for message in messages:
        yield convert.verified_from(message)


class StateServicer(Servicer[StateHandler], state_pb2_grpc.StateServicer):
    register = staticmethod(state_pb2_grpc.add_StateServicer_to_server)

    async def GetState(self, requests: AsyncIterator[state_pb2.StateRequest], context: Any) -> AsyncIterator[state_pb2.StateMessage]:
        async with self._door.answering(context) as caller:
            request = await self._door.first_of_run(requests)
            wanted = StateRequest(stage=request.stage, snapshot=request.snapshot, step=request.step, tied_only=request.tied_only)
            uplink = self._door.traffic.uplink
            with uplink.receiving(caller):
                snapshot, lending = await self._handler.snapshot(caller, wanted)
                with lending:
                    yield state_pb2.StateMessage(header=convert.snapshot_to(snapshot))
                    while (chunk := await lending.next(requests)) is not None:
                        await uplink.turn(len(chunk), caller, lending.left_s)
                        yield state_pb2.StateMessage(chunk=chunk)
                        self._door.traffic.gave("state", PeerRole.RECIPIENT, len(chunk))

    async def GetSketch(self, request: state_pb2.SketchRequest, context: Any) -> state_pb2.SketchReply:
        async with self._door.answering(context, request.run) as caller:
            if len(request.seed) != SKETCH_SEED_BYTES:
                raise BadMessageError("a sketch is asked for under a damaged seed")
            told = await self._handler.sketch(caller, request.stage, request.seed, request.previous)
        await self._door.slow_down(caller)
        return state_pb2.SketchReply(step=told.step, sums=told.sums)
