"""The daemon's gRPC servers: one on a local socket behind the tunnel, and those for direct connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import structlog

from peerd.background import INTERNAL_ERRORS
from peerd.link.direct import KEEPALIVE_OPTIONS, Pins, Showing
from peerd.link.links import CHANNEL_OPTIONS
from peerd.link.local import Neighbours
from peerd.link.metered import counted
from peerd.link.throttle import Throttles
from peerd.wire.chunks import CALLS, PARTS, REPLIES, SLICES

MAX_CONCURRENT_CALLS = 1024
CLOSING_S = 5.0
LOG = structlog.get_logger()


async def start_server(socket_path: str, servicers: Sequence[Any]) -> grpc.aio.Server:
    """Start the server behind the tunnel. It listens on a local socket only."""
    server = grpc.aio.server(options=CHANNEL_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
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

    def look_again(self) -> None:
        """Make `run` look at the caps again."""
        self._asked.set()

    async def close(self, grace_s: float = 0.0) -> None:
        local, self._local, self._showing.socket = self._local, None, ""
        await asyncio.gather(self._close_to_others(grace_s), local.stop(grace_s) if local is not None else asyncio.sleep(0))

    async def _close_to_others(self, grace_s: float) -> None:
        server, self._server, self._showing.port = self._server, None, 0
        if server is not None:
            await server.stop(grace_s)

    async def _look(self) -> None:
        if self._local is None and self._neighbours is not None:
            await self._open_to_neighbours(str(self._neighbours.socket))
        if self._throttles.capped:
            await self._close_to_others(CLOSING_S)
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
        server = grpc.aio.server(
            options=(*CHANNEL_OPTIONS, *KEEPALIVE_OPTIONS, ("grpc.so_reuseport", 0)), maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS
        )
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


class _Methods(dict[str, dict[str, Any]]):
    """Handlers by service and method name. It stands in for a server, so that the generated `add_..._to_server` can fill it."""

    def add_generic_rpc_handlers(self, _handlers: Any) -> None:
        """Ignored: the same handlers are also registered by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self[service] = handlers


def _handlers(servicers: Sequence[Any], throttles: Throttles | None = None) -> tuple[Any, ...]:
    """Return the handlers of a server. If `throttles` are given, they count the messages."""
    methods = _Methods()
    for servicer in servicers:
        servicer.register(servicer, methods)
    for service, name, taken, given in (("peerd.Averaging", "Reduce", PARTS, SLICES), ("peerd.Stage", "Backpropagate", CALLS, REPLIES)):
        if service in methods:
            coders = {"request_deserializer": taken.deserialize, "response_serializer": given.serialize}
            methods[service][name] = methods[service][name]._replace(**coders)
    for handlers in methods.values():
        handlers |= {name: reporting(name, handler) for name, handler in handlers.items()}
        if throttles is not None:
            handlers |= {name: counted(handler, throttles) for name, handler in handlers.items()}
    return tuple(grpc.method_handlers_generic_handler(service, handlers) for service, handlers in methods.items())


def reporting(name: str, handler: Any) -> Any:
    """Wrap the handler of a server's method: unexpected errors are reported here, and the caller gets status UNKNOWN."""
    kind = ("stream" if handler.request_streaming else "unary") + ("_stream" if handler.response_streaming else "_unary")
    method = getattr(handler, kind)

    async def one(request: Any, context: Any) -> Any:
        async with _reported(name, context):
            return await method(request, context)

    async def several(request: Any, context: Any) -> AsyncIterator[Any]:
        async with _reported(name, context), contextlib.aclosing(method(request, context)) as replies:
            async for reply in replies:
                yield reply

    return handler._replace(**{kind: several if handler.response_streaming else one})


@contextlib.asynccontextmanager
async def _reported(name: str, context: Any) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.BaseError:  # a refusal, or gRPC's error for a call that is over
        raise
    except Exception as error:
        INTERNAL_ERRORS.report(name, error)
        await context.abort(grpc.StatusCode.UNKNOWN, f"internal error: {error!r}")
