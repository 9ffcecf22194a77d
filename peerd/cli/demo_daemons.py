"""The demo's daemons: real daemons, each with its own home. They are started, watched, killed on demand and always cleaned up.

A daemon leaves when its standard input closes, so that it ends with the demo, and removes its own home. Its log is a file without a
name, so that not even a killed demo leaves one behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, cast

from peerd.cli.demo_figures import Fault, Observed
from peerd.cli.demo_plan import DemoPlan, Kill
from peerd.cli.demo_process import DemoDaemon, bequeath
from peerd.cli.launch import DaemonFailedError, Ready, describe_exit, module_command, signs_of, wait_until_ready
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.control.protocol import PeersReply, StatusReply, StepInfo
from peerd.errors import DivergedError, PeerdError, disk_error

READY_SILENCE_S = 240.0
POLL_SILENCE_S = 3.0
LEAVE_SILENCE_S = 2.0
LEAVE_GRACE_S = 15.0
TERMINATE_GRACE_S = 5.0
MAX_THREADS = 256
MOST_STARTING = max(2, os.cpu_count() or 1)
"""Number of daemons that start at the same time. Each needs a core for seconds until it can answer."""
EXPORT_SILENCE_S = 600.0
EXPORT_WAIT_S = 60.0
"""For the stages to be at one step; the downloads take as long as they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The place of a daemon on this machine; by default the same network namespace, on loopback."""

    command: tuple[str, ...] = ()
    """Prefix of the daemon's command."""
    host: str = ""
    """IPv4 address to listen on."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from those of a demo's other daemons."""


def here(_peer: int) -> Placement:
    return Placement()


