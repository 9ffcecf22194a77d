"""What passes between this member of a round and one other: chunks each way, and what has been verified of them.

Each direction is a stream of chunks with the receiver's counts coming back. The sender opens it (Give); where it cannot, the receiver
does (Take). A stream that breaks is opened anew, and goes on at the first chunk that its receiver has not verified.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Protocol

from peerd.averaging.carrying import Carrying
from peerd.averaging.exchange import Exchange
from peerd.averaging.flows import Sending, Sendings
from peerd.errors import BadMessageError
from peerd.policy.round.debts import Edge
from peerd.policy.round.under_way import UnderWay
from peerd.wire.messages import Carried, Frame, Verified


class ChunkListener(Protocol):
    """Hears of chunks that have been verified."""

    def part_came(self, author: int, reducer: int, chunks: int) -> None: ...

    def sum_came(self, reducer: int, member: int, chunks: int) -> None: ...

    def delivered(self, member: int, num_bytes: int, took_s: float) -> None:
        """A member has verified so many bytes, `took_s` seconds after the first of them was sent."""

    def more_to_send(self) -> None:
        """There is more for others: of this member's slice, or of what it carries."""

    def forged(self, author: int, reason: str) -> None:
        """A chunk that is to be carried is not as its author signed it."""

    def told_of(self, member: int, told: Verified) -> None:
        """What a member has verified of this member's chunks, as a mate tells it."""


