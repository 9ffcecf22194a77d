"""The caller's end of a bundle: a local socket for a gRPC channel, whose connection goes over as many connections to the peer as pay."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import structlog

from peerd.background import Tasks
from peerd.errors import RemoteError
from peerd.generated import direct_pb2, direct_pb2_grpc
from peerd.link.bundle import ID_BYTES, Bundle
from peerd.link.line import OwnLine
from peerd.link.links import CHANNEL_OPTIONS, LONGEST_CALL_S, ending, remote_errors
from peerd.link.segments import SegmentCounts, Segments, UnderWayBounds
from peerd.policy.route.parallel import Parallel, own_queue_s
from peerd.policy.route.receive_window import receive_window, send_room

LOOK_S = 1.0
"""Period at which the number of connections is looked at, and segments are counted."""
LOOK_SHARE = 0.01
"""The most of the event loop's time that counting may take: it looks at each open file, and in a large stage those are thousands."""
MOST_OF_ALL = 256
"""Connections of all paths that have several."""
LOG = structlog.get_logger()
Dial = Callable[[], Awaitable[tuple[grpc.aio.Channel, Any]]]


class WidePath:
    """Leads to one peer. `channel` is for calls of any kind."""

    def __init__(self, socket: Path, dial: Dial, number: Callable[[], int], failed: Callable[[], None]) -> None:
        """`dial` opens a connection and gives a channel for stubs beside it; `number`: how many there are to be; `failed`: none opens."""
        self._socket = socket
        self._dial = dial
        self._number = number
        self._failed = failed
        self._tasks = Tasks()
        self._bundles = set[Bundle]()
        self._server: asyncio.Server | None = None
        self.channel: grpc.aio.Channel | None = None

    @property
    def num_connections(self) -> int:
        return sum(each.num_strands for each in self._bundles)

    async def open(self) -> None:
        """Raises OSError where the socket cannot be made."""
        self._socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._take, self._socket)
        self.channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=CHANNEL_OPTIONS)

    async def until_unused(self) -> None:
        """Take no new calls, and wait until those on the path have ended."""
        if self.channel is not None:
            await self.channel.close(LONGEST_CALL_S)

    async def close(self) -> None:
        """End the path, with the calls on it."""
        if self.channel is not None:
            await self.channel.close(None)
        if self._server is not None:
            self._server.close()
            self._socket.unlink(missing_ok=True)
        await self._tasks.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.wait({self._tasks.start(self._carry(Bundle((reader, writer))))})

    async def _carry(self, bundle: Bundle) -> None:
        """Let a bundle have as many connections as pay, until it is over."""
        name, running = secrets.token_bytes(ID_BYTES), self._tasks.start(bundle.run())
        strands = dict[asyncio.Task[bool], None]()
        self._bundles.add(bundle)
        try:
            while not running.done():
                number = self._number()
                for _ in range(len(strands), number):
                    strands[self._tasks.start(self._strand(bundle, name))] = None
                await asyncio.wait({running, *strands}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                ended = [each for each in strands if each.done()]
                for each in ended:
                    del strands[each]
                if ended and not (bundle.num_strands if bundle.has_begun else strands):
                    bundle.end()
                    if not any(each.cancelled() or each.result() for each in ended):
                        self._failed()
        finally:
            bundle.end()
            self._bundles.discard(bundle)
            for each in strands:
                each.cancel()
            await asyncio.gather(running, *strands, return_exceptions=True)

    async def _strand(self, bundle: Bundle, name: bytes) -> bool:
        """Let one more connection carry the bundle, until it breaks. Returns whether the other end took it."""
        is_taken = False

        async def heard(rpc: Any) -> AsyncGenerator[direct_pb2.Block]:
            nonlocal is_taken
            async for block in rpc:
                is_taken = True
                yield block

        try:
            connection, channel = await self._dial()
        except RemoteError as error:
            LOG.debug("no connection for a bundle", reason=error.message)
            return False
        try:
            stub: Any = direct_pb2_grpc.DirectStub(channel)
            with ending(stub.Carry()) as rpc, remote_errors():
                await rpc.write(direct_pb2.Block(bundle=name))
                async with contextlib.aclosing(bundle.carry(heard(rpc))) as blocks:
                    async for block in blocks:
                        await rpc.write(block)
        except RemoteError as error:
            LOG.debug("a connection of a bundle ended", reason=error.message)
        finally:
            await connection.close(None)
        return is_taken


class Widening:
    """Lets one path have several connections where that pays."""

    def __init__(self) -> None:
        self.parallel = Parallel()
        self.hosts: Sequence[str] = ()
        """Where the path may lead."""
        self._changed, self._other_way = asyncio.Event(), asyncio.Event()
        self._wide: WidePath | None = None

    @property
    def channel(self) -> grpc.aio.Channel | None:
        """The channel over several connections; None while the path has one."""
        return self._wide.channel if self._wide is not None else None

    @property
    def num_connections(self) -> int:
        """The one connection, and those that carry tensors beside it."""
        return 1 + (self._wide.num_connections if self._wide is not None else 0)

    def counted(self, counts: Mapping[str, Segments], queue_s: float) -> None:
        """Take what was sent to each address since the last call, and how long segments wait in this peer's own queue."""
        found = [counts[host] for host in self.hosts if host in counts]
        path = sum(found, Segments())
        if found and self.parallel.counted(path.sent, path.again, path.busy_s, path.round_trip_s, queue_s):
            self._changed.set()

    def _failed(self) -> None:
        self.parallel.failed()
        self._changed.set()

    async def until_other_way(self) -> None:
        """Wait until there are several where there is one now, or one where there are several."""
        await self._other_way.wait()

    async def run(self, socket: Path, dial: Dial, num_wide: Callable[[], int]) -> None:
        """Open and close the wide path as its segments are counted, until cancelled. `num_wide`: paths that have several connections."""
        paths, leaving = set[WidePath](), Tasks()

        async def end(path: WidePath) -> None:
            await path.until_unused()
            await path.close()
            paths.discard(path)

        try:
            for number in itertools.count():  # the one before may still have calls
                await self._until(lambda: self.parallel.number > 1)
                most = partial(self._number, num_wide)
                wide = WidePath(socket.with_name(f"{socket.name}.{number}"), dial, most, self._failed)
                paths.add(wide)
                try:
                    await wide.open()
                except OSError as error:
                    LOG.warning("no socket for several connections to a peer", error=str(error))
                    self._failed()
                else:
                    self._turn_to(wide)
                await self._until(lambda: self.parallel.number == 1)
                self._turn_to(None)
                leaving.start(end(wide))
        finally:
            self._turn_to(None)
            await leaving.close()
            for path in paths:
                await path.close()

    def _number(self, num_wide: Callable[[], int]) -> int:
        """How many connections there are to be."""
        return min(self.parallel.number, max(1, MOST_OF_ALL // max(1, num_wide())))

    def _turn_to(self, wide: WidePath | None) -> None:
        if wide is not self._wide:
            self._wide = wide
            self._other_way.set()
            self._other_way = asyncio.Event()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()


def _bounds(line: OwnLine) -> UnderWayBounds:
    """What may be under way over a connection, as far as this peer's line is known.

    A line is hardly ever slower downwards, and what arrives shows what others send. Upwards tensors may show less than a line carries, and
    more would never be under way: a probe has to have shown it.
    """
    up, down = line.measured
    to_here = partial(receive_window, max(up or 0.0, down)) if down is not None else None
    if up is None or line.probes.rate is None:
        return UnderWayBounds(to_here)
    return UnderWayBounds(to_here, partial(send_room, up), up)


async def count_losses(counts: SegmentCounts, paths: Callable[[], Sequence[Widening]], line: OwnLine) -> None:
    """Count what is lost on the way over each path, and bound what is under way over each by this peer's `line`, until cancelled."""
    took_s = 0.0
    while True:
        await asyncio.sleep(max(LOOK_S, took_s / LOOK_SHARE))
        began_s = time.thread_time()
        found = counts.look(_bounds(line))
        took_s = time.thread_time() - began_s
        queue_s = own_queue_s((each.round_trip_s, each.least_s) for each in found.values())
        for path in paths():
            path.counted(found, queue_s)
