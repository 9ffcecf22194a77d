"""A receipt as a file: the run's signed manifest, the peer's rows and accounts, and the peer's signature under all of it.

Peers are told once, by their keys, and named by their places after that. Whatever is in a file is covered by a signature or by the form,
which is exact: no two files tell the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgpack

from peerd.config.manifest import MANIFEST_DOMAIN, Manifest, parse_bytes, run_id
from peerd.config.organiser import is_signed_by
from peerd.errors import ManifestError, SignatureError
from peerd.policy.step.accounts import EVERY, Account, SignedAccount, Vouch, WorkDone
from peerd.policy.step.work_receipts import MOST_BYTES, AuditTold, ProvenRow, StageReceipt, WorkReceipt, why_refused
from peerd.table.record import PeerId, RunId

DOMAIN = b"peerd receipt\0"
VERSION = 1
KEY_BYTES, SIGNATURE_BYTES = 32, 64
_PEER_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
REMEMBERED_KEYS = 1 << 12
RawManifest = tuple[bytes, bytes, bytes]
"""The body, the organiser's raw public key, and its signature."""
Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class ReadReceipt:
    """A receipt that is sound, with the manifest of its run."""

    receipt: WorkReceipt
    manifest: Manifest


@lru_cache(maxsize=REMEMBERED_KEYS)
def key_of(peer: PeerId) -> bytes:
    """The raw public key inside a peer id. Raises ValueError for what is no peer id."""
    import base58

    raw = base58.b58decode(peer) if len(peer) <= KEY_BYTES * 2 else b""
    if len(raw) != len(_PEER_PREFIX) + KEY_BYTES or not raw.startswith(_PEER_PREFIX):
        raise ValueError(f"{peer[:16]} is not a peer id")
    return raw[len(_PEER_PREFIX) :]


@lru_cache(maxsize=REMEMBERED_KEYS)
def peer_of(key: bytes) -> PeerId:
    """The peer id of a raw public key."""
    import base58

    return PeerId(base58.b58encode(_PEER_PREFIX + key).decode())


def has_signed(peer: PeerId, text: bytes, signature: bytes) -> bool:
    """Whether the text has this peer's signature. No peer without a key has one."""
    try:
        return is_signed_by(key_of(peer), text, signature)
    except ValueError:
        return False


def pack_account(signed: SignedAccount) -> bytes:
    """An account as a daemon keeps it. The run and the stage are not in it."""
    keys = _Keys()
    return bytes(msgpack.packb([_account_to(signed, keys), keys.told]))


def unpack_account(raw: bytes, run: RunId, stage: int) -> SignedAccount:
    """Raises ValueError. Signatures are not checked."""
    try:
        told, keys = msgpack.unpackb(raw)
        return _account_from(told, run, stage, _peers_from(keys))
    except (ValueError, TypeError, KeyError, IndexError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"no account: {error}") from None


def pack_row(row: ProvenRow) -> bytes:
    return bytes(msgpack.packb(_row_to(row)))


def unpack_row(raw: bytes) -> ProvenRow:
    """Raises ValueError."""
    try:
        return _row_from(msgpack.unpackb(raw))
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"no row: {error}") from None


def pack_receipt(receipt: WorkReceipt, manifest: RawManifest, sign: Sign) -> bytes:
    """The file of a receipt; `sign` makes the signature of its peer."""
    keys = _Keys([receipt.peer])
    parts = [_part_to(part, keys) for part in receipt.parts]
    audits = [[keys.place(told.auditor), told.stage, told.step, told.right, told.differed, told.signature] for told in receipt.audits]
    body = bytes(msgpack.packb([VERSION, list(manifest), keys.told, parts, audits]))
    return bytes(msgpack.packb([body, sign(DOMAIN + body)]))


def read_receipt(raw: bytes, run: RunId | None = None) -> ReadReceipt:
    """Decode a receipt and check all of it. `run`: the run that it has to be of; None: any. Raises SignatureError, which says why."""
    if len(raw) > MOST_BYTES:
        raise _refused(f"it has {len(raw)} bytes, and none has more than {MOST_BYTES}")
    body, signature = _outside(raw)
    try:
        version, (text, organiser, signed), keys, parts, audits = msgpack.unpackb(body)
        peers = _peers_from(keys)
        if version != VERSION or not all(isinstance(each, bytes) for each in (text, organiser, signed)):
            raise ValueError("of another version of peerd, or without a manifest")
    except (ValueError, TypeError, IndexError, msgpack.exceptions.UnpackException) as error:
        raise _refused(f"it is no receipt: {error}") from None
    if not has_signed(peers[0], DOMAIN + body, signature):
        raise _refused("it was changed after its peer had signed it, or another has signed it")
    if len(organiser) != KEY_BYTES or not is_signed_by(organiser, MANIFEST_DOMAIN + text, signed):
        raise _refused("the run's manifest in it is not signed by its organiser")
    try:
        manifest = parse_bytes(text, "the manifest of the receipt")
        own = RunId(run_id(organiser, manifest.name))
        found = tuple(_part_from(each, own, peers) for each in parts)
        receipt = WorkReceipt(own, peers[0], found, _audits_from(audits, peers), peer_of(organiser))
    except (ValueError, TypeError, IndexError, ManifestError) as error:
        raise _refused(f"it is no receipt: {error}") from None
    if why := why_refused(receipt, run or own, has_signed):
        raise _refused(why)
    if why := _why_impossible(receipt, manifest):
        raise _refused(why)
    return ReadReceipt(receipt, manifest)


