"""Runs the dashboard inside the daemon's own event loop, on a socket that is bound already."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn

from peerd.observe.web.app import build
from peerd.observe.web.guard import Access
from peerd.observe.web.stream import DashboardSource, Stream

CLOSE_WITHIN_S = 1
MAX_CONNECTIONS = 256


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the daemon's affair."""
        yield


@contextlib.asynccontextmanager
async def dashboard(listener: socket.socket, source: DashboardSource, access: Access) -> AsyncIterator[None]:
    """Serves until the block ends."""
    stream = Stream(source)
    config = uvicorn.Config(
        build(source, stream, access),
        loop="none",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=CLOSE_WITHIN_S,
    )
    server = _Server(config)
    serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        stream.close()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=2 * CLOSE_WITHIN_S)
        serving.cancel()
