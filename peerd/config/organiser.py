"""The file of the organiser's key, an Ed25519 key that signs a run's manifest.

`peerd new` creates it beside run.toml, as PKCS #8 PEM readable by its owner only. It is never overwritten, because the run's id is
derived from it.
"""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from peerd.errors import SignatureError, UsageError, disk_error

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_FILE = "organiser.key"
_MAX_KEY_BYTES = 16 * 1024


def create_key(path: Path) -> Ed25519PrivateKey:
    """Create a new key at `path`, mode 0600. Raises UsageError if the file exists."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} exists; an organiser's key is never overwritten", "choose another folder") from None
    except OSError as error:
        raise disk_error(path, error) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise disk_error(path, error) from None
    return key


def load_key(path: Path) -> Ed25519PrivateKey:
    """Read a key that `create_key` made. Raises SignatureError if the file is missing or holds something else."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_KEY_BYTES)
    except FileNotFoundError:
        raise SignatureError(
            f"{path}: no such file", f"the organiser's key lies beside run.toml; `peerd new {quote(str(path.parent))} --force` makes one"
        ) from None
    except OSError as error:
        raise disk_error(path, error) from None
    try:
        key = serialization.load_pem_private_key(raw, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError(f"{path} is not an organiser's key", "it must be the Ed25519 key that `peerd new` wrote")
    return key


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """The raw 32-byte public key."""
    return key.public_key().public_bytes_raw()


def is_signed_by(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the organiser with this raw public key has signed the message."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
