"""Receipts on the wire: what both ends of a call sign of it, for rule 20 (audit). The hash of a tensor covers how its bytes are read."""

from __future__ import annotations

from typing import Protocol

from google.protobuf.message import DecodeError

from peerd.errors import BadMessageError
from peerd.generated import audit_pb2, stage_pb2
from peerd.policy.hashing import digest
from peerd.policy.step.auditing import AuditWord
from peerd.policy.step.certificates import ID_BYTES
from peerd.policy.step.evidence import MOST_WORDS, Evidence, SignedWord
from peerd.policy.step.parts import SentPart
from peerd.policy.step.receipts import HASH_BYTES, LEDGER_BYTES, NOTHING, AnsweredPass, AskedPass, Receipt, SentOn, SignedAsk, SignedPass
from peerd.table.record import AverageId, PeerId
from peerd.wire.chunks import digest_of
from peerd.wire.convert import MAX_PEER_CHARS, MAX_SIGNATURE_BYTES, MAX_STAGES
from peerd.wire.messages import Call, CallResult, TensorBytes


def tensor_hash(value: TensorBytes | None) -> bytes:
    """The hash of a tensor as it travels, 32 bytes; NOTHING for none. It takes a while for a large one."""
    if value is None:
        return NOTHING
    return digest("tensor", value.dtype, str(value.shape), str(value.codec), digest_of(value.chunks), size=HASH_BYTES)


class Witness(Protocol):
    """Signs this peer's calls, and looks at what is signed in the answers."""

    async def asks(self, call: Call, peer: PeerId) -> tuple[Call, AskedPass | None]:
        """Return the call as it is sent to `peer`, and what was signed of it; None: nothing."""

    async def took(self, call: Call, asked: AskedPass | None, result: CallResult) -> None:
        """Keep what both ends have signed. Raises BadMessageError if the callee has signed something else than it sent."""


class NoWitness:
    """Signs nothing."""

    async def asks(self, call: Call, _peer: PeerId) -> tuple[Call, AskedPass | None]:
        return call, None

    async def took(self, call: Call, asked: AskedPass | None, result: CallResult) -> None: ...


def ask_to(ask: SignedAsk) -> stage_pb2.PassReceipt:
    """A receipt without an answer."""
    asked = ask.asked
    return stage_pb2.PassReceipt(
        stage=asked.stage,
        step=asked.step,
        microbatch=asked.index,
        caller=asked.caller,
        callee=asked.callee,
        inputs=asked.inputs,
        labels=asked.labels,
        above=asked.above,
        caller_lineage=asked.lineage,
        caller_signature=ask.signature,
    )


def ask_from(message: stage_pb2.PassReceipt) -> SignedAsk:
    """Whether it is signed is not checked here."""
    return receipt_from(message).ask


def receipt_to(receipt: Receipt) -> stage_pb2.PassReceipt:
    message, answered = ask_to(receipt.ask), receipt.answered
    message.gradient, message.below, message.lineage = answered.gradient, answered.below, answered.lineage
    message.ledger, message.callee_signature = answered.ledger, receipt.callee_signature
    return message


def receipt_from(message: stage_pb2.PassReceipt) -> Receipt:
    """Whether it is signed is not checked here."""
    hashes = (message.inputs, message.labels, message.gradient, message.below, message.lineage, message.above, message.caller_lineage)
    if (
        any(len(each) not in (0, HASH_BYTES) for each in hashes)
        or len(message.ledger) not in (0, LEDGER_BYTES)
        or message.stage >= MAX_STAGES
    ):
        raise BadMessageError("a receipt with a hash or a stage out of range")
    if max(len(message.caller), len(message.callee)) > MAX_PEER_CHARS:
        raise BadMessageError("a receipt with a name that no peer has")
    if max(len(message.caller_signature), len(message.callee_signature)) > MAX_SIGNATURE_BYTES:
        raise BadMessageError("the signature of a receipt is too long")
    ends = PeerId(message.caller), PeerId(message.callee)
    made = message.inputs, message.labels, message.above, message.caller_lineage
    asked = AskedPass(message.stage, message.step, message.microbatch, *ends, *made)
    answered = AnsweredPass(message.gradient, message.below, message.lineage, message.ledger)
    return Receipt(asked, answered, message.caller_signature, message.callee_signature)


def pair_to(signed: SignedPass) -> audit_pb2.ReceiptPair:
    below = receipt_to(signed.below) if signed.below is not None else None
    return audit_pb2.ReceiptPair(receipt=receipt_to(signed.own), below=below)


def pair_from(message: audit_pb2.ReceiptPair) -> SignedPass:
    return SignedPass(receipt_from(message.receipt), receipt_from(message.below) if message.HasField("below") else None)


