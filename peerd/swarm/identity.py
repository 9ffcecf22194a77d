"""Who this daemon is: its Ed25519 key, the lock that makes it the only one, and the little state that outlives it.

The key file is what libp2p reads: a protobuf of key type Ed25519 and 64 bytes, private then public. A peer id is the
identity multihash of the public key, so signatures verify against the id alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from filelock import FileLock, Timeout

from peerd.config.paths import Home
from peerd.errors import DiskError, IdentityInUseError, SignatureError
from peerd.table.record import PeerId, RunId

_PRIVATE_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])
_PEER_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
SIGNATURE_BYTES = 64


class Identity:
    """A private key and its peer id."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.peer: PeerId = peer_id_of(key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The key in `path`, made on first use with mode 0600."""
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return cls._create(path)
        if len(raw) != 68 or not raw.startswith(_PRIVATE_PREFIX):
            raise SignatureError(f"{path} is not an identity key", "move it away to get a new identity")
        return cls(Ed25519PrivateKey.from_private_bytes(raw[4:36]))

    @classmethod
    def _create(cls, path: Path) -> Identity:
        key = Ed25519PrivateKey.generate()
        raw = _PRIVATE_PREFIX + key.private_bytes_raw() + key.public_key().public_bytes_raw()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
        return cls(key)


def peer_id_of(public_key: bytes) -> PeerId:
    return PeerId(base58.b58encode(_PEER_PREFIX + public_key).decode())


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


def lock_home(home: Home) -> FileLock:
    """Create the home if need be and hold its lock until the process ends."""
    try:
        home.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(home.lock, mode=0o600)
        lock.acquire(timeout=0)
    except Timeout:
        raise IdentityInUseError(
            f"another daemon runs from {home.folder}", "stop it with `peerd leave`, or choose another folder with --home"
        ) from None
    except OSError as error:
        raise DiskError(f"{home.folder}: {error.strerror}", "choose a folder you can write to with --home") from None
    return lock


class LocalState:
    """What must outlive the daemon: the incarnation (rule T1) and pinned organiser keys. Small, written atomically."""

    def __init__(self, home: Home) -> None:
        self._path = home.state
        self._incarnation = 0
        self._organisers: dict[str, str] = {}
        try:
            document = json.loads(self._path.read_text())
            self._incarnation = int(document["incarnation"])
            self._organisers = {str(run): str(key) for run, key in document["organisers"].items()}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, AttributeError, TypeError):
            raise DiskError(f"{self._path} is damaged", "delete it; pinned organiser keys will be asked for anew") from None

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def raise_incarnation(self, seen: int = 0) -> int:
        """max(stored, seen) + 1, on disk before it is used."""
        self._incarnation = max(self._incarnation, seen) + 1
        self._write()
        return self._incarnation

    def pin(self, run: RunId, organiser_key: bytes) -> bool:
        """Remember a run's organiser on first join. True when it was new; SignatureError when it is another now."""
        known = self._organisers.get(run)
        if known is None:
            self._organisers[run] = organiser_key.hex()
            self._write()
            return True
        if known != organiser_key.hex():
            raise SignatureError(f"run {run} is signed by another organiser than the one pinned", "ask the organiser for the right address")
        return False

    def _write(self) -> None:
        document = json.dumps({"incarnation": self._incarnation, "organisers": self._organisers})
        part = self._path.with_suffix(".part")
        try:
            part.write_text(document)
            part.replace(self._path)
        except OSError as error:
            raise DiskError(f"{self._path}: {error.strerror}", "free some disk space") from None
