"""Records and manifests as bytes: encoding, signatures, and the checks every field passes before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, call
from typing import Any, get_type_hints

import msgpack

from peerd.config.manifest import MANIFEST_DOMAIN, Manifest, parse_bytes, run_id
from peerd.errors import BadMessageError, SignatureError
from peerd.link.peer_keys import public_key_of, verify
from peerd.swarm.identity import SIGNATURE_BYTES, Identity
from peerd.table.forms import as_list
from peerd.table.record import PeerId, PeerRecord, RawRecord, RunId
from peerd.wire.messages import RawManifest

MAX_RECORD_BYTES = 16384
"""Room for four ledgers of the largest step: this peer's and, in a summary of its stage, all its peers', for this step and the next."""
MOST_PUSHED = 2
"""Records in a push: the sender's own, or the two that prove that a peer lies."""
NUM_FIELDS = 27
"""Number of places that every record has. Each later place holds a part: fields that only some records fill in."""
_RECORD_DOMAIN = b"peerd record\0"

_FIELDS = sorted(
    ((name, *hint.__metadata__) for name, hint in get_type_hints(PeerRecord, include_extras=True).items()), key=lambda entry: int(entry[1])
)
_PLACES = [place for _name, place, _form in _FIELDS]
_PARTS = [slice(_PLACES.index(place), _PLACES.index(place) + _PLACES.count(place)) for place in range(NUM_FIELDS, _PLACES[-1] + 1)]
"""The fields that share each later place."""
_NAMES = [name for name, _place, _form in _FIELDS]
_READS = [form.read for _name, _place, form in _FIELDS]
_WRITES = [(number, form.write) for number, (_name, _place, form) in enumerate(_FIELDS) if form.write]
_values_of = attrgetter(*_NAMES)
_SILENT = [(part, _values_of(PeerRecord(peer=PeerId("")))[part]) for part in _PARTS]
"""The parts, with the default values of their fields."""


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A record with the bytes that were signed; only these bytes are passed on."""

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
    def raw(self) -> RawManifest:
        return (self.body, self.organiser_key, self.signature)

    @property
    def run(self) -> RunId:
        return RunId(run_id(self.organiser_key, self.manifest.name))


def sign_record(record: PeerRecord, identity: Identity, run: RunId) -> SignedRecord:
    body = msgpack.packb(_to_list(record))
    return SignedRecord(record, body, identity.sign(_RECORD_DOMAIN + run.encode() + body))


def read_record(body: bytes, signature: bytes, run: RunId) -> SignedRecord:
    """Decode a record, check every field's type and range, and verify the signature. Raises BadMessageError."""
    if len(body) > MAX_RECORD_BYTES or len(signature) != SIGNATURE_BYTES:
        raise BadMessageError(f"record of {len(body)} bytes with a signature of {len(signature)}")
    try:
        record = _from_list(_unpack(body))
        key = public_key_of(record.peer)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise BadMessageError(f"bad record: {error}") from None
    if not verify(key, _RECORD_DOMAIN + run.encode() + body, signature):
        raise BadMessageError(f"the record of {record.peer} is not signed by it")
    return SignedRecord(record, body, signature)


def peek_record(body: bytes) -> tuple[PeerId, tuple[int, int]]:
    """Return the peer that a record names, and its (incarnation, version), without checking the signature."""
    if len(body) > MAX_RECORD_BYTES:
        raise BadMessageError(f"record of {len(body)} bytes")
    try:
        peer, incarnation, version = map(call, _READS[:3], _unpack(body)[:3])
    except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise BadMessageError(f"bad record: {error}") from None
    return peer, (incarnation, version)


def _unpack(body: bytes) -> Any:
    return msgpack.unpackb(body, max_array_len=256, max_str_len=512, max_bin_len=2048)


def has_signed(peer: PeerId, message: bytes, signature: bytes) -> bool:
    """Whether the text has this peer's signature. No peer without a key has one."""
    try:
        return verify(public_key_of(peer), message, signature)
    except ValueError:
        return False


def sign_manifest(manifest: Manifest, organiser: Any) -> SignedManifest:
    """Sign with the organiser's Ed25519PrivateKey."""
    body = manifest.canonical_bytes()
    return SignedManifest(manifest, body, organiser.public_key().public_bytes_raw(), organiser.sign(MANIFEST_DOMAIN + body))


def read_manifest(body: bytes, organiser_key: bytes, signature: bytes) -> SignedManifest:
    """Verify and parse. The caller compares `run` to find out whether it is the right organiser."""
    if len(organiser_key) != 32 or not verify(organiser_key, MANIFEST_DOMAIN + body, signature):
        raise SignatureError(
            "the run's manifest is not signed by its organiser", "ask the organiser for the right address; do not join this one"
        )
    return SignedManifest(parse_bytes(body, "the run's manifest"), body, organiser_key, signature)


def pack(signed: SignedRecord | SignedManifest) -> bytes:
    return bytes(msgpack.packb(signed.raw))


def unpack_manifest(packed: bytes) -> SignedManifest:
    return read_manifest(*_unpacked("manifest", packed, 3, 1 << 17))


def unpack_record(packed: bytes, run: RunId) -> SignedRecord:
    body, signature = _unpacked("record", packed, 2, MAX_RECORD_BYTES)
    return read_record(body, signature, run)


def _unpacked(what: str, packed: bytes, count: int, most_bytes: int) -> list[bytes]:
    """Unpack `count` byte strings of at most `most_bytes` each."""
    try:
        parts = msgpack.unpackb(packed, max_array_len=count, max_bin_len=most_bytes)
        if not isinstance(parts, list) or len(parts) != count or not all(isinstance(part, bytes) for part in parts):
            raise ValueError(f"not {count} byte strings")
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise BadMessageError(f"bad {what}: {error}") from None
    return parts


def _to_list(record: PeerRecord) -> list[Any]:
    """Return the record as plain values, each at the place that its field names."""
    said = _values_of(record)
    parts = [said[part] != default for part, default in _SILENT]
    values = list(said)
    for index, write in _WRITES:
        values[index] = write(values[index])
    while parts and not parts[-1]:
        parts.pop()
    return values[:NUM_FIELDS] + [values[part] if is_there else None for part, is_there in zip(_PARTS, parts, strict=False)]


def _from_list(values: Any) -> PeerRecord:
    if not isinstance(values, list) or not NUM_FIELDS <= len(values) <= NUM_FIELDS + len(_PARTS):
        raise ValueError(f"a record has {NUM_FIELDS} fields and at most {len(_PARTS)} more")
    names, reads, found = _NAMES[:NUM_FIELDS], _READS[:NUM_FIELDS], values[:NUM_FIELDS]
    for part, told in zip(_PARTS, values[NUM_FIELDS:], strict=False):
        if told is not None:
            names += _NAMES[part]
            reads += _READS[part]
            found += as_list(told, part.stop - part.start)
    return PeerRecord(**dict(zip(names, map(call, reads, found), strict=True)))


def read_of_push(caller: PeerId, raws: Sequence[RawRecord]) -> Sequence[RawRecord]:
    """The records of a push that are read: the caller's own, or two of one peer, which may prove that it lies."""
    some = raws[:MOST_PUSHED]
    try:
        names = [peek_record(body)[0] for body, _ in some]
    except BadMessageError:
        return some  # to be counted, and blamed on the caller where it names itself
    return some if len(names) > 1 and len(set(names)) == 1 else [raw for raw, name in zip(some, names, strict=True) if name == caller]
