"""Broken messages over the real services: each is refused with its documented status, counted, and breaks nothing.

The daemon's own handlers stand behind the services, for a run of two stages of which this one is the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.averaging.log import AverageLog
from peerd.averaging.rounds import Rounds
from peerd.config.manifest import MAX_BOUNDARY_BYTES, MAX_MICROBATCHES_PER_STEP
from peerd.policy.roster import Roster, RosterEntry
from peerd.stage.executor import Executor, Pace, Priority
from peerd.stage.service import StageService
from peerd.stage.snapshots import SnapshotServer
from peerd.stage.state import StageState
from peerd.stage.tensors import encode
from peerd.swarm.identity import Identity
from peerd.swarm.membership import Membership, clock_s
from peerd.swarm.signed import sign_record
from peerd.table.record import AverageId, PeerId, PeerRecord, RawRecord, RunId
from peerd.wire import convert
from peerd.wire.clients import AveragingClient, PartHeader, StageClient, StateClient, StateRequest, SwarmClient
from peerd.wire.generated import averaging_pb2, averaging_pb2_grpc, stage_pb2, stage_pb2_grpc, state_pb2, state_pb2_grpc, swarm_pb2_grpc
from peerd.wire.generated import swarm_pb2
from peerd.wire.links import Traffic
from peerd.wire.services import AveragingServicer, Door, StageServicer, StateServicer, SwarmServicer
from peerd.wire.values import Call, CallResult, Description
from tests.tiny_run import tiny_manifest
from tests.wire.local_peers import Served, serving

RUN = RunId("a" * 32)
BAD, STATE, BUSY, GONE = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
)
PATIENCE_S = 2.0
MANIFEST = tiny_manifest(num_stages=2, accumulate="float64")
ROWS = (MANIFEST.train.microbatch_size, MANIFEST.train.sequence_length)
ALL = (1 << MANIFEST.train.microbatches_per_step) - 1


class Nowhere:
    """The last stage sends nothing on."""

    async def send(self, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        raise AssertionError("there is no later stage")


class Listener:
    """The gossip handler without the gossip: merges what comes."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def gossip(self, caller: PeerId, records: Sequence[RawRecord], want_all: bool) -> Sequence[RawRecord]:
        self._membership.absorb(records)
        return ()

    def describe(self) -> Description:
        return Description((), "", 0.0)


@dataclass(slots=True)
class Callee:
    """The daemon under attack, and a caller that it does not know yet."""

    served: Served
    door: Door
    membership: Membership
    state: StageState
    executor: Executor
    service: StageService
    rounds: Rounds
    caller: Identity

    @property
    def me(self) -> PeerId:
        return self.membership.me

    def links(self, caller: Identity | None = None) -> Any:
        return self.served.links_of((caller or self.caller).peer)

    def call(self, **changes: Any) -> Call:
        chance = torch.Generator().manual_seed(1)
        sound = Call(
            call_id=os.urandom(16),
            stage=1,
            step=0,
            index=0,
            accumulate=frozenset({1}),
            inputs=encode(torch.randn((*ROWS, MANIFEST.model.d_model), generator=chance)),
            labels=encode(torch.randint(0, MANIFEST.model.vocab_size, ROWS, generator=chance, dtype=torch.int32)),
        )
        return replace(sound, **changes)

    async def assert_lives(self) -> None:
        """Somebody else's sound microbatch is served as if nothing had been."""
        other = new_identity()
        result = await StageClient(self.links(other), RUN).backpropagate(
            other.peer, self.call(index=1), (), PATIENCE_S, lambda _stage, _peer: None
        )
        assert result.gradient is not None
        assert self.state.record.done == 0b10
        assert self.service.queue == 0


def new_identity() -> Identity:
    return Identity(Ed25519PrivateKey.generate())


