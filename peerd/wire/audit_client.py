"""The calling side of audits: receipts and tensors of other peers' calls, and cases that are told. Rule 20 (audit)."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Any

from peerd.errors import BadMessageError
from peerd.generated import audit_pb2, audit_pb2_grpc
from peerd.link.links import ending, read_within
from peerd.link.traffic import PeerRole
from peerd.policy.step.evidence import Evidence
from peerd.policy.step.receipts import SentOn, SignedPass
from peerd.policy.step.verdicts import MOST_CASES
from peerd.table.record import PeerId
from peerd.wire import convert
from peerd.wire.audit_service import MOST_KNOWN, MOST_NAMES, MOST_PAIRS, WantedBytes
from peerd.wire.chunk_streams import header_of
from peerd.wire.clients import Client, read_chunks
from peerd.wire.messages import TensorBytes
from peerd.wire.receipts import evidence_from, evidence_to, pair_from, sent_on_from
from peerd.wire.tensors import take

KeptTensors = tuple[TensorBytes, TensorBytes, TensorBytes | None]
"""Inputs, labels, and the gradient that was given back. One whose bytes were not wanted has no chunks."""


class AuditClient(Client):
    stub_of = audit_pb2_grpc.AuditStub

    async def get_receipts(
        self, peer: PeerId, stage: int, step: int, known: Collection[bytes], most: int, patience_s: float
    ) -> tuple[list[Evidence], list[SignedPass]]:
        """Return convictions that are not known here, and what is signed of the peer's own calls to a stage in a step, at most `most`.

        No signature is checked. Raises RemoteError.
        """
        request = audit_pb2.ReceiptsRequest(run=self._run, stage=stage, step=step, known=islice(known, MOST_KNOWN))
        convictions, pairs = list[Evidence](), list[SignedPass]()
        with ending((await self._stub(peer)).GetReceipts(request)) as rpc:
            while (message := await read_within(rpc.__aiter__(), patience_s)) is not None:
                self._count(message.ByteSize())
                if message.HasField("conviction"):
                    convictions.append(evidence_from(message.conviction))
                if len(message.pairs) > MOST_PAIRS or len(convictions) > MOST_CASES or len(pairs) + len(message.pairs) > most:
                    raise BadMessageError("more receipts or convictions than there can be")
                pairs += map(pair_from, message.pairs)
        return convictions, pairs

    async def get_sent_on(
        self, peer: PeerId, stage: int, step: int, known: Collection[bytes], most: int, patience_s: float
    ) -> list[SentOn]:
        """Return what peers of a stage have sent on to this one in a step, but for the calls of these names, at most `most`.

        No signature is checked. Raises RemoteError.
        """
        names = b"".join(islice(known, MOST_NAMES))
        request, found = audit_pb2.SentOnRequest(run=self._run, stage=stage, step=step, known=names), list[SentOn]()
        with ending((await self._stub(peer)).GetSentOn(request)) as rpc:
            while (message := await read_within(rpc.__aiter__(), patience_s)) is not None:
                self._count(message.ByteSize())
                if len(message.pairs) > MOST_PAIRS or len(found) + len(message.pairs) > most:
                    raise BadMessageError("more calls than there can be")
                found += map(sent_on_from, message.pairs)
        return found

    async def get_pass(self, peer: PeerId, step: int, signed: bytes, wanted: WantedBytes, patience_s: float) -> KeptTensors:
        """Return the tensors of a call, with the bytes of those that are wanted.

        `signed`: the hash of its receipt, or of what its caller has signed. Who asks has to check them, and what is told of the others.
        Raises RemoteError.
        """
        request = audit_pb2.PassRequest(run=self._run, step=step, signed=signed, wanted=wanted)
        with ending((await self._stub(peer)).GetPass(request)) as rpc:
            header = await header_of(rpc, patience_s, "a pass without a header")
            inputs, labels = convert.tensor_from(header.inputs), convert.tensor_from(header.labels)
            gradient = convert.tensor_from(header.gradient) if header.HasField("gradient") else None
            told = (inputs, labels, gradient)
            values = {which: value for which, value in zip(WantedBytes, told, strict=True) if value is not None and which in wanted}
            num_bytes = sum(value.num_bytes for value in values.values())
            chunks = await read_chunks(rpc, num_bytes, patience_s) if num_bytes else ()
        self._count(num_bytes)
        taken = dict(zip(values, take(chunks, *values.values()), strict=True))
        return taken.get(WantedBytes.INPUTS, inputs), taken.get(WantedBytes.LABELS, labels), taken.get(WantedBytes.GRADIENT, gradient)

    async def tell_case(self, peer: PeerId, evidence: Evidence, timeout_s: float) -> Evidence | None:
        """Tell a peer of a case. Returns what it knows of it, if anything; no signature is checked. Raises RemoteError."""
        reply: Any = await self._ask(peer, "TellCase", evidence_to(evidence, self._run), timeout_s)
        return evidence_from(reply) if reply.HasField("item") or reply.HasField("part") else None

    def _count(self, num_bytes: int) -> None:
        self._links.traffic.took("audits", PeerRole.STAGE_PEER, num_bytes)
