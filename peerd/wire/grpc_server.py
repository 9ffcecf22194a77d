"""The daemon's gRPC servers: the one on a local socket that the tunnel leads to, and those that take direct connections."""

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
    """The one that the tunnel leads to, on a local socket only."""
    server = grpc.aio.server(options=CHANNEL_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
    server.add_generic_rpc_handlers(_handlers(servicers))
    server.add_insecure_port(f"unix:{socket_path}")
    await server.start()
    return server


class DirectEndpoint:
    """Takes direct connections: neighbours' always, others' while no cap is set, for caps are kept in the tunnel."""

    def __init__(
        self, host: str, port: int, showing: Showing, pins: Pins, throttles: Throttles, neighbours: Neighbours | None = None
    ) -> None:
        """`port` 0: any. With `neighbours` it takes their calls, too."""
        self._host, self._port = host, port
        self._showing, self._pins, self._throttles, self._neighbours = showing, pins, throttles, neighbours
        self._servicers: Sequence[Any] = ()
        self._asked = asyncio.Event()
        self._taken = b""
        """The certificates that gRPC was last told to take."""
        self._server: grpc.aio.Server | None = None
        self._local: grpc.aio.Server | None = None

    async def open(self, servicers: Sequence[Any]) -> None:
        self._servicers = servicers
        await self._look()

    async def run(self) -> None:
        """Opens and closes with the caps until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._look()

    def look_again(self) -> None:
        """The caps may be others now."""
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
            LOG.warning("no local socket; other daemons on this machine come by TLS", path=socket)
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
            LOG.warning("no port for direct connections; the tunnel carries everything")
            return
        await server.start()
        self._server, self._port, self._showing.port = server, port, port

    def _bind(self, server: grpc.aio.Server, port: int) -> int:
        """The port at which the server will listen; 0 where it is taken."""
        credentials = grpc.dynamic_ssl_server_credentials(self._configuration(), self._changes, require_client_authentication=True)
        try:
            return int(server.add_secure_port(f"{self._host}:{port}", credentials))
        except RuntimeError:
            return 0

    def _changes(self) -> Any:
        """Asked for by gRPC, on a thread of its own, at every handshake; None: take the same as before."""
        return self._configuration() if self._pins.pems != self._taken else None

    def _configuration(self) -> Any:
        """My certificate, and whom to take: whoever has shown its own."""
        mine, self._taken = self._showing.certificate, self._pins.pems
        return grpc.ssl_server_certificate_configuration([(mine.key_pem, mine.pem)], root_certificates=mine.pem + self._taken)


class _Methods(dict[str, dict[str, Any]]):
    """By service and name, as the generated `add_..._to_server` tell a server of them."""

    def add_generic_rpc_handlers(self, _handlers: Any) -> None:
        """They come again by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self[service] = handlers


def _handlers(servicers: Sequence[Any], throttles: Throttles | None = None) -> tuple[Any, ...]:
    """What a server takes calls with; where `throttles` are given, their messages are counted."""
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
    """A server's method, whose unexpected errors are reported; its caller hears only that there was one."""
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
    except grpc.aio.BaseError:  # how a call is refused, or what gRPC says of one that is over
        raise
    except Exception as error:
        INTERNAL_ERRORS.report(name, error)
        await context.abort(grpc.StatusCode.UNKNOWN, f"internal error: {error!r}")
