"""The certificates of the callers whose direct connections this peer takes, and who is behind such a connection."""

from __future__ import annotations

from typing import Any

from peerd.link.certificate import checked_pem
from peerd.link.local import Neighbours
from peerd.table.record import PeerId

MAX_PINS = 1024


class Pins:
    """The certificates that TLS accepts from callers: of each peer the last one that it has shown.

    Certificates of peers that are gone stay as long as there is room. After a sleep a daemon takes all others for gone, while they
    still call it over connections that outlived the sleep.
    """

    def __init__(self) -> None:
        self._pems: dict[PeerId, bytes] = {}
        self._gone: dict[PeerId, None] = {}
        self._peers: dict[bytes, PeerId] = {}
        self.pems = b""
        """All certificates, concatenated. gRPC's threads read this."""

    def show(self, peer: PeerId, certificate: bytes) -> bool:
        """Accept this certificate for `peer` from now on. Returns False without room. Raises as `checked_pem`."""
        pem = checked_pem(certificate, peer)
        self._gone.pop(peer, None)
        if self._pems.get(peer) == pem:
            return True
        if peer not in self._pems and len(self._pems) >= MAX_PINS:
            if not self._gone:
                return False
            self.forget(next(iter(self._gone)))
        self.forget(peer)
        self._pems[peer], self._peers[pem] = pem, peer
        self.pems = b"".join(self._pems.values())
        return True

    def release(self, peer: PeerId) -> None:
        """Allow the place of a peer that is gone to be reused."""
        if peer in self._pems:
            self._gone[peer] = None

    def forget(self, peer: PeerId) -> None:
        self._gone.pop(peer, None)
        pem = self._pems.pop(peer, None)
        if pem is not None:
            self._peers.pop(pem, None)
            self.pems = b"".join(self._pems.values())

    def caller(self, context: Any) -> PeerId | None:
        """Return the peer behind a call over TLS, whose handshake has proven that it holds the certificate's key; None if unknown."""
        shown = context.auth_context().get("x509_pem_cert")
        return self._peers.get(shown[0]) if shown else None


def caller_past_the_tunnel(context: Any, pins: Pins, neighbours: Neighbours | None) -> PeerId | None:
    """Return the peer behind a call over TLS or a local socket; None if unknown."""
    if context.peer().startswith("unix:"):
        return neighbours.caller(context) if neighbours is not None else None
    return pins.caller(context)
