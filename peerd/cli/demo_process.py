"""One of the demo's daemons: its process, its home and its last report."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO

from peerd.cli.demo_strikes import Suspended
from peerd.cli.launch import Ready, tail_of
from peerd.config.paths import Home
from peerd.control.client import ControlClient
from peerd.control.protocol import StatusReply


@dataclass(slots=True)
class DemoDaemon:
    """A daemon and its last report."""

    peer: int
    stage: int
    home: Home
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    ready: Ready | None = None
    status: StatusReply | None = None
    answers: bool = False
    """It answered the last request."""
    killed: bool = False
    noted: bool = False
    """Its end is recorded as a fault."""
    replaced: bool = False
    suspended: Suspended | None = None
    cut_off: Suspended | None = None
    """Its stopped p2pd."""
    disturbed_until: float = 0.0
    """Time until which a fault affects it."""
    bequest: Mapping[str, bytes] = field(default_factory=dict)
    """Files with which its successor continues an open dashboard."""

    @property
    def client(self) -> ControlClient:
        return ControlClient(self.home)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def step(self) -> int:
        return self.status["peer"]["step"] if self.status is not None else 0

    @property
    def done(self) -> tuple[int, int]:
        """Number of steps and microbatches it has done."""
        return (self.step, self.status["counters"]["accumulated_microbatches"]) if self.status is not None else (0, 0)

    @property
    def phase(self) -> str:
        return self.status["peer"]["phase"] if self.status is not None else "starting"

    @property
    def serves(self) -> bool:
        return self.phase not in ("starting", "joining")

    @property
    def stands_still(self) -> bool:
        return self.suspended is not None and not self.suspended.over

    @property
    def disturbed(self) -> bool:
        cut_off = self.cut_off is not None and not self.cut_off.over
        return self.stands_still or cut_off or time.monotonic() < self.disturbed_until

    def kill(self) -> None:
        """Send SIGKILL. The home is removed then, so the files for a successor are read first, while the process is stopped."""
        self.killed = True
        if self.home.dashboard.exists():
            self.process.send_signal(signal.SIGSTOP)
            self.bequest = bequest_of(self.home)
        self.process.kill()
        self.process.wait()
        self.wake()

    def wake(self) -> None:
        for still in (self.suspended, self.cut_off):
            if still is not None:
                still.wake()

    def tell(self, line: str) -> None:
        """Write a line to its standard input. If the daemon has ended, the function that awaits it reports that."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self.process.stdin.fileno(), f"{line}\n".encode())

    def close_stdin(self) -> None:
        """Close its standard input, which makes the daemon leave."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()

    def close(self) -> None:
        """Close the pipes and the log of an ended daemon."""
        self.close_stdin()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.log.close()

    def log_tail(self) -> str:
        """The end of the log, read without moving the descriptor's offset, because the daemon writes there."""
        size = os.fstat(self.log.fileno()).st_size
        return tail_of(os.pread(self.log.fileno(), size, max(0, size - 16 * 1024)))


def bequest_of(home: Home) -> dict[str, bytes]:
    """The dashboard's port, token and history: files by their path in the home. They stay in memory, so a killed demo leaves none."""
    found: dict[str, bytes] = {}
    with contextlib.suppress(OSError):
        for path in (home.dashboard, *sorted((home.folder / "history").glob("*"))):
            found[str(path.relative_to(home.folder))] = path.read_bytes()
    return found


def bequeath(bequest: Mapping[str, bytes], home: Home) -> None:
    """Write these files into a successor's home."""
    for name, content in bequest.items():
        path = home.folder / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(content)
