"""Certificates that prove a peer id, as libp2p makes them (https://github.com/libp2p/specs/blob/master/tls/tls.md).

A certificate is self-signed by a key of its own. An extension holds the peer's Ed25519 key and, signed with it, the
certificate's key: so whoever can answer under the certificate was named by the peer, and no authority has a say.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from peerd.errors import BadMessageError
from peerd.link.libp2p import PeerID
from peerd.table.record import PeerId

MAX_CERTIFICATE_BYTES = 2048
SERVER_NAME = "peerd"
"""What every certificate is made out to besides the peer id: TLS wants a name, and who it is the extension says."""
VALID_DAYS = 3650
CLOCK_SLACK_DAYS = 1
_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SIGNED_PREFIX = b"libp2p-tls-handshake:"
# A sequence of two strings: an Ed25519 key as libp2p's protobuf, and its signature. Their lengths never differ.
_KEY_HEAD, _SIGNATURE_HEAD = bytes.fromhex("306804240801 1220"), bytes.fromhex("0440")
_PEER_HEAD = bytes.fromhex("002408011220")


@dataclass(frozen=True, slots=True)
class Certificate:
    """One daemon's, with its private key, which never leaves the process."""

    der: bytes
    pem: bytes
    key_pem: bytes


def make_certificate(
    peer: PeerId, sign: Callable[[bytes], bytes], now: datetime.datetime | None = None, days: int = VALID_DAYS
) -> Certificate:
    """A new key (P-256: gRPC's TLS takes no Ed25519 certificates) under a certificate that `sign`, with the peer's own key, vouches for."""
    key = ec.generate_private_key(ec.SECP256R1())
    own = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    now = now or datetime.datetime.now(datetime.UTC)
    extension = _KEY_HEAD + raw_key_of(peer) + _SIGNATURE_HEAD + sign(_SIGNED_PREFIX + own)
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
    """The certificate as PEM, if it is `peer`'s and may be used now. BadMessageError says what is wrong with it."""
    now = now or datetime.datetime.now(datetime.UTC)
    try:
        if len(der) > MAX_CERTIFICATE_BYTES:
            raise ValueError("too long")
        holder, parsed = holder_of(der), x509.load_der_x509_certificate(der)
        key, named = parsed.public_key(), parsed.subject == parsed.issuer == _name(peer)
    except ValueError:
        raise BadMessageError("what was shown is no certificate") from None
    if holder is None:
        raise BadMessageError("the certificate proves no peer id")
    if holder != PeerID.from_base58(peer).to_bytes() or not named:
        raise BadMessageError(f"the certificate is not that of {peer}")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadMessageError("the certificate's key is not of the kind that TLS is spoken with here (P-256)")
    if not parsed.not_valid_before_utc <= now <= parsed.not_valid_after_utc:
        raise BadMessageError("the certificate has expired, or is not valid yet; a clock may be wrong")
    return bytes(parsed.public_bytes(Encoding.PEM))


def holder_of(certificate: bytes) -> bytes | None:
    """The raw peer id that a certificate (DER) proves, None where it proves none. ValueError where it is no certificate."""
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
    if extension.value != _KEY_HEAD + key + _SIGNATURE_HEAD + signature:
        return None
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _SIGNED_PREFIX + own)
    except InvalidSignature:
        return None
    return _PEER_HEAD + key


def raw_key_of(peer: PeerId) -> bytes:
    """The raw Ed25519 public key inside a peer id; ValueError where it holds none."""
    raw: bytes = PeerID.from_base58(peer).to_bytes()
    if len(raw) != len(_PEER_HEAD) + 32 or not raw.startswith(_PEER_HEAD):
        raise ValueError(f"{peer[:16]}... is not an Ed25519 peer id")
    return raw[len(_PEER_HEAD) :]


def _name(peer: PeerId) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, peer)])
