"""Receipts, tensors and cases over the real services: all of it comes as it was sent, and no more than there can be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field, replace

import grpc
import pytest
import torch

from peerd.audit.replays import NO_LABELS
from peerd.config.codec import parse_codec
from peerd.errors import BadMessageError, WrongStateError
from peerd.generated import audit_pb2, audit_pb2_grpc
from peerd.link.traffic import PeerRole, Traffic
from peerd.policy.step.evidence import Evidence
from peerd.policy.step.parts import SentPart
from peerd.policy.step.receipts import NOTHING, AnsweredPass, AskedPass, Receipt, SentOn, SignedAsk, SignedPass
from peerd.table.record import AverageId
from peerd.wire.audit_client import AuditClient, KeptTensors
from peerd.wire.audit_service import ALL_BYTES, MOST_NAMES, MOST_PAIRS, AuditServicer, WantedBytes
from peerd.wire.door import Door
from peerd.wire.messages import TensorBytes
from peerd.wire.receipts import evidence_from, evidence_to, packed_case, pair_from, pair_to, tensor_hash, unpacked_case
from peerd.wire.tensors import encode
from tests.link.local_peers import Served, serving
from tests.policy.test_evidence import FIRST, RIGHT, SECOND, WRONG, evidence, signed_pass, word_of
from tests.wire.callee import DOOR_PATIENCE_S, PATIENCE_S, RUN, new_identity

SIGNED = b"s" * 32


@dataclass
class Keeper:
    """A peer with receipts and tensors of its own making."""

    pairs: list[SignedPass] = field(default_factory=list)
    sent: list[SentOn] = field(default_factory=list)
    kept: KeptTensors | None = None
    heard: list[Evidence] = field(default_factory=list)
    knows: Evidence | None = None

    def receipts(self, stage: int, step: int, known: Collection[bytes]) -> tuple[Sequence[Evidence], Sequence[SignedPass]]:
        assert (stage, step) == (1, 3)
        return [] if self.knows is None or known else [self.knows], self.pairs

    def sent_on(self, stage: int, step: int, known: Collection[bytes]) -> Sequence[SentOn]:
        assert (stage, step) == (1, 3)
        return [each for each in self.sent if each.gave.asked.name(RUN) not in known]

    def kept_pass(self, signed: bytes) -> KeptTensors:
        if self.kept is None or signed != SIGNED:
            raise WrongStateError("that call is not kept")
        return self.kept

    async def hear(self, evidence: Evidence) -> Evidence | None:
        self.heard.append(evidence)
        return self.knows


@pytest.fixture
async def served() -> AsyncIterator[tuple[Keeper, Served]]:
    keeper = Keeper()
    async with serving([AuditServicer(Door(RUN, DOOR_PATIENCE_S, Traffic()), keeper)]) as found:
        yield keeper, found


def numbered(index: int) -> SignedPass:
    signed = signed_pass()
    return replace(signed, own=replace(signed.own, asked=replace(signed.own.asked, index=index)))


def with_next_stage() -> SignedPass:
    below = Receipt(AskedPass(2, 3, 1, SECOND, FIRST, b"o" * 32, b"l" * 32), AnsweredPass(b"g" * 32, NOTHING, b"p" * 32), b"a", b"b")
    return replace(signed_pass(), below=below)


def test_receipts_and_cases_come_back_equal() -> None:
    for signed in (signed_pass(), with_next_stage()):
        assert pair_from(audit_pb2.ReceiptPair.FromString(pair_to(signed).SerializeToString())) == signed
    case = evidence(word_of(FIRST, WRONG), word_of(SECOND, RIGHT))
    assert evidence_from(audit_pb2.AuditCase.FromString(evidence_to(case, RUN).SerializeToString())) == case


def part() -> SentPart:
    return SentPart(SECOND, 1, 3, AverageId(b"a" * 16), (2, 1, 7), b"c" * 32, b"s" * 64, b"b" * 32)


def test_a_case_about_a_part_comes_back_equal() -> None:
    case = replace(evidence(word_of(FIRST, WRONG)), signed=part())
    assert evidence_from(audit_pb2.AuditCase.FromString(evidence_to(case, RUN).SerializeToString())) == case
    assert unpacked_case(packed_case(case, RUN), RUN) == case
    for false in (replace(part(), content=b"short"), replace(part(), average_id=AverageId(b"")), replace(part(), stage=5000)):
        with pytest.raises(BadMessageError, match="part"):
            evidence_from(evidence_to(replace(case, signed=false), RUN))
    with pytest.raises(BadMessageError, match="another run"):
        unpacked_case(packed_case(case, RUN), "another")
    with pytest.raises(BadMessageError, match="no case"):
        unpacked_case(b"\xff\xff", RUN)


def sent_on(index: int = 1) -> SentOn:
    got = AskedPass(1, 3, index, FIRST, SECOND, b"i" * 32, b"l" * 32, b"a" * 32, b"p" * 32)
    asked = AskedPass(2, 3, index, SECOND, FIRST, b"o" * 32, b"l" * 32, got.text(RUN), b"p" * 32)
    return SentOn(SignedAsk(got, b"s"), Receipt(asked, AnsweredPass(b"g" * 32, NOTHING, b"p" * 32), b"a", b"b"))


def test_a_case_about_a_forward_pass_comes_back_equal() -> None:
    case = replace(evidence(word_of(FIRST, WRONG)), signed=sent_on())
    assert evidence_from(audit_pb2.AuditCase.FromString(evidence_to(case, RUN).SerializeToString())) == case
    assert unpacked_case(packed_case(case, RUN), RUN) == case


async def test_an_auditor_gets_what_was_sent_on_but_for_what_it_knows(served: tuple[Keeper, Served]) -> None:
    keeper, links = served
    keeper.sent = [sent_on(index) for index in range(2 * MOST_PAIRS + 1)]
    me = new_identity().peer
    client = AuditClient(links.links_of(me), RUN)
    assert await client.get_sent_on(me, 1, 3, (), len(keeper.sent), PATIENCE_S) == keeper.sent
    known = [each.gave.asked.name(RUN) for each in keeper.sent[2:]]
    assert await client.get_sent_on(me, 1, 3, known, 2, PATIENCE_S) == keeper.sent[:2]
    with pytest.raises(BadMessageError, match="more calls"):
        await client.get_sent_on(me, 1, 3, (), len(keeper.sent) - 1, PATIENCE_S)
    keeper.sent = []
    too_many = [b"n" * 8] * (MOST_NAMES + 1)
    assert await client.get_sent_on(me, 1, 3, too_many, 0, PATIENCE_S) == [], "the caller leaves out what would be refused"


async def test_the_chunk_of_a_part_and_a_case_about_it_travel(served: tuple[Keeper, Served]) -> None:
    keeper, links = served
    content = bytes(range(256)) * 20_000
    keeper.kept = TensorBytes("int32", (len(content) // 4,), (content,)), NO_LABELS, None
    me = new_identity().peer
    client = AuditClient(links.links_of(me), RUN)
    chunk, labels, gradient = await client.get_pass(me, 3, SIGNED, WantedBytes.INPUTS, PATIENCE_S)
    assert (b"".join(chunk.chunks), labels.num_bytes, gradient) == (content, 0, None)
    keeper.knows = replace(evidence(word_of(FIRST, WRONG)), signed=part())
    assert await client.tell_case(me, keeper.knows, PATIENCE_S) == keeper.knows


@pytest.mark.parametrize(
    "changes",
    [{"inputs": b"short"}, {"caller": "x" * 65}, {"callee_signature": bytes(2000)}, {"ledger": b"no name"}, {"stage": 5000}],
)
def test_a_receipt_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    message = pair_to(signed_pass())
    for name, value in changes.items():
        setattr(message.receipt, name, value)
    with pytest.raises(BadMessageError, match="receipt"):
        pair_from(message)


def test_the_hash_of_a_tensor_covers_how_its_bytes_are_read() -> None:
    value = encode(torch.arange(4, dtype=torch.float32))
    others = (replace(value, dtype="int32"), replace(value, shape=(2, 2)), replace(value, codec=parse_codec("int8")))
    assert len({tensor_hash(each) for each in (value, *others)}) == 4
    assert tensor_hash(None) == NOTHING
    (whole,) = value.chunks
    assert tensor_hash(value.with_chunks((whole[:8], whole[8:]))) == tensor_hash(value)


async def test_an_auditor_gets_all_receipts_and_the_convictions_that_it_lacks(served: tuple[Keeper, Served]) -> None:
    keeper, links = served[0], served[1]
    keeper.pairs, keeper.knows = [numbered(index) for index in range(2 * MOST_PAIRS + 1)], evidence(word_of(FIRST, WRONG))
    me = new_identity().peer
    client = AuditClient(links.links_of(me), RUN)
    assert await client.get_receipts(me, 1, 3, (), len(keeper.pairs), PATIENCE_S) == ([keeper.knows], keeper.pairs)
    assert (await client.get_receipts(me, 1, 3, [b"i" * 16], len(keeper.pairs), PATIENCE_S))[0] == []
    with pytest.raises(BadMessageError, match="more receipts"):
        await client.get_receipts(me, 1, 3, (), len(keeper.pairs) - 1, PATIENCE_S)


@pytest.mark.parametrize("has_gradient", [True, False])
async def test_tensors_come_as_they_are_kept(served: tuple[Keeper, Served], has_gradient: bool) -> None:
    keeper, links = served
    inputs, labels = encode(torch.randn(3, 200_000)), encode(torch.arange(6, dtype=torch.int32))
    gradient = encode(torch.randn(300, 1000), parse_codec("int8")) if has_gradient else None
    keeper.kept = inputs, labels, gradient
    me = new_identity().peer
    client = AuditClient(links.links_of(me), RUN)
    found = await client.get_pass(me, 3, SIGNED, ALL_BYTES, PATIENCE_S)
    assert [tensor_hash(each) for each in found] == [tensor_hash(each) for each in keeper.kept]
    with pytest.raises(WrongStateError, match="not kept"):
        await client.get_pass(me, 3, b"o" * 32, ALL_BYTES, PATIENCE_S)


@pytest.mark.parametrize("wanted", [WantedBytes(number) for number in range(8)])
async def test_only_the_bytes_that_are_wanted_travel_and_how_the_others_have_travelled(
    served: tuple[Keeper, Served], wanted: WantedBytes
) -> None:
    keeper, links = served
    kept = encode(torch.randn(3, 200_000)), encode(torch.arange(6, dtype=torch.int32)), encode(torch.randn(300, 1000), parse_codec("int8"))
    keeper.kept, me = kept, new_identity().peer
    links_of = links.links_of(me)
    found = await AuditClient(links_of, RUN).get_pass(me, 3, SIGNED, wanted, PATIENCE_S)
    is_wanted = dict(zip(WantedBytes, kept, strict=True))
    for which, each in zip(WantedBytes, found, strict=True):
        assert each is not None
        assert each.with_chunks(()) == is_wanted[which].with_chunks(())
        assert b"".join(each.chunks) == (b"".join(is_wanted[which].chunks) if which in wanted else b"")
    taken = links_of.traffic.tensors["audits", "none", PeerRole.STAGE_PEER, "received"]
    assert taken == sum(each.num_bytes for which, each in is_wanted.items() if which in wanted)


async def test_a_case_is_heard_and_answered_with_what_is_known(served: tuple[Keeper, Served]) -> None:
    keeper, links = served
    me = new_identity().peer
    client = AuditClient(links.links_of(me), RUN)
    case = evidence(word_of(FIRST, WRONG))
    assert await client.tell_case(me, case, PATIENCE_S) is None
    keeper.knows = evidence(word_of(FIRST, WRONG), word_of(SECOND, RIGHT))
    assert await client.tell_case(me, case, PATIENCE_S) == keeper.knows
    assert keeper.heard == [case, case]


async def test_what_no_auditor_asks_is_refused(served: tuple[Keeper, Served]) -> None:
    stub = await served[1].stub(audit_pb2_grpc.AuditStub, new_identity().peer)
    with pytest.raises(grpc.aio.AioRpcError, match="65 convictions"):
        async for _ in stub.GetReceipts(audit_pb2.ReceiptsRequest(run=RUN, stage=1, step=3, known=[bytes(16)] * 65)):
            pass
    stub = await served[1].stub(audit_pb2_grpc.AuditStub, new_identity().peer)
    with pytest.raises(grpc.aio.AioRpcError, match="32 bytes"):
        async for _ in stub.GetPass(audit_pb2.PassRequest(run=RUN, step=3, signed=b"short")):
            pass
