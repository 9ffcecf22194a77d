"""Contenders that train in turns on one machine: while one works, the others are frozen (SIGSTOP).

The other load of a machine changes within seconds, so sides that run one after another for a minute each cannot be compared.
Here each side does a step or two in its turn, and its clock runs only in its turns.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Protocol, cast

from peerd.cli.demo_daemons import DemoSwarm, Placement, here
from peerd.cli.demo_plan import DemoPlan
from peerd.cli.launch import module_command
from peerd.config.manifest import Manifest
from peerd.control.client import ControlClient
from peerd.control.protocol import TraceReply
from peerd.errors import PeerdError
from scripts.benchmarks._namespaces import DEVICE, Network
from scripts.benchmarks._report import progress
from scripts.benchmarks._sides import sweep_sockets
from scripts.benchmarks._workers import Job

POLL_S = 0.5
"""Polling takes processor time from the team; its moment does not matter, because steps carry the time of their end."""
SILENCE_S = 600.0
HITCHES = ("suppressed_microbatches", "replayed_microbatches", "ledger_resets", "rounds_failed", "faults_seen")
GUARD = "import os, signal, sys\nfor pid in sys.stdin.read().split():\n  try: os.kill(int(pid), signal.SIGCONT)\n  except OSError: pass"
"""A process that thaws frozen processes when the benchmark has ended in any way; they then exit by themselves."""


@dataclass(frozen=True, slots=True)
class Step:
    time_s: float
    """Wall clock at the end of the step."""
    loss: float


class Team(Protocol):
    """Processes that train together, from the return of `start` until the context ends."""

    def start(self) -> None: ...

    def pids(self) -> Sequence[int]: ...

    def steps(self) -> Sequence[Step]:
        """All finished steps. Call it only while the team is not frozen."""
        ...

    def __enter__(self) -> Team: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def place_in(network: Network | None) -> Callable[[int], Placement]:
    """If there is a network, each daemon has one of its machines."""
    if network is None:
        return here
    return lambda peer: Placement(command=network.command(peer), host=network.address(peer))


class Peers:
    """One daemon per stage, or `num_peers` daemons."""

    def __init__(
        self,
        manifest: Manifest,
        observed: bool = True,
        per_stage: int = 1,
        stand_in_ms: float = 0.0,
        place: Callable[[int], Placement] = here,
        slow: Mapping[int, float] = MappingProxyType({}),
        num_peers: int = 0,
    ) -> None:
        num_peers = num_peers or per_stage * manifest.train.num_stages
        plan = DemoPlan(manifest=manifest, num_peers=num_peers, slow=slow, kills=(), chaos=None, stand_in_ms=stand_in_ms, observed=observed)
        self._swarm = DemoSwarm(plan, lambda _text: None, place=place)
        self._steps: list[Step] = []
        self.dashboard = ""
        """The dashboard's address, once the swarm runs and if it has one."""

    def start(self) -> None:
        self._swarm.start()
        self.dashboard = str(self._swarm.daemons[0].client.request("status", silence_s=3.0)["dashboard"])

    def pids(self) -> Sequence[int]:
        """The daemons' processes. p2pd is not among them: it only carries bytes, and keeps connections alive."""
        return [daemon.process.pid for daemon in self._swarm.daemons]

    def steps(self) -> Sequence[Step]:
        self._swarm.require_every_stage()
        client = self._swarm.daemons[self._swarm.plan.num_stages - 1].client
        with contextlib.suppress(PeerdError):  # a busy daemon: the next poll asks again
            found = client.request("history", since=len(self._steps), silence_s=3.0)["steps"]
            self._steps += [Step(step["time_s"], step["loss"]) for step in itertools.takewhile(lambda step: step["time_s"] > 0, found)]
        return self._steps

    def trace(self, num_steps: int) -> TraceReply:
        """The daemons' spans of the step under way and the following ones."""
        client = self._swarm.daemons[0].client
        return cast("TraceReply", client.request("trace", steps=num_steps, timeout_s=SILENCE_S, silence_s=SILENCE_S))

    def links(self) -> list[tuple[int, str, str]]:
        """The links whose codecs are chosen as the swarm runs: the caller's stage, the tensor and its codec."""
        self._swarm.ask(self._swarm.living, SILENCE_S)
        told = [(daemon.stage, daemon.status["links"]) for daemon in self._swarm.living if daemon.status is not None]
        return [(stage, link["tensor"], link["codec"]) for stage, links in told for link in links]

    def counters(self, names: Sequence[str] = HITCHES) -> dict[str, int]:
        """Sums over all daemons; by default the counts that should be 0 in a fair race."""
        self._swarm.poll()
        told: list[Mapping[str, int]] = [dict(daemon.status["counters"]) for daemon in self._swarm.daemons if daemon.status is not None]  # type: ignore[arg-type]
        return {name: sum(counters[name] for counters in told) for name in names}

    @property
    def clients(self) -> list[ControlClient]:
        """One for each daemon."""
        return [daemon.client for daemon in self._swarm.daemons]

    def __enter__(self) -> Peers:
        self._swarm.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._swarm.__exit__(kind, error, trace)