class PairLine:
    """One other member, by its number in the roster."""

    def __init__(self, number: int, exchange: Exchange, carrying: Carrying, listener: ChunkListener) -> None:
        self.number = number
        self._exchange = exchange
        self._carrying = carrying
        self._listener = listener
        self._sendings = Sendings(number, exchange, carrying)
        self._carried: tuple[Carried, ...] = ()
        """What the other last told of edges that a mate carries."""
        self._ready = asyncio.Event()
        """Set when there may be something to send."""
        self._changed = asyncio.Event()
        """Set when there is something new to tell of what came."""
        self._opened = 0
        self._under_way = UnderWay()
        self.num_incoming = self.num_taken = 0
        """Streams on which the other's chunks come, and those that the other has opened for this member's."""
        self._is_untaken = asyncio.Event()
        self.began_s = time.monotonic()
        self.num_bytes = 0
        """Bytes of chunks that went either way."""

    # To the other

    @property
    def has_to_get(self) -> bool:
        """Whether chunks are due from the other that have not come."""
        here, layout = self._exchange, self._exchange.layout
        parts, sums = here.parts_here[self.number], here.sums_here[self.number]
        own = parts < layout.chunks_of(here.me) or sums < layout.chunks_of(self.number)
        return own or not self._carrying.is_complete_for(self.number)

    @property
    def own(self) -> Verified:
        """What the other has verified of this member's own chunks, as far as it has told."""
        return self._sendings.own

    async def until_more(self) -> None:
        """Wait until there may be more to send."""
        self._ready.clear()
        await self._ready.wait()

    @property
    def is_given(self) -> bool:
        """Whether the other has verified all that is to be sent to it."""
        return self._sendings.are_done

    @property
    def num_given(self) -> int:
        """Chunks sent on this line that have been verified."""
        return self._sendings.num_verified

    def told(self, verified: Verified) -> None:
        """Take what the other says that it has verified, of this member's own and of what is carried."""
        before = self._sendings.num_verified
        part, total = self._sendings.told(verified)
        me = self._exchange.me
        if part:
            self._listener.part_came(me, self.number, part)
        if total:
            self._listener.sum_came(me, self.number, total)
        if verified.carried:
            self._carried = verified.carried
            self._look_what_is_carried()
        num_bytes, took_s = self._under_way.verified(max(0, self._sendings.num_verified - before), time.monotonic())
        if num_bytes:
            self._listener.delivered(self.number, num_bytes, took_s)
        if verified.carried:
            self._listener.more_to_send()
        self.look_again()

    def _look_what_is_carried(self) -> None:
        """Take what the other says of edges that a mate carries, as far as this member knows that one does."""
        me = self._exchange.me
        for each in self._carried:
            edge, told = Edge(each.source, each.target), Verified(each.part, each.sum, each.summed)
            mate = self._carrying.mates.get(edge)
            if each.target == self.number and mate == me:
                self._carrying.told_by_target(edge, told)
            elif each.source == me and mate == self.number:
                self._sendings.told_by_mate(edge, each.here)
                self._carrying.agreed.add(edge)
                self._carrying.told[edge] = told
                self._listener.told_of(each.target, told)

    def carried_anew(self) -> None:
        """A mate carries over an edge since."""
        self._look_what_is_carried()
        self.look_again()

    def look_again(self) -> None:
        """There may be more to send on this line, or to tell."""
        self._ready.set()
        self._changed.set()

    @contextlib.contextmanager
    def sending(self) -> Iterator[AsyncGenerator[Frame]]:
        """Open a stream for the chunks that are due, in place of any other. It ends with the block."""
        self._opened += 1
        mine = self._opened
        try:
            yield self._frames(mine)
        finally:
            self._opened += self._opened == mine
            self._ready.set()  # what waits for something to send looks whether its stream is over

    async def _frames(self, mine: int) -> AsyncGenerator[Frame]:
        """Yield the chunks that are due, until the other has verified all of them, or the stream is over."""
        self._under_way.broke()
        self._sendings.resume()
        while self._opened == mine and not self.is_given:
            sending = self._sendings.next() if self._under_way.may_grow else None
            if sending is None:
                self._ready.clear()
                await self._ready.wait()
                continue
            frame = await self._next_frame(sending)
            if frame is None:
                continue
            self._under_way.sent(frame.num_bytes, time.monotonic())
            self.num_bytes += frame.num_bytes
            self._exchange.count(frame, "sent")
            yield frame

    async def _next_frame(self, sending: Sending) -> Frame | None:
        """Return the next chunk of what is to be sent; None if the receiver has it, because its sum is here."""
        flow, carried = sending.flow, sending.carried
        number = flow.next
        flow.next += 1
        if carried is not None and carried.source != self._exchange.me and not flow.is_sum:
            return self._carrying.load(carried).frames[number]
        to = self.number if carried is None else carried.target
        frame = await self._exchange.frame(flow.slice, flow.of, number, to, is_carried=carried is not None)
        if frame is not None and carried is not None and flow.of != self._exchange.me:
            try:
                await self._exchange.check_signature(frame)
            except BadMessageError as error:
                self._listener.forged(flow.of, error.message)
                await asyncio.Event().wait()  # the round ends, and with it this stream
        return frame

    def wake(self) -> None:
        """End the stream on which nothing is due now."""
        self._opened += 1
        self._ready.set()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The other has opened a stream for this member's chunks."""
        self.num_taken += 1
        try:
            yield
        finally:
            self.num_taken -= 1
            if not self.num_taken:
                self._is_untaken.set()

    async def untaken(self) -> None:
        """Wait until the other has no such stream any more."""
        self._is_untaken.clear()
        if self.num_taken:
            await self._is_untaken.wait()

    # From the other

    @contextlib.contextmanager
    def coming_in(self) -> Iterator[None]:
        """The other's chunks come on a stream."""
        self.num_incoming += 1
        try:
            yield
        finally:
            self.num_incoming -= 1

    def size_of(self, frame: Frame) -> int:
        """The number of bytes of a chunk that the other sends. Raises BadMessageError if no such chunk is due from it."""
        exchange, num_members = self._exchange, self._exchange.layout.num_members
        if max(frame.slice, frame.author, frame.to) >= num_members or frame.slice not in (frame.author, frame.to):
            raise BadMessageError("a chunk of a member that is not in the round, or that belongs to nobody there")
        if frame.author != self.number or frame.to != exchange.me:
            self._carrying.check(frame, self.number)
        if frame.number >= exchange.layout.chunks_of(frame.slice):
            raise BadMessageError("a chunk that is in no slice")
        if frame.to == exchange.me:
            exchange.check(frame)
        return exchange.layout.num_bytes(frame.slice, frame.number, frame.author)

    async def takes(self, frame: Frame) -> None:
        """Take a chunk whose size was checked. One that came before is ignored."""
        exchange = self._exchange
        self.num_bytes += frame.num_bytes
        exchange.count(frame, "received")
        if frame.author != self.number or frame.to != exchange.me:
            await exchange.check_signature(frame)
        if frame.to != exchange.me:
            if self._carrying.takes(frame):
                self._listener.more_to_send()
        elif exchange.check(frame):
            summed = exchange.summed
            try:
                await exchange.take(frame)
            except BadMessageError as error:
                if frame.author == self.number:
                    raise
                self._listener.forged(frame.author, error.message)  # a mate carried what its author has signed
                return
            if frame.is_sum:
                self._listener.sum_came(frame.slice, exchange.me, exchange.sums_here[frame.slice])
            else:
                self._listener.part_came(frame.author, exchange.me, exchange.parts_here[frame.author])
            if exchange.summed > summed or self._carrying.mates:
                self._listener.more_to_send()
        self._changed.set()

    async def words(self) -> AsyncGenerator[Verified]:
        """Yield what this member has verified, at once and after each change. It is for the stream to end."""
        last = None
        while True:
            self._changed.clear()
            here = self._exchange
            carried = self._carrying.words_for(self.number)
            verified = Verified(here.parts_here[self.number], here.sums_here[self.number], here.summed, carried)
            if verified != last:
                last = verified
                yield verified
            await self._changed.wait()
