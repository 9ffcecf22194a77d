"""Downloads, and what the clients make of a refusal."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from peerd.errors import BadMessageError, BusyError, WrongStateError
from peerd.generated import (
    averaging_pb2,
    averaging_pb2_grpc,
    state_pb2,
    state_pb2_grpc,
    swarm_pb2,
    swarm_pb2_grpc,
)
from peerd.table.record import AverageId, RunId
from peerd.wire.clients import AveragingClient, StateClient, StateRequest
from peerd.wire.messages import Beat
from peerd.wire.swarm_client import SwarmClient
from tests.wire.callee import PATIENCE_S, RUN, STATE, Callee, assert_refused, drain


async def test_state_of_another_stage_and_averages_that_are_not_held_are_refused(callee: Callee) -> None:
    state = await callee.served.stub(state_pb2_grpc.StateStub, callee.caller.peer)
    await assert_refused(callee, state.GetState(state_pb2.StateRequest(run=RUN, stage=0)), STATE, "stage 0")
    averaging = await callee.served.stub(averaging_pb2_grpc.AveragingStub, callee.caller.peer)
    with pytest.raises(grpc.aio.AioRpcError, match="this peer holds no average"):
        await drain(averaging.GetAverage(averaging_pb2.AverageRequest(run=RUN, stage=1, step=9)))


async def test_a_download_may_begin_anywhere_even_past_its_end(callee: Callee) -> None:
    links = callee.links()
    client = StateClient(links, RUN)
    for first, expected in ((0, 1), (1, 0), ((1 << 64) - 1, 0)):
        header, chunks = await client.get_state(callee.caller.peer, StateRequest(stage=1, first_chunk=first), PATIENCE_S)
        assert len(header.chunk_hashes) == 1
        assert len([chunk async for chunk in chunks]) == expected
    assert links.traffic.tensors == {("state", "none", "donor", "received"): links.traffic.received_bytes}
    assert callee.door.traffic.tensors == {("state", "none", "recipient", "sent"): links.traffic.received_bytes}


async def test_a_call_that_did_not_come_through_the_tunnel_is_refused(callee: Callee) -> None:
    async with grpc.aio.insecure_channel(f"unix:{callee.served.socket}") as channel:
        stub: Any = swarm_pb2_grpc.SwarmStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Describe(swarm_pb2.DescribeRequest())
    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_clients_turn_each_status_into_its_error(callee: Callee) -> None:
    """So that a caller can tell what it may do about it."""
    with pytest.raises(WrongStateError):
        await SwarmClient(callee.links(), RunId("b" * 32)).gossip(callee.caller.peer, [], PATIENCE_S)
    client = AveragingClient(callee.links(), RUN)
    with pytest.raises(WrongStateError):
        await client.beat(callee.caller.peer, Beat(AverageId(bytes(16)), (), (), 0.0), PATIENCE_S)
    with pytest.raises(BadMessageError):
        await SwarmClient(callee.links(), RUN).gossip(callee.caller.peer, [callee.forged()], PATIENCE_S)
    with pytest.raises(BusyError) as banned:
        await SwarmClient(callee.links(), RUN).gossip(callee.caller.peer, [], PATIENCE_S)
    assert 0 < banned.value.retry_after_s <= PATIENCE_S
