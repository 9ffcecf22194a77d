"""`peerd top` on a pseudo-terminal: its output, and the restored state of the terminal afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerd.config.paths import Home
from tests.cli.top.test_screen import Daemon
from tests.control.fake_daemon import serving

MAIN = "from peerd.cli.main import main; main()"
WITH_A_BUG = "import peerd.cli.top.notes as notes; notes.fixed = lambda *_: 1 / 0; " + MAIN
WITHIN_S = 60.0
INTO_ALTERNATE, OUT_OF_ALTERNATE, CURSOR_SHOWN = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"
COLOURED = re.compile(rb"\x1b\[(?:[\d;]*;)?(?:3[0-7]|4[0-7]|9[0-7]|38;[\d;]+|48;[\d;]+)m")


class Terminal:
    """A terminal with `peerd top` on it."""

    def __init__(self, home: Path, program: str, environment: dict[str, str]) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLORTERM")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "top"],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env={**inherited, "PEERD_HOME": str(home), "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        self.written = b""

    def read_until(self, wanted: bytes) -> None:
        deadline = time.monotonic() + WITHIN_S
        while wanted not in self.written:
            assert time.monotonic() < deadline, self.written
            self._read(0.1)

    def end(self) -> int:
        deadline = time.monotonic() + WITHIN_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.written
            self._read(0.05)
        self._read(0.2)
        return self.process.returncode

    def _read(self, timeout_s: float) -> None:
        while select.select([self.master], [], [], timeout_s)[0]:
            self.written += os.read(self.master, 65536)
            timeout_s = 0.0


@contextlib.contextmanager
def terminal(home: Path, program: str = MAIN, **environment: str) -> Iterator[Terminal]:
    found = Terminal(home, program, environment)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.kill()
        found.process.wait()
        os.close(found.master)
        os.close(found.slave)


@pytest.mark.parametrize("way", [b"q", b"\x03", signal.SIGTERM, signal.SIGHUP], ids=["q", "ctrl-c", "SIGTERM", "SIGHUP"])
def test_it_leaves_the_terminal_as_it_was(short_home: Path, way: bytes | signal.Signals) -> None:
    with serving(Home(short_home), Daemon().answer), terminal(short_home) as shown:
        shown.read_until(b"accumulating")
        assert INTO_ALTERNATE in shown.written
        if isinstance(way, bytes):
            os.write(shown.master, way)
        else:
            shown.process.send_signal(way)
        assert shown.end() == 0
        assert termios.tcgetattr(shown.slave) == shown.before
        assert shown.written.rindex(OUT_OF_ALTERNATE) > shown.written.rindex(INTO_ALTERNATE)
        assert CURSOR_SHOWN in shown.written[shown.written.rindex(INTO_ALTERNATE) :]


def test_after_a_pause_all_is_painted_again(short_home: Path) -> None:
    with serving(Home(short_home), Daemon().answer), terminal(short_home) as shown:
        shown.read_until(b"accumulating")
        os.write(shown.master, b"\x1a")
        os.waitid(os.P_PID, shown.process.pid, os.WSTOPPED | os.WNOWAIT)
        shown.written = b""
        shown.process.send_signal(signal.SIGCONT)
        for words in (b"stage / peer", b"all stages have 2 queued", b"0 counted twice", b"quit"):
            shown.read_until(words)
        os.write(shown.master, b"q")
        assert shown.end() == 0


def test_no_color_is_honoured(short_home: Path) -> None:
    for environment, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        with serving(Home(short_home), Daemon().answer), terminal(short_home, **environment) as shown:
            shown.read_until(b"accumulating")
            os.write(shown.master, b"q")
            assert shown.end() == 0
            assert bool(COLOURED.search(shown.written)) is coloured


def test_without_a_daemon_it_is_one_line_and_draws_nothing(short_home: Path) -> None:
    with terminal(short_home) as shown:
        assert shown.end() == 11
        assert b"peerd: error: no peerd daemon runs from" in shown.written
        assert INTO_ALTERNATE not in shown.written
        assert shown.written.count(b"\n") == 1


def test_a_terminal_that_cannot_be_drawn_on_is_told_so(short_home: Path) -> None:
    with terminal(short_home, TERM="dumb") as shown:
        assert shown.end() == 2
        assert b"needs a terminal" in shown.written


def test_a_bug_is_one_line_on_a_terminal_that_is_as_it_was(short_home: Path) -> None:
    with serving(Home(short_home), Daemon().answer), terminal(short_home, WITH_A_BUG) as shown:
        assert shown.end() == 1
        assert termios.tcgetattr(shown.slave) == shown.before
        after = shown.written[shown.written.rindex(OUT_OF_ALTERNATE) :]
        assert b"peerd: error: ZeroDivisionError: division by zero; this is a bug in peerd" in after
        assert b"Traceback" not in shown.written
