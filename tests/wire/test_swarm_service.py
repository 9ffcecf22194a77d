"""Records that break a rule are refused, counted, and believed by nobody; and what a stranger may ask at all."""

from __future__ import annotations

from typing import Any

import pytest

from peerd.config.manifest import MAX_MICROBATCHES_PER_STEP
from peerd.errors import WrongStateError
from peerd.generated import (
    swarm_pb2,
    swarm_pb2_grpc,
)
from peerd.policy.swarm.spreading import MOST_TAGS, TAG_BYTES
from peerd.swarm.identity import Identity
from peerd.swarm.signed import sign_record
from peerd.table.record import PeerRecord, RunId
from peerd.wire.swarm_client import SwarmClient
from tests.wire.callee import BAD, PATIENCE_S, RUN, STATE, Callee, assert_refused, new_identity


def record_of(identity: Identity, **fields: Any) -> PeerRecord:
    return PeerRecord(peer=identity.peer, **{"incarnation": 1, "version": 1, **fields})


def raw_of(record: PeerRecord, signer: Identity, run: RunId = RUN) -> swarm_pb2.SignedRecord:
    signed = sign_record(record, signer, run)
    return swarm_pb2.SignedRecord(body=signed.body, signature=signed.signature)


async def gossip(callee: Callee, *records: swarm_pb2.SignedRecord, run: str = RUN) -> Any:
    stub = await callee.served.stub(swarm_pb2_grpc.SwarmStub, callee.caller.peer)
    return stub.Gossip(swarm_pb2.GossipRequest(run=run, records=records))


@pytest.mark.parametrize("body", [b"", b"junk", b"\x90", b"\xc1", b"\xdc\xff\xff", b"\x91" * 2000, bytes(5000)])
async def test_a_record_that_cannot_be_read_is_counted_and_believed_by_nobody(callee: Callee, body: bytes) -> None:
    """Nobody can tell whose it is."""
    await (await gossip(callee, swarm_pb2.SignedRecord(body=body, signature=bytes(64)), raw_of(record_of(callee.caller), callee.caller)))
    assert callee.membership.find(callee.caller.peer) is not None, "the sound one beside it counts"
    assert (callee.membership.messages_refused, callee.door.refused) == (1, 0)
    await callee.assert_lives()


async def test_a_callers_own_record_that_another_signed_is_refused(callee: Callee) -> None:
    await assert_refused(callee, await gossip(callee, raw_of(record_of(callee.caller), signer=new_identity())), BAD, "not signed by it")
    assert callee.membership.find(callee.caller.peer) is None


async def test_a_third_partys_record_that_another_signed_is_believed_by_nobody_and_costs_only_itself(callee: Callee) -> None:
    victim = new_identity()
    await (await gossip(callee, raw_of(record_of(victim), signer=callee.caller), raw_of(record_of(callee.caller), callee.caller)))
    assert callee.membership.find(victim.peer) is None
    assert callee.membership.find(callee.caller.peer) is not None
    assert (callee.membership.messages_refused, callee.door.refused, callee.door.bans.until_s) == (1, 0, {})


async def test_a_record_of_another_run_is_refused(callee: Callee) -> None:
    record = raw_of(record_of(callee.caller), callee.caller, run=RunId("b" * 32))
    await assert_refused(callee, await gossip(callee, record), BAD, "not signed by it")


async def test_a_caller_hears_whether_this_peer_reaches_one_that_does_not_answer_it(callee: Callee) -> None:
    await (await gossip(callee, raw_of(record_of(callee.caller), callee.caller)))
    client = SwarmClient(callee.links(), RUN)
    assert await client.reaches(callee.caller.peer, callee.caller.peer, PATIENCE_S)
    assert not await client.reaches(callee.caller.peer, new_identity().peer, PATIENCE_S)


async def test_a_third_partys_broken_record_ends_no_conversation(callee: Callee) -> None:
    forged = raw_of(record_of(new_identity()), signer=callee.caller)
    sound = raw_of(record_of(callee.caller), callee.caller)
    client = SwarmClient(callee.links(), RUN)
    for raw in (forged, sound):
        await client.tell(callee.caller.peer, [(raw.body, raw.signature)], PATIENCE_S)
    assert callee.membership.find(callee.caller.peer) is not None
    assert (callee.membership.messages_refused, callee.door.refused) == (1, 0)


async def test_a_ledger_longer_than_a_step_can_be_is_refused(callee: Callee) -> None:
    record = raw_of(record_of(callee.caller, done=1 << MAX_MICROBATCHES_PER_STEP), callee.caller)
    await assert_refused(callee, await gossip(callee, record), BAD)


@pytest.mark.parametrize("known", [b"\0", bytes(9), bytes(TAG_BYTES * (MOST_TAGS + 1))])
async def test_what_is_no_list_of_names_of_records_is_refused(callee: Callee, known: bytes) -> None:
    stub = await callee.served.stub(swarm_pb2_grpc.SwarmStub, callee.caller.peer)
    await assert_refused(callee, stub.Gossip(swarm_pb2.GossipRequest(run=RUN, want_news=True, known=known)), BAD, "record tags")


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
    await assert_refused(callee, await gossip(callee, run="b" * 32), STATE, "this peer serves run")


async def test_contributions_travel_as_they_were_counted(callee: Callee) -> None:
    (stage,) = await SwarmClient(callee.links(), RUN).contributions(callee.caller.peer, 5.0)
    assert (stage.stage, stage.first_step, stage.last_step, stage.steps) == (1, 0, 4, 5)
    assert [(row.peer, row.steps, row.microbatches) for row in stage.tallies] == [("abc", 5, 40)]


async def test_contributions_of_another_run_are_not_told(callee: Callee) -> None:
    with pytest.raises(WrongStateError, match="this peer serves run"):
        await SwarmClient(callee.links(), RunId("b" * 32)).contributions(callee.caller.peer, 5.0)
