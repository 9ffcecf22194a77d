"""Texts over the real services: what is sent comes as it was sent, refusals say why, and a callee that takes long is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
import torch

from peerd.errors import BadMessageError, BusyError, PeerGoneError, WrongStateError
from peerd.generated import texts_pb2, texts_pb2_grpc
from peerd.link.traffic import Traffic
from peerd.policy.inference.paths import TextOffer
from peerd.policy.inference.sampling import Sampling
from peerd.table.record import PeerId, RunId
from peerd.wire.door import Door
from peerd.wire.handlers import Receive
from peerd.wire.tensors import decode, encode
from peerd.wire.text_messages import Extended, TextCall
from peerd.wire.text_service import TextServicer
from peerd.wire.texts import TextClient, call_to
from tests.link.local_peers import Served, serving
from tests.wire.callee import DOOR_PATIENCE_S, PATIENCE_S, RUN

PEER = PeerId("peer")
CPU = torch.device("cpu")
WIDE = torch.arange(400_000, dtype=torch.float32).view(1, 4, 100_000)
"""1.6 MB: two chunks."""
CALL = TextCall(text=b"t" * 16, stage=1, step=3, begin=2, inputs=encode(WIDE))


@dataclass
class Answering:
    """A stage that answers whatever it is told to."""

    answer: Extended | Exception = field(default_factory=lambda: Extended(outputs=encode(2 * WIDE)))
    takes_s: float = 0.0
    asked: list[tuple[TextCall, torch.Tensor]] = field(default_factory=list)
    forgotten: list[bytes] = field(default_factory=list)

    def offer_text(self, caller: PeerId, stage: int) -> TextOffer:
        if stage != 1:
            raise WrongStateError("another stage")
        return TextOffer(peer=PEER, steps=frozenset({7, 3}), wait_s=0.5, is_off=True)

    async def extend_text(self, caller: PeerId, call: TextCall, receive: Receive) -> Extended:
        chunks = tuple(await receive())
        inputs = b"".join(bytes(chunk) for chunk in chunks)[: call.inputs.num_bytes]
        self.asked.append((call, decode(call.inputs.with_chunks((inputs,)), CPU)))
        await asyncio.sleep(self.takes_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def forget_text(self, caller: PeerId, text: bytes) -> None:
        self.forgotten.append(text)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Answering, Served]]:
    answering = Answering()
    async with serving([TextServicer(Door(RUN, DOOR_PATIENCE_S, Traffic()), answering)]) as found:
        yield answering, found


def client_of(there: Served, run: RunId = RUN) -> TextClient:
    return TextClient(there.links_of("asker"), run)


async def test_activations_come_and_go_as_they_are(served: tuple[Answering, Served]) -> None:
    answering, there = served
    client = client_of(there)
    found = await client.extend(PEER, CALL, PATIENCE_S)
    assert found.outputs is not None
    assert torch.equal(decode(found.outputs, CPU), 2 * WIDE)
    [(call, inputs)] = answering.asked
    assert torch.equal(inputs, WIDE)
    assert replace(call, inputs=CALL.inputs) == CALL
    assert await client.offer(PEER, 1, PATIENCE_S) == TextOffer(peer=PEER, steps=frozenset({3, 7}), wait_s=0.5, is_off=True)
    with pytest.raises(WrongStateError, match="another stage"):
        await client.offer(PEER, 0, PATIENCE_S)
    await client.forget(PEER, CALL.text, PATIENCE_S)
    assert answering.forgotten == [CALL.text]


async def test_tokens_told_and_the_choice_come_back(served: tuple[Answering, Served]) -> None:
    answering, there = served
    tokens, sampling = encode(torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)), Sampling(temperature=0.5, top_p=0.75, seed=-7)
    answering.answer = Extended(chosen=(0, 7, 255), waited_s=0.25, computed_s=0.5)
    call = replace(CALL, tokens=tokens, sampling=sampling, num_drafted=2)
    assert await client_of(there).extend(PEER, call, PATIENCE_S) == answering.answer
    assert (answering.asked[0][0].sampling, answering.asked[0][0].num_drafted) == (sampling, 2)
    answering.answer = Extended(known=0)
    assert await client_of(there).extend(PEER, call, PATIENCE_S) == Extended(known=0)


async def test_one_who_computes_for_longer_than_the_patience_is_waited_for() -> None:
    """It says every second that it is at work."""
    patience_s, answering = 3.0, Answering(takes_s=3.2)
    async with serving([TextServicer(Door(RUN, 4.0, Traffic()), answering)]) as there:
        assert (await client_of(there).extend(PEER, CALL, patience_s)).outputs is not None


@pytest.mark.parametrize("error", [WrongStateError("gone"), BusyError("no time", 3.0), PeerGoneError("left")])
async def test_refusals_say_why(served: tuple[Answering, Served], error: WrongStateError | BusyError | PeerGoneError) -> None:
    answering, there = served
    answering.answer = error  # of a call that has all come: gRPC loses the words of an earlier refusal
    with pytest.raises(type(error), match=error.message) as refused:
        await client_of(there).extend(PEER, CALL, PATIENCE_S)
    if isinstance(refused.value, BusyError):
        assert refused.value.retry_after_s == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("answer", [Extended(chosen=(1,)), Extended(chosen=(1, 2)), Extended(outputs=encode(torch.zeros(1, 4, 3)))])
async def test_an_answer_to_another_question_is_the_callees_fault(served: tuple[Answering, Served], answer: Extended) -> None:
    answering, there = served
    answering.answer = answer
    call = CALL if len(answer.chosen) == 1 else replace(CALL, sampling=Sampling())
    with pytest.raises(BadMessageError, match="another call"):
        await client_of(there).extend(PEER, call, PATIENCE_S)


BROKEN = {
    "no header": texts_pb2.ExtendMessage(chunk=b"x"),
    "a short number": texts_pb2.ExtendMessage(header=call_to(replace(CALL, text=b"short"), RUN)),
    "a temperature that cannot be": texts_pb2.ExtendMessage(header=call_to(CALL, RUN)),
    "sizes that do not fit": texts_pb2.ExtendMessage(header=call_to(CALL, RUN)),
    "tokens of an unknown type": texts_pb2.ExtendMessage(header=call_to(CALL, RUN)),
}
BROKEN["a temperature that cannot be"].header.sampling.temperature = -1.0
BROKEN["sizes that do not fit"].header.inputs.num_bytes = 5
BROKEN["tokens of an unknown type"].header.tokens.dtype = "int64"


@pytest.mark.parametrize("broken", BROKEN)
async def test_what_breaks_the_form_is_refused_before_a_tensor_is_read(served: tuple[Answering, Served], broken: str) -> None:
    answering, there = served

    async def messages() -> AsyncIterator[texts_pb2.ExtendMessage]:
        yield BROKEN[broken]

    stub: Any = texts_pb2_grpc.TextsStub(await there.links_of("asker").channel(PEER))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [each async for each in stub.Extend(messages())]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not answering.asked


async def test_another_run_is_refused(served: tuple[Answering, Served]) -> None:
    _, there = served
    client = client_of(there, RunId("b" * 32))
    for asked in (client.offer(PEER, 1, PATIENCE_S), client.extend(PEER, replace(CALL, inputs=encode(WIDE[..., :9])), PATIENCE_S)):
        with pytest.raises(WrongStateError, match="serves run"):
            await asked
