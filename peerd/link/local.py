"""Local sockets between daemons of one user on one machine, which need neither TCP nor TLS.

In the tunnel, where libp2p proves both peer ids, the caller also proves that it runs where the callee runs. The callee then tells it a
socket and a token, which the caller shows with every call. The socket lies in the callee's run folder, which no other user can enter;
a process that can enter it could read the callee's key, too. These bytes do not leave the machine, so they count toward no cap and
no quota.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from blake3 import blake3

from peerd.errors import BadMessageError
from peerd.table.record import PeerId

TOKEN = "peerd-token"  # noqa: S105 - the name of a header
TOKEN_BYTES = 16
MAX_TOKENS = 1024
SOCKET = "local.sock"
_BOOT_ID, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")


def machine_key() -> bytes:
    """Return 32 bytes that only this user's processes in this network namespace of this machine know.

    Another network namespace counts as another machine: whoever separated the two had a reason.
    """
    try:
        where = f"{_BOOT_ID.read_text()} {_NETWORK.stat().st_ino}"
    except OSError:  # not Linux
        import psutil

        where = f"{psutil.boot_time()} {uuid.getnode()}"
    return blake3(f"{where} {os.getuid()}".encode()).digest()


class Neighbours:
    """The neighbours of one daemon: makes and checks proofs of being one, and keeps the tokens that it has given them."""

    def __init__(self, me: PeerId, folder: Path, key: Callable[[], bytes] = machine_key) -> None:
        """`folder` is the daemon's run folder."""
        self._me = me
        self.socket = folder / SOCKET
        self._key = key()
        self._tokens: dict[PeerId, str] = {}
        self._peers: dict[str, PeerId] = {}

    def proof_for(self, callee: PeerId) -> bytes:
        """Return a proof that this peer runs where `callee` runs. A peer elsewhere learns nothing, not even who shares a machine."""
        return self._proof(self._me, callee)

    def token_for(self, caller: PeerId, proof: bytes) -> str:
        """Return the token of a neighbour, always the same one; empty if the proof is wrong or there is no room."""
        if not hmac.compare_digest(proof, self._proof(caller, self._me)):
            return ""
        if caller not in self._tokens and len(self._tokens) < MAX_TOKENS:
            token = secrets.token_hex(TOKEN_BYTES)
            self._tokens[caller], self._peers[token] = token, caller
        return self._tokens.get(caller, "")

    def caller(self, context: Any) -> PeerId | None:
        """Return the peer behind a call over the local socket, by its token; None if unknown."""
        for name, value in context.invocation_metadata() or ():
            if name == TOKEN:
                return self._peers.get(value)
        return None

    def _proof(self, caller: PeerId, callee: PeerId) -> bytes:
        return blake3(f"{caller} {callee}".encode(), key=self._key).digest()


class NeighbourChannel:
    """A channel to a neighbour's socket for the generated stubs. It adds the token to every call."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        """Raises BadMessageError if `token` has not the form of a token."""
        self._channel = channel
        self._headers = ((TOKEN, checked_token(token)),)

    def __getattr__(self, kind: str) -> Any:
        """Wrap the channel's method of this name: `unary_unary`, `unary_stream`, `stream_unary` or `stream_stream`."""
        return partial(self._headed, getattr(self._channel, kind))

    def _headed(self, call: Any, method: str, **coders: Any) -> Any:
        return partial(call(method, **coders), metadata=self._headers)


def checked_token(token: str) -> str:
    """Return `token`. Raises BadMessageError if it has not the form of a token."""
    if len(token) != 2 * TOKEN_BYTES or not set(token) <= set("0123456789abcdef"):
        raise BadMessageError("this is not a token")
    return token


def checked_target(path: str) -> str:
    """Return gRPC's target for a neighbour's socket. Raises BadMessageError unless it lies in a folder that only this user can enter."""
    place = Path(path)
    try:
        folder, there = place.parent.lstat(), place.lstat()
    except (OSError, ValueError):
        raise BadMessageError("there is no such local socket") from None
    is_ours = stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.getuid() and stat.S_IMODE(folder.st_mode) == 0o700
    if not (is_ours and stat.S_ISSOCK(there.st_mode) and place.is_absolute() and place.name == SOCKET):
        raise BadMessageError("this is not the socket of a neighbour")
    return f"unix:{place}"
