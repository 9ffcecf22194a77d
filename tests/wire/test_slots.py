"""Slots: full ones send callers away, and none waits for a caller that sends nothing, or a byte now and then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from peerd.generated import stage_pb2, stage_pb2_grpc
from peerd.wire.budgets import LEAST_ARRIVING
from peerd.wire.clients import StageClient
from tests.wire.callee import BUSY, GONE, MANIFEST, PATIENCE_S, RUN, Callee, assert_refused, drain, new_identity
from tests.wire.test_stage_service import chunk_of, header_of


async def test_more_calls_than_slots_are_told_to_come_later(callee: Callee) -> None:
    silence = asyncio.Event()

    async def sent() -> AsyncIterator[stage_pb2.CallMessage]:
        yield header_of(callee.call())
        await silence.wait()

    stub = await callee.served.stub(stage_pb2_grpc.StageStub, callee.caller.peer)
    stubs = [await callee.served.stub(stage_pb2_grpc.StageStub, new_identity().peer) for _ in range(MANIFEST.slots // LEAST_ARRIVING)]
    waiting = [each.Backpropagate(sent()) for each in stubs for _ in range(LEAST_ARRIVING)]
    for rpc in waiting:
        assert (await rpc.read()).WhichOneof("kind") == "accepted"
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await drain(stub.Backpropagate(sent()))
    assert refusal.value.code() is BUSY
    for rpc in waiting:
        rpc.cancel()
    silence.set()


async def test_a_caller_whose_tensors_trickle_leaves_slots_to_others(callee: Callee) -> None:
    """It opens more calls than there are slots, and another caller's microbatch is served all the same."""
    silence = asyncio.Event()

    async def sent() -> AsyncIterator[stage_pb2.CallMessage]:
        yield header_of(callee.call())
        yield chunk_of(1)
        await silence.wait()

    stub = await callee.served.stub(stage_pb2_grpc.StageStub, callee.caller.peer)
    trickling = [stub.Backpropagate(sent()) for _ in range(2 * MANIFEST.slots)]
    codes = [asyncio.ensure_future(rpc.code()) for rpc in trickling]
    while sum(code.done() for code in codes) < 2 * MANIFEST.slots - LEAST_ARRIVING:
        await asyncio.wait([code for code in codes if not code.done()], return_when=asyncio.FIRST_COMPLETED, timeout=20)
    assert {await code for code in codes if code.done()} == {BUSY}
    other = new_identity()
    result = await StageClient(callee.links(other), RUN).backpropagate(
        other.peer, callee.call(index=1), (), PATIENCE_S, lambda _stage, _peer: None
    )
    assert result.gradient is not None
    assert callee.service.queue == LEAST_ARRIVING
    assert callee.service.num_here() == 0
    for rpc in trickling:
        rpc.cancel()
    silence.set()


async def test_a_caller_that_falls_silent_gets_its_slot_taken_away(callee: Callee) -> None:
    stub = await callee.served.stub(stage_pb2_grpc.StageStub, callee.caller.peer)
    silence = asyncio.Event()

    async def sent() -> AsyncIterator[stage_pb2.CallMessage]:
        yield header_of(callee.call())
        await silence.wait()

    await assert_refused(callee, stub.Backpropagate(sent()), GONE, "no message for")
    silence.set()
