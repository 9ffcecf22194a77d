"""Records and manifests as bytes: encoding, signatures, and the checks every field passes before it is used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgpack

from peerd.config.manifest import MAX_MICROBATCHES_PER_STEP, Manifest, parse_bytes, run_id
from peerd.errors import BadMessageError, SignatureError
from peerd.swarm.identity import SIGNATURE_BYTES, Identity, public_key_of, verify
from peerd.table.record import (
    NO_AVERAGE,
    AverageId,
    Evaluation,
    Lineage,
    PeerId,
    PeerRecord,
    Phase,
    RawRecord,
    Reach,
    RunId,
    StageSummary,
    StepNorm,
    Suspicion,
    TiedSum,
    Void,
)
from peerd.wire.convert import bitmap_from, bitmap_to

MAX_RECORD_BYTES = 8192
"""Room for four ledgers of the largest step: mine and, where I speak for my stage, all its peers', of this step and of the next."""
MAX_NORMS = 8
MAX_PERIODS = 256
"""No peer lives longer unseen than three times so many announce periods, whatever it says."""
MAX_PEERS = 1 << 20
_MAX_COUNT = 1 << 62
NUM_FIELDS = 27
"""That every record has."""
_ABSENT: tuple[list[Any], ...] = ([None, []], [b"", 0], [NO_AVERAGE, [], [0, b""]], [0, False], [1, None])
"""What norms, the next step's ledger, a tied weight, how a peer is reached, and a large swarm are where a record says nothing of it."""
_RECORD_DOMAIN = b"peerd record\0"
_MANIFEST_DOMAIN = b"peerd manifest\0"


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A record with the bytes it was signed as; only those bytes travel on."""

    record: PeerRecord
    body: bytes
    signature: bytes

    @property
    def raw(self) -> RawRecord:
        return (self.body, self.signature)


@dataclass(frozen=True, slots=True)
class SignedManifest:
    manifest: Manifest
    body: bytes
    organiser_key: bytes
    signature: bytes

    @property
    def run(self) -> RunId:
        return RunId(run_id(self.organiser_key, self.manifest.name))


def sign_record(record: PeerRecord, identity: Identity, run: RunId) -> SignedRecord:
    body = msgpack.packb(_to_list(record))
    return SignedRecord(record, body, identity.sign(_RECORD_DOMAIN + run.encode() + body))


def read_record(body: bytes, signature: bytes, run: RunId) -> SignedRecord:
    """Decode, check every field's type and range, and verify the signature. BadMessageError says what is wrong."""
    if len(body) > MAX_RECORD_BYTES or len(signature) != SIGNATURE_BYTES:
        raise BadMessageError(f"record of {len(body)} bytes with a signature of {len(signature)}")
    try:
        record = _from_list(msgpack.unpackb(body, max_array_len=256, max_str_len=512, max_bin_len=2048))
        key = public_key_of(record.peer)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise BadMessageError(f"bad record: {error}") from None
    if not verify(key, _RECORD_DOMAIN + run.encode() + body, signature):
        raise BadMessageError(f"the record of {record.peer} is not signed by it")
    return SignedRecord(record, body, signature)


