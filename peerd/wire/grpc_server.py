"""The daemon's gRPC servers: one on a local socket behind the tunnel, and those for direct connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

import grpc
import structlog
from google.protobuf.message import DecodeError

from peerd.background import INTERNAL_ERRORS
from peerd.errors import BadMessageError, PeerGoneError
from peerd.link.connecting import KEEPALIVE_OPTIONS
from peerd.link.direct import Showing
from peerd.link.links import SERVER_OPTIONS
from peerd.link.local import Neighbours
from peerd.link.metered import counted
from peerd.link.pins import Pins
from peerd.link.throttle import Throttles
from peerd.wire.budgets import allowance_of
from peerd.wire.chunks import CALLS, REPLIES, ROUNDS, ChunkCoder
from peerd.wire.door import Door

LEAST_CLOSING_S = 5.0
"""Time that calls have to finish over TLS once a cap is set, at least."""
LOG = structlog.get_logger()


async def start_server(socket_path: str, servicers: Sequence[Any]) -> grpc.aio.Server:
    """Start the server behind the tunnel. It listens on a local socket only."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers(_handlers(servicers))
    server.add_insecure_port(f"unix:{socket_path}")
    await server.start()
    return server


class DirectEndpoint:
    """Takes direct connections: from neighbours always, from others only while no cap is set, because the tunnel enforces caps."""

    def __init__(
        self, host: str, port: int, showing: Showing, pins: Pins, throttles: Throttles, neighbours: Neighbours | None = None
    ) -> None:
        """With `port` 0 the system chooses one. With `neighbours` it also takes calls over a local socket."""
        self._host, self._port = host, port
        self._showing, self._pins, self._throttles, self._neighbours = showing, pins, throttles, neighbours
        self._servicers: Sequence[Any] = ()
        self._asked = asyncio.Event()
        self._closing_s = LEAST_CLOSING_S
        self._ending: grpc.aio.Server | None = None
        """Takes no new calls, and waits for those under way."""
        self._taken = b""
        """The certificates that gRPC was last told to accept."""
        self._server: grpc.aio.Server | None = None
        self._local: grpc.aio.Server | None = None

    async def open(self, servicers: Sequence[Any]) -> None:
        self._servicers = servicers
        await self._look()

    async def run(self) -> None:
        """Open and close the port as the caps change, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._look()

    def look_again(self, call_s: float = 0.0) -> None:
        """Make `run` look at the caps again. If it closes the port, calls that take up to `call_s` may finish: what they send is little."""
        self._closing_s = max(LEAST_CLOSING_S, call_s)
        self._asked.set()

    async def close(self, grace_s: float = 0.0) -> None:
        local, self._local, self._showing.socket = self._local, None, ""
        servers = [server for server in (local, self._ending) if server is not None]
        await asyncio.gather(self._close_to_others(grace_s), *(server.stop(grace_s) for server in servers))

    async def _close_to_others(self, grace_s: float) -> None:
        server, self._server, self._showing.port = self._server, None, 0
        if server is not None:
            self._ending = server
            await server.stop(grace_s)
            self._ending = None

    async def _look(self) -> None:
        if self._local is None and self._neighbours is not None:
            await self._open_to_neighbours(str(self._neighbours.socket))
        if self._throttles.capped:
            await self._close_to_others(self._closing_s)
        elif self._server is None:
            await self._open()

    async def _open_to_neighbours(self, socket: str) -> None:
        server = self._new_server(None)
        try:
            server.add_insecure_port(f"unix:{socket}")
        except RuntimeError:
            LOG.warning("cannot open the local socket; other daemons on this machine use TLS", path=socket)
            return
        await server.start()
        self._local, self._showing.socket = server, socket

    def _new_server(self, throttles: Throttles | None) -> grpc.aio.Server:
        server = grpc.aio.server(options=(*SERVER_OPTIONS, *KEEPALIVE_OPTIONS, ("grpc.so_reuseport", 0)))
        server.add_generic_rpc_handlers(_handlers(self._servicers, throttles))
        return server

    async def _open(self) -> None:
        server = self._new_server(self._throttles)
        port = self._bind(server, self._port) or self._bind(server, 0)
        if not port:
            LOG.warning("cannot open a port for direct connections; the tunnel carries everything")
            return
        await server.start()
        self._server, self._port, self._showing.port = server, port, port

    def _bind(self, server: grpc.aio.Server, port: int) -> int:
        """Return the port that the server will listen on; 0 if `port` is taken."""
        credentials = grpc.dynamic_ssl_server_credentials(self._configuration(), self._changes, require_client_authentication=True)
        try:
            return int(server.add_secure_port(f"{self._host}:{port}", credentials))
        except RuntimeError:
            return 0

    def _changes(self) -> Any:
        """Return the new TLS configuration, or None if nothing changed. gRPC calls this at every handshake, on its own thread."""
        return self._configuration() if self._pins.pems != self._taken else None

    def _configuration(self) -> Any:
        """Return this daemon's certificate and the certificates to accept: those that callers have shown."""
        mine, self._taken = self._showing.certificate, self._pins.pems
        return grpc.ssl_server_certificate_configuration([(mine.key_pem, mine.pem)], root_certificates=mine.pem + self._taken)


