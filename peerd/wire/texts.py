"""The calling side of texts: asks peers of other stages to go on with them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import replace

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
SMALL_BYTES = 1 << 15
"""Tensors of so many bytes travel in one message with their header, and wait neither behind those of training nor for the line. Some tokens
have that, so that a token waits for little but the way there and back; a long prompt has more."""


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
        num_drafted=header.num_drafted,
    )


def call_to(call: TextCall, run: str) -> texts_pb2.ExtendHeader:
    header = texts_pb2.ExtendHeader(run=run, stage=call.stage, text=call.text, step=call.step, begin=call.begin)
    header.num_drafted = call.num_drafted
    header.inputs.CopyFrom(convert.tensor_to(call.inputs))
    if call.tokens is not None:
        header.tokens.CopyFrom(convert.tensor_to(call.tokens))
    if (sampling := call.sampling) is not None:
        header.sampling.CopyFrom(texts_pb2.SamplingMessage(temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed))
    return header


def done_to(found: Extended) -> texts_pb2.TextDone:
    done = texts_pb2.TextDone(waited_s=found.waited_s, computed_s=found.computed_s)
    if found.outputs is not None:
        done.outputs.CopyFrom(convert.tensor_to(found.outputs))
    elif found.chosen:
        done.chosen.tokens.extend(found.chosen)
    else:
        done.known = found.known or 0
    return done


class TextClient(Client):
    """Asks peers to go on with texts."""

    stub_of = texts_pb2_grpc.TextsStub

    async def offer(self, peer: PeerId, stage: int, timeout_s: float) -> TextOffer:
        """Ask whether a peer of this stage goes on with texts, and when. Raises RemoteError."""
        reply = await self._ask(peer, "Offer", texts_pb2.TextOfferRequest(run=self._run, stage=stage), timeout_s)
        if len(reply.steps) > MOST_STEPS or not 0 <= reply.wait_s < math.inf:
            raise BadMessageError("an offer of more than there can be")
        return TextOffer(peer=peer, steps=frozenset(reply.steps), wait_s=min(reply.wait_s, MOST_WAIT_TOLD_S), is_off=reply.is_off)

    async def extend(self, peer: PeerId, call: TextCall, patience_s: float) -> Extended:
        """Let a peer compute the next tokens of a text. `patience_s` bounds the silence between two messages of the peer.

        The form of the outputs is for the caller to check. Raises RemoteError.
        """

        async def messages() -> AsyncIterator[texts_pb2.ExtendMessage]:
            self._links.traffic.uplink.sends(call.num_bytes)
            chunks, header = chunks_of(call.tensors), call_to(call, self._run)
            if is_small:
                yield texts_pb2.ExtendMessage(header=header, chunk=b"".join(chunks))
                self._links.traffic.gave("texts", PeerRole.NEXT_STAGE, call.num_bytes)
                return
            yield texts_pb2.ExtendMessage(header=header)
            for chunk in chunks:
                yield texts_pb2.ExtendMessage(chunk=chunk)
                self._links.traffic.gave("texts", PeerRole.NEXT_STAGE, len(chunk))

        is_small = call.num_bytes <= SMALL_BYTES
        with ending((await (self._stub_to_ask if is_small else self._stub)(peer)).Extend(messages())) as rpc:
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
            chunks = await read_chunks(rpc, found.outputs.num_bytes, patience_s, message.chunk)
            self._links.traffic.took("texts", PeerRole.NEXT_STAGE, found.outputs.num_bytes)
            return replace(found, outputs=found.outputs.with_chunks(chunks))

    async def forget(self, peer: PeerId, text: bytes, timeout_s: float) -> None:
        """Tell a peer that a text does not go on. Raises RemoteError."""
        await self._ask(peer, "Forget", texts_pb2.ForgetTextRequest(run=self._run, text=text), timeout_s)


def _done_from(done: texts_pb2.TextDone, call: TextCall) -> Extended:
    """The result without the bytes of its outputs. Raises BadMessageError for one that does not answer the call."""
    told = Extended(waited_s=_plausible(done.waited_s), computed_s=_plausible(done.computed_s))
    match done.WhichOneof("kind"):
        case "known":
            return replace(told, known=done.known)
        case "chosen" if call.sampling is not None and len(done.chosen.tokens) == call.num_drafted + 1:
            return replace(told, chosen=tuple(done.chosen.tokens))
        case "outputs" if call.sampling is None:
            return replace(told, outputs=convert.tensor_from(done.outputs))
    raise BadMessageError("a result that answers another call")


def _plausible(seconds: float) -> float:
    """A time that a peer tells, for reports only."""
    return min(seconds, MOST_WAIT_TOLD_S) if seconds > 0 else 0.0


def working() -> texts_pb2.ExtendedMessage:
    return texts_pb2.ExtendedMessage(working=stage_pb2.Working())
