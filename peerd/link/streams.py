"""Byte streams: copying between two of them, the short messages that open some of them, and the tasks that serve them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from peerd.background import Tasks, start
from peerd.errors import BadMessageError, PeerGoneError
from peerd.link.throttle import Throttle, Throttles

CHUNK_BYTES = 256 * 1024
SMALL_BYTES = 2 * 1024
"""What is shorter is a small message, or the end of a tensor: tensors fill whole chunks."""
MAX_MESSAGE_BYTES = 1024
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_ENDS = (OSError, TimeoutError, asyncio.IncompleteReadError, BadMessageError, PeerGoneError)
"""The errors that the other side may cause at any moment."""
Heard = TypeVar("Heard", bound=Message)


class StreamTasks(Tasks):
    """Tasks that serve streams. `close` cancels them without cancelling asyncio's own callbacks around them."""

    async def track(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in a task and return when it has ended."""
        await asyncio.wait({self.start(work, expects=_ENDS)})


def unheard() -> None:
    """Nobody asks when bytes arrived."""


async def splice(local: Stream, remote: Stream, throttles: Throttles, heard: Callable[[], None] = unheard) -> bool:
    """Copy both ways until either side ends, and call `heard` when bytes arrive. Returns True if the remote side ended first."""
    outward = start(_copy(local[0], remote[1], throttles.upload, unheard), expects=_ENDS)
    inward = start(_copy(remote[0], local[1], throttles.download, heard), expects=_ENDS)
    try:
        done, _ = await asyncio.wait({outward, inward}, return_when=asyncio.FIRST_COMPLETED)
        return inward in done
    finally:
        for task in (outward, inward):
            task.cancel()
        await asyncio.gather(outward, inward, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, throttle: Throttle, heard: Callable[[], None]) -> None:
    while data := await source.read(throttle.chunk(CHUNK_BYTES)):
        heard()
        await throttle.let_pass(len(data), goes_first=len(data) < SMALL_BYTES)
        if sink.is_closing():
            return  # it was closed meanwhile, and uvloop refuses to write to it
        sink.write(data)
        await sink.drain()


def say(writer: asyncio.StreamWriter, message: Message) -> None:
    """Write one message of at most `MAX_MESSAGE_BYTES`. This is so short that the buffer need not be drained."""
    raw = message.SerializeToString()
    assert len(raw) <= MAX_MESSAGE_BYTES
    writer.write(len(raw).to_bytes(2, "big") + raw)


async def hear(reader: asyncio.StreamReader, kind: type[Heard]) -> Heard:
    """Read one message. Raises BadMessageError for other bytes, asyncio.IncompleteReadError if the stream ends."""
    num_bytes = int.from_bytes(await reader.readexactly(2), "big")
    if num_bytes > MAX_MESSAGE_BYTES:
        raise BadMessageError(f"the first message of a stream is too long: {num_bytes} bytes")
    try:
        return kind.FromString(await reader.readexactly(num_bytes))
    except DecodeError:
        raise BadMessageError("the first bytes of a stream are not a message") from None
