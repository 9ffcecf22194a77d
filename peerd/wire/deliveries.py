"""Streams to receivers that may stop taking them: what such a stream holds here is given back.

gRPC has no deadline for one message of a stream. A receiver that hangs, and still answers pings, would keep a copy of a state or one of
few slots for as long as it likes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Self

import structlog

from peerd.errors import BadMessageError, PeerGoneError
from peerd.link.links import Bytes, next_within
from peerd.policy.route.yielding import IN_FLIGHT_BYTES
from peerd.wire.chunks import CutFile

SLOWEST_BYTES_PER_S = 125_000.0
"""A receiver that takes so much makes progress. One that has taken less so far is measured by its own rate."""
LEAST_WAIT_S = 1.0
"""A receiver that has let a peer wait for less in all is not idle: its first request takes a round trip."""
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

    @property
    def is_over(self) -> bool:
        """Whether nothing is given any more."""
        return self._is_over

    def take_back(self) -> None:
        """Give up now, as if the receiver had stalled: others need what it keeps."""
        self.is_stalled = True
        self._end()

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

    def __init__(self, chunks: Iterable[Bytes], patience_s: float, ended: Callable[[], object] | None = None) -> None:
        """`ended` runs once, when the delivery is over."""
        super().__init__(patience_s, self._drop)
        self._chunks = iter(chunks)
        self._ended = ended
        self._present = memoryview(b"")

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the chunks. Each may be used until the next one is asked for, or the delivery is over."""
        while chunk := self.take():
            self.sends(len(chunk))
            yield chunk

    def take(self) -> memoryview:
        """The next chunk; empty at the end."""
        self._present = memoryview(next(self._chunks, b""))
        return self._present

    def _drop(self) -> None:
        if self._ended is not None:
            self._ended()
        self._chunks = iter(())
        self._present.release()  # whatever waits with the chunk must not keep the memory that it is a view of


class Lending(Watch):
    """A file of which one receiver asks for chunks. It is let go when the receiver has enough, or stalls: asks for nothing, too."""

    def __init__(self, file: CutFile, patience_s: float, ended: Callable[[bool], object] | None = None) -> None:
        """`ended` runs once, at the end: with True if the stream broke, so that the receiver may come back for the rest."""
        super().__init__(patience_s, self._let_go)
        self._file: CutFile | None = file
        self._num_bytes = file.num_bytes
        self._left = bytearray(b"\1") * len(file)
        """1 for each chunk that was not asked for yet."""
        self._ended = ended
        self._waited_s = 0.0
        """For its requests, the present one left out."""
        self._waits_since_s: float | None = None
        self._leaves_by_s = -math.inf
        self.is_whole = False
        """Whether the receiver has said that it needs no more."""

    def __enter__(self) -> Self:
        self.sends(0)  # the first request may take as long to come as any other
        return super().__enter__()

    @property
    def left_s(self) -> float | None:
        """The time until all has been sent, at its rate so far; None while that is not known. A receiver may need less of it."""
        elapsed_s = time.monotonic() - self._began_s
        return max(0.0, self._num_bytes - self.sent_bytes) * elapsed_s / self.sent_bytes if self.sent_bytes else None

    @property
    def is_idle(self) -> bool:
        """Whether this peer has waited most of the time for the receiver to ask for something."""
        now_s = time.monotonic()
        waited_s = self._waited_s + (max(0.0, now_s - self._waits_since_s) if self._waits_since_s is not None else 0.0)
        return waited_s > max(LEAST_WAIT_S, (now_s - self._began_s) / 2)

    def leaves_by(self, when_s: float) -> None:
        """By then all that was sent will have left this peer (`time.monotonic`). Until then it does not wait for the receiver."""
        self._leaves_by_s = when_s

    @property
    def has_had_its_time(self) -> bool:
        """Whether a receiver that is fast enough would have all of it by now, and this one lets the peer wait."""
        allowed_s = self._patience_s + (IN_FLIGHT_BYTES + self._num_bytes) / SLOWEST_BYTES_PER_S
        return self.is_idle and time.monotonic() - self._began_s > allowed_s

    def chunk(self, number: int) -> bytes:
        """One chunk, which is sent now. Raises PeerGoneError if the receiver has stalled, BadMessageError if it asks for no chunk of the
        file, or for one again: it would keep the file for as long as it likes."""
        chunk = self._asked(number).chunk(number)
        self.sends(len(chunk))
        return chunk

    async def next(self, requests: AsyncIterator[Any]) -> bytes | None:
        """The chunk that the receiver asks for next; None: it needs no more. Raises as `read`."""
        self._waits_since_s = since_s = max(time.monotonic(), self._leaves_by_s)
        try:
            asked = await next_within(requests, self.allowed_s(0))
        finally:
            self._waited_s, self._waits_since_s = self._waited_s + max(0.0, time.monotonic() - since_s), None
        if asked is None:
            self.is_whole = True
            return None
        return await self.read(asked.chunk)

    async def read(self, number: int) -> bytes:
        """The same. Nothing else waits for the disk. Raises PeerGoneError, too, if that fails."""
        file = self._asked(number)
        try:
            chunk = await asyncio.to_thread(file.chunk, number) if file.is_stored else file.chunk(number)
        except OSError as error:
            raise PeerGoneError(f"this peer's disk fails: {error}") from None
        self.sends(len(chunk))
        return chunk

    def _asked(self, number: int) -> CutFile:
        if self._file is None:
            raise PeerGoneError("the caller took nothing of the answer for too long")
        if number >= len(self._left) or not self._left[number]:
            raise BadMessageError(f"chunk {number} is not one of the file, or was asked for before")
        self._left[number] = 0
        return self._file

    def _let_go(self) -> None:
        if self._ended is not None:
            self._ended(not self.is_whole and not self.is_stalled)
        self._file = None
