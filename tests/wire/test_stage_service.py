"""Calls that break a rule are refused with their documented status and counted, and the daemon serves on."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from peerd.config.codec import parse_codec
from peerd.config.manifest import MAX_BOUNDARY_BYTES, MAX_MICROBATCHES_PER_STEP
from peerd.errors import BusyError, WrongStateError
from peerd.generated import (
    stage_pb2,
    stage_pb2_grpc,
)
from peerd.link.traffic import Way
from peerd.policy.route.compressing import FEWEST_RATES
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.microbatches import forward_backward
from peerd.stage.results import BackwardResult, HeldMicrobatch
from peerd.stage.state import StageState
from peerd.swarm.signed import sign_record
from peerd.table.record import PeerRecord, RawRecord
from peerd.wire import convert
from peerd.wire.clients import StageClient
from peerd.wire.messages import Call, CallResult
from peerd.wire.swarm_client import SwarmClient
from peerd.wire.tensors import decode, encode
from tests.wire.callee import ALL, BAD, GONE, MANIFEST, PATIENCE_S, ROWS, RUN, STATE, Callee, assert_refused, drain, new_identity

CPU = torch.device("cpu")
OVERFLOWED = grpc.StatusCode.OUT_OF_RANGE


def header_of(call: Call, records: Sequence[RawRecord] = (), **changes: Any) -> stage_pb2.CallMessage:
    header = convert.call_to(call, RUN, records)
    for name, value in changes.items():
        setattr(header, name, value)
    return stage_pb2.CallMessage(header=header)


def tensor_messages(call: Call) -> list[stage_pb2.CallMessage]:
    return [stage_pb2.CallMessage(chunk=bytes(chunk)) for chunk in (*call.inputs.chunks, *call.labels.chunks)]


def sent(call: Call) -> list[stage_pb2.CallMessage]:
    return [header_of(call), *tensor_messages(call)]


def chunk_of(num_bytes: int) -> stage_pb2.CallMessage:
    return stage_pb2.CallMessage(chunk=bytes(num_bytes))


async def backpropagate(callee: Callee, *messages: stage_pb2.CallMessage) -> None:
    """Send the first message, and the others once the call is accepted; AioRpcError when it is refused."""
    stub = await callee.served.stub(stage_pb2_grpc.StageStub, callee.caller.peer)
    rpc = stub.Backpropagate()
    for message in messages[:1]:
        await rpc.write(message)
    if not messages[1:]:
        await rpc.done_writing()
    while (reply := await rpc.read()) is not grpc.aio.EOF:
        if reply.WhichOneof("kind") == "accepted":
            for message in messages[1:]:
                await rpc.write(message)
            await rpc.done_writing()
    if (code := await rpc.code()) is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(code, await rpc.initial_metadata(), await rpc.trailing_metadata(), await rpc.details())


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"stage": 0}, STATE, "this peer serves stage 1"),
        ({"step": 1}, STATE, "this peer is at step 0"),
        ({"step": 1 << 60}, STATE, "this peer is at step 0"),
        ({"index": MANIFEST.train.microbatches_per_step}, BAD, "microbatch 3 of a step of 3"),
        ({"index": MAX_MICROBATCHES_PER_STEP}, BAD, "out of range"),
        ({"call_id": b""}, BAD, "16 bytes"),
        ({"inputs": encode(torch.zeros(*ROWS, 33))}, BAD, "is due"),
        ({"inputs": encode(torch.zeros(*ROWS, 32, dtype=torch.int32))}, BAD, "is due"),
        ({"labels": encode(torch.zeros(*ROWS))}, BAD, "is due"),
        ({"inputs": encode(torch.zeros(*ROWS, 32), parse_codec("int8"))}, BAD, "encoded as int8 where none is due"),
        ({"labels": encode(torch.zeros((2, 2), dtype=torch.int32))}, BAD, "is due"),
        ({"labels": encode(torch.full(ROWS, 256, dtype=torch.int32))}, BAD, "vocabulary"),
        ({"labels": encode(torch.full(ROWS, -1, dtype=torch.int32))}, BAD, "vocabulary"),
        ({"inputs": encode(torch.full((*ROWS, 32), math.nan))}, OVERFLOWED, "not finite"),
        ({"inputs": encode(torch.full((*ROWS, 32), math.inf))}, OVERFLOWED, "not finite"),
    ],
)
async def test_a_call_that_breaks_a_rule_is_refused(callee: Callee, changes: dict[str, Any], status: grpc.StatusCode, words: str) -> None:
    call = callee.call(**changes)
    await assert_refused(callee, backpropagate(callee, header_of(call), *tensor_messages(call)), status, words)
    assert callee.service.counters.accumulated == 1  # the sound one's


async def test_a_third_partys_broken_records_cost_a_call_and_its_caller_nothing(callee: Callee) -> None:
    """The caller may have passed on what another peer made."""
    forged = sign_record(PeerRecord(peer=new_identity().peer, incarnation=1, version=1), callee.caller, RUN).raw
    sound = sign_record(PeerRecord(peer=callee.caller.peer, incarnation=1, version=1), callee.caller, RUN).raw
    call = callee.call()
    await backpropagate(callee, header_of(call, [forged, (b"junk", b""), sound]), *tensor_messages(call))
    assert callee.service.counters.accumulated == 1
    assert callee.membership.find(callee.caller.peer) is not None
    assert (callee.membership.messages_refused, callee.door.refused, callee.door.bans.until_s) == (2, 0, {})


async def test_a_callers_own_broken_record_is_its_own_fault(callee: Callee) -> None:
    await assert_refused(callee, backpropagate(callee, header_of(callee.call(), [callee.forged()])), BAD, "not signed by it")


async def test_tensors_are_counted_by_what_they_are_their_codec_the_peers_role_and_direction(callee: Callee) -> None:
    links = callee.links()
    await StageClient(links, RUN).backpropagate(callee.caller.peer, callee.call(), (), PATIENCE_S, lambda _stage, _peer: None)
    labels = 4 * ROWS[0] * ROWS[1]
    size = labels * MANIFEST.decoder.d_model
    assert callee.door.traffic.tensors == {
        ("activations", "none", "previous_stage", "received"): size,
        ("tokens", "none", "previous_stage", "received"): labels,
        ("activation_gradients", "none", "previous_stage", "sent"): size,
    }
    assert links.traffic.tensors == {
        ("activations", "none", "next_stage", "sent"): size,
        ("tokens", "none", "next_stage", "sent"): labels,
        ("activation_gradients", "none", "next_stage", "received"): size,
    }


async def test_a_reply_tells_how_fast_tensors_came_in_how_long_they_were_held_and_how_many_may_be(callee: Callee) -> None:
    links, peer = callee.links(), callee.caller.peer
    client, calls = StageClient(links, RUN), [replace(callee.call(), call_id=bytes([number] * 16)) for number in range(FEWEST_RATES)]
    results = [await client.backpropagate(peer, call, (), PATIENCE_S, lambda _stage, _peer: None) for call in calls]
    result = results[0]  # the others are of a microbatch that is done
    assert all((rate or 0) > 0 for rate in links.traffic.rates(peer))
    assert links.traffic.rates(peer) == links.traffic.rates(peer, Way.TUNNEL) != links.traffic.rates(peer, Way.DIRECT)
    assert result.held_s > 0
    assert result.slots == MANIFEST.slots


async def average(callee: Callee) -> None:
    """All microbatches of step 0 are held here, and summed alone."""
    record = callee.state.record
    for index in range(MANIFEST.train.microbatches_per_step):
        await send(callee, callee.call(index=index))
    mine = RosterEntry(record.peer, record.incarnation, record.ledger_no, ALL)
    roster = Roster(record.stage, record.step, 0, record.peer, (mine,))
    _, total = callee.state.open_round(roster)
    assert total is not None
    callee.state.take_average(roster, total)


async def send(callee: Callee, call: Call) -> CallResult:
    return await StageClient(callee.links(), RUN).backpropagate(callee.caller.peer, call, (), PATIENCE_S, lambda _stage, _peer: None)


async def test_a_microbatch_of_the_step_that_my_average_leads_to_waits_for_it_and_counts_for_it(
    callee: Callee, monkeypatch: pytest.MonkeyPatch
) -> None:
    await average(callee)
    received, committed, waited_s = asyncio.Event(), asyncio.Event(), 0.0
    monkeypatch.setattr("peerd.stage.calls.time", SimpleNamespace(monotonic=lambda: time.monotonic() + waited_s))

    async def changed(timeout_s: float) -> None:
        received.set()
        await committed.wait()

    callee.host.wait = changed
    early = asyncio.ensure_future(send(callee, callee.call(step=1, index=0)))
    await received.wait()
    assert callee.service.queue == 1
    assert callee.state.record.step == 0
    callee.state.commit()
    waited_s = 1000.0
    committed.set()
    found = await early
    assert (callee.state.record.step, callee.state.record.done) == (1, 0b1)
    later = await send(callee, callee.call(step=1, index=1))
    assert found.gradient is not None
    assert later.gradient is not None
    assert found.gradient.chunks == later.gradient.chunks, "computed with the same parameters"
    assert found.held_s > waited_s > later.held_s > 0, "its wait is no part of the way"


@pytest.mark.parametrize("loses", ["its average", "its patience"])
async def test_a_microbatch_does_not_wait_for_a_step_that_does_not_begin(
    callee: Callee, loses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of the step under way may need its slot (hole 17)."""
    monkeypatch.setattr("peerd.stage.calls.MOST_EARLY_S", 0.0 if loses == "its patience" else 1000.0)
    await average(callee)

    async def changed(timeout_s: float) -> None:
        if loses == "its average":
            callee.state.begin_joining()
        await asyncio.sleep(0.01)

    callee.host.wait = changed
    with pytest.raises(WrongStateError, match="this peer is still at step 0"):
        await send(callee, callee.call(step=1))
    assert callee.service.queue == 0