@pytest.fixture
async def callee(tmp_path: Path) -> AsyncIterator[Callee]:
    torch.set_num_threads(1)
    membership, executor = Membership(new_identity(), RUN, ttl_s=30.0), Executor()
    state = StageState(MANIFEST, PeerRecord(peer=membership.me, incarnation=1, stage=1), torch.device("cpu"), membership.live)
    await executor.run(Priority.CONTROL, state.serve)
    membership.own = lambda: state.record
    membership.publish()
    door = Door(RUN, PATIENCE_S, Traffic())
    service = StageService(MANIFEST, state, executor, Nowhere(), Pace())
    service.on_records = lambda _caller, records: membership.absorb(records)
    servicers = [SwarmServicer(door, Listener(membership)), StageServicer(door, service), StateServicer(door, SnapshotServer(state, executor))]
    with contextlib.ExitStack() as stack:
        stack.callback(executor.close)
        async with serving([]) as elsewhere:
            client = AveragingClient(elsewhere.links_of(membership.me), RUN)
            log = AverageLog(tmp_path / "averages", state.accumulator.flat.dtype)
            rounds = Rounds(state, executor, client, log, 0.3, clock_s)
            stack.callback(rounds.shut)
            async with serving([*servicers, AveragingServicer(door, rounds)]) as served:
                yield Callee(served, door, membership, state, executor, service, rounds, new_identity())