@dataclass(slots=True)
class DemoSwarm:
    """A context manager that leaves no daemon and no file, however the block ends."""

    plan: DemoPlan
    say: Callable[[str], None]
    module: str = "peerd.daemon"
    """Python module that each daemon runs; a benchmark has its own."""
    place: Callable[[int], Placement] = here
    daemons: list[DemoDaemon] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    folder: Path = field(init=False)
    began: float = field(default_factory=time.monotonic)
    _history: dict[int, StepInfo] = field(default_factory=dict)
    _complete: bool = False
    """True once all living daemons served at the same time."""
    pool: ThreadPoolExecutor = field(init=False)

    def __enter__(self) -> DemoSwarm:
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="peerd-demo-"))
        except OSError as error:
            raise disk_error(Path(tempfile.gettempdir()), error, "set TMPDIR to a folder you can write to") from None
        self.pool = ThreadPoolExecutor(max_workers=MAX_THREADS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._end_daemons()
        except KeyboardInterrupt:  # a second Ctrl-C: kill at once
            self._kill(list(self.daemons))
        finally:
            for daemon in self.daemons:
                daemon.close()
            self.pool.shutdown(wait=False, cancel_futures=True)
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- starting -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the organiser's daemon and all others, few at a time. Returns once each can be reached.

        Daemons that start at the same time as the first receive its address as soon as it has one.
        """
        home = self._make_home(0)
        self._write_run(home.folder)
        self.say("starting peer 0 (stage 0), the organiser's")
        self._spawn(0, 0, home, {"run_file": str(home.folder / "run.toml")})
        for peer in range(1, self.plan.num_peers):
            if peer >= MOST_STARTING:
                self._await_next()
            self.say(f"starting peer {peer} (stage {self.plan.stage_of(peer)}), which joins the first")
            self._join(peer, self.plan.stage_of(peer))
        while any(daemon.ready is None for daemon in self.daemons):
            self._await_next()

    def _await_next(self) -> None:
        """Wait until the first of the starting daemons can be reached."""
        daemon = next(each for each in self.daemons if each.ready is None)
        ready = self._await(daemon)
        if daemon is self.daemons[0]:
            for waiting in self.daemons[1:]:
                waiting.tell(ready.join)

    def spawn_another(self, stage: int, address: str, dead: DemoDaemon | None = None) -> None:
        """Start another daemon, possibly as a replacement, without waiting until it can be reached."""
        peer = len(self.daemons)
        why = " in a dead one's place" if dead is not None else ""
        self.say(f"starting peer {peer} (stage {stage}){why}")
        self.pool.submit(self._await_or_kill, self._join(peer, stage, address, dead.bequest if dead is not None else {}))

    def spawn_again(self, daemon: DemoDaemon, address: str) -> DemoDaemon:
        """Kill a daemon, and start it from what is on its disk; without an address it rejoins the peers that it remembers."""
        peer, daemon.noted, daemon.replaced = len(self.daemons), True, True
        home = Home(self.folder / str(peer))
        daemon.kill_saving_disk(home)
        self.say(f"starting peer {peer} (stage {daemon.stage}), which is peer {daemon.peer} again")
        again = self._spawn(peer, daemon.stage, home, {"join": address, "data": self.plan.data_of_joiners})
        self.pool.submit(self._await_or_kill, again)
        return again

    def _join(self, peer: int, stage: int, address: str = "", bequest: Mapping[str, bytes] = MappingProxyType({})) -> DemoDaemon:
        """Start a daemon that joins at the address; without one it joins the first daemon, once that has an address."""
        home = self._make_home(peer)
        bequeath(bequest, home)
        daemon = self._spawn(peer, stage, home, {"join": address, "join_told": not address, "data": self.plan.data_of_joiners})
        first = self.daemons[0].ready
        if not address and first is not None:
            daemon.tell(first.join)
        return daemon

    def _await_or_kill(self, daemon: DemoDaemon) -> None:
        """Wait for the daemon, or kill it. The next poll reports its end."""
        try:
            self._await(daemon)
        except PeerdError:
            daemon.process.kill()

    def _make_home(self, peer: int) -> Home:
        home = Home(self.folder / str(peer))
        home.folder.mkdir(mode=0o700)
        return home

    def _write_run(self, folder: Path) -> None:
        from peerd.config import manifest
        from peerd.config.organiser import KEY_FILE, create_key

        (folder / "run.toml").write_text(manifest.dump(self.plan.manifest), encoding="utf-8")
        create_key(folder / KEY_FILE)

    def _spawn(self, peer: int, stage: int, home: Home, purpose: dict[str, Any]) -> DemoDaemon:
        place = self.place(peer)
        settings = Settings(
            host=place.host,
            port_mapping=not place.host,
            home=str(home.folder),
            stage=stage,
            keeps_stage=True,
            device="cpu",
            compute_stand_in_ms=self.plan.stand_in_ms,
            slow_factor=self.plan.slow.get(peer, 1.0),
            allow_faults=self.plan.chaos is not None,
            dashboard=self.plan.observed and (peer == 0 or home.dashboard.exists()),
            observe=self.plan.observed,
            follow_parent=True,
            ephemeral=True,
            **purpose | {"moves": self.plan.moves},
        )
        log = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - closed when the demo ends
        process = subprocess.Popen(
            [*place.command, *module_command(self.module, replace(settings, **place.settings).to_json())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            process_group=0,  # Ctrl-C reaches only the demo, which ends them in order. Sessions would not share cores by niceness
            env={**os.environ, "PEERD_READY": "json"},
        )
        daemon = DemoDaemon(peer=peer, stage=settings.stage, home=home, process=process, log=log)
        self.daemons.append(daemon)
        return daemon

    def _await(self, daemon: DemoDaemon) -> Ready:
        try:
            daemon.ready = wait_until_ready(daemon.process, READY_SILENCE_S, signs_of(daemon.process, daemon.log_bytes))
        except DaemonFailedError as failed:
            told = failed.told_by(daemon.log_tail(), None)
            raise type(told)(f"peer {daemon.peer}: {told.message}", told.remedy) from None
        return daemon.ready

    # -- watching -----------------------------------------------------------------------------------------------

    @property
    def living(self) -> list[DemoDaemon]:
        return [daemon for daemon in self.daemons if daemon.alive]

    @property
    def step(self) -> int:
        """The step that the swarm has reached."""
        return max((daemon.step for daemon in self.living), default=0)

    @property
    def steps(self) -> tuple[StepInfo, ...]:
        return tuple(self._history[step] for step in sorted(self._history))

    @property
    def num_steps_told(self) -> int:
        """Number of steps up to the newest reported one, including those before the run's start."""
        return max(self._history, default=-1) + 1

    @property
    def finished(self) -> bool:
        return bool(self.living) and all(daemon.step >= self.plan.steps for daemon in self.living)

    @property
    def steps_done(self) -> bool:
        """True if at least one living daemon of each stage has done all steps."""
        done = {daemon.stage for daemon in self.living if daemon.step >= self.plan.steps}
        return len(done) == self.plan.num_stages

    def poll(self) -> None:
        """Ask every living daemon for its status and steps, and note daemons that have ended."""
        self._note_faults()
        first_unknown = next(step for step in itertools.count() if step not in self._history)
        self.ask(living := self.living, POLL_SILENCE_S)
        list(self.pool.map(lambda daemon: self._ask_for_steps(daemon, first_unknown), living))
        self._note_faults()
        self._require_sound()

    def _require_sound(self) -> None:
        """Raise DivergedError once every living daemon says that the run has diverged."""
        statuses = [daemon.status for daemon in self.living]
        said = [item["title"] for status in statuses if status for item in status["health"] if item["code"] == "diverged"]
        if said and len(said) == len(statuses):
            raise DivergedError(said[0], "choose a lower train.learning_rate")

    def ask(self, daemons: Sequence[DemoDaemon], silence_s: float) -> None:
        """Update the status of these daemons. A daemon that does not answer in time keeps its last status."""
        list(self.pool.map(lambda daemon: self._ask_one(daemon, silence_s), daemons))

    def _ask_one(self, daemon: DemoDaemon, silence_s: float) -> None:
        daemon.answers = False
        if not daemon.stands_still:
            with contextlib.suppress(PeerdError):  # busy, or it has just ended
                daemon.status = cast(StatusReply, daemon.client.request("status", silence_s=silence_s))
                daemon.answers = True

    def _ask_for_steps(self, daemon: DemoDaemon, since: int) -> None:
        if not daemon.answers:
            return
        with contextlib.suppress(PeerdError):
            for step in daemon.client.request("history", since=since, silence_s=POLL_SILENCE_S)["steps"]:
                if not self._history.setdefault(step["step"], step)["time_s"]:
                    self._history[step["step"]] = step  # a joined daemon knows losses of earlier steps, but not their times

    def table(self, seen_by: Sequence[DemoDaemon] = ()) -> PeersReply | None:
        """The swarm as the first of these daemons sees it; by default the first living one."""
        for daemon in seen_by or self.living:
            with contextlib.suppress(PeerdError):
                return cast(PeersReply, daemon.client.request("peers", silence_s=POLL_SILENCE_S))
        return None

    def labels(self) -> dict[str, str]:
        """The demo's number of each peer, by peer id."""
        return {daemon.ready.peer: f"peer {daemon.peer}" for daemon in self.daemons if daemon.ready is not None}

    def note(self, daemon: DemoDaemon, kind: str, detail: str) -> Fault:
        """Record a fault of a daemon."""
        t_s = round(time.monotonic() - self.began, 3)
        fault = Fault(t_s=t_s, peer=daemon.peer, stage=daemon.stage, phase=daemon.phase, kind=kind, detail=detail)
        self.faults.append(fault)
        self.say(f"peer {daemon.peer} (stage {daemon.stage}) {detail} in step {daemon.step}, {daemon.phase}")
        return fault

    def amend(self, fault: Fault, detail: str, lasted_s: float, steps_again: int = 0) -> None:
        """Say how a fault that lasted ended, and what it cost."""
        ended = replace(fault, detail=detail, lasted_s=round(lasted_s, 3), steps_again=steps_again)
        self.faults[self.faults.index(fault)] = ended
        self.say(f"peer {fault.peer} (stage {fault.stage}) {detail}")

    def _note_faults(self) -> None:
        for daemon in self.daemons:
            if daemon.alive or daemon.noted:
                continue
            daemon.noted = True
            self.note(daemon, "kill" if daemon.killed else "ended", describe_exit(daemon.process.returncode))
            if not daemon.killed:
                self._say_last_words(daemon)

    def _say_last_words(self, daemon: DemoDaemon) -> None:
        for line in daemon.log_tail().strip().splitlines()[-5:]:
            self.say(f"  peer {daemon.peer} said: {line[:300]}")

    def require_every_stage(self) -> None:
        """Raises PeerdError if a stage has no living peer left, because training cannot continue."""
        served = {daemon.stage for daemon in self.living}
        for stage in range(self.plan.num_stages):
            if stage not in served:
                dead = ", ".join(f"peer {fault.peer} {fault.detail}" for fault in self.faults if fault.stage == stage)
                raise PeerdError(f"stage {stage} has no living peer left ({dead})", "start the demo with more --peers")

    def heard(self) -> tuple[object, ...]:
        """A value that changes whenever a daemon makes progress."""
        return tuple(daemon.done for daemon in self.daemons if daemon.status is not None)

    def observed(self) -> Observed:
        return Observed(
            steps=self.steps,
            counters={daemon.peer: daemon.status["counters"] for daemon in self.daemons if daemon.status is not None},
            faults=tuple(self.faults),
            stages_of_replacements=tuple(daemon.stage for daemon in self.daemons[self.plan.num_peers :]),
            duration_s=time.monotonic() - self.began,
        )

    # -- acting -------------------------------------------------------------------------------------------------

    def kill_due(self, kills: tuple[Kill, ...]) -> tuple[Kill, ...]:
        """Send SIGKILL to the daemons whose --kill step is reached. Returns the kills that are not due yet.

        No daemon is killed before all serve: the first ones train while others join, and a stage with one peer would be lost with it.
        """
        self._complete = self._complete or all(daemon.serves for daemon in self.living)
        if not self._complete:
            return kills
        step = self.step
        for kill in kills:
            daemon = self.daemons[kill.peer]
            if kill.step <= step and daemon.alive:
                daemon.kill()
        return tuple(kill for kill in kills if kill.step > step)

    def export(self, folder: Path) -> None:
        """Let a living daemon export the whole model; if it fails, try the next one."""
        problem: PeerdError | None = None
        for daemon in self.living:
            try:
                daemon.client.request(
                    "export", folder=str(folder), timeout_s=EXPORT_WAIT_S, silence_s=EXPORT_SILENCE_S, on_progress=self.say
                )
            except PeerdError as error:
                problem = error
            else:
                return
        raise problem or PeerdError("no daemon is left to export from")

    # -- ending -------------------------------------------------------------------------------------------------

    def _end_daemons(self) -> None:
        """Ask each to leave at once, close its standard input, then SIGTERM, then SIGKILL, each with its grace."""
        living = self.living
        for daemon in living:
            daemon.wake()
        list(self.pool.map(_ask_to_leave, (daemon for daemon in living if daemon.ready is not None)))
        for daemon in living:
            daemon.close_stdin()
            if daemon.ready is None:  # it may not be listening to anything yet
                daemon.process.terminate()
        left = _still_alive_after(living, LEAVE_GRACE_S)
        for daemon in left:
            daemon.process.terminate()
        self._kill(_still_alive_after(left, TERMINATE_GRACE_S))

    def _kill(self, daemons: list[DemoDaemon]) -> None:
        for daemon in daemons:
            daemon.process.kill()
        for daemon in daemons:
            daemon.process.wait()
            daemon.wake()


def _ask_to_leave(daemon: DemoDaemon) -> None:
    with contextlib.suppress(PeerdError):  # not up yet, or ended: closing its standard input has the same effect
        daemon.client.request("leave", now=True, silence_s=LEAVE_SILENCE_S)


def _still_alive_after(daemons: list[DemoDaemon], grace_s: float) -> list[DemoDaemon]:
    deadline = time.monotonic() + grace_s
    for daemon in daemons:
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.process.wait(max(0.0, deadline - time.monotonic()))
    return [daemon for daemon in daemons if daemon.alive]
