"""Finds out which peer answers at an IP address and port. p2pd cannot do this: it would use a connection that it already has.

A libp2p endpoint that uses TLS shows a certificate that proves its peer id, and so does an endpoint for direct connections. The
handshake suffices to identify the peer; nothing else is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from peerd.link.certificate import holder_of
from peerd.table.record import PeerId

_GREETING = ("/multistream/1.0.0", "/tls/1.0.0")


async def answers_as(peer: PeerId, host: str, port: int, timeout_s: float, *, direct: bool = False) -> bool:
    """Return whether `peer` itself answers there in time: as a libp2p endpoint, or as one for direct connections if `direct`.

    Raises nothing, whatever answers there.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            if not direct and not await _is_libp2p(reader, writer):
                return False
            await writer.start_tls(caller_context("h2" if direct else "libp2p"))
            certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return certificate is not None and holder_of(certificate) == peer
    except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):  # ssl.SSLError is an OSError
        return False
    finally:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.transport.abort()


async def _is_libp2p(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Return whether the other end speaks multistream-select and accepts TLS."""
    for word in _GREETING:
        writer.write(_line(word))
    for word in _GREETING:
        if await reader.readexactly(len(_line(word))) != _line(word):
            return False
    return True


def _line(word: str) -> bytes:
    """Frame a word for multistream-select: its length, the word, a newline."""
    text = word.encode() + b"\n"
    return bytes([len(text)]) + text


def caller_context(protocol: str = "libp2p") -> ssl.SSLContext:
    """Return a TLS 1.3 client context without certificate authorities: the caller checks the extension. `protocol` is an ALPN name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([protocol])
    return context
