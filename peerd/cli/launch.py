"""Starts a daemon, in place of this process or detached, with the given Settings.

A daemon prints one JSON line once others can reach it, or ends with an exit code and a line that begins with ERROR_PREFIX.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

from peerd.errors import ERROR_PREFIX, ExitCode, PeerdError, TimedOutError, disk_error, error_class_of

if TYPE_CHECKING:
    from peerd.config.paths import Home
    from peerd.config.settings import Settings

READY_SILENCE_S = 180.0
"""A daemon that starts is given up when it shows no sign of work for so long: data and checkpoints may be of any size."""
LOOK_S, COMPUTED_S = 0.5, 5.0
"""Time between two looks for such signs, and the processor time that counts as one: hashing from a slow disk takes that in two minutes."""
STOP_GRACE_S = 10.0
_TAIL_BYTES = 16 * 1024
_MAX_READY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The line that a daemon prints once it can be reached."""

    join: str
    """The address for `peerd join`, with #RUN-ID."""
    peer: str
    run: str
    pid: int
    organiser: str
    """The organiser's public key, hex."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of peerd as a process. -P keeps the current folder off the import path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def run_in_foreground(settings: Settings, *, as_json: bool) -> NoReturn:
    """Replace this process with the daemon, which then handles signals and the terminal."""
    os.environ["PEERD_READY"] = "json" if as_json else "text"
    command = module_command("peerd.daemon", settings.to_json())
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)  # noqa: S606 - the daemon is this very interpreter


def run_detached(settings: Settings, home: Home, hear: Callable[[str], None] = lambda _text: None) -> Ready:
    """Start the daemon in its own session and return once it can be reached. It logs to the home's log file.

    `hear` is told what the daemon does until then.
    """
    log_start = _prepare_log(home)
    with home.log.open("ab") as log:
        process = subprocess.Popen(
            module_command("peerd.daemon", settings.to_json()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PEERD_READY": "steps"},
        )
    try:
        return wait_until_ready(process, READY_SILENCE_S, signs_of(process, lambda: home.log.stat().st_size), hear)
    except DaemonFailedError as failed:
        with home.log.open("rb") as log:
            log.seek(log_start if log_start <= log.seek(0, os.SEEK_END) else 0)  # the log may have been rotated
            raise failed.told_by(tail_of(log.read()), home.log) from None
    except BaseException:
        stop_process(process)
        raise


def _prepare_log(home: Home) -> int:
    """Create the home and return the position in its log where this daemon's part will begin."""
    try:
        home.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with home.log.open("ab") as log:
            return log.tell()
    except OSError as error:
        raise disk_error(home.folder, error, "choose a folder you can write to with --home") from None


