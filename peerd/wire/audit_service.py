"""The called side of audits: what this peer keeps of its calls, and the cases that others tell. Rule 20 (audit)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from enum import IntFlag
from typing import Any, TypeVar

from peerd.config.manifest import MAX_MICROBATCHES_PER_STEP
from peerd.errors import BadMessageError, BusyError
from peerd.generated import audit_pb2, audit_pb2_grpc
from peerd.link.few_each import FewEach
from peerd.link.traffic import PeerRole
from peerd.policy.step.receipts import HASH_BYTES, NAME_BYTES
from peerd.wire import convert
from peerd.wire.door import Door
from peerd.wire.handlers import AuditHandler
from peerd.wire.messages import chunks_of
from peerd.wire.receipts import evidence_from, evidence_to, pair_to, sent_on_to
from peerd.wire.services import Servicer

MOST_PAIRS = 256
"""Receipts in one message, some 200 KB."""
MOST_KNOWN = 64
MOST_NAMES = MAX_MICROBATCHES_PER_STEP
"""Names of calls to one peer in a step."""
PASSES_AT_ONCE = 2
"""Passes that one caller gets at once: an auditor computes one after another."""


Told = TypeVar("Told", audit_pb2.ReceiptsMessage, audit_pb2.SentOnMessage)


class WantedBytes(IntFlag):
    """The tensors of a call whose bytes an auditor wants, in the order in which they travel."""

    INPUTS = 1
    LABELS = 2
    GRADIENT = 4


NO_BYTES = WantedBytes(0)
"""How the tensors have travelled is all that is wanted."""
ALL_BYTES = WantedBytes.INPUTS | WantedBytes.LABELS | WantedBytes.GRADIENT


class AuditServicer(Servicer[AuditHandler], audit_pb2_grpc.AuditServicer):
    register = staticmethod(audit_pb2_grpc.add_AuditServicer_to_server)

    def __init__(self, door: Door, handler: AuditHandler) -> None:
        super().__init__(door, handler)
        self._giving = FewEach(door.knows)

    async def GetReceipts(self, request: audit_pb2.ReceiptsRequest, context: Any) -> AsyncIterator[audit_pb2.ReceiptsMessage]:
        async with self._door.answering(context, request.run):
            if len(request.known) > MOST_KNOWN:
                raise BadMessageError(f"the ids of {len(request.known)} convictions")
            convictions, pairs = self._handler.receipts(request.stage, request.step, frozenset(request.known))
        for evidence in convictions:
            yield self._counted(audit_pb2.ReceiptsMessage(conviction=evidence_to(evidence, self._door.run)))
        for first in range(0, len(pairs), MOST_PAIRS):
            yield self._counted(audit_pb2.ReceiptsMessage(pairs=map(pair_to, pairs[first : first + MOST_PAIRS])))

    async def GetSentOn(self, request: audit_pb2.SentOnRequest, context: Any) -> AsyncIterator[audit_pb2.SentOnMessage]:
        async with self._door.answering(context, request.run):
            if len(request.known) > MOST_NAMES * NAME_BYTES:
                raise BadMessageError(f"the names of more than {MOST_NAMES} calls")
            pairs = self._handler.sent_on(request.stage, request.step, frozenset(_names_in(request.known)))
        for first in range(0, len(pairs), MOST_PAIRS):
            yield self._counted(audit_pb2.SentOnMessage(pairs=map(sent_on_to, pairs[first : first + MOST_PAIRS])))

    def _counted(self, message: Told) -> Told:
        self._door.traffic.gave("audits", PeerRole.STAGE_PEER, message.ByteSize())
        return message

    async def GetPass(self, request: audit_pb2.PassRequest, context: Any) -> AsyncIterator[audit_pb2.PassMessage]:
        async with self._door.answering(context, request.run) as caller:
            with self._giving.by(caller, PASSES_AT_ONCE) as may_have:
                if not may_have:
                    raise BusyError("other microbatches are on their way to you")
                if len(request.signed) != HASH_BYTES:
                    raise BadMessageError("the hash of a receipt has 32 bytes")
                kept, wanted = self._handler.kept_pass(request.signed), WantedBytes(request.wanted & ALL_BYTES)
                headers = dict(zip(("inputs", "labels", "gradient"), map(convert.tensor_to, filter(None, kept)), strict=False))
                yield audit_pb2.PassMessage(header=audit_pb2.PassHeader(**headers))
                given = chunks_of(each for which, each in zip(WantedBytes, kept, strict=True) if each is not None and which in wanted)
                async with self._door.giving(context, caller, given, "audits", PeerRole.STAGE_PEER) as chunks:
                    async for chunk in chunks:
                        yield audit_pb2.PassMessage(chunk=chunk)

    async def TellCase(self, request: audit_pb2.AuditCase, context: Any) -> audit_pb2.AuditCase:
        async with self._door.answering(context, request.run):
            known = await self._handler.hear(evidence_from(request))
        reply = audit_pb2.AuditCase() if known is None else evidence_to(known, self._door.run)
        return self._door.traffic.answered(request, reply)


def _names_in(content: bytes) -> Iterator[bytes]:
    return (content[at : at + NAME_BYTES] for at in range(0, len(content), NAME_BYTES))
