"""One gRPC channel per peer, reused; errors turned into what the caller can do about them; bytes counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol, TypeVar

import grpc

from peerd.errors import BadMessageError, BusyError, PeerdError, PeerGoneError, RemoteError, WrongStateError
from peerd.link.traffic import Traffic, Way
from peerd.link.tunnel import Tunnel
from peerd.table.record import PeerId

Bytes = bytes | memoryview
CHUNK_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 4 * CHUNK_BYTES
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),  # to gRPC: the least time an attempt gets; a circuit takes half a dozen round trips
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.http2.lookahead_bytes", 4 * CHUNK_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)
STATUS: dict[type[PeerdError], grpc.StatusCode] = {
    BadMessageError: grpc.StatusCode.INVALID_ARGUMENT,
    WrongStateError: grpc.StatusCode.FAILED_PRECONDITION,
    BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PeerGoneError: grpc.StatusCode.UNAVAILABLE,
}
"""How an error travels: a callee refuses with the status, and its caller raises the error again."""
RETRY_AFTER_MS = "retry-after-ms"
MOST_RETRY_MS = 60_000
_CUT_SHORT = "Internal error from Core"
"""What gRPC's client makes of a refusal that comes while it still sends; the callee's own status is lost to it."""
Message = TypeVar("Message")


class Paths(Protocol):
    """Ways around the tunnel (`DirectPaths`)."""

    def channel(self, peer: PeerId) -> Any: ...

    def leads_to(self, peer: PeerId) -> bool: ...

    def drop(self, peer: PeerId) -> None: ...

    async def close(self) -> None: ...


class Links:
    """Channels to other peers: through the tunnel, and for tensors the direct one where there is one."""

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel
        self._channels: dict[PeerId, grpc.aio.Channel] = {}
        self._opening: dict[PeerId, asyncio.Lock] = {}
        self.traffic = Traffic()
        self.direct: Paths | None = None

    async def channel_for_tensors(self, peer: PeerId) -> Any:
        """A `grpc.aio.Channel` as far as stubs can tell."""
        return (await self.way_for_tensors(peer))[0]

    async def way_for_tensors(self, peer: PeerId) -> tuple[Any, Way]:
        """The same, and where it leads through."""
        direct = self.direct.channel(peer) if self.direct is not None else None
        return (direct, Way.DIRECT) if direct else (await self.channel(peer), Way.TUNNEL)

    async def quickest_channel(self, peer: PeerId) -> Any:
        """The direct channel if there is one now; none is looked for."""
        leads = self.direct is not None and self.direct.leads_to(peer)
        return await (self.channel_for_tensors(peer) if leads else self.channel(peer))

    async def channel(self, peer: PeerId) -> grpc.aio.Channel:
        async with self._opening.setdefault(peer, asyncio.Lock()):
            known = self._channels.get(peer)
            if known is None:
                known = grpc.aio.insecure_channel(await self._tunnel.target(peer), options=CHANNEL_OPTIONS)
                self._channels[peer] = known
            return known

    async def drop(self, peer: PeerId) -> None:
        """Close what leads to a peer that is gone for good."""
        if self.direct is not None:
            self.direct.drop(peer)
        channel = self._channels.pop(peer, None)
        self._opening.pop(peer, None)
        self.traffic.forget(peer)
        if channel is not None:
            await channel.close(None)
            await self._tunnel.close_target(peer)

    async def close(self) -> None:
        if self.direct is not None:
            await self.direct.close()
        for peer in list(self._channels):
            await self.drop(peer)


def was_cut_short(error: grpc.aio.AioRpcError) -> bool:
    """Whether the callee had ended the call, in whatever way, before it had all of it."""
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _CUT_SHORT


def as_remote_error(error: grpc.aio.AioRpcError) -> RemoteError:
    """The error class that tells what the caller can do."""
    if was_cut_short(error):
        return BusyError("the callee refused the call before it had all of it")
    kind = next((kind for kind, status in STATUS.items() if status is error.code()), PeerGoneError)
    told: Any = kind(error.details() or error.code().name.lower())
    if isinstance(told, BusyError):
        told.retry_after_s = _retry_after_s(error)
    remote: RemoteError = told
    return remote


def _retry_after_s(error: grpc.aio.AioRpcError) -> float:
    """What the callee says of it, as far as it is believed."""
    for name, value in error.trailing_metadata() or ():
        if name == RETRY_AFTER_MS and isinstance(value, str) and value.isdecimal() and len(value) <= len(str(MOST_RETRY_MS)):
            return min(int(value), MOST_RETRY_MS) / 1000
    return 0.0


async def read_within(call: AsyncIterator[Message], patience_s: float) -> Message | None:
    """The next message of a stream, None at its end. PeerGoneError when it takes too long; RemoteError as the peer says."""
    with remote_errors():
        return await next_within(call, patience_s)


async def next_within(messages: AsyncIterator[Message], patience_s: float) -> Message | None:
    """The next message of a stream, None at its end. PeerGoneError when it takes too long."""
    try:
        async with asyncio.timeout(patience_s):
            return await anext(messages, None)
    except TimeoutError:
        raise PeerGoneError(f"no word for {patience_s:.1f} s") from None


@contextlib.contextmanager
def remote_errors() -> Iterator[None]:
    """Raises what ends a call inside as a RemoteError: as the peer says, or when the connection closes."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # gRPC tells so at times that this task was cancelled, which must end it
            raise asyncio.CancelledError from None
        raise as_remote_error(error) from None
    except asyncio.CancelledError:
        raise_if_ours()
        raise PeerGoneError("the connection was closed") from None


def raise_if_ours() -> None:
    """Inside `except CancelledError`: pass on a cancellation of this task.

    gRPC cancels a call from within when its channel closes; only the task's own cancellation may end the task.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise


@contextlib.contextmanager
def ending(rpc: Any) -> Iterator[Any]:
    """A call that is cancelled at the end of the block, however that comes about."""
    try:
        yield rpc
    finally:
        rpc.cancel()


async def answer_of(rpc: Any) -> Any:
    """What a call with one answer brings. RemoteError as the peer says, or when the connection closes."""
    with remote_errors():
        return await rpc
