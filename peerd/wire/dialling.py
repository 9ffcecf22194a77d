"""Who answers at an IP address and port, found out without libp2p's own daemon, which would use the connection it has.

A libp2p peer that speaks TLS shows a certificate whose extension holds its public key and, signed with it, the certificate's
own key (https://github.com/libp2p/specs/blob/master/tls/tls.md). Looking at that proves who answers; nothing else is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from peerd.table.record import PeerId
from peerd.wire.libp2p import PeerID

_GREETING = ("/multistream/1.0.0", "/tls/1.0.0")
_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SIGNED_PREFIX = b"libp2p-tls-handshake:"
# A sequence of two strings: an Ed25519 key as libp2p's protobuf, and its signature. Their lengths never differ.
_KEY_HEAD, _SIGNATURE_HEAD = bytes.fromhex("306804240801 1220"), bytes.fromhex("0440")
_PEER_HEAD = bytes.fromhex("002408011220")


async def answers_as(peer: PeerId, host: str, port: int, timeout_s: float) -> bool:
    """Whether `peer` itself answers there within the time. Never raises for what is or is not there."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            for word in _GREETING:
                writer.write(_line(word))
            for word in _GREETING:
                if await reader.readexactly(len(_line(word))) != _line(word):
                    return False
            await writer.start_tls(caller_context())
            certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return certificate is not None and holder_of(certificate) == PeerID.from_base58(peer).to_bytes()
    except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):  # ssl.SSLError is an OSError
        return False
    finally:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.transport.abort()


def holder_of(certificate: bytes) -> bytes | None:
    """The raw peer id that a libp2p certificate (DER) proves, None where it proves none. ValueError where it is no certificate."""
    parsed = x509.load_der_x509_certificate(certificate)
    try:
        extension = parsed.extensions.get_extension_for_oid(_EXTENSION).value
    except x509.ExtensionNotFound:
        return None
    assert isinstance(extension, x509.UnrecognizedExtension)
    key, signature = extension.value[len(_KEY_HEAD) :][:32], extension.value[-64:]
    if extension.value != _KEY_HEAD + key + _SIGNATURE_HEAD + signature:
        return None
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _vouched(parsed.public_key()))
    except InvalidSignature:
        return None
    return _PEER_HEAD + key


def extension_of(peer: PeerId, key: CertificatePublicKeyTypes, sign: Callable[[bytes], bytes]) -> x509.UnrecognizedExtension:
    """What makes a certificate of `key` prove that `peer`, whose identity key signs, answers."""
    return x509.UnrecognizedExtension(_EXTENSION, _KEY_HEAD + raw_key_of(peer) + _SIGNATURE_HEAD + sign(_vouched(key)))


def raw_key_of(peer: PeerId) -> bytes:
    """The raw Ed25519 public key inside a peer id; ValueError where it holds none."""
    raw: bytes = PeerID.from_base58(peer).to_bytes()
    if len(raw) != len(_PEER_HEAD) + 32 or not raw.startswith(_PEER_HEAD):
        raise ValueError(f"{peer[:16]}... is not an Ed25519 peer id")
    return raw[len(_PEER_HEAD) :]


def _vouched(key: CertificatePublicKeyTypes) -> bytes:
    return _SIGNED_PREFIX + key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _line(word: str) -> bytes:
    """As multistream-select frames it: the length, the word, a line's end."""
    text = word.encode() + b"\n"
    return bytes([len(text)]) + text


def caller_context() -> ssl.SSLContext:
    """TLS 1.3 without authorities: the certificate's extension says who it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    return context