def peek_record(body: bytes) -> tuple[PeerId, tuple[int, int]]:
    """Whose record it claims to be, and its (incarnation, version), before its signature is checked."""
    if len(body) > MAX_RECORD_BYTES:
        raise BadMessageError(f"record of {len(body)} bytes")
    try:
        fields = msgpack.unpackb(body, max_array_len=256, max_str_len=512, max_bin_len=2048)
        return PeerId(_text(fields[0], 64)), (_count(fields[1]), _count(fields[2]))
    except (ValueError, TypeError, IndexError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise BadMessageError(f"bad record: {error}") from None


def sign_manifest(manifest: Manifest, organiser: Any) -> SignedManifest:
    """Sign with the organiser's Ed25519PrivateKey."""
    body = manifest.canonical_bytes()
    return SignedManifest(manifest, body, organiser.public_key().public_bytes_raw(), organiser.sign(_MANIFEST_DOMAIN + body))


def read_manifest(body: bytes, organiser_key: bytes, signature: bytes) -> SignedManifest:
    """Verify and parse. Whether the organiser is the right one is the caller's question: compare `run`."""
    if len(organiser_key) != 32 or not verify(organiser_key, _MANIFEST_DOMAIN + body, signature):
        raise SignatureError(
            "the run's manifest is not signed by its organiser", "ask the organiser for the right address; do not join this one"
        )
    return SignedManifest(parse_bytes(body, "the run's manifest"), body, organiser_key, signature)


def pack_manifest(signed: SignedManifest) -> bytes:
    return bytes(msgpack.packb([signed.body, signed.organiser_key, signed.signature]))


def unpack_manifest(raw: bytes) -> SignedManifest:
    try:
        body, key, signature = msgpack.unpackb(raw, max_array_len=3, max_bin_len=1 << 17)
        if not all(isinstance(part, bytes) for part in (body, key, signature)):
            raise ValueError("not three byte strings")
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise BadMessageError(f"bad manifest: {error}") from None
    return read_manifest(body, key, signature)


def pack_record(signed: SignedRecord) -> bytes:
    return bytes(msgpack.packb([signed.body, signed.signature]))


def unpack_record(raw: bytes, run: RunId) -> SignedRecord:
    try:
        body, signature = msgpack.unpackb(raw, max_array_len=2, max_bin_len=MAX_RECORD_BYTES)
        if not (isinstance(body, bytes) and isinstance(signature, bytes)):
            raise ValueError("not two byte strings")
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise BadMessageError(f"bad record: {error}") from None
    return read_record(body, signature, run)


def _to_list(record: PeerRecord) -> list[Any]:
    """What only some records say comes last, each in a place of its own: null where absent, and nothing after the last that is there."""
    norms = [record.gradient_norm, [[known.step, known.norm] for known in record.norms]]
    told = [[known.step, known.id] for known in record.tied_sums]
    tied = [record.tied_sum, told, [record.tied.inexact, record.tied.chain]]
    following = [bitmap_to(record.next_done), record.next_ledger_no]
    reached = [int(record.reach), record.relays]
    large = [record.periods, None if record.summary is None else _summary_to(record.summary)]
    parts = [norms, following, tied, reached, large]
    some = [part if part != none else None for part, none in zip(parts, _ABSENT, strict=True)]
    while some and some[-1] is None:
        some.pop()
    return _step_and_vitals(record) + some


def _summary_to(told: StageSummary) -> list[Any]:
    return [told.peers, told.trainers, told.queue, told.throughput, bitmap_to(told.held), bitmap_to(told.next_held)]


def _step_and_vitals(record: PeerRecord) -> list[Any]:
    return [
        record.peer,
        record.incarnation,
        record.version,
        list(record.addresses),
        record.stage,
        record.step,
        int(record.phase),
        bitmap_to(record.done),
        record.ledger_no,
        record.average_id,
        [record.lineage.inexact, record.lineage.chain],
        record.leaving,
        record.trains,
        record.trains_from,
        [[s.peer, s.incarnation, s.version] for s in record.suspects],
        [[v.peer, v.incarnation, v.step] for v in record.voids],
        list(record.checkpoints),
        record.gives_start,
        record.queue,
        record.in_flight,
        record.throughput,
        record.tokens,
        record.last_loss,
        [record.evaluation.step, record.evaluation.loss] if record.evaluation else None,
        record.software,
        record.device,
        record.memory_bytes,
    ]


def _from_list(fields: Any) -> PeerRecord:
    if not isinstance(fields, list) or not NUM_FIELDS <= len(fields) <= NUM_FIELDS + len(_ABSENT):
        raise ValueError(f"a record has {NUM_FIELDS} fields and at most {len(_ABSENT)} more")
    (peer, incarnation, version, addresses, stage, step, phase, done, ledger_no, average_id, lineage, leaving, trains, trains_from) = (
        fields[:14]
    )
    (suspects, voids, checkpoints, gives_start, queue, in_flight, throughput, tokens, last_loss) = fields[14:23]
    evaluation, software, device, memory = fields[23:NUM_FIELDS]
    norms_told, following, tied_told, reached, large = _parts(fields[NUM_FIELDS:])
    (gradient_norm, norms), (next_done, next_ledger_no), (tied_sum, tied_sums, tied) = norms_told, following, tied_told
    (reach, relays), (periods, summary) = reached, large
    (inexact, chain), (tied_inexact, tied_chain) = _list(lineage, 2), _list(tied, 2)
    return PeerRecord(
        peer=PeerId(_text(peer, 64)),
        incarnation=_count(incarnation),
        version=_count(version),
        addresses=tuple(_text(address, 256) for address in _list(addresses)[:8]),
        reach=Reach(_count(reach, 3)),
        relays=_flag(relays),
        stage=_count(stage, 4096),
        step=_count(step),
        phase=Phase(_count(phase, 3)),
        done=bitmap_from(_bytes(done, MAX_MICROBATCHES_PER_STEP // 8)),
        ledger_no=_count(ledger_no),
        next_done=bitmap_from(_bytes(next_done, MAX_MICROBATCHES_PER_STEP // 8)),
        next_ledger_no=_count(next_ledger_no),
        average_id=AverageId(_bytes(average_id, 16)),
        lineage=Lineage(_count(inexact), _bytes(chain, 32)),
        gradient_norm=None if gradient_norm is None else _norm(gradient_norm),
        norms=tuple(StepNorm(_count(each[0]), _norm(each[1])) for each in map(_pair, _list(norms)[:MAX_NORMS])),
        tied_sum=AverageId(_bytes(tied_sum, 16)),
        tied_sums=tuple(TiedSum(_count(each[0]), AverageId(_bytes(each[1], 16))) for each in map(_pair, _list(tied_sums)[:MAX_NORMS])),
        tied=Lineage(_count(tied_inexact), _bytes(tied_chain, 32)),
        leaving=_flag(leaving),
        trains=_flag(trains),
        trains_from=_count(trains_from),
        suspects=tuple(Suspicion(PeerId(_text(s[0], 64)), _count(s[1]), _count(s[2])) for s in map(_triple, _list(suspects))),
        voids=tuple(Void(PeerId(_text(v[0], 64)), _count(v[1]), _count(v[2])) for v in map(_triple, _list(voids))),
        checkpoints=tuple(_count(each) for each in _list(checkpoints)),
        gives_start=_flag(gives_start),
        queue=_count(queue, 1 << 20),
        in_flight=_count(in_flight, 1 << 20),
        throughput=_real(throughput),
        tokens=_count(tokens),
        last_loss=None if last_loss is None else _real(last_loss),
        evaluation=None if evaluation is None else _evaluation(evaluation),
        software=_text(software, 64),
        device=_text(device, 64),
        memory_bytes=_count(memory),
        periods=max(1, _count(periods, MAX_PERIODS)),
        summary=None if summary is None else _summary(summary),
    )


def _parts(given: list[Any]) -> list[list[Any]]:
    """What only some records say, in the order of `_ABSENT`."""
    absent = [list(none) for none in _ABSENT]
    found = [none if part is None else _list(part, len(none)) for none, part in zip(absent, given, strict=False)]
    return found + absent[len(given) :]


def _count(value: Any, most: int = _MAX_COUNT) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"not a number between 0 and {most}")
    return value


def _real(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


def _norm(value: Any) -> float:
    """Infinite is a sound answer: something overflowed."""
    if type(value) not in (int, float) or not value >= 0:
        raise ValueError("not a norm")
    return float(value)


def _text(value: Any, most: int) -> str:
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise ValueError(f"not a printable text of at most {most} characters")
    return value


def _bytes(value: Any, most: int) -> bytes:
    if not isinstance(value, bytes) or len(value) > most:
        raise ValueError(f"not at most {most} bytes")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("not a truth value")
    return value


def _list(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or len(value) > 64 or (length is not None and len(value) != length):
        raise ValueError("not a list of the right length")
    return value


def _pair(value: Any) -> list[Any]:
    return _list(value, 2)


def _evaluation(value: Any) -> Evaluation:
    step, loss = _list(value, 2)
    return Evaluation(_count(step), _real(loss))


def _summary(value: Any) -> StageSummary:
    peers, trainers, queue, throughput, held, next_held = _list(value, 6)
    return StageSummary(
        peers=_count(peers, MAX_PEERS),
        trainers=_count(trainers, MAX_PEERS),
        queue=_count(queue, 1 << 40),
        throughput=_real(throughput),
        held=bitmap_from(_bytes(held, MAX_MICROBATCHES_PER_STEP // 8)),
        next_held=bitmap_from(_bytes(next_held, MAX_MICROBATCHES_PER_STEP // 8)),
    )


def _triple(value: Any) -> list[Any]:
    return _list(value, 3)
