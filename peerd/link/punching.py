"""Direct connections to peers behind routers: both ends send to each other at the same time, and both routers let the packets in.

The two tell each other their addresses in the tunnel, which a relay carries. A third peer, which can be dialled, tells each at which
address its packets arrive. Then a QUIC connection (quic.py) is made. Its streams carry the TLS of direct connections to the callee's own
port, so the peers prove who they are as on every direct connection, and what is counted there is counted here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from peerd.background import Tasks
from peerd.errors import BusyError, PeerGoneError, RemoteError
from peerd.generated import direct_pb2, direct_pb2_grpc
from peerd.link.connecting import pause_s
from peerd.link.links import Links, answer_of
from peerd.link.punched_line import PunchedLine
from peerd.link.quic import KEY_BYTES, QuicConnection, QuicNode, is_installed
from peerd.link.streams import Stream
from peerd.policy.owner.rate_limit import Ration
from peerd.policy.route.holes import MAX_ADDRESS, MOST_ADDRESSES, SILENT_S, targets_in
from peerd.table.record import PeerId

MEET_TIMEOUT_S = 5.0
"""Time for which both ends try."""
LOOK_TIMEOUT_S = 4.0
ASK_TIMEOUT_S = 15.0
"""Time for the other end's answer, which may have to find its own address first."""
MOST_LINES = 2
"""Connections with one peer: where both ends have dialled there are two."""
MOST_MIRRORS = 3
"""Peers that are asked in turn from where packets come."""
MOST_EXPECTED = 1024
NOT_INSTALLED = "the package for it is not installed: pip install 'peerd[nat]'"
LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What the rest of the daemon knows."""

    mirrors: Callable[[], Sequence[PeerId]]
    """Peers that can be dialled: they see from where this peer's packets come."""
    hosts: Callable[[], Sequence[str]]
    """This machine's own IPv4 addresses, as peers are told them."""
    tls: Callable[[], tuple[str, int]]
    """Where this peer takes direct connections: host and TCP port; the port is 0 while it takes none."""


