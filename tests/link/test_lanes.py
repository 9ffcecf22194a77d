"""Turns on a link: one at a time, in order, and none is left waiting behind one that broke."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from peerd.errors import PeerGoneError, UnheardError
from peerd.generated import stage_pb2, stage_pb2_grpc
from peerd.link.lanes import Lanes, Turn
from peerd.link.traffic import Traffic
from peerd.table.record import PeerId, RawRecord
from peerd.wire import convert
from peerd.wire.clients import StageClient
from peerd.wire.door import Door
from peerd.wire.handlers import Progress, Receive
from peerd.wire.messages import Call, CallResult
from peerd.wire.services import StageServicer
from peerd.wire.tensors import decode, encode
from tests.link.local_peers import serving
from tests.wire.callee import RUN

PATIENCE_S = 10.0
LARGE_VALUES = 8 << 20


async def test_who_began_first_sends_first_and_other_ends_do_not_wait() -> None:
    lanes, sent = Lanes(), list[int]()

    async def send(number: int, end: str) -> Turn:
        turn = lanes.turn(end)
        await turn.begin()
        sent.append(number)
        return turn

    first = await send(0, "a")
    waiting = [asyncio.ensure_future(send(number, "a")) for number in (1, 2)]
    other = await send(3, "b")
    assert sent == [0, 3]
    first.end()
    first.end()  # without effect: it is the next one's turn
    second = await waiting[0]
    assert not waiting[1].done()
    second.end()
    (await waiting[1]).end()
    other.end()
    assert sent == [0, 3, 1, 2]
    assert len(lanes) == 0


async def test_behind_one_that_broke_nobody_waits_for_the_same() -> None:
    lanes = Lanes()
    turn = lanes.turn("a")
    await turn.begin()
    waiting = [asyncio.ensure_future(lanes.turn("a").begin()) for _ in range(3)]
    await asyncio.sleep(0)
    turn.end(broken=True)
    for each in waiting:
        with pytest.raises(UnheardError):
            await each
    assert len(lanes) == 0
    afresh = lanes.turn("a")
    await afresh.begin()
    afresh.end()


async def test_a_turn_ends_with_whatever_happens_in_it() -> None:
    lanes = Lanes()
    for error in (ValueError(), PeerGoneError("gone")):
        with pytest.raises(type(error)):
            async with lanes.turn("a"):
                raise error
    assert len(lanes) == 0


async def test_who_gives_up_waiting_leaves_no_trace() -> None:
    lanes = Lanes()
    turn = lanes.turn("a")
    await turn.begin()
    waiting = asyncio.ensure_future(lanes.turn("a").begin())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    turn.end()
    assert len(lanes) == 0


class SlowReader:
    """A stage handler that takes a call's tensors only when it is told to, and gives back what came."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.reads: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.news = asyncio.Condition()

    async def backpropagate(self, caller: PeerId, call: Call, receive: Receive, progress: Progress) -> CallResult:
        async with self.news:
            self.begun.append(call.index)
            self.news.notify_all()
        await self.reads[call.index].wait()
        chunks = await receive()
        return CallResult(gradient=call.inputs.with_chunks(tuple(chunks[:-1])), downstream_s=0.0, records=())

    def absorb(self, caller: PeerId, records: Sequence[RawRecord]) -> None: ...

    def cancel(self, caller: PeerId, call_id: bytes) -> None: ...

    async def until(self, *begun: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.news:
            await self.news.wait_for(lambda: self.begun == list(begun))


def large_call(index: int) -> Call:
    """More than a link takes before anybody reads at its other end."""
    inputs, labels = encode(torch.full((LARGE_VALUES,), float(index))), encode(torch.zeros(2, dtype=torch.int32))
    return Call(call_id=bytes([index] * 16), stage=1, step=0, index=index, accumulate=frozenset({0, 1}), inputs=inputs, labels=labels)


async def test_a_microbatch_leaves_when_the_one_before_is_out_or_given_up() -> None:
    handler = SlowReader()
    async with serving([StageServicer(Door(RUN, PATIENCE_S, Traffic()), handler)]) as served:
        client = StageClient(served.links_of("caller"), RUN)

        def send(index: int) -> asyncio.Task[CallResult]:
            callee = PeerId("callee")
            return asyncio.ensure_future(client.backpropagate(callee, large_call(index), (), PATIENCE_S, lambda _stage, _peer: None))

        stuck = send(0)
        await handler.until(0)
        waiting = [send(1), send(2)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.wait(waiting)
        assert handler.begun == [0]
        stuck.cancel()
        await handler.until(0, 1)
        handler.reads[1].set()
        await handler.until(0, 1, 2)
        handler.reads[2].set()
        for index, each in enumerate(waiting, start=1):
            gradient = (await each).gradient
            assert gradient is not None
            assert decode(gradient, torch.device("cpu"))[-1] == index


async def test_a_gradient_goes_back_when_the_one_before_is_out_or_given_up() -> None:
    handler = SlowReader()
    for index in (0, 1):
        handler.reads[index].set()
    async with serving([StageServicer(Door(RUN, PATIENCE_S, Traffic()), handler)]) as served:
        stub = await served.stub(stage_pb2_grpc.StageStub, "caller")

        def messages(index: int) -> Iterator[stage_pb2.CallMessage]:
            call = large_call(index)
            tensors = (*call.inputs.chunks, *call.labels.chunks)
            yield stage_pb2.CallMessage(header=convert.call_to(call, RUN, ()))
            for chunk in tensors:
                yield stage_pb2.CallMessage(chunk=bytes(chunk))

        async def until_done(rpc: Any) -> list[str]:
            """What is said before it: a call whose gradient has no turn yet is still worked on."""
            said: list[str] = []
            while (reply := await rpc.read()).WhichOneof("kind") != "done":
                said.append(reply.WhichOneof("kind"))
            return said

        unread = stub.Backpropagate(messages(0))
        async with asyncio.timeout(PATIENCE_S):
            await until_done(unread)
        waiting = stub.Backpropagate(messages(1))
        done = asyncio.ensure_future(until_done(waiting))
        await handler.until(0, 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(PATIENCE_S / 4 + 0.5):
                await asyncio.shield(done)
        unread.cancel()
        async with asyncio.timeout(PATIENCE_S):
            assert "working" in await done
        waiting.cancel()


@dataclass
class OneByOne:
    """Ways around the tunnel of which the first one there is leads on, as when a path is given up for another."""

    channels: list[Any]

    def channel(self, _peer: PeerId) -> Any:
        return self.channels[0]

    def open_channel(self, peer: PeerId) -> Any:
        return self.channel(peer)

    def is_local(self, _peer: PeerId) -> bool:
        return False

    def is_wide(self, _peer: PeerId) -> bool:
        return False

    async def until_other_way(self, _peer: PeerId) -> None:
        await asyncio.Event().wait()

    def leads_to(self, _peer: PeerId) -> bool:
        return True

    def drop(self, _peer: PeerId) -> None: ...

    def cut(self, _peer: PeerId) -> None: ...

    def cut_all(self) -> None: ...

    async def close(self) -> None: ...


async def test_who_waited_for_its_turn_takes_the_connection_that_there_is_then() -> None:
    handler, callee = SlowReader(), PeerId("callee")
    async with serving([StageServicer(Door(RUN, PATIENCE_S, Traffic()), handler)]) as served:
        links = served.links_of("caller")
        paths = OneByOne([await served.links_of("caller").channel(callee) for _ in range(2)])
        links.direct = paths
        client = StageClient(links, RUN)
        first, second = (
            asyncio.ensure_future(client.backpropagate(callee, large_call(index), (), PATIENCE_S, lambda _stage, _peer: None))
            for index in (0, 1)
        )
        await handler.until(0)
        closing = asyncio.ensure_future(paths.channels.pop(0).close(PATIENCE_S))
        handler.reads[0].set()
        assert (await first).gradient is not None
        await closing
        await handler.until(0, 1)
        handler.reads[1].set()
        assert (await second).gradient is not None
