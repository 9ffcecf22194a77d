"""Peer ids and the Ed25519 keys inside them: an id is the identity multihash of the public key, so signatures verify against it alone."""

from __future__ import annotations

from functools import lru_cache

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from peerd.table.record import PeerId

_PEER_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
REMEMBERED_KEYS = 1 << 12


def peer_id_of(public_key: bytes) -> PeerId:
    return PeerId(base58.b58encode(_PEER_PREFIX + public_key).decode())


@lru_cache(maxsize=REMEMBERED_KEYS)
def public_key_of(peer: str) -> bytes:
    """The raw public key inside a peer id; ValueError when it is not an Ed25519 peer id."""
    if len(peer) > 64:
        raise ValueError("peer id too long")
    raw = base58.b58decode(peer)
    if len(raw) != len(_PEER_PREFIX) + 32 or not raw.startswith(_PEER_PREFIX):
        raise ValueError(f"{peer[:16]}... is not an Ed25519 peer id")
    return raw[len(_PEER_PREFIX) :]


def verify(public_key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
