"""A listening Unix socket that takes clients even when this process may open no more files.

asyncio takes none then, and libuv closes what it takes at once, so that the daemon seems to have ended. So a few descriptors are kept in
reserve. One is given up for each client that comes at such a moment, and taken back when the client has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from peerd.background import Tasks

RESERVE = 4
"""Clients that can be served at once when no other descriptor is left."""
AGAIN_S = 0.1
"""Pause while not even the reserve has a descriptor left."""
BACKLOG = 100
LAST_WORDS_S = 0.5
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """Serves each client in a task of its own, from its creation until `close`."""

    def __init__(self, path: Path, serve: Serve, limit_bytes: int) -> None:
        """Only this user can open the socket at `path`. No line of a client may be longer than `limit_bytes`."""
        self._serve, self._limit_bytes = serve, limit_bytes
        self._loop = asyncio.get_running_loop()
        self._clients = Tasks()
        self._reserve: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        path.unlink(missing_ok=True)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(BACKLOG)
        self._listen()

    async def close(self) -> None:
        """Take no more clients, and end those that remain."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        while self._reserve:
            os.close(self._reserve.pop())
        if self._clients.running:  # `leave` ends the daemon, and its answer is still to be sent
            await asyncio.wait(self._clients.running, timeout=LAST_WORDS_S)
        self._clients.cancel()

    def _listen(self) -> None:
        self._fill_reserve()
        if self._is_open:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Take a client. The loop calls this as long as one waits."""
        try:
            client, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return  # the client has gone already
        except OSError:
            if self._reserve:
                os.close(self._reserve.pop())
            else:
                self._loop.remove_reader(self._socket)
                self._loop.call_later(AGAIN_S, self._listen)
            return
        self._clients.start(self._attend(client), expects=(OSError,))

    async def _attend(self, client: socket.socket) -> None:
        with contextlib.closing(client):
            reader, writer = await asyncio.open_unix_connection(sock=client, limit=self._limit_bytes)
            try:
                await self._serve(reader, writer)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        self._fill_reserve()

    def _fill_reserve(self) -> None:
        with contextlib.suppress(OSError):
            while self._is_open and len(self._reserve) < RESERVE:
                self._reserve.append(os.open(os.devnull, os.O_RDONLY))

    @property
    def _is_open(self) -> bool:
        return self._socket.fileno() >= 0
