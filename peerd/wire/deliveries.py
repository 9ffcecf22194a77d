"""Streams to receivers that may stop taking them: what such a stream holds here is given back.

gRPC has no deadline for one message of a stream. A receiver that hangs, and still answers pings, would keep a copy of a state or one of
few slots for as long as it likes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import structlog

from peerd.link.links import Bytes

IN_FLIGHT_BYTES = 16 << 20
"""Buffers on the way (gRPC, libp2p, TCP) take up to so much before the receiver has any of it, and go on in steps of up to this size."""
SLOWEST_BYTES_PER_S = 125_000.0
"""A receiver that takes so much makes progress. One that has taken less so far is measured by its own rate."""
LOG = structlog.get_logger()


class Watch:
    """Watches one stream, as a context: `give_up` runs once, when the receiver stalls or at the end of the block."""

    def __init__(self, patience_s: float, give_up: Callable[[], object]) -> None:
        self._patience_s = patience_s
        self._give_up = give_up
        self._began_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self.sent_bytes = 0
        self.is_stalled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: Any) -> None:
        self._end()

    def sends(self, num_bytes: int) -> None:
        """The next message is sent: by now the receiver, or a buffer on the way, has taken all before it."""
        self._cancel()
        self._timer = asyncio.get_running_loop().call_later(self.allowed_s(num_bytes), self._stall)
        self.sent_bytes += num_bytes

    def allowed_s(self, num_bytes: int) -> float:
        """The time within which a receiver that makes progress takes a message of this size."""
        taken, elapsed_s = self.sent_bytes - IN_FLIGHT_BYTES, max(time.monotonic() - self._began_s, 1e-6)
        rate = min(SLOWEST_BYTES_PER_S, taken / elapsed_s) if taken > 0 else SLOWEST_BYTES_PER_S
        return self._patience_s + (IN_FLIGHT_BYTES + num_bytes) / rate

    def _stall(self) -> None:
        self.is_stalled = True
        LOG.info("a receiver takes nothing any more", sent_bytes=self.sent_bytes)
        self._end()

    def _end(self) -> None:
        self._cancel()
        if not self._is_over:
            self._is_over = True
            self._give_up()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Delivery(Watch):
    """The chunks of a stream to one receiver. Their memory is freed when they are sent, or when the receiver stalls."""

    def __init__(self, chunks: Iterable[Bytes], num_bytes: int, patience_s: float, ended: Callable[[bool], object] | None = None) -> None:
        """`ended` runs once, when the delivery is over: with True if it broke, so that the receiver may come back for the rest."""
        super().__init__(patience_s, self._drop)
        self._chunks = iter(chunks)
        self._num_bytes = num_bytes
        self._ended = ended
        self._is_whole = False
        self._present = memoryview(b"")

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the chunks. Each may be used until the next one is asked for, or the delivery is over."""
        while chunk := self.take():
            self.sends(len(chunk))
            yield chunk
        self._is_whole = True

    @property
    def left_s(self) -> float | None:
        """The time until it is over, at its rate so far; None while that is not known."""
        elapsed_s = time.monotonic() - self._began_s
        return (self._num_bytes - self.sent_bytes) * elapsed_s / self.sent_bytes if self.sent_bytes else None

    def take(self) -> memoryview:
        """The next chunk; empty at the end."""
        self._present = memoryview(next(self._chunks, b""))
        return self._present

    def _drop(self) -> None:
        if self._ended is not None:
            self._ended(not self._is_whole and not self.is_stalled)
        self._chunks = iter(())
        self._present.release()  # whatever waits with the chunk must not keep the memory that it is a view of
