"""The door of a daemon: who calls, whether the caller may, and the status codes that refusals get."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import structlog

from peerd.errors import BadMessageError, BusyError, PeerdError, PeerGoneError, WrongStateError
from peerd.link.few_each import FewEach, everybody
from peerd.link.links import CHUNK_BYTES, MOST_RETRY_MS, RETRY_AFTER_MS, STATUS, Arrival, Bytes, next_within, with_time_for
from peerd.link.traffic import PeerRole, Traffic
from peerd.link.tunnel import caller_of
from peerd.table.record import PeerId, RunId
from peerd.timeline.spans import SpanRing
from peerd.wire.admission import BEFORE_ADMISSION, TOLD_TO_ALL, Admission, Everybody
from peerd.wire.bans import Bans
from peerd.wire.budgets import MOST_PUT_OFF, Allowance, OpenCalls, UselessCalls
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
    useless: UselessCalls = field(init=False)
    put_off: FewEach = field(init=False)
    """Refusals that wait, of calls that do not count as open."""
    bans: Bans = field(default_factory=Bans)
    admission: Admission = field(default_factory=Everybody)

    def __post_init__(self) -> None:
        self.calls, self.useless, self.put_off = OpenCalls(self.knows), UselessCalls(self.knows), FewEach(self.knows)

    def knows(self, caller: PeerId) -> bool:
        return self.is_known(caller)

    async def caller(self, context: Any) -> PeerId:
        """The caller of a call that was let in. One that goes on for long may have been banned meanwhile."""
        caller = await self._named(context)
        try:
            self.admission.check(caller, is_to_show=True)
            self._hear(caller)
        except BusyError as error:
            await self.refuse(context, caller, error)
        return caller

    async def _named(self, context: Any) -> PeerId:
        caller = caller_of(context.peer()) or self.proven(context)
        if caller is None:
            words = "calls come through the tunnel, or by TLS under a certificate that was shown there"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, words)
            raise AssertionError("abort never returns")
        return caller

    def _hear(self, caller: PeerId) -> None:
        """Raises BusyError if the caller is banned: with PeerGoneError it would suspect this peer, and tell the swarm."""
        left_s = self.bans.left_s(caller)
        if left_s > 0:
            raise BusyError("the caller sent a broken message; try again later", left_s)
        self.traffic.hear(caller)

    async def refuse(self, context: Any, caller: PeerId, error: PeerdError, *, may_wait: bool = True) -> NoReturn:
        """End a call. With `may_wait` its caller hears of that later, if it has made many calls of no use."""
        if isinstance(error, BadMessageError):
            self.refused += 1
            self.bans.add(caller, self.patience_s)
            LOG.warning("message refused", sender=caller, reason=error.message)
        if may_wait and isinstance(error, BadMessageError | BusyError | WrongStateError):
            await self.slow_down(caller)
        later = _later(error.retry_after_s) if isinstance(error, BusyError) else ()
        await context.abort(STATUS.get(type(error), grpc.StatusCode.INTERNAL), error.message, later)
        raise AssertionError("abort never returns")

    async def slow_down(self, caller: PeerId) -> None:
        """Count a call that changed nothing, and wait before it is answered if the caller makes many of those."""
        delay_s = self.useless.delay_s(caller, self.slots(), time.monotonic())
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    @contextlib.asynccontextmanager
    async def letting_in(self, context: Any, method: str, allowance: Allowance) -> AsyncIterator[None]:
        """Admit a call before any message of it is read, and count it while the block runs. A PeerdError in the block refuses the call."""
        caller = await self._named(context)
        try:
            if method not in TOLD_TO_ALL:
                self.admission.check(caller, is_to_show=method in BEFORE_ADMISSION)
            self._hear(caller)
            with self.calls.by(caller, method, allowance, self.slots()):
                yield
        except PeerdError as error:
            with self.put_off.by(caller, MOST_PUT_OFF) as may_wait:
                await self.refuse(context, caller, error, may_wait=may_wait)

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

    @contextlib.asynccontextmanager
    async def giving(
        self, context: Any, caller: PeerId, chunks: Iterable[bytes], tensor: str, role: PeerRole
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The chunks of an answer, each as soon as the uplink has room for it; each is counted once it is sent. At the end of the block
        a caller that has taken nothing for too long is refused."""
        with Watch(self.patience_s, lambda: None) as watch:

            async def each() -> AsyncIterator[bytes]:
                for chunk in chunks:
                    watch.sends(len(chunk))
                    await self.traffic.uplink.turn(len(chunk))
                    yield chunk
                    self.traffic.gave(tensor, role, len(chunk))

            yield each()
        await self.check_taken(context, caller, watch)

    def check_run(self, run: str) -> None:
        if run != self.run:
            raise WrongStateError(f"this peer serves run {self.run}")

    async def read(self, messages: AsyncIterator[Any], most_bytes: int = CHUNK_BYTES) -> Any:
        return await next_within(messages, with_time_for(self.patience_s, most_bytes))

    async def first_of_run(self, messages: AsyncIterator[Any]) -> Any:
        """The first message of a stream, if it is about this run."""
        first = await self.read(messages)
        if first is None:
            raise PeerGoneError("the stream ended before its first message")
        self.check_run(first.run)
        return first

    async def read_chunks(self, messages: AsyncIterator[Any], num_bytes: int, begun: Bytes = b"") -> tuple[Any, ...]:
        """Read chunks of exactly `num_bytes` together, including `begun`. Raises BadMessageError if they do not add up."""
        arrival = Arrival(self.patience_s)

        async def read(missing: int) -> Any:
            message = await next_within(messages, arrival.left_s(missing))
            arrival.came(len(message.chunk) if message is not None else 0)
            return message

        chunks = await collected(read, num_bytes, begun)
        self.traffic.received_bytes += num_bytes
        return chunks


def _later(pause_s: float) -> tuple[tuple[str, str], ...]:
    """What a refusal says of the time for which this peer will refuse."""
    return ((RETRY_AFTER_MS, str(min(math.ceil(1000 * pause_s), MOST_RETRY_MS))),) if pause_s > 0 else ()