class Holes:
    """The QUIC connections of one daemon."""

    def __init__(self, links: Links, folder: Path, host: str, port: int, around: Whereabouts) -> None:
        """Sockets for gRPC's channels lie in `folder`; the UDP port is bound at first use."""
        self._links = links
        self._folder = folder
        self._bind = host, port
        self._around = around
        self._opening = asyncio.Lock()
        self._looking = asyncio.Lock()
        self._node: QuicNode | None = None
        self._look: tuple[str, QuicConnection] | None = None
        self._fruitless: dict[PeerId, tuple[int, float]] = {}
        """By peer that could not tell how often in a row, and until when it is not asked again."""
        self._expected: dict[bytes, PeerId] = {}
        """Peers by the keys of their nodes, as told in the tunnel."""
        self._lines: dict[PunchedLine, None] = {}
        """The connections that run, the oldest first."""
        self._changed = asyncio.Event()
        """Set when there is one more connection, or a key is told."""
        self._before = 0, 0
        """Bytes sent and received over connections that have ended."""
        self._servers: dict[PeerId, asyncio.Server] = {}
        self._tasks = Tasks()
        self._ration = Ration(each=12, total=60)
        self.why = "" if is_installed() else NOT_INSTALLED
        """Why it makes no connections; empty while it does."""

    @property
    def port(self) -> int:
        """The UDP port; 0 while none is bound."""
        return self._node.port if self._node is not None else 0

    @property
    def seen_at(self) -> str:
        """The address and port at which others see this peer's packets, as last told; empty if unknown."""
        return self._look[0] if self._look is not None else ""

    @property
    def num_lines(self) -> int:
        return sum(line.is_open for line in self._lines)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes sent and received over all connections so far, as UDP."""
        now = [line.connection.carried for line in self._lines]
        return self._before[0] + sum(each.sent for each in now), self._before[1] + sum(each.received for each in now)

    def line(self, peer: PeerId) -> PunchedLine | None:
        """The open connection with a peer."""
        return next((line for line in self._lines if line.peer == peer and line.is_open), None)

    # The calling side

    async def target(self, peer: PeerId) -> str:
        """Return the gRPC target that leads to the peer's TLS port. Raises RemoteError with the reason if there is no connection."""
        try:
            await self._meet(peer)
            path = self._folder / f"at-{peer[-16:]}"
            if peer not in self._servers:
                path.unlink(missing_ok=True)
                self._servers[peer] = await asyncio.start_unix_server(lambda r, w: self._carry(peer, (r, w)), path)
        except (OSError, TimeoutError) as error:
            raise PeerGoneError(f"no way through the routers: {str(error) or 'nothing came through'}") from None
        return f"unix:{path}"

    def close_target(self, peer: PeerId) -> None:
        """Take no new connections for the peer. Those that there are go on."""
        server = self._servers.pop(peer, None)
        if server is not None:
            server.close()
            (self._folder / f"at-{peer[-16:]}").unlink(missing_ok=True)

    def cut(self, peer: PeerId) -> None:
        """End the connections with a peer at once."""
        for line in self._lines:
            if line.peer == peer:
                line.connection.close()

    def cut_all(self) -> None:
        """End all connections, because this machine has another address now."""
        for line in self._lines:
            line.connection.close()
        if self._look is not None:
            self._look[1].close()
            self._look = None

    async def close(self) -> None:
        for peer in list(self._servers):
            self.close_target(peer)
        self.cut_all()
        await self._tasks.close()
        if self._node is not None:
            await self._node.close()

    async def _carry(self, peer: PeerId, local: Stream) -> None:
        line = self.line(peer)
        with contextlib.closing(local[1]):
            if line is not None:
                await asyncio.wait({self._tasks.start(line.carry(local), expects=(OSError, TimeoutError))})

    async def _meet(self, peer: PeerId) -> PunchedLine:
        """Return the connection with a peer; make it where there is none. Raises OSError, TimeoutError or RemoteError."""
        known = self.line(peer)
        if known is not None:
            return known
        node = await self._own_node()
        there = await self._punch(peer, await self._own_end(node, asks=True))
        if not self._targets(there):
            raise PeerGoneError("the peer takes no connections through routers")
        return await self._meet_at(node, peer, there)

    async def _meet_at(self, node: QuicNode, peer: PeerId, there: direct_pb2.End) -> PunchedLine:
        """Dial the peer until there is a connection with it, whichever end has made it. Raises TimeoutError where none comes."""
        self._expect(there.node, peer)
        dialling = self._tasks.start(self._dial(node, peer, there), expects=(OSError,))
        try:
            async with asyncio.timeout(MEET_TIMEOUT_S):
                while (line := self.line(peer)) is None:
                    await self._until_changed()
                return line
        finally:
            dialling.cancel()

    async def _dial(self, node: QuicNode, peer: PeerId, there: direct_pb2.End) -> None:
        connection = await node.dial(there.node, self._targets(there))
        self._tasks.start(self._keep(peer, connection))

    # The called side

    async def answer(self, caller: PeerId, told: direct_pb2.End) -> direct_pb2.End:
        """Return where this peer's own node is, and dial that of the caller if it has told addresses. Raises RemoteError to refuse.

        A caller to which nothing comes back through the routers asks for packets, and says later that none came.
        """
        if told.silent:
            await asyncio.gather(*(line.send_signs() for line in self._lines if line.peer == caller and line.is_open))
            return direct_pb2.End()
        if told.closed:
            self._end_silent(caller)
            return direct_pb2.End()
        targets = self._targets(told)
        if self.why or (targets and not self._around.tls()[1]):
            return direct_pb2.End()
        if targets and (refusal := self._ration.take(caller, time.monotonic())):
            raise BusyError(refusal)
        try:
            node = await self._own_node()
        except PeerGoneError:
            return direct_pb2.End()
        end = await self._own_end(node, asks=bool(targets))
        if targets:
            self._tasks.start(self._meet_at(node, caller, told), expects=(OSError, TimeoutError))
        return end

    def _end_silent(self, caller: PeerId) -> None:
        """End the connections that the caller may mean: a younger one it cannot have found silent."""
        for line in self._lines:
            if line.peer == caller and line.age_s >= SILENT_S:
                line.connection.close()

    async def _take(self, connection: QuicConnection) -> None:
        """Keep a connection of a peer that was met in the tunnel, whose answer may arrive after its connection."""
        async with asyncio.timeout(MEET_TIMEOUT_S):
            while (peer := self._expected.get(connection.node)) is None:
                await self._until_changed()
        await self._keep(peer, connection)

    # Both

    async def _keep(self, peer: PeerId, connection: QuicConnection) -> None:
        """Use a connection with a peer until it ends. It takes the place of the oldest one if the peer has too many."""
        for old in [line for line in self._lines if line.peer == peer and line.is_open][: 1 - MOST_LINES]:
            old.connection.close()
        LOG.info("connected through the routers", peer=peer, address=connection.address)
        line = PunchedLine(peer, connection, self._around.tls, self._ask_for_signs)
        self._lines[line] = None
        self._tell_change()
        try:
            await line.run()
        finally:
            del self._lines[line]
            carried = connection.carried
            self._before = self._before[0] + carried.sent, self._before[1] + carried.received
        if line.is_silent:
            await self._tell_closed(peer)

    async def _tell_closed(self, peer: PeerId) -> None:
        """Tell the other end that the hole has closed: it may wait for an answer, and has nothing to send by which it would notice."""
        with contextlib.suppress(RemoteError):
            await self._punch(peer, direct_pb2.End(closed=True))

    async def _ask_for_signs(self, peer: PeerId) -> bool:
        """Ask the other end to send packets through the hole. Returns whether it has answered in the tunnel."""
        try:
            await self._punch(peer, direct_pb2.End(silent=True))
        except RemoteError:
            return False
        return True

    async def _punch(self, peer: PeerId, told: direct_pb2.End) -> direct_pb2.End:
        """Tell a peer in the tunnel, and return its answer. Raises RemoteError."""
        stub: Any = direct_pb2_grpc.DirectStub(await self._links.channel(peer))
        there: direct_pb2.End = await answer_of(stub.Punch(told, timeout=ASK_TIMEOUT_S))
        return there

    async def _until_changed(self) -> None:
        await self._changed.wait()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _expect(self, key: bytes, peer: PeerId) -> None:
        self._expected.pop(key, None)
        self._expected[key] = peer
        if len(self._expected) > MOST_EXPECTED:
            del self._expected[next(iter(self._expected))]
        self._tell_change()

    def _targets(self, end: direct_pb2.End) -> list[str]:
        if len(end.node) != KEY_BYTES:
            return []
        told = [address for address in end.addresses[:MOST_ADDRESSES] if len(address) <= MAX_ADDRESS]
        return targets_in(told, loopback=self._bind[0].startswith("127."), outside=self.seen_at.partition(":")[0])

    async def _own_node(self) -> QuicNode:
        """Raises PeerGoneError where this machine makes no such connections."""
        if self.why:
            raise PeerGoneError(self.why)
        async with self._opening:
            if self._node is None:
                try:
                    self._node = await QuicNode.open(*self._bind, self._take)
                except (OSError, ImportError) as error:
                    self.why = f"no UDP port: {error}"
                    raise PeerGoneError(self.why) from None
        return self._node

    async def _own_end(self, node: QuicNode, *, asks: bool) -> direct_pb2.End:
        """Where this peer's node is. `asks`: first ask others at which address they see it, unless that is known."""
        seen = [await self._find_out(node)] if asks else []
        found = dict.fromkeys([*filter(None, seen), *(f"{host}:{node.port}" for host in self._around.hosts())])
        return direct_pb2.End(node=node.key, addresses=list(found)[:MOST_ADDRESSES])

    async def _find_out(self, node: QuicNode) -> str:
        """Return at which address and port others see this node; empty if nobody tells."""
        async with self._looking:
            if self._look is not None and self._look[1].is_open:
                return self._look[0]
            now_s, there = time.monotonic(), self._around.mirrors()
            self._fruitless = {peer: self._fruitless[peer] for peer in there if peer in self._fruitless}
            mirrors = [peer for peer in there if self._fruitless.get(peer, (0, 0.0))[1] <= now_s]
            for mirror in mirrors[:MOST_MIRRORS]:
                failures = self._fruitless.get(mirror, (0, 0.0))[0] + 1
                self._fruitless[mirror] = failures, now_s + pause_s(failures)
                with contextlib.suppress(RemoteError, OSError, TimeoutError):
                    async with asyncio.timeout(LOOK_TIMEOUT_S):
                        self._look = await self._look_in(mirror, node)
                    del self._fruitless[mirror]
                    LOG.debug("own address", seen_at=self.seen_at, by=mirror)
                    break
            return self.seen_at

    async def _look_in(self, mirror: PeerId, node: QuicNode) -> tuple[str, QuicConnection]:
        there = await self._punch(mirror, direct_pb2.End())
        targets = self._targets(there)
        if not targets:
            raise PeerGoneError("the peer makes no connections by QUIC")
        told, connection = await node.look(there.node, targets)
        seen = targets_in([told], loopback=True)
        if not seen:
            connection.close()
            raise PeerGoneError("what the peer tells is no address")
        return seen[0], connection
