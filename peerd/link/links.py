"""One reused gRPC channel for each peer, and the translation of gRPC errors into error classes that say what the caller can do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol, TypeVar

import grpc

from peerd.errors import (
    BadMessageError,
    BusyError,
    ChangedLabelsError,
    NotFiniteError,
    PeerdError,
    PeerGoneError,
    RemoteError,
    UnwelcomeError,
    WrongStateError,
)
from peerd.link.closing import ClosingChannels
from peerd.link.traffic import Traffic, Way
from peerd.link.tunnel import Tunnel
from peerd.policy.swarm.suspicion import AnswerTimes
from peerd.served_time import served_timeout
from peerd.table.record import PeerId

Bytes = bytes | memoryview
CHUNK_BYTES = 1 << 20
HOME_BYTES_PER_S = 2_500_000.0
"""A home's uplink of 20 Mbit/s."""
LEAST_BYTES_PER_S = 16_000.0
"""A stream that is slower counts as broken. A home's uplink, shared by 150 streams, gives each of them as much."""
LONGEST_CALL_S = 24 * 3600.0
"""A connection that takes no new calls is closed when the last one on it has ended, after this time at the latest. A microbatch may take
minutes, and each call ends by itself where the other end says nothing any more."""
MAX_MESSAGE_BYTES = 4 * CHUNK_BYTES
MAX_REQUEST_BYTES = 2 * CHUNK_BYTES
"""The largest message to a server: a header with the first chunk, or 64 records."""
ATTEMPT_MS = 600_000
"""gRPC's own limit for an attempt to connect. It counts seconds of the clock, so a short one would end and repeat, for ever, what only a
busy machine or a full line delays. Whoever dials ends an attempt, in served time."""
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", ATTEMPT_MS),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.http2.lookahead_bytes", 4 * CHUNK_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS = tuple(
    (name, MAX_REQUEST_BYTES) if name == "grpc.max_receive_message_length" else (name, value) for name, value in CHANNEL_OPTIONS
)
TENSORS_IDLE_MS = 60_000
"""A connection of the tunnel for tensors is closed when no call has used it for this time (gRPC does that once for a channel). It takes
three files at each end, and nothing uses it where a direct path leads to the peer by then. A new one costs a few round trips. The one for
small messages stays for minutes (`close_unused`): its end tells that the peer has died, and a re-dial must not wait for a new one."""
STATUS: dict[type[PeerdError], grpc.StatusCode] = {
    BadMessageError: grpc.StatusCode.INVALID_ARGUMENT,
    WrongStateError: grpc.StatusCode.FAILED_PRECONDITION,
    NotFiniteError: grpc.StatusCode.OUT_OF_RANGE,
    ChangedLabelsError: grpc.StatusCode.DATA_LOSS,
    BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnwelcomeError: grpc.StatusCode.PERMISSION_DENIED,
    PeerGoneError: grpc.StatusCode.UNAVAILABLE,
}
"""The status of each error on the wire: the callee refuses with the status, and the caller raises the error again."""
RETRY_AFTER_MS = "retry-after-ms"
MOST_RETRY_MS = 60_000
_CUT_SHORT = "Internal error from Core"
"""The details that gRPC's client gives for a refusal that arrives while it still sends; it loses the callee's own status."""
Message = TypeVar("Message")


class Paths(Protocol):
    """Ways around the tunnel (`DirectPaths`)."""

    def channel(self, peer: PeerId) -> Any: ...

    def open_channel(self, peer: PeerId) -> Any: ...

    def is_wide(self, peer: PeerId) -> bool: ...

    def is_local(self, peer: PeerId) -> bool: ...

    async def until_other_way(self, peer: PeerId) -> None: ...

    def leads_to(self, peer: PeerId) -> bool: ...

    def drop(self, peer: PeerId) -> None: ...

    def cut(self, peer: PeerId) -> None: ...

    def cut_all(self) -> None: ...

    async def close(self) -> None: ...


