"""The calling side of texts: asks peers of other stages to go on with them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

from peerd.errors import BadMessageError, PeerGoneError
from peerd.generated import stage_pb2, texts_pb2, texts_pb2_grpc
from peerd.link.links import ending, read_within
from peerd.link.traffic import PeerRole
from peerd.policy.inference.paths import TextOffer
from peerd.policy.inference.sampling import Sampling
from peerd.table.record import MAX_STEP, PeerId
from peerd.wire import convert
from peerd.wire.clients import Client, read_chunks
from peerd.wire.messages import chunks_of
from peerd.wire.text_messages import Extended, TextCall

MOST_STEPS = 8
"""Steps in one offer."""
MOST_WAIT_TOLD_S = 3600.0


def call_from(header: texts_pb2.ExtendHeader) -> TextCall:
    """The call without the bytes of its tensors. Raises BadMessageError."""
    if len(header.text) != convert.ID_BYTES or header.step > MAX_STEP or header.stage > convert.MAX_STAGES:
        raise BadMessageError("a text whose number, step or stage cannot be")
    told = header.sampling
    try:
        sampling = Sampling(temperature=told.temperature, top_p=told.top_p, seed=told.seed) if header.HasField("sampling") else None
    except ValueError as error:
        raise BadMessageError(str(error)) from None
    return TextCall(
        text=header.text,
        stage=header.stage,
        step=header.step,
        begin=header.begin,
        inputs=convert.tensor_from(header.inputs),
        tokens=convert.tensor_from(header.tokens) if header.HasField("tokens") else None,
        sampling=sampling,
    )


def call_to(call: TextCall, run: str) -> texts_pb2.ExtendHeader:
    header = texts_pb2.ExtendHeader(run=run, stage=call.stage, text=call.text, step=call.step, begin=call.begin)
    header.inputs.CopyFrom(convert.tensor_to(call.inputs))
    if call.tokens is not None:
        header.tokens.CopyFrom(convert.tensor_to(call.tokens))
    if (sampling := call.sampling) is not None:
        header.sampling.CopyFrom(texts_pb2.SamplingMessage(temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed))
    return header


def done_to(found: Extended) -> texts_pb2.TextDone:
    if found.outputs is not None:
        return texts_pb2.TextDone(outputs=convert.tensor_to(found.outputs))
    if found.token is not None:
        return texts_pb2.TextDone(token=found.token)
    return texts_pb2.TextDone(known=found.known or 0)


class TextClient(Client):
    """Asks peers to go on with texts."""

    stub_of = texts_pb2_grpc.TextsStub

    async def offer(self, peer: PeerId, stage: int, timeout_s: float) -> TextOffer:
        """Ask whether a peer of this stage goes on with texts, and when. Raises RemoteError."""
        reply = await self._ask(peer, "Offer", texts_pb2.TextOfferRequest(run=self._run, stage=stage), timeout_s)
        if len(reply.steps) > MOST_STEPS or not 0 <= reply.wait_s < math.inf:
            raise BadMessageError("an offer of more than there can be")
        return TextOffer(peer=peer, steps=frozenset(reply.steps), wait_s=min(reply.wait_s, MOST_WAIT_TOLD_S))

    async def extend(self, peer: PeerId, call: TextCall, patience_s: float) -> Extended:
        """Let a peer compute the next tokens of a text. `patience_s` bounds the silence between two messages of the peer.

        The form of the outputs is for the caller to check. Raises RemoteError.
        """

        async def messages() -> AsyncIterator[texts_pb2.ExtendMessage]:
            self._links.traffic.uplink.sends(call.num_bytes)
            yield texts_pb2.ExtendMessage(header=call_to(call, self._run))
            for chunk in chunks_of(call.tensors):
                yield texts_pb2.ExtendMessage(chunk=chunk)
                self._links.traffic.gave("texts", PeerRole.NEXT_STAGE, len(chunk))

        with ending((await self._stub(peer)).Extend(messages())) as rpc:
            stream = rpc.__aiter__()
            while (message := await read_within(stream, patience_s)) is not None and message.WhichOneof("kind") == "working":
                self._links.traffic.hear(peer)
            if message is None:
                raise PeerGoneError("the call ended without a result")
            if message.WhichOneof("kind") != "done":
                raise BadMessageError("a chunk of the outputs came before the result")
            found = _done_from(message.done, call)
            if found.outputs is None:
                return found
            chunks = await read_chunks(rpc, found.outputs.num_bytes, patience_s)
            self._links.traffic.took("texts", PeerRole.NEXT_STAGE, found.outputs.num_bytes)
            return Extended(outputs=found.outputs.with_chunks(chunks))

    async def forget(self, peer: PeerId, text: bytes, timeout_s: float) -> None:
        """Tell a peer that a text does not go on. Raises RemoteError."""
        await self._ask(peer, "Forget", texts_pb2.ForgetTextRequest(run=self._run, text=text), timeout_s)


def _done_from(done: texts_pb2.TextDone, call: TextCall) -> Extended:
    """The result without the bytes of its outputs. Raises BadMessageError for one that does not answer the call."""
    match done.WhichOneof("kind"):
        case "known":
            return Extended(known=done.known)
        case "token" if call.sampling is not None:
            return Extended(token=done.token)
        case "outputs" if call.sampling is None:
            return Extended(outputs=convert.tensor_from(done.outputs))
    raise BadMessageError("a result that answers another call")


def working() -> texts_pb2.ExtendedMessage:
    return texts_pb2.ExtendedMessage(working=stage_pb2.Working())
