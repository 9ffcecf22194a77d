"""Bounds the size of a background daemon's log: a full one becomes `daemon.log.1`, and a new one begins.

Everything written to standard error goes to the log, including tracebacks and messages of libraries, so standard error itself is
redirected to the new file. If standard error is anything but the home's log (a terminal, a journal, another file), nothing is moved.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from typing import TextIO

from peerd.config.paths import Home
from peerd.errors import disk_error
from peerd.unwritten import UNWRITTEN

MAX_BYTES = 10 << 20
LOG_LINES = "log"


class RotatingStream:
    """Writes to a text stream over a file descriptor, and renames the log when it is full. Any thread may write."""

    def __init__(self, stream: TextIO, home: Home, max_bytes: int = MAX_BYTES) -> None:
        self._stream = stream
        self._home = home
        self._max_bytes = max_bytes
        self._next_try_bytes = max_bytes
        self._guard = threading.Lock()

    def write(self, text: str) -> int:
        try:
            with self._guard:
                self._stream.write(text)
                if text.endswith("\n"):  # never within a line
                    self._stream.flush()
                    self._rotate_if_full()
        except OSError as error:  # a full disk, a terminal that is gone: the daemon goes on
            UNWRITTEN.note(LOG_LINES, disk_error(self._home.log, error), is_logged=False)
        else:
            UNWRITTEN.forget(LOG_LINES, is_logged=False)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def _rotate_if_full(self) -> None:
        mine = os.fstat(self._stream.fileno())
        if mine.st_size < self._next_try_bytes:
            return
        try:
            there = self._home.log.stat()
            if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
                self._rotate()
                self._next_try_bytes = self._max_bytes
                return
        except OSError:  # a full disk or a missing folder: the log stays where it is
            pass
        self._next_try_bytes = mine.st_size + self._max_bytes // 10

    def _rotate(self) -> None:
        log = self._home.log
        fresh = log.with_name(log.name + ".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            names = [log, *self._home.full_logs]
            for source, target in reversed(list(itertools.pairwise(names))):
                if source.exists():
                    source.replace(target)
            fresh.replace(log)
            os.dup2(descriptor, self._stream.fileno())
        finally:
            os.close(descriptor)
