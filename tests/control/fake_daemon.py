"""Control sockets with the answers of a test: any bytes for one request, or replies for any number of them."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

from peerd.config.paths import Home
from peerd.link.run_folder import claim


def line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Lines(list[object]):
    """Several messages that answer one request."""


@contextlib.contextmanager
def run_folder_of(home: Home) -> Iterator[None]:
    """The folder of the sockets, created and removed as a daemon and its keeper do."""
    claimed = claim(home.run_folder)
    try:
        yield
    finally:
        shutil.rmtree(home.run_folder, ignore_errors=True)
        claimed.release()


@contextlib.contextmanager
def answering(home: Home, *chunks: bytes, then_hang: bool = False) -> Iterator[list[dict[str, Any]]]:
    """Serve one connection. Yields the list that will contain its request."""
    requests: list[dict[str, Any]] = []
    ended = threading.Event()
    with run_folder_of(home), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(home.control_socket))
        listener.listen(1)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as reader:
                requests.append(json.loads(reader.readline()))
                with contextlib.suppress(OSError):
                    for chunk in chunks:
                        connection.sendall(chunk)
                    if then_hang:
                        ended.wait(10)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield requests
        finally:
            ended.set()
            thread.join(5)


@contextlib.contextmanager
def serving(home: Home, answer: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    """Serve any number of connections until the block ends. `answer` returns the message for each request."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                found = answer(json.loads(self.rfile.readline()))
                for message in found if isinstance(found, Lines) else (found,):
                    self.wfile.write(line(message))

    with run_folder_of(home), socketserver.ThreadingUnixStreamServer(str(home.control_socket), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            home.control_socket.unlink()
            server.shutdown()
            thread.join(5)