@dataclass(slots=True)
class Workers:
    """Baseline processes, of which the last reports."""

    jobs: Sequence[Job]
    report: Path
    network: Network | None = None
    """If there is a network, each job has one of its machines."""
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        interface = "lo" if self.network is None else DEVICE
        for machine, job in enumerate(self.jobs):
            there = () if self.network is None else self.network.command(machine)
            with self.report.open("wb") if job is self.jobs[-1] else Path(os.devnull).open("wb") as output:
                process = subprocess.Popen(
                    [*there, *module_command("scripts.benchmarks._workers", job.to_json())],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    start_new_session=True,  # so that Ctrl-C reaches only the benchmark
                    env={**os.environ, "GLOO_SOCKET_IFNAME": interface, "HIVEMIND_LOGLEVEL": "CRITICAL"},
                )
            self._processes.append(process)

    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._processes]

    def steps(self) -> Sequence[Step]:
        for process in self._processes:
            if process.poll() is not None:
                raise PeerdError(f"a worker ended with exit code {process.returncode}")
        lines = self.report.read_text(encoding="utf-8").splitlines(keepends=True)
        return [Step(**json.loads(line)) for line in lines if line.endswith("\n")]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # including its forked processes
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        if any(job.kind == "mediated" for job in self.jobs):
            sweep_sockets()


@dataclass(slots=True)
class Contender:
    """A team with a clock of its own."""

    name: str
    team: Team
    steps: Sequence[Step] = ()
    _begins: list[float] = field(default_factory=list)
    """For each turn the wall clock at its beginning, and the time worked until then."""
    _before: list[float] = field(default_factory=list)
    _worked_s: float = 0.0

    def warm_up(self, num_steps: int) -> None:
        """Start the team, do the first steps, and freeze it."""
        began = time.time()
        self.team.start()
        self._work_until(num_steps, began)

    def turn(self, num_steps: int) -> float:
        """Do `steps` more steps. Returns the seconds of work per step."""
        before, last = self.stretch(num_steps)
        return (self.worked_s(last.time_s) - self.worked_s(before.time_s)) / num_steps

    def stretch(self, num_steps: int) -> tuple[Step, Step]:
        """Do `steps` more steps. Returns the step before them and the last of them."""
        self.thaw()
        began = time.time()
        done = len(self.team.steps())
        steps = self._work_until(done + num_steps, began)
        return steps[done - 1], steps[done + num_steps - 1]

    def thaw(self) -> None:
        for pid in self.team.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def freeze(self) -> None:
        for pid in self.team.pids():
            os.kill(pid, signal.SIGSTOP)

    def _work_until(self, num_steps: int, began: float) -> Sequence[Step]:
        self._begins.append(began)
        self._before.append(self._worked_s)
        while len(steps := self.team.steps()) < num_steps:
            if time.time() - began > SILENCE_S:
                raise PeerdError(f"{self.name}: nothing done for {SILENCE_S:.0f} s")
            time.sleep(POLL_S)
        self.freeze()
        self._worked_s += time.time() - began
        self.steps = tuple(steps)
        return steps

    def worked_s(self, wall_s: float) -> float:
        """The time worked until then. A step never ends while its team is frozen."""
        turn = max(0, bisect.bisect_right(self._begins, wall_s) - 1)
        return self._before[turn] + wall_s - self._begins[turn]


@contextlib.contextmanager
def warmed_up(contenders: Sequence[Contender], steps: int) -> Iterator[None]:
    """Start all contenders; each does its first steps and is frozen. However the context ends, none stays frozen."""
    with contextlib.ExitStack() as stack:
        for contender in contenders:
            stack.enter_context(contender.team)
        keeper = stack.enter_context(subprocess.Popen([sys.executable, "-c", GUARD], stdin=subprocess.PIPE, start_new_session=True))
        assert keeper.stdin is not None
        for contender in contenders:
            stack.callback(contender.thaw)
        for contender in contenders:
            progress(f"warming up {contender.name}")
            contender.warm_up(steps)
            keeper.stdin.write("".join(f"{pid}\n" for pid in contender.team.pids()).encode())
            keeper.stdin.flush()
        yield