class DaemonFailedError(PeerdError):
    """A daemon ended before it could be reached."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the daemon {describe_exit(code)} before it could be reached")
        self.code = code

    def told_by(self, log_tail: str, log: Path | None) -> PeerdError:
        """The error for the daemon's exit code, with the daemon's own message if its log ends with one."""
        own = [line.removeprefix(ERROR_PREFIX) for line in log_tail.splitlines() if line.startswith(ERROR_PREFIX)]
        kind = error_class_of(self.code)
        if own:
            return kind(own[-1])
        lines = log_tail.strip().splitlines()
        last = f" (its last line: {lines[-1].strip()[:200]})" if lines else ""
        return kind(f"{self.message}{last}", f"read its log: {log}" if log else "")


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"
    return f"exited with code {code}"


def tail_of(log: bytes) -> str:
    return log[-_TAIL_BYTES:].decode(errors="replace")


def signs_of(process: subprocess.Popen[bytes], log_bytes: Callable[[], int]) -> Callable[[], object]:
    """What changes while a process works: the size of its log, and, every few seconds of it, its processor time."""
    import psutil

    def look() -> object:
        log, busy_s = 0, 0.0
        with contextlib.suppress(OSError):
            log = log_bytes()
        with contextlib.suppress(psutil.Error):
            used = psutil.Process(process.pid).cpu_times()
            busy_s = used.user + used.system
        return log, int(busy_s / COMPUTED_S)

    return look


def wait_until_ready(
    process: subprocess.Popen[bytes],
    silence_s: float,
    signs: Callable[[], object] = lambda: None,
    hear: Callable[[str], None] = lambda _text: None,
) -> Ready:
    """Read the ready line. Raises DaemonFailedError if the daemon ended instead, TimedOutError if nothing changed for `silence_s`.

    `signs` returns what changes while the daemon works. `hear` is given what the daemon says that it does before that line.
    """
    if process.stdout is None:
        raise ValueError("the process was started without a pipe for its standard output")
    seen, changed = signs(), time.monotonic()
    received = b""
    with selectors.DefaultSelector() as selector, process.stdout as stdout:
        selector.register(stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(min(LOOK_S, silence_s)):
                if (now := signs()) != seen:
                    seen, changed = now, time.monotonic()
                elif time.monotonic() - changed >= silence_s:
                    told = f"the daemon cannot be reached yet, and has shown no sign of work for {silence_s:g} s"
                    raise TimedOutError(told, "is the machine overloaded?")
                continue
            chunk = os.read(stdout.fileno(), _MAX_READY_BYTES)
            if not chunk or len(received) > _MAX_READY_BYTES:
                raise DaemonFailedError(stop_process(process))
            *lines, received = (received + chunk).split(b"\n")
            for line in map(_parse_line, lines):
                if isinstance(line, Ready):
                    return line
                hear(line)
            changed = time.monotonic()


def _parse_line(line: bytes) -> Ready | str:
    """The ready line, or what the daemon says that it does."""
    try:
        fields = json.loads(line)
        if "doing" in fields:
            return str(fields["doing"])
        return Ready(pid=int(fields["pid"]), **{name: str(fields[name]) for name in ("join", "peer", "run", "organiser")})
    except (ValueError, KeyError, TypeError):
        raise PeerdError("a line of the daemon cannot be understood", "client and daemon may differ in version") from None


def stop_process(process: subprocess.Popen[bytes], grace_s: float = STOP_GRACE_S) -> int:
    """End a child: wait briefly, then send SIGTERM, then SIGKILL. Returns its exit status."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(0.5)
    process.terminate()
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def run_child(
    module: str,
    request: object,
    *,
    what: str,
    silence_s: float = math.inf,
    hear: Callable[[bytes], None] | None = None,
    must_tell: bool = False,
) -> dict[str, Any]:
    """Run a module of peerd and return the JSON object that is its last line on stdout. Its stderr goes to this process's stderr.

    `hear` is given each line of stdout as it comes. Raises ChildFailedError with the child's exit code, where the child has already
    printed the reason, and TimedOutError if it neither prints nor computes anything for `silence_s`, s. With `must_tell` a child that
    prints nothing for so long has hung, whatever it computes: waiting for a GPU takes processor time.
    """
    process = subprocess.Popen(module_command("peerd.child", module, json.dumps(request)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        last = _last_line_of(process, what, silence_s, hear or (lambda _line: None), must_tell)
    finally:
        if process.poll() is None:
            stop_process(process)
        if process.stdout is not None:
            process.stdout.close()
    if process.returncode:
        raise ChildFailedError(process.returncode)
    try:
        reply = json.loads(last)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise PeerdError(f"{what} gave no readable result")
    return reply


def _last_line_of(process: subprocess.Popen[bytes], what: str, silence_s: float, hear: Callable[[bytes], None], must_tell: bool) -> bytes:
    """Read what a process writes until it ends; `hear` each line. Returns the last line. TimedOutError: see `run_child`."""
    looks = silence_s < math.inf and not must_tell
    signs = signs_of(process, lambda: 0) if looks else lambda: None
    seen, changed = signs(), time.monotonic()
    rest, last, output = b"", b"", cast(IO[bytes], process.stdout)
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            if selector.select(min(LOOK_S, silence_s) if silence_s < math.inf else None):
                piece = os.read(output.fileno(), _MAX_READY_BYTES)
                if not piece:
                    process.wait()
                    return rest or last
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    last = line
                    hear(line)
                seen, changed = signs(), time.monotonic()
            elif (now := signs()) != seen:
                seen, changed = now, time.monotonic()
            elif time.monotonic() - changed >= silence_s:
                shown = "has told nothing" if must_tell else "has shown no sign of work"
                raise TimedOutError(f"{what} {shown} for {silence_s:g} s", "try again")


class ChildFailedError(PeerdError):
    """A child ended with an error that it has already printed."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the command {describe_exit(code)}")
        self.code = code if code > 0 else ExitCode.FAILURE
