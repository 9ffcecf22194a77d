"""One gRPC channel per peer, reused; errors turned into what the caller can do about them; bytes counted."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from peerd.errors import BadMessageError, BusyError, PeerGoneError, RemoteError, WrongStateError
from peerd.policy.compressing import RateMeter
from peerd.table.record import PeerId
from peerd.wire.tunnel import Tunnel
from peerd.wire.values import CHUNK_BYTES, TensorBytes

MAX_MESSAGE_BYTES = 4 * CHUNK_BYTES
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.http2.lookahead_bytes", 4 * CHUNK_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)
_FAULTS: dict[grpc.StatusCode, type[RemoteError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadMessageError,
    grpc.StatusCode.FAILED_PRECONDITION: WrongStateError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: BusyError,
}
_CUT_SHORT = "Internal error from Core"
"""What gRPC's client makes of a refusal that comes while it still sends; the callee's own status is lost to it."""
Message = TypeVar("Message")


@dataclass(slots=True)
class Traffic:
    """Bytes of RPC payload this daemon has sent and received, tensors and messages alike."""

    sent_bytes: int = 0
    received_bytes: int = 0
    boundary_bytes: int = 0
    boundary_crossings: int = 0
    tensors: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Bytes of tensors by what they are, their codec and sent or received."""
    incoming: defaultdict[PeerId, RateMeter] = field(default_factory=lambda: defaultdict(RateMeter))
    """How fast tensors come in, by the peer that sends them."""
    outgoing: dict[PeerId, float] = field(default_factory=dict)
    """Bytes per second at which mine arrive, by the peer that measured and told it."""

    def count(self, what: str, direction: str, tensor: TensorBytes) -> None:
        self.tensors[what, str(tensor.codec), direction] += tensor.num_bytes

    @contextmanager
    def receiving(self, peer: PeerId, num_bytes: int) -> Iterator[None]:
        """So many bytes of tensors are on their way from `peer`, whose first word of them has come."""
        meter = self.incoming[peer]
        meter.begin(time.monotonic())
        arrived = 0
        try:
            yield
            arrived = num_bytes
        finally:
            meter.end(arrived, time.monotonic())

    def told(self, peer: PeerId, rate: float) -> None:
        """`peer` says how fast my tensors come in; 0 where it does not know yet."""
        if math.isfinite(rate) and rate > 0:
            self.outgoing[peer] = rate

    def forget(self, peer: PeerId) -> None:
        self.outgoing.pop(peer, None)
        self.incoming.pop(peer, None)


class Links:
    """Channels to other peers through the tunnel."""

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel
        self._channels: dict[PeerId, grpc.aio.Channel] = {}
        self._opening: dict[PeerId, asyncio.Lock] = {}
        self.traffic = Traffic()

    async def channel(self, peer: PeerId) -> grpc.aio.Channel:
        async with self._opening.setdefault(peer, asyncio.Lock()):
            known = self._channels.get(peer)
            if known is None:
                known = grpc.aio.insecure_channel(await self._tunnel.target(peer), options=CHANNEL_OPTIONS)
                self._channels[peer] = known
            return known

    async def drop(self, peer: PeerId) -> None:
        """Close what leads to a peer that is gone for good."""
        channel = self._channels.pop(peer, None)
        self._opening.pop(peer, None)
        self.traffic.forget(peer)
        if channel is not None:
            await channel.close(None)
            await self._tunnel.close_target(peer)

    async def close(self) -> None:
        for peer in list(self._channels):
            await self.drop(peer)


def as_remote_error(error: grpc.aio.AioRpcError) -> RemoteError:
    """The error class that tells what the caller can do."""
    if error.code() is grpc.StatusCode.INTERNAL and error.details() == _CUT_SHORT:
        return BusyError("the callee refused the call before it had all of it")
    kind = _FAULTS.get(error.code(), PeerGoneError)
    return kind(error.details() or error.code().name.lower())


async def read_within(call: AsyncIterator[Message], patience_s: float) -> Message | None:
    """The next message of a stream, None at its end. PeerGoneError when it takes too long; RemoteError as the peer says."""
    try:
        async with asyncio.timeout(patience_s):
            return await anext(call, None)
    except TimeoutError:
        raise PeerGoneError(f"no word for {patience_s:.1f} s") from None
    except grpc.aio.AioRpcError as error:
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


def chunks_of(data: bytes) -> tuple[bytes, ...]:
    """Cut into chunks of at most 1 MB; copies (gRPC takes only `bytes`), so not for the event loop when large."""
    if len(data) <= CHUNK_BYTES:
        return (data,) if data else ()
    view = memoryview(data)
    return tuple(bytes(view[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))
