"""The progress of a download or conversion, and its display on a terminal. A report may raise an exception to interrupt the work."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

QUIET_FOR_S = 1.0
"""Shorter work shows no bar."""
SHOWN_EVERY_S = 0.2
BAR_WIDTH = 24


@dataclass(frozen=True, slots=True)
class ByteProgress:
    what: str
    done_bytes: int
    total_bytes: int
    """0: unknown."""

    @property
    def share(self) -> float:
        return min(1.0, self.done_bytes / self.total_bytes) if self.total_bytes else 0.0

    @property
    def text(self) -> str:
        done, total = self.done_bytes / 1e6, self.total_bytes / 1e6
        return f"{self.what}: {done:,.1f} of {total:,.1f} MB, {self.share:.0%}" if total else f"{self.what}: {done:,.1f} MB"


Report = Callable[[ByteProgress], None]


def silent(_progress: ByteProgress) -> None:
    """A report that shows nothing."""


class Interrupted(BaseException):
    """Raised by a report: stop, keep what is done, and continue from there next time."""


class TerminalBar:
    """A report that keeps one line on standard error; `clear` removes it when the work is done."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._shown_s = 0.0
        self._width = 0

    def __call__(self, progress: ByteProgress) -> None:
        now_s = time.monotonic()
        if now_s - self._began_s < QUIET_FOR_S or now_s - self._shown_s < SHOWN_EVERY_S:
            return
        self._shown_s = now_s
        filled = round(BAR_WIDTH * progress.share)
        line = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {progress.text}"
        self._write(line[: shutil.get_terminal_size().columns - 1])

    def clear(self) -> None:
        if self._width:
            self._write("")
            sys.stderr.write("\r")
            sys.stderr.flush()

    def _write(self, line: str) -> None:
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)


class ProgressLog:
    """A report that writes the progress to the log every `every_s` seconds."""

    def __init__(self, say: Callable[[str], None], every_s: float = 10.0) -> None:
        self._say = say
        self._every_s = every_s
        self._said_s = time.monotonic()

    def __call__(self, progress: ByteProgress) -> None:
        if time.monotonic() - self._said_s >= self._every_s:
            self._said_s = time.monotonic()
            self._say(progress.text)