CODED: tuple[tuple[str, str, ChunkCoder | None, ChunkCoder | None], ...] = (
    ("peerd.Averaging", "Give", ROUNDS, None),
    ("peerd.Averaging", "Take", None, ROUNDS),
    ("peerd.Stage", "Backpropagate", CALLS, REPLIES),
)
"""Methods whose messages carry chunks, with the coders of what comes and goes."""


class _Methods(dict[str, dict[str, Any]]):
    """Handlers by service and method name. It stands in for a server, so that the generated `add_..._to_server` can fill it."""

    def add_generic_rpc_handlers(self, _handlers: Any) -> None:
        """Ignored: the same handlers are also registered by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self[service] = handlers


def _handlers(servicers: Sequence[Any], throttles: Throttles | None = None) -> tuple[Any, ...]:
    """Return the handlers of a server. If `throttles` are given, they count the messages."""
    methods, doors = _Methods(), dict[str, Door]()
    for servicer in servicers:
        before = set(methods)
        servicer.register(servicer, methods)
        doors |= dict.fromkeys(set(methods) - before, servicer.door)
    for service, name, taken, given in CODED:
        if service in methods:
            coders = {"request_deserializer": taken and taken.deserialize, "response_serializer": given and given.serialize}
            methods[service][name] = methods[service][name]._replace(**{key: coder for key, coder in coders.items() if coder})
    for service, handlers in methods.items():
        if throttles is not None:
            handlers |= {name: counted(handler, throttles) for name, handler in handlers.items()}
        handlers |= {name: guarded(name, handler, doors[service]) for name, handler in handlers.items()}
    return tuple(grpc.method_handlers_generic_handler(service, handlers) for service, handlers in methods.items())


def guarded(name: str, handler: Any, door: Door) -> Any:
    """Wrap the handler of a server's method, so that a caller is let in before any of its messages is read.

    gRPC reads the message of a call with one request before it calls the handler. So each method is registered as one that takes a stream
    of raw bytes, which looks the same to callers. Unexpected errors are reported here, and the caller gets status UNKNOWN.
    """
    kind = ("stream" if handler.request_streaming else "unary") + ("_stream" if handler.response_streaming else "_unary")
    method, allowance = getattr(handler, kind), allowance_of(name)

    async def request_of(raw: AsyncIterator[bytes]) -> Any:
        messages = _Messages(raw, handler.request_deserializer, allowance.num_bytes)
        if handler.request_streaming:
            return messages
        request = await door.read(messages, allowance.num_bytes)
        if request is None:
            raise PeerGoneError("the call ended before its message")
        return request

    async def one(raw: AsyncIterator[bytes], context: Any) -> Any:
        async with _reported(name, context), door.letting_in(context, name, allowance):
            return await method(await request_of(raw), context)

    async def several(raw: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async with (
            _reported(name, context),
            door.letting_in(context, name, allowance),
            contextlib.aclosing(method(await request_of(raw), context)) as replies,
        ):
            async for reply in replies:
                yield reply

    methods = {kind: None, f"stream_{kind.rpartition('_')[2]}": several if handler.response_streaming else one}
    return handler._replace(request_streaming=True, request_deserializer=None, **methods)


class _Messages:
    """The messages of a call, each read when it is asked for."""

    def __init__(self, raw: AsyncIterator[bytes], deserialize: Callable[[bytes], Any], most_bytes: int) -> None:
        self._raw = raw
        self._deserialize = deserialize
        self._most_bytes = most_bytes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Raises BadMessageError for bytes that are no message, or too many."""
        data = await anext(self._raw)
        if len(data) > self._most_bytes:
            raise BadMessageError(f"a message of {len(data)} bytes, where {self._most_bytes} are the most")
        try:
            return self._deserialize(data)
        except DecodeError:
            raise BadMessageError("these bytes are no message") from None


@contextlib.asynccontextmanager
async def _reported(name: str, context: Any) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.BaseError:  # a refusal, or gRPC's error for a call that is over
        raise
    except Exception as error:
        INTERNAL_ERRORS.report(name, error)
        await context.abort(grpc.StatusCode.UNKNOWN, f"internal error: {error!r}")
