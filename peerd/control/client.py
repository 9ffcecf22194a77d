"""The client's side of the control socket: one request, its progress lines, one reply. Stdlib only.

It turns a daemon that is absent, has ended, is silent or answers wrongly into an error for the user. protocol.py holds the protocol.
"""

from __future__ import annotations

import fcntl
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peerd.config.paths import Home
from peerd.control.protocol import MAX_LINE_BYTES, SCHEMA, Reply
from peerd.errors import NoDaemonError, PeerdError, TimedOutError, error_class_of

DEFAULT_SILENCE_S = 10.0
_CHUNK_BYTES = 64 * 1024
_LOOK_S = 0.05
"""How often a client looks whether a daemon has ended."""


class ControlClient:
    """Sends requests to the daemon of one home. Each request opens its own connection; the client keeps no state between them."""

    def __init__(self, home: Home) -> None:
        self.home = home

    def request(
        self,
        verb: str,
        *,
        silence_s: float = DEFAULT_SILENCE_S,
        on_progress: Callable[[str], None] | None = None,
        **arguments: Any,
    ) -> Reply:
        """Send one request and return the content of the daemon's `ok`.

        `silence_s` is the longest wait for the next line. A line of progress that repeats the last one shows only that the daemon
        is still at it, and is not passed on. Raises NoDaemonError, TimedOutError, the error that the daemon
        answered with, or PeerdError for a reply that breaks the protocol.
        """
        said = None
        with self._connect(silence_s) as connection:
            try:
                connection.sendall(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
                for line in _lines(connection, silence_s):
                    message = _decode(line)
                    if "progress" in message:
                        if on_progress is not None and message["progress"] != said:
                            on_progress(str(message["progress"]))
                        said = message["progress"]
                        continue
                    return _outcome(message)
            except TimeoutError:
                raise TimedOutError(
                    f"the daemon of {self.home.folder} did not answer `{verb}` within {silence_s:g} s",
                    f"try again, or read its log: {self.home.log}",
                ) from None
            except OSError as error:
                raise self._gone(verb, error.strerror or str(error)) from None
        raise self._gone(verb, "it closed the connection")

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until the daemon of this home has ended and given its lock back. Returns whether it has within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while _is_held(self.home.lock):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def _connect(self, silence_s: float) -> socket.socket:
        path = self.home.control_socket
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(silence_s)
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            raise self._unreachable(path, error) from None
        return connection

    def _unreachable(self, path: Path, error: OSError) -> PeerdError:
        folder = self.home.folder
        start = "start one with `peerd start RUN.toml` or `peerd join ADDRESS`, or name its home with --home"
        match error:
            case FileNotFoundError() | NotADirectoryError() if _is_held(self.home.lock):
                return NoDaemonError(f"the peerd daemon of {folder} is starting or ending, and answers nothing now", "wait some seconds")
            case FileNotFoundError() | NotADirectoryError():
                return NoDaemonError(f"no peerd daemon runs from {folder}", start)
            case ConnectionRefusedError():
                return NoDaemonError(f"the peerd daemon of {folder} is gone and left its socket behind", start)
            case PermissionError():
                return NoDaemonError(f"the peerd daemon of {folder} belongs to another user", "name your own home with --home")
            case TimeoutError():
                return TimedOutError(f"the daemon of {folder} does not answer", f"read its log: {self.home.log}")
        return NoDaemonError(f"cannot reach a peerd daemon at {path}: {error.strerror or error}", start)

    def _gone(self, verb: str, reason: str) -> PeerdError:
        return NoDaemonError(
            f"the daemon of {self.home.folder} ended before it answered `{verb}` ({reason})", f"read its log: {self.home.log}"
        )


def _is_held(lock: Path) -> bool:
    """Whether a daemon holds the lock of its home."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # gone again when the file is closed
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _lines(connection: socket.socket, silence_s: float) -> Iterator[bytes]:
    """Yield the lines of the reply. Each must be complete within `silence_s` and have at most MAX_LINE_BYTES."""
    buffer = bytearray()
    deadline = time.monotonic() + silence_s
    while True:
        end = buffer.find(b"\n")
        if end >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            yield line
            deadline = time.monotonic() + silence_s
            continue
        if len(buffer) > MAX_LINE_BYTES:
            raise PeerdError(f"the daemon's reply is longer than {MAX_LINE_BYTES} bytes", "client and daemon may differ in version")
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        connection.settimeout(remaining_s)
        chunk = connection.recv(_CHUNK_BYTES)
        if not chunk:
            return
        buffer += chunk


def _decode(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise _bad_reply()
    return message


def _outcome(message: dict[str, Any]) -> Reply:
    match message:
        case {"ok": dict() as reply}:
            schema = reply.get("schema")
            if schema != SCHEMA:
                raise PeerdError(
                    f"the daemon speaks control schema {schema}, this client {SCHEMA}", "use the peerd version that started the daemon"
                )
            return reply
        case {"error": {"exit_code": int(code), "message": str(text), "remedy": str(remedy)}}:
            raise error_class_of(code)(text, remedy)
    raise _bad_reply()


def _bad_reply() -> PeerdError:
    return PeerdError("the daemon's reply cannot be understood", "client and daemon may differ in version: restart the daemon")
