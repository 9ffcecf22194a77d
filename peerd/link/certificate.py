"""Certificates that prove a peer id, as libp2p makes them (https://github.com/libp2p/specs/blob/master/tls/tls.md).

A certificate has a key of its own and is self-signed. An extension holds the peer's Ed25519 key and its signature of the
certificate's key. So the peer itself vouches for whoever holds the certificate's key, and no certificate authority is needed.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from peerd.errors import BadMessageError, WrongStateError
from peerd.link.peer_keys import peer_id_of, public_key_of, verify
from peerd.table.record import PeerId

MAX_CERTIFICATE_BYTES = 2048
SERVER_NAME = "peerd"
"""The DNS name in every certificate. TLS requires one; the extension is what identifies the peer."""
VALID_DAYS = 3650
CLOCK_SLACK_DAYS = 1
_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SIGNED_PREFIX = b"libp2p-tls-handshake:"
# ASN.1: a sequence of two octet strings of fixed lengths: an Ed25519 key in libp2p's protobuf form, and its signature.
_KEY_HEAD, _SIGNATURE_HEAD = bytes.fromhex("306804240801 1220"), bytes.fromhex("0440")


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate of one daemon, with its private key, which never leaves the process."""

    der: bytes
    pem: bytes
    key_pem: bytes


def make_certificate(
    peer: PeerId, sign: Callable[[bytes], bytes], now: datetime.datetime | None = None, days: int = VALID_DAYS
) -> Certificate:
    """Make a new key and its certificate. `sign` signs with the peer's key. The new key is P-256: gRPC rejects Ed25519 certificates."""
    key = ec.generate_private_key(ec.SECP256R1())
    own = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    now = now or datetime.datetime.now(datetime.UTC)
    extension = _KEY_HEAD + public_key_of(peer) + _SIGNATURE_HEAD + sign(_SIGNED_PREFIX + own)
    built = (
        x509.CertificateBuilder()
        .subject_name(_name(peer))
        .issuer_name(_name(peer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=CLOCK_SLACK_DAYS))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.UnrecognizedExtension(_EXTENSION, extension), critical=False)
        .sign(key, SHA256())
    )
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Certificate(built.public_bytes(Encoding.DER), built.public_bytes(Encoding.PEM), key_pem)


def checked_pem(der: bytes, peer: PeerId, now: datetime.datetime | None = None) -> bytes:
    """Return the certificate as PEM. Raises BadMessageError with the reason unless it is that of `peer`.

    Raises WrongStateError if it is not valid at `now`: one of the two clocks is wrong, and nobody lies.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    try:
        if len(der) > MAX_CERTIFICATE_BYTES:
            raise ValueError("too long")
        holder, parsed = holder_of(der), x509.load_der_x509_certificate(der)
        key, named = parsed.public_key(), parsed.subject == parsed.issuer == _name(peer)
    except ValueError:
        raise BadMessageError("the bytes are not a certificate") from None
    if holder is None:
        raise BadMessageError("the certificate proves no peer id")
    if holder != peer or not named:
        raise BadMessageError(f"the certificate is not that of {peer}")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadMessageError("the certificate's key is not of the kind that peerd uses (P-256)")
    if not parsed.not_valid_before_utc <= now <= parsed.not_valid_after_utc:
        raise WrongStateError("the certificate has expired, or is not valid yet; a clock may be wrong")
    return bytes(parsed.public_bytes(Encoding.PEM))


def holder_of(certificate: bytes) -> PeerId | None:
    """Return the peer id that a certificate (DER) proves; None where it proves none. Raises ValueError for other bytes."""
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        extension = parsed.extensions.get_extension_for_oid(_EXTENSION).value
        own = parsed.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except x509.ExtensionNotFound:
        return None
    except (TypeError, UnsupportedAlgorithm, x509.DuplicateExtension, x509.InvalidVersion, x509.UnsupportedGeneralNameType) as error:
        raise ValueError(str(error)) from None
    assert isinstance(extension, x509.UnrecognizedExtension)
    key, signature = extension.value[len(_KEY_HEAD) :][:32], extension.value[-64:]
    is_sound = extension.value == _KEY_HEAD + key + _SIGNATURE_HEAD + signature and verify(key, _SIGNED_PREFIX + own, signature)
    return peer_id_of(key) if is_sound else None


def _name(peer: PeerId) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, peer)])