class Links:
    """Channels to other peers: through the tunnel, and direct ones for tensors where they exist."""

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel
        self._channels: dict[tuple[PeerId, bool], grpc.aio.Channel] = {}
        """By peer and whether for tensors: in one connection small messages would wait behind the tensors sent before them."""
        self._opening: dict[PeerId, asyncio.Lock] = {}
        self._used_s: dict[PeerId, float] = {}
        """When a channel of the tunnel to each peer was last asked for (`time.monotonic`)."""
        self._closing = ClosingChannels()
        self.traffic = Traffic(heard_s=tunnel.heard_s)
        self.answered_s, self.refused_s = tunnel.answered_s, tunnel.refused_s
        """When bytes last came from each peer over the tunnel's channels to it (`time.monotonic`)."""
        self.answer_times = AnswerTimes()
        """Of small questions, whose answers need no computing."""
        self.direct: Paths | None = None

    async def channel_for_tensors(self, peer: PeerId) -> Any:
        """Return the direct channel if there is one, otherwise the tunnel's. Stubs take either like a `grpc.aio.Channel`."""
        return (await self.way_for_tensors(peer))[0]

    async def way_for_tensors(self, peer: PeerId) -> tuple[Any, Way]:
        """Return the channel for tensors and the way it takes."""
        direct = self.direct.channel(peer) if self.direct is not None else None
        return (direct, Way.DIRECT) if direct else (await self.channel(peer, for_tensors=True), Way.TUNNEL)

    async def quickest_channel(self, peer: PeerId) -> Any:
        """Return the direct channel if one is open, otherwise the tunnel's for small messages. Does not try to open a direct one."""
        return (self.direct.open_channel(peer) if self.direct is not None else None) or await self.channel(peer)

    def is_lossy(self, peer: PeerId) -> bool:
        """Return whether so many packets to the peer are lost that tensors take several connections."""
        return self.direct is not None and self.direct.is_wide(peer)

    def is_local(self, peer: PeerId) -> bool:
        """Return whether the peer is on this machine and tensors take a local socket to it."""
        return self.direct is not None and self.direct.is_local(peer)

    async def until_other_way(self, peer: PeerId) -> None:
        """Wait until `channel_for_tensors` gives several connections to the peer in place of one, or one in place of several."""
        if self.direct is None:
            await asyncio.Event().wait()
        else:
            await self.direct.until_other_way(peer)

    async def channel(self, peer: PeerId, *, for_tensors: bool = False) -> grpc.aio.Channel:
        """Return the tunnel's channel for small messages, or that for tensors. Raises PeerGoneError if it needs a socket and gets none."""
        async with self._opening.setdefault(peer, asyncio.Lock()):
            self._used_s[peer] = time.monotonic()
            known = self._channels.get((peer, for_tensors))
            if known is None:
                idle = (("grpc.client_idle_timeout_ms", TENSORS_IDLE_MS),) if for_tensors else ()
                try:
                    target = await self._tunnel.target(peer)
                except OSError as error:
                    raise PeerGoneError(f"no socket for the way to {peer}: {error.strerror or error}") from None
                known = grpc.aio.insecure_channel(target, options=(*CHANNEL_OPTIONS, *idle))
                self._channels[peer, for_tensors] = known
            return known

    async def hang_up(self, peer: PeerId) -> None:
        """End the tunnel's connection to a peer that does not answer; the channels stay, and the next call dials it anew."""
        await self._tunnel.hang_up(peer)

    async def leave_address(self, peer: PeerId) -> None:
        """End all connections to a peer that has another address now, with the calls on them."""
        if self.direct is not None:
            self.direct.cut(peer)
        await self.hang_up(peer)

    def cut_all(self) -> None:
        """End all connections past the tunnel at once, because this machine has another address now."""
        if self.direct is not None:
            self.direct.cut_all()

    async def drop(self, peer: PeerId) -> None:
        """Close all channels to a peer that is gone for good."""
        if self.direct is not None:
            self.direct.drop(peer)
        channels = self._take_channels(peer)
        self._opening.pop(peer, None)
        self.traffic.forget(peer)
        for channel in channels:
            await channel.close(None)
        if channels:
            await self._tunnel.close_target(peer)

    async def close_unused(self, kept_s: float) -> None:
        """Close the tunnel's channels to peers that nothing was sent to for `kept_s`. Calls on them end first; the next one dials anew."""
        for peer in [peer for peer, used_s in self._used_s.items() if time.monotonic() - used_s > kept_s]:
            async with self._opening.setdefault(peer, asyncio.Lock()):
                if time.monotonic() - self._used_s.get(peer, float("inf")) > kept_s:
                    for channel in self._take_channels(peer):
                        self._closing.soon(channel, LONGEST_CALL_S)
                    await self._tunnel.close_target(peer)

    def _take_channels(self, peer: PeerId) -> list[grpc.aio.Channel]:
        self._used_s.pop(peer, None)
        return [self._channels.pop((peer, each)) for each in (True, False) if (peer, each) in self._channels]

    async def close(self) -> None:
        await self._closing.now()
        if self.direct is not None:
            await self.direct.close()
        for peer in {peer for peer, _ in self._channels}:
            await self.drop(peer)


