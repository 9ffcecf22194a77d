"""Local sockets: past TCP and TLS, between daemons of one user on one machine.

Whether two are neighbours is settled in the tunnel, whose libp2p proves both ends, together with the rest of a direct path: the
caller proves that it runs where the callee runs, and is told a socket and a token, which it shows with every call. The socket lies in
the callee's run folder, which no other user can enter; whoever can has the callee's key as well. What goes over it does not leave the
machine, so it counts toward no cap and no quota.
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
    """32 bytes that this user's processes in this network of this machine have in common, and that nobody elsewhere can guess.

    Another network namespace is another machine: what is between the two is there for a reason.
    """
    try:
        where = f"{_BOOT_ID.read_text()} {_NETWORK.stat().st_ino}"
    except OSError:  # not Linux
        import psutil

        where = f"{psutil.boot_time()} {uuid.getnode()}"
    return blake3(f"{where} {os.getuid()}".encode()).digest()


class Neighbours:
    """What one daemon knows of those beside it: how to prove that it is one, and the tokens that it has given them."""

    def __init__(self, me: PeerId, folder: Path, key: Callable[[], bytes] = machine_key) -> None:
        """`folder` is its run folder."""
        self._me = me
        self.socket = folder / SOCKET
        self._key = key()
        self._tokens: dict[PeerId, str] = {}
        self._peers: dict[str, PeerId] = {}

    def proof_for(self, callee: PeerId) -> bytes:
        """That I run where it does, if it does; it tells others nothing, not even whether two peers share a machine."""
        return self._proof(self._me, callee)

    def token_for(self, caller: PeerId, proof: bytes) -> str:
        """What a neighbour shows from now on, always the same; empty for one that is none, or where there is no room."""
        if not hmac.compare_digest(proof, self._proof(caller, self._me)):
            return ""
        if caller not in self._tokens and len(self._tokens) < MAX_TOKENS:
            token = secrets.token_hex(TOKEN_BYTES)
            self._tokens[caller], self._peers[token] = token, caller
        return self._tokens.get(caller, "")

    def caller(self, context: Any) -> PeerId | None:
        """The peer behind a call over the local socket, by the token that it shows."""
        for name, value in context.invocation_metadata() or ():
            if name == TOKEN:
                return self._peers.get(value)
        return None

    def _proof(self, caller: PeerId, callee: PeerId) -> bytes:
        return blake3(f"{caller} {callee}".encode(), key=self._key).digest()


class NeighbourChannel:
    """A channel to a neighbour's socket, as the generated stubs take one: every call shows the token."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        """BadMessageError for what is no token."""
        self._channel = channel
        self._headers = ((TOKEN, checked_token(token)),)

    def __getattr__(self, kind: str) -> Any:
        """The channel's method for this kind of call: `unary_unary`, `unary_stream`, `stream_unary` or `stream_stream`."""
        return partial(self._headed, getattr(self._channel, kind))

    def _headed(self, call: Any, method: str, **coders: Any) -> Any:
        return partial(call(method, **coders), metadata=self._headers)


def checked_token(token: str) -> str:
    """BadMessageError for what is none."""
    if len(token) != 2 * TOKEN_BYTES or not set(token) <= set("0123456789abcdef"):
        raise BadMessageError("that is no token")
    return token


def checked_target(path: str) -> str:
    """gRPC's target for a neighbour's socket. BadMessageError unless it is a socket in a folder that only this user can enter."""
    place = Path(path)
    try:
        folder, there = place.parent.lstat(), place.lstat()
    except (OSError, ValueError):
        raise BadMessageError("there is no such local socket") from None
    is_ours = stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.getuid() and stat.S_IMODE(folder.st_mode) == 0o700
    if not (is_ours and stat.S_ISSOCK(there.st_mode) and place.is_absolute() and place.name == SOCKET):
        raise BadMessageError("that is no neighbour's socket")
    return f"unix:{place}"
