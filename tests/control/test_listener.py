"""The control socket while this process may open no more files, on the event loop that daemons use."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from pathlib import Path

import pytest
import uvloop

from peerd.control.listener import RESERVE, Listener
from tests.few_files import no_file_left


async def ask_while_no_file_is_left(path: Path, num_clients: int) -> None:
    """More clients than the reserve has room for; none of the first ones is answered before all that can be are heard."""
    heard, answer = asyncio.Semaphore(0), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"anybody there?\n"
        heard.release()
        await answer.wait()
        writer.write(b"yes\n")
        await writer.drain()

    async def replies(clients: list[socket.socket]) -> list[bytes]:
        return [await asyncio.get_running_loop().sock_recv(client, 100) for client in clients]

    listener = Listener(path, serve, 1000)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(num_clients)]
        for client in clients:
            client.setblocking(False)
        for _ in range(2):  # the reserve is there again afterwards
            with no_file_left():
                for client in clients[: num_clients // 2]:
                    client.connect(str(path))
                    client.send(b"anybody there?\n")
                for _ in range(RESERVE):
                    await heard.acquire()
                answer.set()
                assert await replies(clients[: num_clients // 2]) == [b"yes\n"] * (num_clients // 2)
                answer.clear()
                del clients[: num_clients // 2]
    await listener.close()


@pytest.mark.timeout(30)
def test_clients_are_served_while_no_other_file_can_be_opened() -> None:
    with tempfile.TemporaryDirectory(prefix="peerd-t-") as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask_while_no_file_is_left(Path(folder) / "s", 2 * (RESERVE + 2)))
