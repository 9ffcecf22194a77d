"""QUIC connections between peers, by the package iroh, which the extra `nat` installs. Only this module uses it.

The node here knows no relays and asks no service for addresses: it dials the addresses that it is given, and takes connections. What a
connection proves is a key made for this process. The peer ids at both ends are proven by the TLS inside its streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import cache
from typing import Any

import structlog

from peerd.background import Tasks
from peerd.link.streams import Stream
from peerd.policy.route.holes import QuicCounts

PACKAGE = "iroh"
STREAMS, LOOK = b"peerd/streams/1", b"peerd/look/1"
"""What a connection is for: streams that carry gRPC; or one that tells a peer from which address its packets come."""
KEY_BYTES = 32
SIGN = b"\0"
"""What a sign of life carries."""
MAX_SEEN_BYTES = 64
MOST_HANDSHAKES = 256
"""Connections of others that have begun, or are served."""
MOST_LOOKS = 128
"""Connections of others that look at their addresses here."""
HANDSHAKE_TIMEOUT_S = 5.0
LOG = structlog.get_logger()


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


@cache
def _library() -> Any:
    """The binding, with a faster copy of bytes: its own copies byte by byte in Python. Raises ImportError where it is not installed."""
    found = importlib.import_module(f"{PACKAGE}.iroh_ffi")

    def write(builder: Any, value: bytes) -> None:
        with builder._reserve(len(value)):
            ctypes.memmove(ctypes.addressof(builder.rbuf.data.contents) + builder.rbuf.len, bytes(value), len(value))

    found._UniffiRustBufferBuilder.write = write
    return found


class QuicReader:
    """The incoming half of a QUIC stream, as far as `splice` uses an `asyncio.StreamReader`."""

    def __init__(self, half: Any) -> None:
        self._half = half

    async def read(self, num_bytes: int) -> bytes:
        """Return what is there, at least a byte; empty at the end of the stream. Raises OSError if the connection breaks."""
        with _as_os_error():
            return bytes(await self._half.read(num_bytes))


class QuicWriter:
    """The outgoing half of a QUIC stream, as far as `splice` uses an `asyncio.StreamWriter`."""

    def __init__(self, half: Any) -> None:
        self._half = half
        self._waiting = b""

    def write(self, data: bytes) -> None:
        self._waiting += data

    async def drain(self) -> None:
        """Return when the connection has taken what was written. Raises OSError if it breaks."""
        data, self._waiting = self._waiting, b""
        with _as_os_error():
            await self._half.write_all(data)

    def is_closing(self) -> bool:
        return False

    async def finish(self) -> None:
        """Say that nothing more comes."""
        with contextlib.suppress(OSError), _as_os_error():
            await self._half.finish()


class QuicConnection:
    """A QUIC connection to the node with the key `node`."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.node = bytes(made.remote_id().to_bytes())

    async def open(self) -> Stream:
        """Open a stream. Raises OSError if the connection has broken."""
        with _as_os_error():
            return self._stream(await self._made.open_bi())

    async def streams(self) -> AsyncIterator[Stream]:
        """The streams that the other end opens, until the connection ends."""
        with contextlib.suppress(OSError):
            while True:
                with _as_os_error():
                    both = await self._made.accept_bi()
                yield self._stream(both)

    def _stream(self, both: Any) -> Stream:
        halves: Any = QuicReader(both.recv()), QuicWriter(both.send())
        stream: Stream = halves
        return stream

    def send_sign(self) -> None:
        """Send a packet that the other end acknowledges, unless data that wait for their acknowledgement fill the way."""
        with contextlib.suppress(OSError), _as_os_error():
            self._made.send_datagram(SIGN)

    @property
    def is_open(self) -> bool:
        return self._made.close_reason() is None

    @property
    def carried(self) -> QuicCounts:
        stats = self._made.stats()
        return QuicCounts(stats.udp_tx_bytes, stats.udp_rx_bytes)

    @property
    def address(self) -> str:
        """The address and port of the other end that packets go to now; empty if unknown."""
        return next((str(path.remote_addr) for path in self._made.paths() if path.is_selected), "")

    @property
    def round_trip_s(self) -> float:
        """The mean time in which packets are answered now; 0 if unknown."""
        return next((1e-3 * float(path.rtt_ms) for path in self._made.paths() if path.is_selected), 0.0)

    async def closed(self) -> None:
        """Return when the connection has ended. Until then forget the other end's signs of life, which have done their work by coming."""
        with contextlib.suppress(OSError), _as_os_error():
            while True:
                await self._made.read_datagram()
        await self._made.closed()

    def close(self) -> None:
        with contextlib.suppress(OSError), _as_os_error():
            self._made.close(0, b"")


