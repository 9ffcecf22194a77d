"""Encrypts a stream through a relay: TLS 1.3 between the two ends, each of which proves its peer id to the other.

The callee shows a libp2p certificate (certificate.py), whose key its identity key has signed. The caller then signs, inside the
encrypted stream and with its identity key, the hash of that certificate and a nonce from the callee. So the signature is valid for this
connection only, and an attacker in between would need the certificate's key to read or use it.
"""

from __future__ import annotations

import hashlib
import secrets
import ssl
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from peerd.errors import BadMessageError, PeerGoneError
from peerd.link.certificate import holder_of, make_certificate
from peerd.link.dialling import caller_context
from peerd.link.peer_keys import public_key_of, verify
from peerd.link.streams import Stream
from peerd.table.record import PeerId

NONCE_BYTES, SIGNATURE_BYTES = 32, 64
_CALLER_DOMAIN = b"peerd circuit caller\0"


class Seal:
    """Encrypts the circuits of one peer. `sign` signs with its identity key; no other user can enter `folder`."""

    def __init__(self, me: PeerId, sign: Callable[[bytes], bytes], folder: Path) -> None:
        self._me = me
        self._sign = sign
        self._folder = folder

    async def call(self, callee: PeerId, stream: Stream) -> None:
        """Encrypt the stream as its caller. Raises PeerGoneError if the other end is not `callee`."""
        reader, writer = stream
        await writer.start_tls(caller_context())
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if certificate is None or holder_of(certificate) != callee:
            raise PeerGoneError(f"{callee} is not at the other end of the circuit")
        writer.write(self._sign(_claim(certificate, await reader.readexactly(NONCE_BYTES))))
        await writer.drain()

    async def answer(self, caller: PeerId, stream: Stream) -> None:
        """Encrypt the stream as its callee. Raises BadMessageError if the other end is not `caller`. Nothing may have been read ahead."""
        reader, writer = stream
        context, certificate = self._own
        await writer.start_tls(context)
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(nonce)
        await writer.drain()
        signature = await reader.readexactly(SIGNATURE_BYTES)
        if not verify(public_key_of(caller), _claim(certificate, nonce), signature):
            raise BadMessageError(f"{caller} is not at the other end of the circuit")

    @cached_property
    def _own(self) -> tuple[ssl.SSLContext, bytes]:
        """The TLS context with this daemon's key and certificate, made at first use. OpenSSL loads them only from a file."""
        made = make_certificate(self._me, self._sign)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["libp2p"])
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix="seal-") as file:  # mode 0600
            file.write(made.key_pem + made.pem)
            file.flush()
            context.load_cert_chain(file.name)
        return context, made.der


def _claim(certificate: bytes, nonce: bytes) -> bytes:
    return _CALLER_DOMAIN + hashlib.sha256(certificate).digest() + nonce
