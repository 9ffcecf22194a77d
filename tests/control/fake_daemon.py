"""A control socket that answers one request with whatever bytes a test wants, well-formed or not."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

from peerd.config.paths import Home


def line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


@contextlib.contextmanager
def answering(home: Home, *chunks: bytes, then_hang: bool = False) -> Iterator[list[dict[str, Any]]]:
    """Serve one connection; yields the list that its request will be put into."""
    home.run_folder.mkdir(parents=True, exist_ok=True)
    requests: list[dict[str, Any]] = []
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
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
            home.control_socket.unlink()
