"""One of the demo's daemons: its process, its home and its last report.

A separate shell wakes a stopped process, so that it is woken even if the demo is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO

from peerd.cli.launch import Ready, tail_of
from peerd.config.paths import Home
from peerd.control.client import ControlClient
from peerd.control.protocol import StatusReply

WAKE = 'sleep "$1"; kill -CONT "$2"'


@dataclass(frozen=True, slots=True)
class Suspended:
    """A process that is stopped for a while."""

    pid: int
    waker: subprocess.Popen[bytes]

    @classmethod
    def begin(cls, pid: int, for_s: float) -> Suspended:
        null = subprocess.DEVNULL
        command = ["/bin/sh", "-c", WAKE, "sh", str(for_s), str(pid)]
        waker = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
        os.kill(pid, signal.SIGSTOP)
        return cls(pid, waker)

    @property
    def over(self) -> bool:
        return self.waker.poll() is not None

    def wake(self) -> None:
        """Wake the process now, and end its waker."""
        if not self.over:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.waker.pid, signal.SIGKILL)
            self.waker.wait()


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

    @property
    def steps_on_disk(self) -> frozenset[int]:
        """Steps of its stage's checkpoints, by the names of the files, `STAGEofSTAGES-STEP-HASH`."""
        found = self.home.folder.glob(f"checkpoints/*/{self.stage}of*-*-*.safetensors")
        return frozenset(int(path.stem.split("-")[1]) for path in found)

    @property
    def has_p2pd(self) -> bool:
        """False while a new one is about to start."""
        try:
            return p2pd_of(self.process.pid) > 0
        except ProcessLookupError:
            return False

    def suspend(self, for_s: float) -> None:
        self.suspended = Suspended.begin(self.process.pid, for_s)

    def cut_links(self, for_s: float) -> None:
        """Stop its p2pd."""
        self.cut_off = Suspended.begin(p2pd_of(self.process.pid), for_s)

    def kill_saving_disk(self, home: Home) -> None:
        """Send SIGKILL, after its files have become those of another home, which a successor uses."""
        self.process.send_signal(signal.SIGSTOP)
        self.home.folder.rename(home.folder)
        shutil.rmtree(home.run_folder, ignore_errors=True)  # its sockets
        self.kill()

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
        size = self.log_bytes()
        return tail_of(os.pread(self.log.fileno(), size, max(0, size - 16 * 1024)))

    def whole_log(self) -> str:
        return os.pread(self.log.fileno(), self.log_bytes(), 0).decode(errors="replace")

    def log_bytes(self) -> int:
        return os.fstat(self.log.fileno()).st_size


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


def p2pd_of(pid: int) -> int:
    """The process id of a daemon's p2pd: the only child of its keeper, which is the daemon's only child."""
    import psutil

    try:
        for keeper in psutil.Process(pid).children():
            for child in keeper.children():
                return child.pid
    except psutil.NoSuchProcess:
        pass
    raise ProcessLookupError(pid)