def sent_on_to(sent: SentOn) -> audit_pb2.SentOnPair:
    return audit_pb2.SentOnPair(got=ask_to(sent.got), gave=receipt_to(sent.gave))


def sent_on_from(message: audit_pb2.SentOnPair) -> SentOn:
    return SentOn(ask_from(message.got), receipt_from(message.gave))


def evidence_to(evidence: Evidence, run: str) -> audit_pb2.AuditCase:
    words = [
        audit_pb2.AuditWord(judge=each.judge, deviation=each.word.deviation, tolerance=each.word.tolerance, signature=each.signature)
        for each in evidence.words
    ]
    case = audit_pb2.AuditCase(run=run, accuser=evidence.accuser, coins=evidence.coins, words=words, insists=evidence.insists)
    if isinstance(evidence.signed, SentPart):
        case.part.CopyFrom(_part_to(evidence.signed))
    elif isinstance(evidence.signed, SentOn):
        case.sent_on.CopyFrom(sent_on_to(evidence.signed))
    else:
        case.item.CopyFrom(pair_to(evidence.signed))
    return case


def _part_to(sent: SentPart) -> audit_pb2.SentPart:
    slice_number, place, number = sent.place
    return audit_pb2.SentPart(
        author=sent.author,
        stage=sent.stage,
        step=sent.step,
        average_id=sent.average_id,
        slice=slice_number,
        place=place,
        number=number,
        content=sent.content,
        signature=sent.signature,
        basis=sent.basis,
    )


def _part_from(message: audit_pb2.SentPart) -> SentPart:
    hashes = len(message.content), len(message.basis)
    if len(message.average_id) != ID_BYTES or hashes not in ((HASH_BYTES, 0), (HASH_BYTES, HASH_BYTES)) or message.stage >= MAX_STAGES:
        raise BadMessageError("a part with a hash or a stage out of range")
    if len(message.author) > MAX_PEER_CHARS or len(message.signature) > MAX_SIGNATURE_BYTES:
        raise BadMessageError("a part with a name or a signature that is too long")
    place = message.slice, message.place, message.number
    author, average_id = PeerId(message.author), AverageId(message.average_id)
    return SentPart(author, message.stage, message.step, average_id, place, message.content, message.signature, message.basis)


def evidence_from(message: audit_pb2.AuditCase) -> Evidence:
    """Whether it is signed is not checked here."""
    names = (message.accuser, *(each.judge for each in message.words))
    signatures = (message.coins, message.insists, *(each.signature for each in message.words))
    if len(message.words) > MOST_WORDS or max(map(len, names)) > MAX_PEER_CHARS or max(map(len, signatures)) > MAX_SIGNATURE_BYTES:
        raise BadMessageError("a case with too many words, or with a name or a signature that is too long")
    words = (SignedWord(PeerId(each.judge), AuditWord(each.deviation, each.tolerance), each.signature) for each in message.words)
    return Evidence(_work_from(message), PeerId(message.accuser), message.coins, insists=message.insists).with_words(words)


def _work_from(message: audit_pb2.AuditCase) -> SignedPass | SentOn | SentPart:
    if message.HasField("part"):
        return _part_from(message.part)
    return sent_on_from(message.sent_on) if message.HasField("sent_on") else pair_from(message.item)


def packed_case(evidence: Evidence, run: str) -> bytes:
    """A case as it lies in a file."""
    return evidence_to(evidence, run).SerializeToString(deterministic=True)


def unpacked_case(content: bytes, run: str) -> Evidence:
    """Whether it is signed is not checked here. Raises BadMessageError, also for a case of another run."""
    try:
        message = audit_pb2.AuditCase.FromString(content)
    except DecodeError:
        raise BadMessageError("no case") from None
    if message.run != run:
        raise BadMessageError("a case of another run")
    return evidence_from(message)


def tell_above(header: stage_pb2.CallHeader, above: SignedAsk | None) -> None:
    """Write the call that the caller got itself into its own."""
    if above is not None:
        header.above.CopyFrom(ask_to(above))


def above_in(header: stage_pb2.CallHeader) -> SignedAsk | None:
    """Whether it is signed is not checked here."""
    if len(header.lineage) not in (0, HASH_BYTES):
        raise BadMessageError("a call with a lineage that is none")
    return ask_from(header.above) if header.HasField("above") else None


def tell_signed(done: stage_pb2.Done, signed: SignedPass | None) -> None:
    """Write what is signed of a call into its reply."""
    if signed is not None:
        done.receipt.CopyFrom(receipt_to(signed.own))
        if signed.below is not None:
            done.below.CopyFrom(receipt_to(signed.below))


def signed_in(done: stage_pb2.Done) -> SignedPass | None:
    if not done.HasField("receipt"):
        return None
    return SignedPass(receipt_from(done.receipt), receipt_from(done.below) if done.HasField("below") else None)
