"""What an organiser signs about who may take part: the list of the run, and invitations. `policy/swarm/access.py` judges by them.

An invitation is for one peer id, so it needs no secret and no count: whoever copies it cannot use it, and each daemon checks it alone. A
token for whoever comes first would need all peers to agree who that was. Both name the run, so neither counts in another one.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerd.config.atomic import replace_file
from peerd.config.organiser import is_signed_by, public_bytes
from peerd.errors import BadMessageError, disk_error
from peerd.policy.swarm.access import NO_END as NO_END
from peerd.policy.swarm.access import NO_LIST as NO_LIST
from peerd.policy.swarm.access import AccessList as AccessList
from peerd.table.record import PeerId

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

LIST_FILE = "access.list"
"""The organiser's newest list, beside the key."""
MAX_LIST_BYTES = 1 << 17
SIGNATURE_BYTES = 64
END_BYTES = 8
INVITATION_BYTES = END_BYTES + SIGNATURE_BYTES
MAX_END_S = 1 << 53
_LIST_DOMAIN = b"peerd access list\0"
_INVITATION_DOMAIN = b"peerd invitation\0"
_PEER_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
PEER_ID = "12D3KooW[1-9A-HJ-NP-Za-km-z]{44}"
_PEER_ID = re.compile(PEER_ID, re.ASCII)

RawList = tuple[bytes, bytes]
"""A list as it travels: its body, and the organiser's signature."""


def is_peer_id(text: object) -> bool:
    """Whether this may be the id of a daemon."""
    return isinstance(text, str) and _PEER_ID.fullmatch(text) is not None


def organisers_peer(public_key: bytes) -> PeerId:
    """The peer id that the organiser's own key would have."""
    import base58

    return PeerId(base58.b58encode(_PEER_PREFIX + public_key).decode())


# The list


def sign_list(listed: AccessList, run: str, key: Ed25519PrivateKey) -> RawList:
    """Raises ValueError for a list that no daemon would take."""
    body = json.dumps(
        {"number": listed.number, "allowed": sorted(listed.allowed), "banned": dict(listed.banned)}, sort_keys=True, separators=(",", ":")
    ).encode()
    _check_list(listed, body, public_bytes(key))
    return body, key.sign(_LIST_DOMAIN + run.encode() + body)


def read_list(raw: RawList, run: str, organiser_key: bytes) -> AccessList:
    """Verify and decode a list. Raises BadMessageError if it is too long, of another run or organiser, or breaks a rule of lists."""
    body, signature = raw
    if len(body) > MAX_LIST_BYTES or len(signature) != SIGNATURE_BYTES:
        raise BadMessageError(f"an access list of {len(body)} bytes with a signature of {len(signature)}")
    if not is_signed_by(organiser_key, _LIST_DOMAIN + run.encode() + body, signature):
        raise BadMessageError("an access list that this run's organiser has not signed")
    return list_in(body, organiser_key)


def list_in(body: bytes, organiser_key: bytes) -> AccessList:
    """Decode the body of a list. Raises BadMessageError."""
    try:
        document = json.loads(body)
        if not isinstance(document, dict) or document.keys() != {"number", "allowed", "banned"}:
            raise ValueError("not the fields of a list")
        number, allowed, banned = document["number"], document["allowed"], document["banned"]
        if type(number) is not int or number < 1 or not isinstance(allowed, list) or not isinstance(banned, dict):
            raise ValueError("a field of another type")
        if not all(map(is_peer_id, (*allowed, *banned))) or not all(isinstance(reason, str) for reason in banned.values()):
            raise ValueError("an entry that is no peer with a reason")
        listed = AccessList(number, frozenset(allowed), banned)
        _check_list(listed, body, organiser_key)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadMessageError(f"bad access list: {error}") from None
    return listed


def _check_list(listed: AccessList, body: bytes, organiser_key: bytes) -> None:
    if len(body) > MAX_LIST_BYTES:
        raise ValueError(f"a list takes at most {MAX_LIST_BYTES} bytes: lift old bans, or give shorter reasons")
    if organisers_peer(organiser_key) in listed.banned:
        raise ValueError("a list cannot ban the organiser's own key")


def packed(raw: RawList) -> bytes:
    """A list as it lies in a file and goes through the control socket: the signature, then the body."""
    body, signature = raw
    return signature + body


def unpacked(told: bytes) -> RawList:
    return told[SIGNATURE_BYTES:], told[:SIGNATURE_BYTES]


def write_list(path: Path, raw: RawList) -> None:
    """Keep a list on disk. Raises DiskError or LimitError."""
    replace_file(path, packed(raw))


def list_on_disk(path: Path, run: str, organiser_key: bytes) -> tuple[RawList, AccessList] | None:
    """The list that `write_list` kept; None if there is none. Raises BadMessageError if it is damaged or another run's, DiskError."""
    try:
        with path.open("rb") as file:
            told = file.read(SIGNATURE_BYTES + MAX_LIST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error(path, error) from None
    raw = unpacked(told)
    return raw, read_list(raw, run, organiser_key)


# Invitations


def sign_invitation(peer: str, until_s: int, run: str, key: Ed25519PrivateKey) -> bytes:
    """`until_s`: until when it holds, in seconds since the epoch; 0: without an end."""
    end = until_s.to_bytes(END_BYTES, "big")
    return end + key.sign(_invitation_message(peer, end, run))


def invited_until(invitation: bytes, peer: str, run: str, organiser_key: bytes) -> int | None:
    """Until when an invitation lets this peer into the run, in seconds since the epoch, 0 for ever; None if it is no such invitation."""
    end, signature = invitation[:END_BYTES], invitation[END_BYTES:]
    if len(invitation) != INVITATION_BYTES or not is_signed_by(organiser_key, _invitation_message(peer, end, run), signature):
        return None
    until_s = int.from_bytes(end, "big")
    return until_s if until_s <= MAX_END_S else None


def _invitation_message(peer: str, end: bytes, run: str) -> bytes:
    return _INVITATION_DOMAIN + run.encode() + b"\0" + peer.encode() + b"\0" + end


def invitation_text(invitation: bytes) -> str:
    """An invitation as one word that can be sent in a message."""
    return base64.urlsafe_b64encode(invitation).decode()


def invitations_in(text: str) -> list[bytes]:
    """The invitations among the words of a text: what organisers send may have a line for each of several peers."""
    found = []
    for word in text.split():
        try:
            raw = base64.b64decode(word, altchars=b"-_", validate=True)
        except (ValueError, binascii.Error):
            continue
        if len(raw) == INVITATION_BYTES:
            found.append(raw)
    return found


def banning(listed: AccessList, peers: Iterable[str], reason: str) -> AccessList:
    """The next list, with these peers banned. Raises ValueError if that is no list."""
    return listed.banning(map(PeerId, peers), reason)


def lifting(listed: AccessList, peers: Iterable[str]) -> AccessList:
    """The next list, which says nothing of these peers."""
    return listed.lifting(map(PeerId, peers))


def allowing(listed: AccessList, peers: Iterable[str]) -> AccessList:
    """The next list, with these peers allowed, and no longer banned. Raises ValueError if that is no list."""
    return listed.allowing(map(PeerId, peers))


def describe_list(listed: AccessList) -> dict[str, Any]:
    """A list as plain values."""
    banned = [{"peer": peer, "reason": reason} for peer, reason in sorted(listed.banned.items())]
    return {"number": listed.number, "allowed": sorted(listed.allowed), "banned": banned}
