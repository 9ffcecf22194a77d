"""Real daemons for tests: started, asked, stopped, killed; when the block ends nothing of them may be left.

A `Swarm` is a context manager with a folder of its own. Every daemon's home, cache and temporary folder lie inside, so
what is left behind is plain to see, and any process that belongs to it has the folder's name in its environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from peerd.cli.launch import Ready, module_command, wait_until_ready
from peerd.config.manifest import Manifest, dump
from peerd.config.organiser import KEY_FILE, create_key
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.control.client import ControlClient
from peerd.control.protocol import Counters, PeersReply, StatusReply, StepInfo
from peerd.errors import ERROR_PREFIX
from tests.swarm.forked import CAN_FORK, Forked

READY_TIMEOUT_S = 120.0
END_TIMEOUT_S = 40.0
STACKS_S = 1.0
LEFTOVERS_GONE_WITHIN_S = 10.0
LOOK_AGAIN_S, LOOK_SHARE = 0.02, 0.2
"""A test that looks at dozens of daemons would else take from them the time that it waits for."""
LIMITED = """exec 2> >(cat >> "$0"); limit=$1; shift; exec prlimit --fsize="$limit" "$@" """
"""A command under a limit of file sizes; its log goes through a process that has none. $0 is the log, $1 the limit."""
Found = TypeVar("Found")


def until(look: Callable[[], Found], timeout_s: float = 60.0) -> Found:
    """The first truthy thing that `look` finds; fails when the time is up."""
    began_s = looks_at_s = time.monotonic()
    while not (found := look()):
        now_s = time.monotonic()
        assert now_s < began_s + timeout_s, f"not within {timeout_s:g} s; last found: {found!r}"
        time.sleep(max(LOOK_AGAIN_S, (now_s - looks_at_s) / LOOK_SHARE))
        looks_at_s = time.monotonic()
    return found


@dataclass(slots=True)
class Daemon:
    """One `python -m peerd.daemon`."""

    settings: Settings
    process: subprocess.Popen[bytes]
    log_file: Path
    began_s: float
    _ready: Ready | None = None

    @property
    def home(self) -> Home:
        return Home(Path(self.settings.home))

    @property
    def ready(self) -> Ready:
        """Waits until others can reach it."""
        if self._ready is None:
            self._ready = wait_until_ready(self.process, READY_TIMEOUT_S)
        return self._ready

    @property
    def was_ready(self) -> bool:
        return self._ready is not None

    def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Waits until the daemon can be reached."""
        assert self.ready.pid
        return ControlClient(self.home).request(verb, silence_s=arguments.pop("silence_s", 30.0), **arguments)

    @property
    def status(self) -> StatusReply:
        return cast(StatusReply, self.request("status"))

    @property
    def counters(self) -> Counters:
        return self.status["counters"]

    @property
    def table(self) -> PeersReply:
        return cast(PeersReply, self.request("peers"))

    @property
    def evaluations(self) -> dict[int, float]:
        """Loss on the evaluation tokens, by step."""
        return {each["step"]: each["loss"] for each in self.request("history", since=0)["evaluations"]}

    @property
    def history(self) -> list[StepInfo]:
        return cast(list[StepInfo], self.request("history", since=0)["steps"])

    @property
    def p2pd(self) -> int:
        """The process id of its p2pd: the only child of the keeper, which is its own only child."""
        return _children(_children(self.process.pid)[0])[0]

    def wait_for_step(self, step: int, timeout_s: float = 60.0) -> None:
        self.request("wait", step=step, timeout_s=timeout_s, silence_s=timeout_s + 5)

    def wait_until_serving(self, timeout_s: float = 60.0) -> float:
        """Seconds from the start of its process until it served."""
        self.request("wait", serving=True, timeout_s=timeout_s, silence_s=timeout_s + 5)
        return time.monotonic() - self.began_s

    def wait_until_mid_step(self, step: int) -> None:
        """Until its ledger of `step` or a later one holds something and the step goes on."""
        self.wait_for_step(step)
        until(lambda: _is_mid_step(self.status, step))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def exit_code(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Waits for its end."""
        return self.process.wait(timeout_s)

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.log.splitlines() if line.startswith(ERROR_PREFIX)]


def _is_mid_step(status: StatusReply, step: int) -> bool:
    peer = status["peer"]
    return bool(peer["step"] >= step and peer["phase"] == "accumulating" and 0 < peer["done"] < status["run"]["microbatches_per_step"])


@dataclass(slots=True)
class Swarm:
    """Daemons of one run. `start` starts the organiser's, `join` one more."""

    manifest: Manifest
    daemons: list[Daemon] = field(default_factory=list)
    folder: Path = field(init=False)

    def __enter__(self) -> Swarm:
        self.folder = Path(tempfile.mkdtemp(prefix="peerd-t-", dir="/tmp"))
        for name in ("organiser", "tmp", "logs"):
            (self.folder / name).mkdir()
        (self.folder / "organiser" / "run.toml").write_text(dump(self.manifest))
        create_key(self.folder / "organiser" / KEY_FILE)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            left = self._end_all() + self._leftovers()
            problem = AssertionError(f"left behind: {left}") if left and error is None else None
            self._note_logs(error or problem)
        finally:
            for process in self.processes():
                os.kill(process, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)
        if problem is not None:
            raise problem

    # Starting

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PEERD_READY": "json",
            "TMPDIR": str(self.folder / "tmp"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "XDG_STATE_HOME": str(self.folder / "state"),
        }

    @property
    def run_file(self) -> Path:
        return self.folder / "organiser" / "run.toml"

    @property
    def address(self) -> str:
        """What others join with: the first daemon's."""
        return self.daemons[0].ready.join

    def new_home(self) -> Home:
        """A home that does not exist yet."""
        return Home(self.folder / "h" / str(len(self.daemons)))

    def start(self, **settings: Any) -> Daemon:
        return self.spawn(run_file=str(self.run_file), **settings)

    def join(self, stage: int = -1, **settings: Any) -> Daemon:
        """A daemon that has the run's data unless `data` says otherwise."""
        data = settings.pop("data", self.manifest.data.source)
        return self.spawn(stage=stage, join=settings.pop("join", None) or self.address, data=data, **settings)

    def spawn(self, *, cache: Path | None = None, within: str = "", **settings: Any) -> Daemon:
        """Returns at once; `ready` waits."""
        usual = {"device": "cpu", "dashboard": False, "follow_parent": True, "ephemeral": True}
        known: dict[str, Any] = {"home": str(self.new_home().folder), **usual}
        return self.spawn_with(Settings(**{**known, **settings}), cache=cache, within=within)

    def spawn_with(
        self, settings: Settings, most_file_bytes: int | None = None, clock_off_s: float = 0.0, cache: Path | None = None, within: str = ""
    ) -> Daemon:
        """`most_file_bytes` stands for a full disk: no longer file can be written, but for the log. `cache` for another machine's.
        `within` is a network namespace."""
        log_file = self.folder / "logs" / f"{len(self.daemons)}.log"
        command = module_command("peerd.daemon", settings.to_json())
        environment = {
            **self.environment,
            **(self.clock_off_by(clock_off_s) if clock_off_s else {}),
            **({"XDG_CACHE_HOME": str(cache)} if cache else {}),
        }
        imports_the_same = environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
        kind = Forked if CAN_FORK and imports_the_same and most_file_bytes is None and not within else subprocess.Popen[bytes]
        if most_file_bytes is not None:
            command = ["bash", "-c", LIMITED, str(log_file), str(most_file_bytes), *command]
        if within:
            command = ["ip", "netns", "exec", within, *command]
        with log_file.open("wb") as log:
            process = kind(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        daemon = Daemon(settings, process, log_file, time.monotonic())
        self.daemons.append(daemon)
        return daemon

    def clock_off_by(self, seconds: float) -> dict[str, str]:
        """The environment of a process whose wall clock is off: Python imports sitecustomize at its start."""
        folder = self.folder / f"clock-{seconds:g}"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(f"import time\nright = time.time\ntime.time = lambda: right() + {seconds!r}\n")
        return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [self.environment.get("PYTHONPATH")])])}

    # Looking

    @property
    def living(self) -> list[Daemon]:
        return [daemon for daemon in self.daemons if daemon.process.poll() is None]

    def wait_for_step(self, step: int, timeout_s: float = 60.0) -> None:
        for daemon in self.living:
            daemon.wait_for_step(step, timeout_s)

    def total(self, name: str) -> int:
        """Sum of a counter over those alive."""
        return sum(int(dict(daemon.counters)[name]) for daemon in self.living)  # type: ignore[call-overload]

    def assert_exact(self) -> None:
        """Nothing was counted twice, left out, or given up, and no bug showed."""
        for name in ("duplicate_microbatches", "lost_microbatches", "inexact_steps", "internal_errors"):
            assert {name: self.total(name)} == {name: 0}

    def export(self, daemon: Daemon) -> Path:
        folder = self.folder / "exported"
        daemon.request("export", folder=str(folder))
        return folder

    def processes(self) -> list[int]:
        """Every live process that belongs to this swarm."""
        return [
            *_processes_with(str(self.folder).encode()),
            *(each.process.pid for each in self.living if isinstance(each.process, Forked)),
        ]

    # Ending

    def _end_all(self) -> list[str]:
        """Returns those that had to be killed, in words."""
        for daemon in self.living:
            daemon.signal(signal.SIGCONT)
            assert daemon.process.stdin is not None
            daemon.process.stdin.close()  # whoever started it is gone, for all it knows
            if not daemon.was_ready:
                daemon.signal(signal.SIGTERM)
        stubborn = []
        for daemon in self.daemons:
            try:
                daemon.process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                stubborn.append(f"{daemon.home.folder.name} did not end")
                daemon.signal(signal.SIGUSR1)  # its log says what it waits for
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.process.wait(STACKS_S)
                daemon.kill()
            _close_pipes(daemon)
        return stubborn

    def _leftovers(self) -> list[str]:
        """Processes and files that outlived their daemons; the keepers get a moment to sweep."""
        deadline = time.monotonic() + LEFTOVERS_GONE_WITHIN_S
        while (left := list(self._left_now())) and time.monotonic() < deadline:
            time.sleep(LOOK_AGAIN_S)
        return left

    def _left_now(self) -> Iterator[str]:
        for process in self.processes():
            yield f"process {process}: {_command_of(process)}"
        for folder in ("h", "tmp", "state"):
            yield from (str(path) for path in (self.folder / folder).rglob("*") if not _is_torchs(path))
        yield from (str(path) for path in (self.folder / "cache").rglob("*") if path.suffix not in ("", ".bin", ".json"))
        yield from (str(path) for path in Path("/tmp").glob("hivemind-*"))

    def _note_logs(self, error: BaseException | None) -> None:
        if error is not None:
            for daemon in self.daemons:
                error.add_note(f"-- {daemon.log_file.name} (exit {daemon.process.returncode}):\n{daemon.log[-12000:]}")


def _is_torchs(path: Path) -> bool:
    """The empty folder that importing torch's compiler makes, once for all programs of a user."""
    return path.name.startswith("torchinductor_") and path.is_dir()


def _close_pipes(daemon: Daemon) -> None:
    for pipe in (daemon.process.stdin, daemon.process.stdout):
        if pipe is not None and not pipe.closed:
            pipe.close()


def _processes_with(mark: bytes) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes():
                yield int(entry.name)
        except OSError:
            continue


def _command_of(process: int) -> str:
    try:
        return (Path("/proc") / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "gone"


def run_peerd(
    environment: dict[str, str], *arguments: object, timeout_s: float = 120.0, within: str = ""
) -> subprocess.CompletedProcess[str]:
    """One command line of the real client, in a process of its own, maybe `within` a network namespace."""
    command = [
        *(["ip", "netns", "exec", within] if within else []),
        sys.executable,
        "-P",
        "-c",
        "from peerd.cli.main import main; main()",
        *map(str, arguments),
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
