"""The demo's daemons: real ones, each with its own home, started, watched, killed on demand and always cleaned up.

Decides nothing about training. A daemon leaves when its standard input closes, so none outlives the demo, and removes
its own home; its log is a file without a name, so that not even a killed demo leaves one behind.
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
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, cast

from peerd.cli.demo_figures import Fault, Observed
from peerd.cli.demo_plan import DemoPlan, Kill
from peerd.cli.demo_process import DemoDaemon, bequeath
from peerd.cli.launch import DaemonFailedError, Ready, describe_exit, module_command, wait_until_ready
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.control.protocol import PeersReply, StatusReply, StepInfo
from peerd.errors import DiskError, PeerdError

READY_TIMEOUT_S = 240.0
POLL_SILENCE_S = 3.0
LEAVE_SILENCE_S = 2.0
LEAVE_GRACE_S = 15.0
TERMINATE_GRACE_S = 5.0
MAX_THREADS = 256
MOST_STARTING = max(2, os.cpu_count() or 1)
"""Daemons at a time: each takes a core for seconds until it can answer anybody."""
EXPORT_SILENCE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where on this machine a daemon runs; as it is, simply here and on loopback."""

    command: tuple[str, ...] = ()
    """What to put before its own."""
    host: str = ""
    """IPv4 address to listen on."""


def here(_peer: int) -> Placement:
    return Placement()


