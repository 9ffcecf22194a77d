"""A bundle of connections to a peer that carry one byte stream between them, as `policy/route/parallel.py` wants it.

At the caller a local socket takes one connection of gRPC's; at the callee the bundle is one to the local gRPC server. All calls in between
see one connection that is as fast as all strands together. Each strand is a call (`Direct.Carry`) on a TLS connection of its own, which has
proven who calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from peerd.background import start
from peerd.errors import BadMessageError, BusyError, PeerGoneError
from peerd.generated import direct_pb2
from peerd.link.strands import BLOCK_BYTES, EACH, Incoming, Outgoing, Strand
from peerd.link.streams import Stream
from peerd.policy.route.parallel import MOST
from peerd.table.record import PeerId

ID_BYTES = 16
MOST_ENDED = 256
MOST_OF_ONE = 4
"""Bundles of one caller: one, and those before it that have died unnoticed."""
Blocks = AsyncGenerator[direct_pb2.Block]
Coming = AsyncIterator[direct_pb2.Block]


class Bundle:
    """One end of a bundle. `local` is the connection whose bytes it carries; the bundle closes it."""

    def __init__(self, local: Stream, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader, self._writer = local
        self._clock = clock
        self._outgoing, self._incoming = Outgoing(), Incoming()
        self._strands: dict[Strand, asyncio.Event] = {}
        self._idle: dict[Strand, None] = {}
        """Strands that wait for something to send, in the order in which they began to wait."""
        self._has_room, self._came = asyncio.Event(), asyncio.Event()
        self._told = 0
        """Up to which block the other end knows that all are passed on."""
        self.has_begun = False
        """Whether it has had a strand: once it has none any more, what was under way is lost."""
        self.over = asyncio.Event()

    @property
    def num_strands(self) -> int:
        return len(self._strands)

    async def run(self) -> None:
        """Carry bytes until the local connection ends, or `end`."""
        works = [start(work, expects=(OSError,)) for work in (self._read(), self._pass_on(), self._until_over())]
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.end()
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
            self._writer.close()

    def end(self) -> None:
        self.over.set()
        for wake in self._strands.values():
            wake.set()

    async def carry(self, came: Coming) -> Blocks:
        """Let a strand carry: yield the blocks that go over it, and take those that `came` over it, until either end ends it."""
        strand, wake = Strand(), asyncio.Event()
        self._strands[strand], self.has_begun = wake, True
        self._has_room.set()
        taking = start(self._take(strand, came), expects=(Exception,))
        taking.add_done_callback(lambda _task: wake.set())
        try:
            while not (self.over.is_set() or taking.done()):
                block = self._next(strand)
                if block is not None:
                    yield block
                else:
                    await self._wait(strand, wake)
            if taking.done():
                taking.result()
        finally:
            taking.cancel()
            self._leave(strand)

    def _leave(self, strand: Strand) -> None:
        del self._strands[strand]
        self._idle.pop(strand, None)
        self._outgoing.lost(strand)
        for other, wake in self._strands.items():
            other.must_tell = True
            wake.set()

    async def _wait(self, strand: Strand, wake: asyncio.Event) -> None:
        """Wait until the strand may have something to send, or a block may be late."""
        is_free = len(strand.under_way) < EACH
        if is_free:
            self._idle[strand] = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._outgoing.late_s if is_free else None):
                await wake.wait()
        wake.clear()
        self._idle.pop(strand, None)

    def _next(self, strand: Strand) -> direct_pb2.Block | None:
        taken = self._outgoing.take(strand, self._clock())
        if taken is None and not strand.must_tell:
            return None
        strand.must_tell = False
        number, data = taken or (0, b"")
        self._told = self._incoming.passed_on
        return direct_pb2.Block(number=number, data=data, came=strand.came, passed_on=self._incoming.passed_on)

    async def _take(self, strand: Strand, came: Coming) -> None:
        async for block in came:
            self._outgoing.arrived(strand, block.came, block.passed_on, self._clock())
            if block.data:
                self._incoming.put(block.number, block.data)
                strand.came += 1
                strand.must_tell = True
                self._came.set()
            if self._outgoing.has_room(len(self._strands)):
                self._has_room.set()
            self._strands[strand].set()

    async def _read(self) -> None:
        while True:
            while not self._outgoing.has_room(len(self._strands)):
                self._has_room.clear()
                await self._has_room.wait()
            data = await self._reader.read(BLOCK_BYTES)
            if not data:
                return
            self._outgoing.put(data)
            strand = next(iter(self._idle), None)
            if strand is not None:
                del self._idle[strand]
                self._strands[strand].set()

    async def _pass_on(self) -> None:
        while True:
            self._came.clear()
            while (data := self._incoming.next()) is not None:
                self._writer.write(data)
                await self._writer.drain()
                self._incoming.passed_on += 1
                if self._incoming.passed_on - self._told >= EACH and self._strands:  # the other end's window may be as small as a strand's
                    strand, wake = next(iter(self._strands.items()))
                    strand.must_tell = True
                    wake.set()
            await self._came.wait()

    async def _until_over(self) -> None:
        await self.over.wait()


class Bundles:
    """The bundles that others lead to this peer."""

    def __init__(self, connect: Callable[[PeerId], Awaitable[Stream]]) -> None:
        """`connect` gives a connection to the local gRPC server on which calls count as this peer's."""
        self._connect = connect
        self._bundles: dict[tuple[PeerId, bytes], asyncio.Future[Bundle]] = {}
        self._ended: deque[tuple[PeerId, bytes]] = deque(maxlen=MOST_ENDED)
        """The last ones that are over: a connection that comes late begins none anew."""

    async def carry(self, caller: PeerId, first: direct_pb2.Block, came: Coming) -> Blocks:
        """Let one more connection of `caller` carry a bundle, which its first message names. Raises RemoteError if it may not."""
        bundle = await self._bundle(caller, first.bundle)
        if bundle.num_strands >= MOST or bundle.over.is_set():
            raise BusyError("this bundle has as many connections as it may have, or is over")
        try:
            async with contextlib.aclosing(bundle.carry(came)) as blocks:
                async for block in blocks:
                    yield block
        finally:
            if not bundle.num_strands:
                bundle.end()

    async def _bundle(self, caller: PeerId, name: bytes) -> Bundle:
        if len(name) != ID_BYTES:
            raise BadMessageError("this is not the name of a bundle")
        known = self._bundles.get((caller, name))
        if known is None:
            if (caller, name) in self._ended:
                raise BusyError("this bundle is over")
            if sum(other == caller for other, _ in self._bundles) >= MOST_OF_ONE:
                raise BusyError("one caller may not have more bundles")
            known = self._bundles[caller, name] = asyncio.ensure_future(self._open(caller, name))
        return await asyncio.shield(known)

    async def _open(self, caller: PeerId, name: bytes) -> Bundle:
        try:
            bundle = Bundle(await self._connect(caller))
        except OSError as error:
            del self._bundles[caller, name]
            raise PeerGoneError(f"no local connection: {error}") from None
        start(self._run(bundle, caller, name))
        return bundle

    async def _run(self, bundle: Bundle, caller: PeerId, name: bytes) -> None:
        try:
            await bundle.run()
        finally:
            self._bundles.pop((caller, name), None)
            self._ended.append((caller, name))

    def close(self) -> None:
        for each in self._bundles.values():
            if each.done() and not each.cancelled() and each.exception() is None:
                each.result().end()
