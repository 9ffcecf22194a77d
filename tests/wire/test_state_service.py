"""Downloads, and what the clients make of a refusal."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import grpc
import pytest
from blake3 import blake3

from peerd.errors import BadMessageError, BusyError, WrongStateError
from peerd.generated import (
    averaging_pb2,
    averaging_pb2_grpc,
    state_pb2,
    state_pb2_grpc,
    swarm_pb2,
    swarm_pb2_grpc,
)
from peerd.link.links import CHUNK_BYTES
from peerd.link.traffic import Traffic
from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId, Lineage, PeerId, RunId
from peerd.wire.chunks import CutFile, state_chunk_bytes
from peerd.wire.clients import AveragingClient, StageClient
from peerd.wire.door import Door
from peerd.wire.messages import SKETCH_SEED_BYTES, Average, Beat, StateRequest
from peerd.wire.services import AveragingServicer
from peerd.wire.state_client import StateClient
from peerd.wire.swarm_client import SwarmClient
from tests.link.local_peers import serving
from tests.wire.callee import BAD, DOOR_PATIENCE_S, PATIENCE_S, RUN, STATE, Callee, assert_refused, drain, new_identity
from tests.wire.lent import whole_of


async def test_state_of_another_stage_and_averages_that_are_not_held_are_refused(callee: Callee) -> None:
    state = await callee.served.stub(state_pb2_grpc.StateStub, callee.caller.peer)
    await assert_refused(callee, state.GetState(iter([state_pb2.StateRequest(run=RUN, stage=0)])), STATE, "stage 0")
    averaging = await callee.served.stub(averaging_pb2_grpc.AveragingStub, callee.caller.peer)
    with pytest.raises(grpc.aio.AioRpcError, match="this peer holds no average"):
        await drain(averaging.GetAverage(iter([averaging_pb2.AverageRequest(run=RUN, stage=1, step=9)])))


async def test_two_peers_with_one_state_have_one_sketch_under_each_seed_and_unlike_ones_under_unlike_seeds(callee: Callee) -> None:
    """A peer that has just made one says that it is busy for a while, so that joiners take a small share of its time."""
    client, told, busy = StateClient(callee.links(), RUN), list[bytes](), 0
    for number in range(2):
        while len(told) <= number:
            try:
                told.append((await client.sketch(callee.caller.peer, 1, bytes([number] * SKETCH_SEED_BYTES), False, PATIENCE_S)).sums)
            except BusyError:
                busy += 1
    assert told[0] != told[1]
    assert len(told[0]) == len(told[1]) > 0
    assert busy


async def test_a_sketch_is_refused_for_another_stage_and_under_a_damaged_seed(callee: Callee) -> None:
    with pytest.raises(WrongStateError, match="no state of stage 0"):
        await StateClient(callee.links(), RUN).sketch(callee.caller.peer, 0, bytes(SKETCH_SEED_BYTES), False, PATIENCE_S)
    while True:
        with pytest.raises((WrongStateError, BusyError)) as raised:
            await StateClient(callee.links(), RUN).sketch(callee.caller.peer, 1, bytes(SKETCH_SEED_BYTES), True, PATIENCE_S)
        if isinstance(raised.value, WrongStateError):
            assert "the step before" in raised.value.message
            break
    stub = await callee.served.stub(state_pb2_grpc.StateStub, callee.caller.peer)
    await assert_refused(callee, stub.GetSketch(state_pb2.SketchRequest(run=RUN, stage=1, seed=b"short")), BAD, "seed")


async def test_a_joiner_asks_for_chunks_by_number_and_gets_them_in_the_order_in_which_it_asked(callee: Callee) -> None:
    links = callee.links()
    async with StateClient(links, RUN).open(callee.caller.peer, StateRequest(stage=1), PATIENCE_S) as opened:
        header = opened.header
        first, last = state_chunk_bytes(header.num_bytes), header.num_bytes % state_chunk_bytes(header.num_bytes)
        numbers = [len(header.chunk_hashes) - 1, *range(len(header.chunk_hashes) - 1)]
        for number in numbers:
            opened.ask(number)
        chunks = {number: await opened.take(last if number == numbers[0] else first) for number in numbers}
        await opened.end()
    assert tuple(blake3(chunks[number]).digest() for number in sorted(chunks)) == header.chunk_hashes
    assert links.traffic.tensors == {("state", "none", "donor", "received"): header.num_bytes}
    assert callee.door.traffic.tensors == {("state", "none", "recipient", "sent"): header.num_bytes}


async def test_a_state_waits_until_what_training_has_sent_is_gone(callee: Callee) -> None:
    traffic = callee.door.traffic
    traffic.line.probes.saw(1e6, 0.1, time.monotonic())
    await traffic.uplink.turn(1 << 20)  # another joiner has just got a chunk
    traffic.uplink.sends(400_000)
    began_s = time.monotonic()
    async with StateClient(callee.links(), RUN).open(callee.caller.peer, StateRequest(stage=1), PATIENCE_S) as opened:
        assert len(await whole_of(opened)) == opened.header.num_bytes
    assert time.monotonic() - began_s > 0.35


async def test_of_two_joiners_that_a_full_line_does_not_carry_together_the_later_one_hears_when_to_come_back(
    callee: Callee, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = 4 * state_chunk_bytes(0)
    for module in ("yielding", "receiving"):
        monkeypatch.setattr(f"peerd.policy.route.{module}.LEAST_BYTES_PER_S", least)
    uplink, put_off = callee.door.traffic.uplink, list[float]()
    callee.door.traffic.line.probes.saw(1e3, 0.1, time.monotonic())
    both = asyncio.Barrier(2)

    async def state() -> bytes:
        joiner, is_first = new_identity(), True
        while True:
            try:
                async with StateClient(callee.links(joiner), RUN).open(joiner.peer, StateRequest(stage=1), PATIENCE_S) as opened:
                    if is_first:
                        await both.wait()
                    is_first = False
                    return await whole_of(opened)
            except BusyError as error:
                put_off.append(error.retry_after_s)
                await asyncio.sleep(error.retry_after_s)

    with uplink.exchanging():
        await uplink.turn(least)  # the next chunk leaves in a second
        assert len({*await asyncio.wait_for(asyncio.gather(state(), state()), 20)}) == 1
    assert put_off
    assert all(0 < pause_s <= 15.0 for pause_s in put_off)


async def test_microbatches_and_their_gradients_count_as_what_training_sends(callee: Callee) -> None:
    links, call = callee.links(), callee.call()
    for traffic in (links.traffic, callee.door.traffic):
        traffic.line.probes.saw(call.inputs.num_bytes / 10.0, 0.1, time.monotonic())
        await traffic.uplink.turn(1 << 20)
    await StageClient(links, RUN).backpropagate(callee.caller.peer, call, (), PATIENCE_S, lambda _stage, _peer: None)
    for traffic in (links.traffic, callee.door.traffic):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(traffic.uplink.turn(1), 0.1)


class OneAverage:
    """Gives an average of some chunks."""

    def __init__(self) -> None:
        self.data = random.Random(1).randbytes(5 * CHUNK_BYTES + 7)

    async def get_average(self, _stage: int, _step: int, _section: int | None) -> tuple[Average, CutFile, bool]:
        file = CutFile((self.data,), chunk_bytes=CHUNK_BYTES)
        roster = Roster(1, 2, 0, PeerId("a"), ())
        return Average(roster, Lineage(0, b"x"), file.num_bytes, AverageId(b"t"), 0.5, file.hashes()), file, False


async def test_an_average_travels_as_a_state_does() -> None:
    giver: Any = OneAverage()
    door = Door(RUN, DOOR_PATIENCE_S, Traffic())
    async with serving([AveragingServicer(door, giver)]) as served:
        links = served.links_of("mate")
        async with AveragingClient(links, RUN).open_average(PeerId("mate"), 1, 2, None, PATIENCE_S) as opened:
            header = opened.header
            assert (header.roster.step, header.lineage, header.tied_sum, header.norm) == (2, Lineage(0, b"x"), b"t", 0.5)
            assert await whole_of(opened) == giver.data
    assert links.traffic.tensors == {("averages", "none", "stage_peer", "received"): len(giver.data)}
    assert door.traffic.tensors == {("averages", "none", "stage_peer", "sent"): len(giver.data)}


@pytest.mark.parametrize("number", [1 << 20, (1 << 64) - 1])
async def test_a_chunk_that_is_not_there_is_a_broken_message(callee: Callee, number: int) -> None:
    stub = await callee.served.stub(state_pb2_grpc.StateStub, callee.caller.peer)
    requests = iter([state_pb2.StateRequest(run=RUN, stage=1), state_pb2.StateRequest(chunk=number)])
    with pytest.raises(grpc.aio.AioRpcError, match="is not one of the file") as refusal:
        await drain(stub.GetState(requests))
    assert refusal.value.code() is BAD


async def test_a_peer_that_is_past_the_snapshot_that_is_named_makes_no_copy_of_another(callee: Callee) -> None:
    named = StateRequest(stage=1, snapshot=bytes(32), step=9)
    with pytest.raises(WrongStateError, match="holds no copy of step 9"):
        async with StateClient(callee.links(), RUN).open(callee.caller.peer, named, PATIENCE_S):
            raise AssertionError("it was opened")


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