async def assert_refused(callee: Callee, rpc: Any, status: grpc.StatusCode, words: str = "") -> None:
    """The status; that a broken message counts as refused and anything else does not; and that the daemon lives on."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await drain(rpc)
    assert refusal.value.code() is status
    assert words in (refusal.value.details() or "")
    assert callee.door.refused == (1 if status is BAD else 0)
    await callee.assert_lives()


async def drain(rpc: Any) -> None:
    async with asyncio.timeout(20):
        if hasattr(rpc, "__aiter__"):
            async for _ in rpc:
                continue
        else:
            await rpc


# Calls


def header_of(call: Call, records: Sequence[RawRecord] = (), **changes: Any) -> stage_pb2.CallMessage:
    header = convert.call_to(call, RUN, records)
    for name, value in changes.items():
        setattr(header, name, value)
    return stage_pb2.CallMessage(header=header)


def tensor_messages(call: Call) -> list[stage_pb2.CallMessage]:
    return [stage_pb2.CallMessage(chunk=chunk) for chunk in (*call.inputs.chunks, *call.labels.chunks)]


async def backpropagate(callee: Callee, *messages: stage_pb2.CallMessage) -> Any:
    stub = await callee.served.stub(stage_pb2_grpc.StageStub, callee.caller.peer)

    async def sent() -> AsyncIterator[stage_pb2.CallMessage]:
        for message in messages:
            yield message

    return stub.Backpropagate(sent())


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"stage": 0}, STATE, "I serve stage 1"),
        ({"step": 1}, STATE, "I am at step 0"),
        ({"step": 1 << 60}, STATE, "I am at step 0"),
        ({"index": MANIFEST.train.microbatches_per_step}, BAD, "microbatch 3 of a step of 3"),
        ({"index": MAX_MICROBATCHES_PER_STEP}, BAD, "out of range"),
        ({"call_id": b""}, BAD, "16 bytes"),
        ({"inputs": encode(torch.zeros(*ROWS, 33))}, BAD, "is due"),
        ({"inputs": encode(torch.zeros(*ROWS, 32, dtype=torch.int32))}, BAD, "is due"),
        ({"labels": encode(torch.zeros(*ROWS))}, BAD, "is due"),
        ({"labels": encode(torch.zeros((2, 2), dtype=torch.int32))}, BAD, "is due"),
        ({"labels": encode(torch.full(ROWS, 256, dtype=torch.int32))}, BAD, "vocabulary"),
        ({"labels": encode(torch.full(ROWS, -1, dtype=torch.int32))}, BAD, "vocabulary"),
        ({"inputs": encode(torch.full((*ROWS, 32), math.nan))}, BAD, "not finite"),
        ({"inputs": encode(torch.full((*ROWS, 32), math.inf))}, BAD, "not finite"),
    ],
)
async def test_a_call_that_breaks_a_rule_is_refused(
    callee: Callee, changes: dict[str, Any], status: grpc.StatusCode, words: str
) -> None:
    call = callee.call(**changes)
    await assert_refused(callee, await backpropagate(callee, header_of(call), *tensor_messages(call)), status, words)
    assert callee.service.counters.accumulated == 1  # the sound one's


async def test_a_call_of_another_run_is_refused(callee: Callee) -> None:
    await assert_refused(callee, await backpropagate(callee, header_of(callee.call(), run="b" * 32)), STATE, "I serve run")


async def test_a_call_without_a_header_is_refused(callee: Callee) -> None:
    await assert_refused(callee, await backpropagate(callee, stage_pb2.CallMessage(chunk=b"junk")), BAD, "without a header")


async def test_a_call_without_anything_is_refused(callee: Callee) -> None:
    await assert_refused(callee, await backpropagate(callee), BAD, "without a header")


async def test_a_tensor_larger_than_any_may_be_is_refused_before_its_bytes_come(callee: Callee) -> None:
    message = header_of(callee.call())
    message.header.inputs.CopyFrom(stage_pb2.TensorHeader(shape=[MAX_BOUNDARY_BYTES], dtype="float32", num_bytes=4 * MAX_BOUNDARY_BYTES))
    await assert_refused(callee, await backpropagate(callee, message), BAD, "dimensions")


@pytest.mark.parametrize("change", ["too few", "too many", "empty"])
async def test_bytes_that_do_not_add_up_are_refused(callee: Callee, change: str) -> None:
    call = callee.call()
    sound = tensor_messages(call)
    chunks = {"too few": sound[:-1], "too many": [*sound[:-1], stage_pb2.CallMessage(chunk=bytes(4096))], "empty": [stage_pb2.CallMessage(chunk=b"")]}
    await assert_refused(callee, await backpropagate(callee, header_of(call), *chunks[change]), BAD, "do not add up")


async def test_a_caller_that_falls_silent_gets_its_slot_taken_away(callee: Callee) -> None:
    stub = await callee.served.stub(stage_pb2_grpc.StageStub, callee.caller.peer)
    silence = asyncio.Event()

    async def sent() -> AsyncIterator[stage_pb2.CallMessage]:
        yield header_of(callee.call())
        await silence.wait()

    await assert_refused(callee, stub.Backpropagate(sent()), GONE, "no word for")
    silence.set()


async def test_more_calls_than_slots_are_told_to_come_later(callee: Callee) -> None:
    silence = asyncio.Event()

    async def sent() -> AsyncIterator[stage_pb2.CallMessage]:
        yield header_of(callee.call())
        await silence.wait()

    stub = await callee.served.stub(stage_pb2_grpc.StageStub, callee.caller.peer)
    slots = 2 * MANIFEST.train.num_stages + 2
    waiting = [stub.Backpropagate(sent()) for _ in range(slots)]
    for rpc in waiting:
        assert (await rpc.read()).WhichOneof("kind") == "accepted"
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await drain(stub.Backpropagate(sent()))
    assert refusal.value.code() is BUSY
    for rpc in waiting:
        rpc.cancel()
    silence.set()


async def test_a_call_twice_at_once_is_refused_and_the_first_is_served(callee: Callee) -> None:
    call, go_on = callee.call(), asyncio.Event()

    async def slowly() -> AsyncIterator[stage_pb2.CallMessage]:
        yield header_of(call)
        await go_on.wait()
        for message in tensor_messages(call):
            yield message

    stub = await callee.served.stub(stage_pb2_grpc.StageStub, callee.caller.peer)
    first = stub.Backpropagate(slowly())
    assert (await first.read()).WhichOneof("kind") == "accepted"
    with pytest.raises(grpc.aio.AioRpcError, match="under way"):
        await drain(await backpropagate(callee, header_of(call)))
    go_on.set()
    await drain(first)
    assert callee.state.record.done == 0b1


async def test_whoever_sent_a_broken_message_is_not_listened_to_for_a_while(callee: Callee) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await drain(await backpropagate(callee))
    call = callee.call()
    await assert_still_unheard(await backpropagate(callee, header_of(call), *tensor_messages(call)))
    await callee.assert_lives()


async def assert_still_unheard(rpc: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="broken message lately"):
        await drain(rpc)


# Records


def record_of(identity: Identity, **fields: Any) -> PeerRecord:
    return PeerRecord(peer=identity.peer, **{"incarnation": 1, "version": 1, **fields})


def raw_of(record: PeerRecord, signer: Identity, run: RunId = RUN) -> swarm_pb2.SignedRecord:
    signed = sign_record(record, signer, run)
    return swarm_pb2.SignedRecord(body=signed.body, signature=signed.signature)


async def gossip(callee: Callee, *records: swarm_pb2.SignedRecord, run: str = RUN) -> Any:
    stub = await callee.served.stub(swarm_pb2_grpc.SwarmStub, callee.caller.peer)
    return stub.Gossip(swarm_pb2.GossipRequest(run=run, records=records))


@pytest.mark.parametrize("body", [b"", b"junk", b"\x90", b"\xc1", b"\xdc\xff\xff", b"\x91" * 2000, bytes(5000)])
async def test_a_record_that_cannot_be_read_is_refused(callee: Callee, body: bytes) -> None:
    await assert_refused(callee, await gossip(callee, swarm_pb2.SignedRecord(body=body, signature=bytes(64))), BAD)
    assert callee.membership.messages_refused == 1


async def test_a_record_signed_by_somebody_else_is_refused(callee: Callee) -> None:
    victim = new_identity()
    await assert_refused(callee, await gossip(callee, raw_of(record_of(victim), signer=callee.caller)), BAD, "not signed by it")
    assert callee.membership.find(victim.peer) is None


async def test_a_record_of_another_run_is_refused(callee: Callee) -> None:
    record = raw_of(record_of(callee.caller), callee.caller, run=RunId("b" * 32))
    await assert_refused(callee, await gossip(callee, record), BAD, "not signed by it")


async def test_a_ledger_longer_than_a_step_can_be_is_refused(callee: Callee) -> None:
    record = raw_of(record_of(callee.caller, done=1 << MAX_MICROBATCHES_PER_STEP), callee.caller)
    await assert_refused(callee, await gossip(callee, record), BAD)


async def test_an_old_record_sent_again_changes_nothing(callee: Callee) -> None:
    new, old = record_of(callee.caller, version=2, done=0b11), record_of(callee.caller, version=1, done=0b01)
    for record in (new, old):
        await (await gossip(callee, raw_of(record, callee.caller)))
    assert callee.membership.find(callee.caller.peer) == new
    assert callee.door.refused == 0


async def test_too_many_records_at_once_are_refused(callee: Callee) -> None:
    record = raw_of(record_of(callee.caller), callee.caller)
    await assert_refused(callee, await gossip(callee, *[record] * 65), BAD, "65 records")


async def test_gossip_of_another_run_is_refused(callee: Callee) -> None:
    await assert_refused(callee, await gossip(callee, run="b" * 32), STATE, "I serve run")


# Averaging


async def test_a_roster_that_does_not_cover_the_step_is_not_joined(callee: Callee) -> None:
    await callee.assert_lives()  # so that it holds microbatch 1
    mine = callee.state.record
    for theirs, words in ((0b001, "cover"), (0b111, "meets"), (0b1101, "beyond")):
        entries = (RosterEntry(mine.peer, 1, mine.ledger_no, mine.done), RosterEntry(callee.caller.peer, 1, 1, theirs))
        roster = Roster(1, 0, 0, callee.caller.peer, tuple(sorted(entries)))
        joined, reason, _ = await AveragingClient(callee.links(), RUN).propose(callee.caller.peer, roster, PATIENCE_S)
        assert not joined
        assert words in reason
    assert callee.state.record == mine


async def test_a_roster_proposed_by_another_than_its_leader_is_refused(callee: Callee) -> None:
    roster = convert.roster_to(Roster(1, 0, 0, callee.me, (RosterEntry(callee.me, 1, 1, ALL),)))
    stub = await callee.served.stub(averaging_pb2_grpc.AveragingStub, callee.caller.peer)
    await assert_refused(callee, stub.Propose(averaging_pb2.Proposal(run=RUN, roster=roster)), BAD, "by its leader")


async def test_an_oversize_ledger_in_a_roster_is_refused(callee: Callee) -> None:
    entry = averaging_pb2.RosterEntry(peer=callee.me, done=bytes(MAX_MICROBATCHES_PER_STEP // 8 + 1))
    stub = await callee.served.stub(averaging_pb2_grpc.AveragingStub, callee.caller.peer)
    proposal = averaging_pb2.Proposal(run=RUN, roster=averaging_pb2.Roster(entries=[entry]))
    await assert_refused(callee, stub.Propose(proposal), BAD, "ledger longer")


async def test_a_part_of_no_round_is_refused_after_it_was_held_for_a_while(callee: Callee) -> None:
    await assert_refused(callee, await reduce(callee, part(AverageId(bytes(16)))), STATE, "no such round")


async def test_a_part_with_another_ledger_size_or_value_than_the_rosters_is_refused(callee: Callee) -> None:
    roster = await open_round(callee)
    size = callee.state.accumulator.flat.numel() // 2 * 8
    theirs = roster.entries[1 - roster.peers.index(callee.me)].done
    wrong = [part(roster.average_id, ledger=ALL, num_bytes=size), part(roster.average_id, ledger=theirs, num_bytes=8)]
    wrong.append(part(roster.average_id, ledger=theirs, slice_index=7, num_bytes=size))
    for header in wrong:
        callee.door.banned_until_s.clear()
        with pytest.raises(grpc.aio.AioRpcError, match="not what the roster says"):
            await drain(await reduce(callee, header))
    assert callee.door.refused == len(wrong)


async def test_a_part_that_is_not_finite_is_refused(callee: Callee) -> None:
    roster = await open_round(callee)
    mine = roster.peers.index(callee.me)
    length = callee.state.accumulator.flat.numel()
    size = ((length * (mine + 1)) // 2 - (length * mine) // 2) * 8
    header = part(roster.average_id, ledger=roster.entries[1 - mine].done, slice_index=mine, num_bytes=size)
    chunk = torch.full((size // 8,), math.nan, dtype=torch.float64).numpy().tobytes()
    with pytest.raises(grpc.aio.AioRpcError, match="not finite"):
        await drain(await reduce(callee, header, chunk))


def part(average_id: AverageId, ledger: int = 0, slice_index: int = 0, num_bytes: int = 8) -> averaging_pb2.PartHeader:
    return averaging_pb2.PartHeader(average_id=average_id, slice=slice_index, ledger=convert.bitmap_to(ledger), num_bytes=num_bytes)


async def reduce(callee: Callee, header: averaging_pb2.PartHeader, *chunks: bytes) -> Any:
    stub = await callee.served.stub(averaging_pb2_grpc.AveragingStub, callee.caller.peer)

    async def sent() -> AsyncIterator[averaging_pb2.PartMessage]:
        yield averaging_pb2.PartMessage(header=header)
        for chunk in chunks:
            yield averaging_pb2.PartMessage(chunk=chunk)

    return stub.Reduce(sent())


async def open_round(callee: Callee) -> Roster:
    """The caller brings what the callee does not hold, and the callee joins; nobody ever answers its own parts."""
    await callee.assert_lives()
    mine = callee.state.record
    entries = (RosterEntry(mine.peer, 1, mine.ledger_no, mine.done), RosterEntry(callee.caller.peer, 1, 1, ALL & ~mine.done))
    roster = Roster(1, 0, 0, callee.caller.peer, tuple(sorted(entries)))
    joined, reason, _ = await AveragingClient(callee.links(), RUN).propose(callee.caller.peer, roster, PATIENCE_S)
    assert joined, reason
    return roster


# State


async def test_state_of_another_stage_and_averages_that_are_not_held_are_refused(callee: Callee) -> None:
    state = await callee.served.stub(state_pb2_grpc.StateStub, callee.caller.peer)
    await assert_refused(callee, state.GetState(state_pb2.StateRequest(run=RUN, stage=0)), STATE, "stage 0")
    averaging = await callee.served.stub(averaging_pb2_grpc.AveragingStub, callee.caller.peer)
    with pytest.raises(grpc.aio.AioRpcError, match="I hold no average"):
        await drain(averaging.GetAverage(averaging_pb2.AverageRequest(run=RUN, stage=1, step=9)))


async def test_a_download_may_begin_anywhere_even_past_its_end(callee: Callee) -> None:
    client = StateClient(callee.links(), RUN)
    for first, expected in ((0, 1), (1, 0), ((1 << 64) - 1, 0)):
        header, chunks = await client.get_state(callee.caller.peer, StateRequest(stage=1, first_chunk=first), PATIENCE_S)
        assert len(header.chunk_hashes) == 1
        assert len([chunk async for chunk in chunks]) == expected


async def test_a_call_that_did_not_come_through_the_tunnel_is_refused(callee: Callee) -> None:
    async with grpc.aio.insecure_channel(f"unix:{callee.served.socket}") as channel:
        stub: Any = swarm_pb2_grpc.SwarmStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Describe(swarm_pb2.DescribeRequest())
    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_clients_turn_each_status_into_its_error(callee: Callee) -> None:
    """So that a caller can tell what it may do about it."""
    from peerd.errors import BadMessageError, WrongStateError

    with pytest.raises(WrongStateError):
        await SwarmClient(callee.links(), RunId("b" * 32)).gossip(callee.caller.peer, [], PATIENCE_S)
    with pytest.raises(WrongStateError):
        header = PartHeader(AverageId(bytes(16)), 0, 0, 8)
        await AveragingClient(callee.links(), RUN).reduce(callee.caller.peer, header, [bytes(8)], PATIENCE_S)
    with pytest.raises(BadMessageError):
        await SwarmClient(callee.links(), RUN).gossip(callee.caller.peer, [(b"junk", b"")], PATIENCE_S)
