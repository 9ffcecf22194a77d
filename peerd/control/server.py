"""The daemon's side of the control socket: one JSON request per connection, answered as protocol.py defines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from peerd.background import INTERNAL_ERRORS
from peerd.control.listener import Listener
from peerd.control.protocol import MAX_LINE_BYTES
from peerd.errors import PeerdError, UsageError, system_error

REQUEST_TIMEOUT_S = 10.0
PIECE = 250
"""Number of list elements encoded without a break. It takes a millisecond; a long history in one piece would take fifty."""
Say = Callable[[str], None]
"""Sends a line of progress. It raises OSError where the client is gone, some time after it went."""
Verb = Callable[[Mapping[str, Any], Say], Awaitable[Mapping[str, Any]]]


@contextlib.asynccontextmanager
async def control_server(path: Path, verbs: Mapping[str, Verb]) -> AsyncIterator[None]:
    """Serve `verbs` on a socket that only this user can open, until the block ends."""
    listener = Listener(path, partial(_serve, verbs), MAX_LINE_BYTES)
    try:
        yield
    finally:
        await listener.close()


async def _serve(verbs: Mapping[str, Verb], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    def send(message: Mapping[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    def say(text: str) -> None:
        if writer.is_closing():
            raise ConnectionResetError("the client is gone")
        send({"progress": text})

    try:
        reply = await _answer(verbs, reader, say)
        writer.write(await _encoded({"ok": reply}))
    except Exception as error:
        told = _told(error)
        send({"error": {"exit_code": int(told.exit_code), "message": told.message, "remedy": told.remedy}})
    await writer.drain()


def _told(error: Exception) -> PeerdError:
    """The error as the client hears of it."""
    if isinstance(error, PeerdError):
        return error
    meant = system_error(error) if isinstance(error, OSError) else None
    if meant is None and not isinstance(error, OSError):
        INTERNAL_ERRORS.report("control", error)
    return meant or PeerdError(f"the daemon could not answer: {type(error).__name__}: {error}", "see its log")


async def _encoded(message: Mapping[str, Any]) -> bytes:
    """Encode a message as a line of JSON. Other tasks can run between its pieces."""
    found = bytearray()
    for piece in pieces_of(message):
        found += piece.encode()
        if len(piece) >= PIECE:
            await asyncio.sleep(0)
    return bytes(found + b"\n")


def pieces_of(value: Any) -> Iterator[str]:
    """Yield pieces of JSON that, joined, encode the value. A long list is split into pieces of PIECE elements, at any depth."""
    if isinstance(value, Mapping):
        for number, (name, each) in enumerate(value.items()):
            yield f"{', ' if number else '{'}{json.dumps(str(name))}: "
            yield from pieces_of(each)
        yield "}" if value else "{}"
    elif isinstance(value, list | tuple) and len(value) > PIECE:
        for start in range(0, len(value), PIECE):
            yield (", " if start else "[") + json.dumps(value[start : start + PIECE])[1:-1]
        yield "]"
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
        for number, each in enumerate(value):
            yield ", " if number else "["
            yield from pieces_of(each)
        yield "]"
    else:
        yield json.dumps(value)


async def _answer(verbs: Mapping[str, Verb], reader: asyncio.StreamReader, say: Say) -> Mapping[str, Any]:
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            line = await reader.readline()
        request = json.loads(line)
        verb = verbs[request["verb"]]
    except (TimeoutError, ValueError, KeyError, TypeError):
        raise UsageError(f"not a request; verbs are {', '.join(sorted(verbs))}", "use the peerd command of the same version") from None
    return await verb(request, say)
