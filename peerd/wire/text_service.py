"""The called side of texts: what an asker sends is checked, then handed to the stage, which computes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from peerd.errors import BadMessageError, BusyError
from peerd.generated import texts_pb2, texts_pb2_grpc
from peerd.link.few_each import FewEach
from peerd.link.links import Bytes
from peerd.link.traffic import PeerRole
from peerd.wire.convert import ID_BYTES
from peerd.wire.door import Door
from peerd.wire.handlers import TextHandler
from peerd.wire.messages import chunks_of
from peerd.wire.services import Servicer, given_up
from peerd.wire.texts import SMALL_BYTES, call_from, done_to, working

ARRIVING_AT_ONCE = 2
"""Calls of one caller whose tensors may arrive at once, and of all callers without a record together."""


class TextServicer(Servicer[TextHandler], texts_pb2_grpc.TextsServicer):
    register = staticmethod(texts_pb2_grpc.add_TextsServicer_to_server)

    def __init__(self, door: Door, handler: TextHandler) -> None:
        super().__init__(door, handler)
        self._arriving = FewEach(door.knows)

    async def Offer(self, request: texts_pb2.TextOfferRequest, context: Any) -> texts_pb2.TextOfferReply:
        async with self._door.answering(context, request.run) as caller:
            offer = self._handler.offer_text(caller, request.stage)
        reply = texts_pb2.TextOfferReply(steps=sorted(offer.steps), wait_s=offer.wait_s, is_off=offer.is_off)
        return self._door.traffic.answered(request, reply)

    async def Extend(self, messages: AsyncIterator[texts_pb2.ExtendMessage], context: Any) -> AsyncIterator[texts_pb2.ExtendedMessage]:
        async with self._door.answering(context) as caller:
            first = await self._door.read(messages)
            if first is None or not first.HasField("header"):
                raise BadMessageError("a text without a header")
            self._door.check_run(first.header.run)
            call = call_from(first.header)

            async def receive() -> tuple[Bytes, ...]:
                with self._arriving.by(caller, ARRIVING_AT_ONCE) as may_arrive:
                    if not may_arrive:
                        raise BusyError("your other texts still arrive")
                    return await self._door.read_chunks(messages, call.num_bytes, first.chunk)

            work = asyncio.ensure_future(self._handler.extend_text(caller, call, receive))
            try:
                while not (await asyncio.wait({work}, timeout=self._door.patience_s / 4))[0]:
                    yield working()
                found = work.result()
            finally:
                await given_up(work)
            self._door.traffic.received("texts", PeerRole.PREVIOUS_STAGE, call.num_bytes)
            outputs = () if found.outputs is None else (found.outputs,)
            num_bytes = sum(each.num_bytes for each in outputs)
            if num_bytes <= SMALL_BYTES:
                self._door.traffic.uplink.sends(num_bytes)
                yield texts_pb2.ExtendedMessage(done=done_to(found), chunk=b"".join(chunks_of(outputs)))
                if num_bytes:
                    self._door.traffic.gave("texts", PeerRole.PREVIOUS_STAGE, num_bytes)
                return
            yield texts_pb2.ExtendedMessage(done=done_to(found))
            async with self._door.giving(context, caller, chunks_of(outputs), "texts", PeerRole.PREVIOUS_STAGE) as chunks:
                async for chunk in chunks:
                    yield texts_pb2.ExtendedMessage(chunk=chunk)

    async def Forget(self, request: texts_pb2.ForgetTextRequest, context: Any) -> texts_pb2.ForgetTextReply:
        async with self._door.answering(context, request.run) as caller:
            if len(request.text) != ID_BYTES:
                raise BadMessageError("the number of a text has 16 bytes")
            await self._handler.forget_text(caller, request.text)
        return texts_pb2.ForgetTextReply()