def _why_impossible(receipt: WorkReceipt, manifest: Manifest) -> str:
    """What the run of this manifest cannot have had; empty if it can."""
    for part in receipt.parts:
        if any(signed.account.step % EVERY and signed.account.step != manifest.train.steps for signed in part.accounts):
            return "an account in it is of no step at which one is due"
        account = part.accounts[-1].account
        if account.stage >= manifest.train.num_stages:
            return "its run has no such stage"
        if counts_too_much(account, manifest) or part.until.work.tokens > account.counted.tokens:
            return "it counts more than the steps had"
    return ""


def counts_too_much(account: Account, manifest: Manifest) -> bool:
    """Whether an account counts more than its averages can have had in this run."""
    counted = account.counted
    most = counted.microbatches * manifest.tokens_per_microbatch_at(account.step)
    return counted.microbatches > counted.steps * manifest.train.microbatches_per_step or counted.tokens > most


def _refused(why: str) -> SignatureError:
    return SignatureError(f"this receipt proves nothing: {why}", "ask its peer for another; `peerd contributions --receipt FILE` writes it")


def _outside(raw: bytes) -> tuple[bytes, bytes]:
    try:
        found = msgpack.unpackb(raw)
        is_exact = isinstance(found, list) and len(found) == 2 and bytes(msgpack.packb(found)) == raw
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        is_exact = False
    if not is_exact or not all(isinstance(each, bytes) for each in found):
        raise _refused("it is no receipt, or a part of one")
    return found[0], found[1]


class _Keys:
    """The keys of a file, and their places in it."""

    def __init__(self, peers: Iterable[PeerId] = ()) -> None:
        self._places: dict[PeerId, int] = {}
        for peer in peers:
            self.place(peer)

    def place(self, peer: PeerId) -> int:
        return self._places.setdefault(peer, len(self._places))

    @property
    def told(self) -> bytes:
        return b"".join(map(key_of, self._places))


def _peers_from(raw: Any) -> list[PeerId]:
    if not isinstance(raw, bytes) or not raw or len(raw) % KEY_BYTES:
        raise ValueError("no keys")
    return [peer_of(raw[at : at + KEY_BYTES]) for at in range(0, len(raw), KEY_BYTES)]


def _account_to(signed: SignedAccount, keys: _Keys) -> list[Any]:
    account = signed.account
    signers = [keys.place(peer) for peer in account.signers]
    vouches = [[keys.place(each.signer), each.time_s, each.signature] for each in signed.vouches]
    return [account.first_step, account.step, account.root, _work_to(account.counted), signers, vouches]


def _account_from(told: Sequence[Any], run: RunId, stage: int, peers: Sequence[PeerId]) -> SignedAccount:
    first_step, step, root, counted, signers, vouches = told
    account = Account(
        run, stage, _count(first_step), _count(step), _bytes(root), _work_from(counted), tuple(peers[_count(each)] for each in signers)
    )
    return SignedAccount(account, tuple(Vouch(peers[_count(who)], _count(time_s), _bytes(own)) for who, time_s, own in vouches))


def _row_to(row: ProvenRow) -> list[Any]:
    return [_work_to(row.work), row.place, row.size, b"".join(row.path)]


def _row_from(told: Sequence[Any]) -> ProvenRow:
    work, place, size, path = told
    if len(_bytes(path)) % KEY_BYTES:
        raise ValueError("no way to a root")
    hashes = tuple(path[at : at + KEY_BYTES] for at in range(0, len(path), KEY_BYTES))
    return ProvenRow(_work_from(work), _count(place), _count(size), hashes)


def _part_to(part: StageReceipt, keys: _Keys) -> list[Any]:
    since = None if part.since is None else [part.since_at, _row_to(part.since)]
    return [part.accounts[0].account.stage, [_account_to(each, keys) for each in part.accounts], _row_to(part.until), since]


def _part_from(told: Sequence[Any], run: RunId, peers: Sequence[PeerId]) -> StageReceipt:
    stage, accounts, until, since = told
    found = tuple(_account_from(each, run, _count(stage), peers) for each in accounts)
    if not found:
        raise ValueError("a stage without an account")
    since_at, row = (-1, None) if since is None else (_count(since[0]), _row_from(since[1]))
    return StageReceipt(found, _row_from(until), since_at, row)


def _audits_from(told: Sequence[Any], peers: Sequence[PeerId]) -> tuple[AuditTold, ...]:
    found = []
    for who, stage, step, right, differed, signature in told:
        found.append(AuditTold(peers[_count(who)], _count(stage), _count(step), _count(right), _count(differed), _bytes(signature)))
    return tuple(found)


def _work_to(work: WorkDone) -> list[int]:
    return [work.steps, work.microbatches, work.tokens]


def _work_from(told: Sequence[Any]) -> WorkDone:
    steps, microbatches, tokens = map(_count, told)
    return WorkDone(steps, microbatches, tokens)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("a number is out of range")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) > MOST_BYTES:
        raise ValueError("a field has no bytes")
    return value