@dataclass(slots=True)
class DemoSwarm:
    """A context manager: on leaving it, however that happens, no daemon and no file is left."""

    plan: DemoPlan
    say: Callable[[str], None]
    module: str = "peerd.daemon"
    """What each daemon runs; a benchmark has its own."""
    place: Callable[[int], Placement] = here
    daemons: list[DemoDaemon] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    folder: Path = field(init=False)
    began: float = field(default_factory=time.monotonic)
    _history: dict[int, StepInfo] = field(default_factory=dict)
    _complete: bool = False
    """All have served at one time."""
    _pool: ThreadPoolExecutor = field(init=False)

    def __enter__(self) -> DemoSwarm:
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="peerd-demo-"))
        except OSError as error:
            raise DiskError(f"cannot make a temporary folder: {error.strerror}", "set TMPDIR to a folder you can write to") from None
        self._pool = ThreadPoolExecutor(max_workers=MAX_THREADS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._end_daemons()
        except KeyboardInterrupt:  # a second Ctrl-C: now
            self._kill(list(self.daemons))
        finally:
            for daemon in self.daemons:
                daemon.close()
            self._pool.shutdown(wait=False, cancel_futures=True)
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- starting -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the organiser's daemon and all others, few at a time; returns once each can be reached.

        Those that come up beside the first hear its address as soon as it has one.
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
        """The one that has been starting for longest can be reached."""
        daemon = next(each for each in self.daemons if each.ready is None)
        ready = self._await(daemon)
        if daemon is self.daemons[0]:
            for waiting in self.daemons[1:]:
                waiting.tell(ready.join)

    def spawn_another(self, stage: int, address: str, dead: DemoDaemon | None = None) -> None:
        """One more daemon, maybe in the place of a dead one; does not wait until it can be reached."""
        peer = len(self.daemons)
        why = " in a dead one's place" if dead is not None else ""
        self.say(f"starting peer {peer} (stage {stage}){why}")
        self._pool.submit(self._await_or_kill, self._join(peer, stage, address, dead.bequest if dead is not None else {}))

    def _join(self, peer: int, stage: int, address: str = "", bequest: Mapping[str, bytes] = MappingProxyType({})) -> DemoDaemon:
        """Where no address is given, at the first's, once that has one."""
        home = self._make_home(peer)
        bequeath(bequest, home)
        daemon = self._spawn(peer, stage, home, {"join": address, "join_told": not address, "data": self.plan.data_of_joiners})
        first = self.daemons[0].ready
        if not address and first is not None:
            daemon.tell(first.join)
        return daemon

    def _await_or_kill(self, daemon: DemoDaemon) -> None:
        """What became of it the next poll tells."""
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
            stay=True,
            device="cpu",
            compute_stand_in_ms=self.plan.stand_in_ms,
            slow_factor=self.plan.slow.get(peer, 1.0),
            allow_faults=self.plan.chaos is not None,
            dashboard=self.plan.observed and (peer == 0 or home.dashboard.exists()),
            observe=self.plan.observed,
            follow_parent=True,
            ephemeral=True,
            **purpose,
        )
        log = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - closed when the demo ends
        process = subprocess.Popen(
            [*place.command, *module_command(self.module, settings.to_json())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # so that Ctrl-C reaches the demo alone, which then ends them in order
            env={**os.environ, "PEERD_READY": "json"},
        )
        daemon = DemoDaemon(peer=peer, stage=settings.stage, home=home, process=process, log=log)
        self.daemons.append(daemon)
        return daemon

    def _await(self, daemon: DemoDaemon) -> Ready:
        try:
            daemon.ready = wait_until_ready(daemon.process, READY_TIMEOUT_S)
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
        """Up to the newest of which a daemon has told, those before the run's start included."""
        return max(self._history, default=-1) + 1

    @property
    def finished(self) -> bool:
        return bool(self.living) and all(daemon.step >= self.plan.steps for daemon in self.living)

    @property
    def steps_done(self) -> bool:
        """Some living daemon of each stage has done all steps."""
        done = {daemon.stage for daemon in self.living if daemon.step >= self.plan.steps}
        return len(done) == self.plan.num_stages

    def poll(self) -> None:
        """Ask every living daemon how it does; note who has ended."""
        self._note_faults()
        first_unknown = next(step for step in itertools.count() if step not in self._history)
        self.ask(living := self.living, POLL_SILENCE_S)
        list(self._pool.map(lambda daemon: self._ask_for_steps(daemon, first_unknown), living))
        self._note_faults()

    def ask(self, daemons: Sequence[DemoDaemon], silence_s: float) -> None:
        """Their status; of one that does not answer in time what was last heard stands."""
        list(self._pool.map(lambda daemon: self._ask_one(daemon, silence_s), daemons))

    def _ask_one(self, daemon: DemoDaemon, silence_s: float) -> None:
        daemon.answers = False
        if not daemon.stands_still:
            with contextlib.suppress(PeerdError):  # busy or just gone
                daemon.status = cast(StatusReply, daemon.client.request("status", silence_s=silence_s))
                daemon.answers = True

    def _ask_for_steps(self, daemon: DemoDaemon, since: int) -> None:
        if not daemon.answers:
            return
        with contextlib.suppress(PeerdError):
            for step in daemon.client.request("history", since=since, silence_s=POLL_SILENCE_S)["steps"]:
                if not self._history.setdefault(step["step"], step)["time_s"]:
                    self._history[step["step"]] = step  # a joiner knows the losses of steps before it came, not their times

    def table(self) -> PeersReply | None:
        """The swarm as the first living daemon has it."""
        for daemon in self.living:
            with contextlib.suppress(PeerdError):
                return cast(PeersReply, daemon.client.request("peers", silence_s=POLL_SILENCE_S))
        return None

    def labels(self) -> dict[str, str]:
        """Peer ids by the demo's own numbers."""
        return {daemon.ready.peer: f"peer {daemon.peer}" for daemon in self.daemons if daemon.ready is not None}

    def note(self, daemon: DemoDaemon, kind: str, detail: str) -> None:
        """Something befell a daemon now."""
        self.faults.append(
            Fault(
                t_s=round(time.monotonic() - self.began, 3),
                peer=daemon.peer,
                stage=daemon.stage,
                phase=daemon.phase,
                kind=kind,
                detail=detail,
            )
        )
        self.say(f"peer {daemon.peer} (stage {daemon.stage}) {detail} in step {daemon.step}, {daemon.phase}")

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
        """Raises PeerdError where a stage has no living peer left: then nothing can go on."""
        served = {daemon.stage for daemon in self.living}
        for stage in range(self.plan.num_stages):
            if stage not in served:
                dead = ", ".join(f"peer {fault.peer} {fault.detail}" for fault in self.faults if fault.stage == stage)
                raise PeerdError(f"stage {stage} has no living peer left ({dead})", "start the demo with more --peers")

    def heard(self) -> tuple[object, ...]:
        """Changes whenever any daemon got anything done."""
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
        """SIGKILL whom --kill names at a step that the swarm has reached; returns those whose time is yet to come.

        Nobody dies before all have come to serve: the first ones train while others join, and who held a stage alone would take it along.
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
        """Have a living daemon write the whole model; the next one where it cannot."""
        problem: PeerdError | None = None
        for daemon in self.living:
            try:
                daemon.client.request("export", folder=str(folder), silence_s=EXPORT_SILENCE_S, on_progress=self.say)
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
        list(self._pool.map(_ask_to_leave, (daemon for daemon in living if daemon.ready is not None)))
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
    with contextlib.suppress(PeerdError):  # not up yet, or gone: closing its standard input says the same
        daemon.client.request("leave", now=True, silence_s=LEAVE_SILENCE_S)


def _still_alive_after(daemons: list[DemoDaemon], grace_s: float) -> list[DemoDaemon]:
    deadline = time.monotonic() + grace_s
    for daemon in daemons:
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.process.wait(max(0.0, deadline - time.monotonic()))
    return [daemon for daemon in daemons if daemon.alive]