async def test_a_microbatch_waits_for_a_step_that_is_being_made_however_long_that_takes(
    callee: Callee, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerd.stage.calls.MOST_EARLY_S", 0.0)
    await average(callee)
    looks = 0

    async def changed(timeout_s: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 20:
            callee.state.commit()
        await asyncio.sleep(0)

    callee.host.wait = changed
    callee.host.is_committing = True
    await send(callee, callee.call(step=1))
    assert (callee.state.record.step, callee.state.record.done) == (1, 0b1)


async def test_a_call_of_another_run_is_refused(callee: Callee) -> None:
    await assert_refused(callee, backpropagate(callee, header_of(callee.call(), run="b" * 32)), STATE, "this peer serves run")


async def test_a_call_without_a_header_is_refused(callee: Callee) -> None:
    await assert_refused(callee, backpropagate(callee, stage_pb2.CallMessage(chunk=b"junk")), BAD, "without a header")


async def test_a_call_without_anything_is_one_that_was_given_up(callee: Callee) -> None:
    await assert_refused(callee, backpropagate(callee), GONE, "ended before its first message")


async def test_a_tensor_larger_than_any_may_be_is_refused_before_its_bytes_come(callee: Callee) -> None:
    message = header_of(callee.call())
    message.header.inputs.CopyFrom(stage_pb2.TensorHeader(shape=[MAX_BOUNDARY_BYTES], dtype="float32", num_bytes=4 * MAX_BOUNDARY_BYTES))
    await assert_refused(callee, backpropagate(callee, message), BAD, "dimensions")


@pytest.mark.parametrize("change", ["too many", "empty"])
async def test_bytes_that_do_not_add_up_are_refused(callee: Callee, change: str) -> None:
    call = callee.call()
    sound = tensor_messages(call)
    odd = {"too many": [*sound[:-1], chunk_of(4096)], "empty": [chunk_of(0)]}
    await assert_refused(callee, backpropagate(callee, header_of(call), *odd[change]), BAD, "do not add up")


async def test_one_that_is_leaving_takes_nothing_new_and_is_not_taken_for_dead(callee: Callee) -> None:
    callee.service.leaving = True
    call = callee.call()
    with pytest.raises((WrongStateError, BusyError), match=r"this peer is leaving|refused the call"):  # the reply may be cut short
        await StageClient(callee.links(), RUN).backpropagate(callee.caller.peer, call, (), PATIENCE_S, lambda _stage, _peer: None)


async def test_one_that_pauses_gives_back_what_it_has_not_begun_and_finishes_what_it_has(
    callee: Callee, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(state: StageState, batch: HeldMicrobatch, *let_through: Any) -> BackwardResult:
        begun.set()
        go_on.wait(20)
        return forward_backward(state, batch, *let_through)

    monkeypatch.setattr("peerd.stage.jobs.forward_backward", slowly)
    stub = await callee.served.stub(stage_pb2_grpc.StageStub, callee.caller.peer)
    first = stub.Backpropagate(iter(sent(callee.call(index=0))))
    assert await asyncio.to_thread(begun.wait, 20)
    second = stub.Backpropagate(iter(sent(callee.call(index=1))))
    assert (await second.read()).WhichOneof("kind") == "accepted"
    callee.service.handing_back = True
    go_on.set()
    assert (await second.code(), await second.details()) == (STATE, "this peer is leaving")
    await drain(first)
    assert callee.service.counters.accumulated == 1
    assert callee.service.queue == callee.door.refused == 0


async def test_a_call_twice_at_once_is_refused_and_the_first_is_served(callee: Callee) -> None:
    call, go_on = callee.call(), asyncio.Event()

    async def slowly() -> AsyncIterator[stage_pb2.CallMessage]:
        yield header_of(call)
        await go_on.wait()
        for message in tensor_messages(call):
            yield message

    stub = await callee.served.stub(stage_pb2_grpc.StageStub, callee.caller.peer)
    first = stub.Backpropagate(slowly())
    replies = first.__aiter__()
    assert (await anext(replies)).WhichOneof("kind") == "accepted"
    with pytest.raises(grpc.aio.AioRpcError, match="under way"):
        await drain(backpropagate(callee, header_of(call)))
    go_on.set()
    assert "done" in [reply.WhichOneof("kind") async for reply in replies]
    assert callee.state.record.done == 0b1


async def test_whoever_sent_a_broken_message_is_not_listened_to_for_a_while(callee: Callee) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await drain(backpropagate(callee, stage_pb2.CallMessage(chunk=b"junk")))
    with pytest.raises(BusyError, match="sent a broken message"):
        await SwarmClient(callee.links(), RUN).gossip(callee.caller.peer, [], PATIENCE_S)
    await callee.assert_lives()


async def test_a_refusal_while_tensors_are_still_being_sent_is_not_taken_for_a_dead_peer(callee: Callee) -> None:
    """gRPC may lose the callee's status then; the caller must not ban, replay and re-dial because of it."""
    client = StageClient(callee.links(), RUN)
    large = callee.call(stage=0, inputs=encode(torch.zeros(1 << 21)))
    for _ in range(20):
        with pytest.raises((WrongStateError, BusyError)):
            await client.backpropagate(callee.caller.peer, large, (), PATIENCE_S, lambda _stage, _peer: None)
    await callee.assert_lives()


async def test_a_gradient_asked_for_again_is_given_again_and_not_computed(callee: Callee, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replay for an earlier stage asks of those that hold their part still."""
    client, computed = StageClient(callee.links(), RUN), []

    def counted(state: StageState, batch: HeldMicrobatch, *let_through: Any) -> BackwardResult:
        computed.append(batch.ticket.index)
        return forward_backward(state, batch, *let_through)

    monkeypatch.setattr("peerd.stage.jobs.forward_backward", counted)

    async def sent_again(accumulate: set[int], **changes: Any) -> CallResult:
        call = callee.call(accumulate=frozenset(accumulate), **changes)
        return await client.backpropagate(callee.caller.peer, call, (), PATIENCE_S, lambda _stage, _peer: None)

    def bytes_of(result: CallResult) -> bytes:
        assert result.gradient is not None
        return b"".join(bytes(chunk) for chunk in result.gradient.chunks)

    first = bytes_of(await sent_again({0, 1}))
    again = await sent_again({0})
    assert bytes_of(again) == first
    assert again.records == callee.host.own_records()
    assert computed == [0]
    assert (callee.service.counters.accumulated, callee.service.counters.suppressed) == (1, 1)
    await sent_again({0}, index=1)
    assert computed == [0, 1], "of another microbatch nothing is known"
    other = encode(torch.zeros((*ROWS, MANIFEST.decoder.d_model)))
    assert bytes_of(await sent_again({0}, index=1, inputs=other)) != first
    assert computed == [0, 1, 1], "from other activations another gradient comes"
    computed.pop()
    slots, callee.service.slots = callee.service.slots, 0
    assert bytes_of(await sent_again({0})) == first, "what is known takes no slot"
    for changes in ({"inputs": other}, {"index": 2}):
        with pytest.raises(BusyError):
            await sent_again({0}, **changes)
    monkeypatch.setattr(callee.service, "_held", {bytes([number]): None for number in range(2)})
    with pytest.raises(BusyError, match="as many more microbatches as there are slots"):
        await sent_again({0})
    monkeypatch.setattr(callee.service, "_held", {})
    callee.service.slots = slots
    await sent_again({0, 1})
    assert computed == [0, 1, 0], "this stage is asked to add it, too: that is for its ledger to refuse"


async def test_an_evaluation_gives_the_loss_and_leaves_ledger_and_accumulator_alone(callee: Callee) -> None:
    client = StageClient(callee.links(), RUN)
    call = callee.call(evaluation=True, accumulate=frozenset())
    result = await client.backpropagate(callee.caller.peer, call, (), PATIENCE_S, lambda _stage, _peer: None)
    with torch.no_grad():
        expected = callee.state.holdings.module(decode(call.inputs, CPU), decode(call.labels, CPU).long())
    assert result.gradient is None
    assert result.loss == float(expected)
    assert callee.state.record.done == 0
    assert not callee.state.accumulator.flat.any()
    await callee.assert_lives()


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"step": 1}, STATE, "this peer does not hold the parameters of step 1"),
        ({"index": MANIFEST.train.evaluation_microbatches}, BAD, "microbatch 16 of an evaluation of 16"),
        ({"stage": 0}, STATE, "this peer serves stage 1"),
    ],
)
async def test_an_evaluation_that_cannot_be_is_refused(
    callee: Callee, changes: dict[str, Any], status: grpc.StatusCode, words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await backpropagate(callee, header_of(callee.call(evaluation=True, **changes)))
    assert refusal.value.code() is status
    assert words in (refusal.value.details() or "")
    await callee.assert_lives()
