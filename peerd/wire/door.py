"""The door of a daemon: who calls, whether the caller may, and the status codes that refusals get."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import structlog

from peerd.errors import BadMessageError, BusyError, PeerdError, PeerGoneError, WrongStateError
from peerd.link.few_each import everybody
from peerd.link.links import CHUNK_BYTES, MOST_RETRY_MS, RETRY_AFTER_MS, STATUS, Arrival, Bytes, next_within, with_time_for
from peerd.link.traffic import Traffic
from peerd.link.tunnel import caller_of
from peerd.table.record import PeerId, RunId
from peerd.timeline.spans import SpanRing
from peerd.wire.budgets import Allowance, OpenCalls
from peerd.wire.chunks import collected
from peerd.wire.deliveries import Watch

LOG = structlog.get_logger()


def nobody(_context: Any) -> PeerId | None:
    """Return None: without direct connections there is no caller outside the tunnel."""
    return None


def _one_slot() -> int:
    return 1


@dataclass(slots=True)
class Door:
    """What all services share: the run that they serve, the patience with silent callers, the traffic counters and the bans."""

    run: RunId
    patience_s: float
    traffic: Traffic
    spans: SpanRing = field(default_factory=lambda: SpanRing(0))
    proven: Callable[[Any], PeerId | None] = nobody
    """Returns the authenticated caller outside the tunnel (`caller_past_the_tunnel`)."""
    slots: Callable[[], int] = _one_slot
    """Returns how many microbatches this peer holds at once: its callers may have as many calls open."""
    is_known: Callable[[PeerId], bool] = everybody
    """Tells whether a caller has a record of this run that counts."""
    refused: int = 0
    calls: OpenCalls = field(init=False)
    banned_until_s: dict[PeerId, float] = field(default_factory=dict)
    """Senders of broken messages, and the time from which they may call again (monotonic clock), the earliest first."""

    def __post_init__(self) -> None:
        self.calls = OpenCalls(self.knows)

    def knows(self, caller: PeerId) -> bool:
        return self.is_known(caller)

    async def caller(self, context: Any) -> PeerId:
        caller = caller_of(context.peer()) or self.proven(context)
        if caller is None:
            words = "calls come through the tunnel, or by TLS under a certificate that was shown there"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, words)
            raise AssertionError("abort never returns")
        left_s = self.banned_until_s.get(caller, 0.0) - time.monotonic()
        if left_s > 0:
            # Not UNAVAILABLE, because the caller would suspect this peer and tell the swarm.
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the caller sent a broken message; try again later", _later(left_s))
        self.traffic.hear(caller)
        return caller

    async def refuse(self, context: Any, caller: PeerId, error: PeerdError) -> NoReturn:
        if isinstance(error, BadMessageError):
            self.refused += 1
            self._ban(caller, time.monotonic())
            LOG.warning("message refused", sender=caller, reason=error.message)
        later = _later(error.retry_after_s) if isinstance(error, BusyError) else ()
        await context.abort(STATUS.get(type(error), grpc.StatusCode.INTERNAL), error.message, later)
        raise AssertionError("abort never returns")

    def _ban(self, caller: PeerId, now_s: float) -> None:
        self.banned_until_s.pop(caller, None)
        self.banned_until_s[caller] = now_s + self.patience_s
        while (first := next(iter(self.banned_until_s))) != caller and self.banned_until_s[first] <= now_s:
            del self.banned_until_s[first]

    @contextlib.asynccontextmanager
    async def letting_in(self, context: Any, method: str, allowance: Allowance) -> AsyncIterator[None]:
        """Admit a call before any message of it is read, and count it while the block runs. A PeerdError in the block refuses the call."""
        caller = await self.caller(context)
        try:
            with self.calls.by(caller, method, allowance, self.slots()):
                yield
        except PeerdError as error:
            await self.refuse(context, caller, error)

    @contextlib.asynccontextmanager
    async def answering(self, context: Any, run: str | None = None) -> AsyncIterator[PeerId]:
        """Yield the caller of a call about this run. A PeerdError raised in the block refuses the call."""
        caller = await self.caller(context)
        try:
            if run is not None:
                self.check_run(run)
            yield caller
        except PeerdError as error:
            await self.refuse(context, caller, error)

    async def check_taken(self, context: Any, caller: PeerId, watch: Watch) -> None:
        """Refuse the rest of a call whose caller has not taken what was sent."""
        if watch.is_stalled:
            await self.refuse(context, caller, PeerGoneError("the caller took nothing of the answer for too long"))

    def check_run(self, run: str) -> None:
        if run != self.run:
            raise WrongStateError(f"this peer serves run {self.run}")

    async def read(self, messages: AsyncIterator[Any], most_bytes: int = CHUNK_BYTES) -> Any:
        return await next_within(messages, with_time_for(self.patience_s, most_bytes))

    async def read_chunks(
        self,
        messages: AsyncIterator[Any],
        num_bytes: int,
        begun: Bytes = b"",
        told: Callable[[int], None] = lambda _num_bytes: None,
        num_streams: int = 1,
    ) -> tuple[Any, ...]:
        """Read chunks of exactly `num_bytes` together, including `begun`. Raises BadMessageError if they do not add up.

        `told` hears the size of each. `num_streams` share the sender's uplink with this one.
        """
        arrival = Arrival(self.patience_s, num_streams)

        async def read(missing: int) -> Any:
            message = await next_within(messages, arrival.left_s(missing))
            size = len(message.chunk) if message is not None else 0
            arrival.came(size)
            told(size)
            return message

        told(len(begun))
        chunks = await collected(read, num_bytes, begun)
        self.traffic.received_bytes += num_bytes
        return chunks


def _later(pause_s: float) -> tuple[tuple[str, str], ...]:
    """What a refusal says of the time for which this peer will refuse."""
    return ((RETRY_AFTER_MS, str(min(math.ceil(1000 * pause_s), MOST_RETRY_MS))),) if pause_s > 0 else ()