Take = Callable[[QuicConnection], Awaitable[None]]
"""Has a connection that another node has made; returns when that may be closed."""


class QuicNode:
    """This process's end of QUIC connections: one UDP port."""

    def __init__(self, endpoint: Any, take: Take) -> None:
        self._endpoint = endpoint
        self._take = take
        self._tasks = Tasks()
        self._num_looks = 0
        self.key = bytes(endpoint.id().to_bytes())
        """The public key under which others dial it: 32 bytes."""
        self.port = next((int(socket.rpartition(":")[2]) for socket in endpoint.bound_sockets() if socket[0] != "["), 0)
        """The UDP port over IPv4."""

    @classmethod
    async def open(cls, host: str, port: int, take: Take) -> QuicNode:
        """Bind a UDP port; with `port` 0 the system chooses one. Raises OSError if that fails, ImportError without the package."""
        library = _library()
        options = library.EndpointOptions(
            preset=library.preset_minimal(),
            bind_addr=f"{host}:{port}",
            relay_mode=library.RelayMode.disabled(),
            alpns=[STREAMS, LOOK],
        )
        with _as_os_error():
            node = cls(await library.Endpoint.bind(options), take)
        node._tasks.start(node._accept())
        return node

    async def dial(self, key: bytes, addresses: list[str], purpose: bytes = STREAMS) -> QuicConnection:
        """Connect to the node with this key, at the first of the addresses that answers. Raises OSError if none does.

        Packets go out to all addresses until it is cancelled, or the library gives up.
        """
        library = _library()
        with _as_os_error():
            target = library.EndpointAddr(library.EndpointId.from_bytes(key), None, addresses)
            return QuicConnection(await self._endpoint.connect(target, purpose))

    async def look(self, key: bytes, addresses: list[str]) -> tuple[str, QuicConnection]:
        """Return the address and port from which this node's packets come to another, and the connection, which keeps it so while open."""
        connection = await self.dial(key, addresses, LOOK)
        try:
            reader, writer = await connection.open()
            writer.write(b"?")
            await writer.drain()
            seen = b""
            while data := await reader.read(MAX_SEEN_BYTES):
                seen += data
                if len(seen) > MAX_SEEN_BYTES:
                    raise OSError("what the other node tells is no address")
        except BaseException:
            connection.close()
            raise
        return seen.decode("ascii", "replace"), connection

    async def close(self) -> None:
        await self._tasks.close()
        with contextlib.suppress(OSError), _as_os_error():
            await self._endpoint.close()

    async def _accept(self) -> None:
        while True:
            with contextlib.suppress(OSError), _as_os_error():
                incoming = await self._endpoint.accept_next()
                if incoming is None:
                    return
                if len(self._tasks.running) > MOST_HANDSHAKES:
                    await incoming.ignore()
                    continue
                self._tasks.start(self._serve(incoming), expects=(OSError, TimeoutError))

    async def _serve(self, incoming: Any) -> None:
        with _as_os_error():
            where = await incoming.remote_addr()
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                accepting = await incoming.accept()
                purpose = await accepting.alpn()
                connection = QuicConnection(await accepting.connect())
        try:
            if bytes(purpose) == STREAMS:
                await self._take(connection)
            else:
                await self._tell(connection, str(getattr(where, "addr", "")))
        finally:
            connection.close()

    async def _tell(self, connection: QuicConnection, where: str) -> None:
        """Tell a node where its packets come from, once, and leave the connection open for as long as it likes."""
        if self._num_looks >= MOST_LOOKS:
            return
        self._num_looks += 1
        try:
            async for _reader, writer in connection.streams():
                writer.write(where.encode())
                await writer.drain()
                await _finish(writer)
                break
            await connection.closed()
        finally:
            self._num_looks -= 1


async def _finish(writer: Any) -> None:
    await writer.finish()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise OSError for the library's own errors."""
    try:
        yield
    except _library().IrohError as error:
        raise OSError(str(error.message())) from None
