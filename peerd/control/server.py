"""The daemon's end of the control socket: one JSON request a connection, answers as protocol.py says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from peerd.control.protocol import MAX_LINE_BYTES
from peerd.errors import ExitCode, PeerdError, UsageError

REQUEST_TIMEOUT_S = 10.0
Say = Callable[[str], None]
Verb = Callable[[Mapping[str, Any], Say], Awaitable[Mapping[str, Any]]]


@contextlib.asynccontextmanager
async def control_server(path: Path, verbs: Mapping[str, Verb]) -> AsyncIterator[None]:
    """Serve `verbs` on a socket only this user can reach, until the block ends."""
    clients: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(_serve(verbs, reader, writer))
        clients.add(task)
        await asyncio.wait({task})
        clients.discard(task)

    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(serve, path, limit=MAX_LINE_BYTES)
    path.chmod(0o600)
    try:
        yield
    finally:
        server.close()
        if clients:  # a moment for the answer to the verb that ended us
            await asyncio.wait(clients, timeout=0.5)
        for task in clients:
            task.cancel()


async def _serve(verbs: Mapping[str, Verb], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    def send(message: Mapping[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    with contextlib.closing(writer), contextlib.suppress(OSError):
        try:
            send({"ok": await _answer(verbs, reader, lambda text: send({"progress": text}))})
        except PeerdError as error:
            send({"error": {"exit_code": int(error.exit_code), "message": error.message, "remedy": error.remedy}})
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"the daemon could not answer: {type(error).__name__}: {error}"
            send({"error": {"exit_code": int(ExitCode.FAILURE), "message": what, "remedy": "see its log"}})
        await writer.drain()


async def _answer(verbs: Mapping[str, Verb], reader: asyncio.StreamReader, say: Say) -> Mapping[str, Any]:
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            line = await reader.readline()
        request = json.loads(line)
        verb = verbs[request["verb"]]
    except (TimeoutError, ValueError, KeyError, TypeError):
        raise UsageError(f"not a request; verbs are {', '.join(sorted(verbs))}", "use the peerd command of the same version") from None
    return await verb(request, say)
