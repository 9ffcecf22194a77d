"""The live stream: while there are viewers, each tick makes one message and sends it to all of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from peerd.background import start

SMALL_SWARM = 100
TICK_S = 0.5
LARGE_TICK_S = 1.0
WAITING_PER_VIEWER = 4
MAX_VIEWERS = 64
MAX_PER_ADDRESS = 8
KEEP_ALIVE_S = 15.0


class DashboardSource(Protocol):
    """Source of the dashboard's data, implemented by the daemon."""

    async def past(self, reach_s: float) -> Mapping[str, Any]:
        """Steps, samples and events of the last `reach_s` seconds: the first message to a viewer."""
        ...

    async def now(self, seen: Mapping[str, int]) -> Mapping[str, Any]:
        """The current state of the swarm, and the steps, samples and events that are newer than `seen`."""
        ...

    async def contributions(self) -> Mapping[str, Any]: ...

    def join_address(self) -> str:
        """The address at which others join, with the run's id."""
        ...

    async def leave(self) -> None: ...

    async def pause(self, yes: bool) -> None:
        """Pause the daemon, or resume it."""
        ...

    def metrics(self) -> bytes: ...

    def take_code(self, code: str) -> bool:
        """True if the code replaces the token. It is invalid from now on."""
        ...


class Stream:
    """The stream to all viewers. Contract: without viewers nothing is computed; a slow viewer misses messages and delays no other."""

    def __init__(self, source: DashboardSource) -> None:
        self._source = source
        self._viewers: dict[asyncio.Queue[bytes | None], str] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._seen: dict[str, int] = {}

    async def watch(self, address: str, reach_s: float) -> AsyncIterator[bytes]:
        """Server-sent events for one viewer, until it or the daemon leaves. The first one covers the last `reach_s` seconds."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(WAITING_PER_VIEWER)
        self._viewers[queue] = address
        try:
            yield b"retry: 1000\n\n" + _message("past", await self._source.past(reach_s))
            if self._ticking is None or self._ticking.done():
                self._ticking = start(self._tick())
            while True:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        message = await queue.get()
                except TimeoutError:
                    message = b": still here\n\n"
                if message is None:
                    return
                yield message
        finally:
            del self._viewers[queue]

    def is_full(self, address: str) -> bool:
        """True if another viewer from this address would exceed a limit."""
        return len(self._viewers) >= MAX_VIEWERS or list(self._viewers.values()).count(address) >= MAX_PER_ADDRESS

    def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        self._send_away()

    async def _tick(self) -> None:
        try:
            while self._viewers:
                now = await self._source.now(self._seen)
                self._seen = dict(now["seen"])
                message = _message("now", now)
                for queue in self._viewers:
                    _put(queue, message)
                await asyncio.sleep(TICK_S if now["num_peers"] <= SMALL_SWARM else LARGE_TICK_S)
        finally:
            self._send_away()  # remaining viewers reconnect, which starts a new task

    def _send_away(self) -> None:
        for queue in self._viewers:
            _put(queue, None)


def _put(queue: asyncio.Queue[bytes | None], message: bytes | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(message)


def _message(kind: str, content: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(content, separators=(',', ':'), allow_nan=False)}\n\n".encode()