def was_cut_short(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the callee ended the call, for whatever reason, before it had received all of it."""
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _CUT_SHORT


def as_remote_error(error: grpc.aio.AioRpcError) -> RemoteError:
    """Return the error of the class that says what the caller can do."""
    if was_cut_short(error):
        return BusyError("the callee refused the call before it had all of it")
    kind = next((kind for kind, status in STATUS.items() if status is error.code()), PeerGoneError)
    told: Any = kind(error.details() or error.code().name.lower())
    if isinstance(told, BusyError):
        told.retry_after_s = _retry_after_s(error)
    remote: RemoteError = told
    return remote


def _retry_after_s(error: grpc.aio.AioRpcError) -> float:
    """Return the pause that the callee asks for, at most `MOST_RETRY_MS`; 0 where it asks for none."""
    for name, value in error.trailing_metadata() or ():
        if name == RETRY_AFTER_MS and isinstance(value, str) and value.isdecimal() and len(value) <= len(str(MOST_RETRY_MS)):
            return min(int(value), MOST_RETRY_MS) / 1000
    return 0.0


def with_time_for(patience_s: float, num_bytes: int) -> float:
    """The longest silence before a message of so many bytes, at most a chunk, is complete: of its bytes nothing shows until then."""
    return patience_s + min(num_bytes, CHUNK_BYTES) / LEAST_BYTES_PER_S


class Arrival:
    """The time that the bytes of one stream may take: for each message the patience, and its bytes at the least rate.

    All messages together have the patience once. So a sender may be slow, or silent once, but it must not trickle.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._until_s = clock() + patience_s

    def left_s(self, missing: int) -> float:
        """The time within which the next message has to be complete, where so many bytes are missing."""
        message_s = min(missing, CHUNK_BYTES) / LEAST_BYTES_PER_S
        return max(0.0, min(self._patience_s, self._until_s - self._clock()) + message_s)

    def came(self, num_bytes: int) -> None:
        self._until_s += num_bytes / LEAST_BYTES_PER_S


async def read_within(call: AsyncIterator[Message], patience_s: float) -> Message | None:
    """Return the next message of a call, None at its end. Raises PeerGoneError after `patience_s`, or the peer's RemoteError."""
    with remote_errors():
        return await next_within(call, patience_s)


async def next_within(messages: AsyncIterator[Message], patience_s: float) -> Message | None:
    """Return the next message, None at the end. Raises PeerGoneError after `patience_s` of silence."""
    try:
        async with served_timeout(patience_s):
            return await anext(messages, None)
    except TimeoutError:
        raise PeerGoneError(f"no message for {patience_s:.1f} s") from None


@contextlib.contextmanager
def remote_errors() -> Iterator[None]:
    """Raise a RemoteError for a gRPC error in the body: the one that the peer sent, or PeerGoneError if the connection closed."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # gRPC may raise this when the task is cancelled; the cancellation must go on
            raise asyncio.CancelledError from None
        raise as_remote_error(error) from None
    except asyncio.CancelledError:
        raise_if_ours()
        raise PeerGoneError("the connection was closed") from None


def raise_if_ours() -> None:
    """Re-raise CancelledError, inside its `except`, if this task itself is being cancelled.

    gRPC also raises it when a channel closes under a call, which must not end the task.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise


@contextlib.contextmanager
def ending(rpc: Any) -> Iterator[Any]:
    """Yield a call and cancel it at the end of the block, whatever ends the block."""
    try:
        yield rpc
    finally:
        rpc.cancel()


async def answer_of(rpc: Any) -> Any:
    """Return the reply of a call with one reply. Raises the peer's RemoteError, or PeerGoneError if the connection closes."""
    with remote_errors():
        return await rpc
