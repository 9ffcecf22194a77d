"""The daemon's side of the control socket: one JSON request per connection, answered as protocol.py defines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from peerd.background import INTERNAL_ERRORS, Tasks
from peerd.control.protocol import MAX_LINE_BYTES
from peerd.errors import ExitCode, PeerdError, UsageError

REQUEST_TIMEOUT_S = 10.0
PIECE = 250
"""Number of list elements encoded without a break. It takes a millisecond; a long history in one piece would take fifty."""
Say = Callable[[str], None]
"""Sends a line of progress. It raises OSError where the client is gone, some time after it went."""
Verb = Callable[[Mapping[str, Any], Say], Awaitable[Mapping[str, Any]]]


@contextlib.asynccontextmanager
async def control_server(path: Path, verbs: Mapping[str, Verb]) -> AsyncIterator[None]:
    """Serve `verbs` on a socket that only this user can open, until the block ends."""
    clients = Tasks()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.wait({clients.start(_serve(verbs, reader, writer))})

    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(serve, path, limit=MAX_LINE_BYTES)
    path.chmod(0o600)
    try:
        yield
    finally:
        server.close()
        if clients.running:  # `leave` ends the daemon, and its answer is still to be sent
            await asyncio.wait(clients.running, timeout=0.5)
        clients.cancel()


async def _serve(verbs: Mapping[str, Verb], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    def send(message: Mapping[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    def say(text: str) -> None:
        if writer.is_closing():
            raise ConnectionResetError("the client is gone")
        send({"progress": text})

    with contextlib.closing(writer), contextlib.suppress(OSError):
        try:
            reply = await _answer(verbs, reader, say)
            writer.write(await _encoded({"ok": reply}))
        except PeerdError as error:
            send({"error": {"exit_code": int(error.exit_code), "message": error.message, "remedy": error.remedy}})
        except Exception as error:
            if not isinstance(error, OSError):
                INTERNAL_ERRORS.report("control", error)
            what = f"the daemon could not answer: {type(error).__name__}: {error}"
            send({"error": {"exit_code": int(ExitCode.FAILURE), "message": what, "remedy": "see its log"}})
        await writer.drain()


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
