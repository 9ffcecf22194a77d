"""A real model of home size through its whole life on this machine: what each daemon takes of its memory, beside the estimate.

2 stages x 2 peers: they start, train 5 steps, lose a peer by SIGKILL, take a joiner, export, are all killed, and resume from their disks.
In each of these moments every daemon's peak (VmHWM, less what a daemon of a tiny model has) is compared with the estimate of its stage.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from peerd.cli.demo_daemons import DemoSwarm, Placement
from peerd.cli.demo_plan import DemoPlan
from peerd.cli.demo_process import DemoDaemon
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.config.paths import Home
from peerd.errors import PeerdError, TimedOutError
from peerd.models.stages import estimate_stage_memory, initial_parameter_spec
from scripts.benchmarks._report import SCHEMA, progress

NUM_STAGES, NUM_PEERS, STEPS = 2, 4, 5
VOCABULARY, SEQUENCE, MICROBATCHES = 32_000, 256, 4
D_MODEL = {30: 320, 100: 576, 300: 1024}
"""By millions of parameters: 14 layers, feed-forward four times as wide."""
LOOK_S, SILENCE_S, STEP_SILENCE_S, READ_S = 1.0, 10.0, 900.0, 30.0
OVER = 1.10
"""The most that a peak may be of its estimate."""
MOST_GB = 20.0
"""Of all daemons together."""
MOST_LATE_S = 0.05
"""Lateness of a daemon's event loop at 99.9 %, above that of an empty loop beside it."""
LAG = re.compile(r'^peerd_event_loop_lag_quantile_seconds\{.*?share="0\.999".*?\} ([0-9.e+-]+)$', re.MULTILINE)
HITCHES = ("rounds_failed", "replayed_microbatches", "faults_seen", "internal_errors")
TELLING = ("round closed", "a round goes on without a member", "error")
"""Parts of the lines of logs that say what a hitch was."""
MUST_BE_0 = ("duplicate_microbatches", "lost_microbatches", "inexact_steps", "internal_errors")


@dataclass(slots=True, kw_only=True)
class Moment:
    """One part of the swarm's life."""

    name: str
    seconds: float = 0.0
    peaks: dict[int, float] = field(default_factory=dict)
    """By daemon, its peak over the estimate."""
    together_gb: float = 0.0
    """The largest sum of all daemons' resident sets at one time."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late event loops were at 99.9 % in five minutes: the latest of the daemons', and the latest of as many empty ones beside them."""

    until: str
    late_s: float
    empty_s: float

    @property
    def above_s(self) -> float:
        return self.late_s - self.empty_s

    @property
    def words(self) -> str:
        late_ms, empty_ms = 1000 * self.late_s, 1000 * self.empty_s
        return f"{self.until} event loops are late by up to {late_ms:.0f} ms at 99.9 %, as many empty ones by up to {empty_ms:.0f} ms"


@dataclass(slots=True)
class Life:
    swarm: DemoSwarm
    base_bytes: int
    empty_loops: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Holds those that run beside now."""
    ask_empty_s: list[Callable[[], float]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    lateness: list[Lateness] = field(default_factory=list)
    hitches: dict[int, Counter[str]] = field(default_factory=dict)
    """What each daemon had counted at the end of the last moment."""
    missed: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def moment(self, name: str, faults: bool = False) -> Iterator[Moment]:
        """Measure what happens in the block. Without `faults` nothing is to fail there, or to be launched again."""
        now, began_s = Moment(name=name), time.monotonic()
        self.moments.append(now)
        for daemon in self.swarm.living:
            _forget_peak(daemon)
        yield now
        self._note_peaks()
        if not faults:
            self._look_for_hitches(name)
        self.hitches = {daemon.peer: self._hitches_of(daemon) for daemon in self.swarm.living}
        now.seconds = round(time.monotonic() - began_s, 1)
        peaks = ", ".join(f"peer {peer} {share:.2f}" for peer, share in sorted(now.peaks.items()))
        progress(f"{name}: {now.seconds:.0f} s; peak over estimate: {peaks}; together {now.together_gb:.1f} GB")

    def _hitches_of(self, daemon: DemoDaemon) -> Counter[str]:
        counters = dict(daemon.status["counters"]) if daemon.status is not None else {}
        return Counter({name: int(counters.get(name, 0)) for name in HITCHES})  # type: ignore[call-overload]

    def _look_for_hitches(self, name: str) -> None:
        """Miss what each daemon has counted since the moment before, or since it began."""
        self.swarm.ask(self.swarm.living, SILENCE_S)
        for daemon in self.swarm.living:
            found = self._hitches_of(daemon) - self.hitches.get(daemon.peer, Counter())
            self.missed += [f"{name}: {what} is {count} at peer {daemon.peer} without a fault" for what, count in found.items()]
            if found:
                self.missed += [line for line in daemon.whole_log().splitlines() if any(each in line for each in TELLING)]

    def restart_empty_loops(self) -> None:
        """Run one for each daemon: the latest of several is later than one alone."""
        self.empty_loops.close()
        self.ask_empty_s = [self.empty_loops.enter_context(empty_loop()) for _ in range(NUM_PEERS)]

    def note_lateness(self, until: str) -> None:
        self.lateness.append(Lateness(until, lateness_s(self.swarm), max(ask_s() for ask_s in self.ask_empty_s)))
        progress(self.lateness[-1].words)

    def look(self) -> None:
        time.sleep(LOOK_S)
        self.swarm.ask(self.swarm.living, SILENCE_S)
        self._note_peaks()

    def _note_peaks(self) -> None:
        manifest, now, together = self.swarm.plan.manifest, self.moments[-1], 0
        for daemon in self.swarm.living:
            peak, resident = _memory(daemon, "VmHWM"), _memory(daemon, "VmRSS")
            estimate = estimate_stage_memory(manifest, daemon.stage, manifest.slots).device
            now.peaks[daemon.peer] = round(max(now.peaks.get(daemon.peer, 0.0), (peak - self.base_bytes) / estimate), 3)
            together += resident
        now.together_gb = round(max(now.together_gb, together / 1e9), 2)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        heard, heard_s = self.swarm.heard(), time.monotonic()
        while not holds():
            self.look()
            if self.swarm.heard() != heard:
                heard, heard_s = self.swarm.heard(), time.monotonic()
            if time.monotonic() - heard_s > STEP_SILENCE_S:
                raise TimedOutError(f"nothing done for {STEP_SILENCE_S:.0f} s: {what}")

    def step_ended(self, step: int) -> bool:
        """Whether all have ended this step, and serve."""
        return all(daemon.serves and daemon.step > step for daemon in self.swarm.living)

    def totals(self, names: tuple[str, ...]) -> dict[str, int]:
        told = [dict(daemon.status["counters"]) for daemon in self.swarm.living if daemon.status is not None]
        return {name: sum(int(each[name]) for each in told) for name in names}  # type: ignore[call-overload]


def manifest_of(millions: int) -> Manifest:
    width = D_MODEL[millions]
    return Manifest(
        name="big",
        model=ModelConfig(num_layers=14, d_model=width, num_heads=width // 64, d_ff=4 * width, vocab_size=VOCABULARY),
        train=TrainConfig(
            num_stages=NUM_STAGES, microbatches_per_step=MICROBATCHES, microbatch_size=1, sequence_length=SEQUENCE, learning_rate=3e-4
        ),
        compute=ComputeConfig(threads=1, recompute="always"),
        swarm=SwarmConfig(rebalance_period_s=0.0, checkpoint_every_steps=3),
    )


def place(_peer: int) -> Placement:
    """Each has metrics, and its files last."""
    return Placement(settings={"observe": True, "dashboard": True, "ephemeral": False})


def plan_of(manifest: Manifest, num_peers: int) -> DemoPlan:
    return DemoPlan(manifest=manifest, num_peers=num_peers, slow={}, kills=(), chaos=None, stand_in_ms=0.0)


def tiny_bytes() -> int:
    """The resident set of a daemon that trains next to nothing."""
    manifest = Manifest(
        name="tiny",
        model=ModelConfig(num_layers=2, d_model=64, num_heads=1, d_ff=64),
        train=TrainConfig(num_stages=2, microbatches_per_step=4, microbatch_size=1, sequence_length=32),
        compute=ComputeConfig(threads=1),
    )
    with DemoSwarm(plan_of(manifest, 2), lambda _text: None, place=place) as swarm:
        swarm.start()
        life = Life(swarm, 0)
        with life.moment("tiny"):
            life.until(lambda: life.step_ended(2), "two steps of a tiny model")
            return max(_memory(daemon, "VmRSS") for daemon in swarm.living)


def live(life: Life) -> None:
    swarm = life.swarm
    with life.moment("starts"):
        swarm.start()
        life.until(lambda: all(daemon.serves for daemon in swarm.daemons), "all serve")
    with life.moment("trains"):
        life.until(lambda: life.step_ended(STEPS - 1), f"{STEPS} steps")
    with life.moment("loses a peer", faults=True):
        victim = swarm.daemons[-1]
        victim.noted = True
        victim.kill()
        life.until(lambda: life.step_ended(STEPS), "a step without it")
    ready = swarm.daemons[0].ready
    assert ready is not None
    with life.moment("takes a joiner"):
        swarm.spawn_another(victim.stage, ready.join)
        life.until(lambda: swarm.daemons[-1].serves and life.step_ended(STEPS + 1), "a step with the joiner")
    with life.moment("exports"):
        swarm.export(swarm.folder / "exported")
        shutil.rmtree(swarm.folder / "exported")
    life.note_lateness("before the blackout")
    with life.moment("resumes", faults=True):
        reached = swarm.step
        resume_all(life)
        life.until(lambda: life.step_ended(reached), "a step after the blackout")
    life.note_lateness("after it")
    life.missed += [f"{name} is {count}" for name, count in life.totals(MUST_BE_0).items() if count]


def resume_all(life: Life) -> None:
    """Kill all daemons, and start them again from their disks.

    Empty loops are started with the last of them: over more time, the same stall of the machine is a smaller share of what it tells.
    """
    swarm, before = life.swarm, life.swarm.living
    for daemon in before:
        daemon.noted = True
        daemon.kill()
    for daemon in before:
        if daemon is before[-1]:
            life.restart_empty_loops()
        address = next((each.ready.join for each in swarm.living if each.ready is not None), "")
        home = Home(swarm.folder / str(len(swarm.daemons)))
        daemon.home.folder.rename(home.folder)
        shutil.rmtree(home.run_folder, ignore_errors=True)  # its sockets
        again = swarm._spawn(len(swarm.daemons), daemon.stage, home, {"join": address, "data": swarm.plan.data_of_joiners})
        swarm._await(again)


def lateness_s(swarm: DemoSwarm) -> float:
    """How late the event loop of a daemon is at 99.9 %, at most."""
    found = []
    for daemon in swarm.living:
        address = daemon.client.request("status", silence_s=READ_S)["dashboard"]
        with urllib.request.urlopen(f"{address}metrics", timeout=READ_S) as reply:  # noqa: S310 - a daemon of this benchmark
            found += [float(told) for told in LAG.findall(reply.read().decode())]
    return max(found)


@contextlib.contextmanager
def empty_loop() -> Iterator[Callable[[], float]]:
    """Run an empty loop beside; the value says how late that was at 99.9 % since it began, or in five minutes, in seconds."""
    with contextlib.ExitStack() as stack:
        null = stack.enter_context(Path("/dev/null").open("w"))
        told = stack.enter_context(tempfile.TemporaryFile("w+"))  # nobody reads before the end: a pipe would be full by then
        command = [sys.executable, "-m", "scripts.benchmarks._empty_loop"]
        process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=told, stderr=null, text=True))
        assert process.stdin is not None
        stack.callback(process.stdin.close)

        def ask_s() -> float:
            """Read without moving the descriptor's offset, because that loop writes there."""
            lines = os.pread(told.fileno(), os.fstat(told.fileno()).st_size, 0).split(b"\n")
            return float(json.loads(lines[-2])["0.999"])

        yield ask_s


def _forget_peak(daemon: DemoDaemon) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{daemon.process.pid}/clear_refs").write_text("5", encoding="ascii")


def _memory(daemon: DemoDaemon, what: str) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{daemon.process.pid}/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])
    return 0


def big(millions: int, as_json: bool) -> int:
    """Live the life of a model of so many million parameters. Returns 1 if something does not hold."""
    manifest = manifest_of(millions)
    base = tiny_bytes()
    numbers = [sum(_size(shape) for shape in initial_parameter_spec(manifest, stage).values()) for stage in range(NUM_STAGES)]
    estimates = [estimate_stage_memory(manifest, stage, manifest.slots).device for stage in range(NUM_STAGES)]
    sizes = ", ".join(f"{each / 1e9:.2f} GB" for each in estimates)
    progress(f"{sum(numbers) / 1e6:.0f} M parameters; a daemon alone {base / 1e9:.2f} GB, stages {sizes}")
    with DemoSwarm(plan_of(manifest, NUM_PEERS), progress, place=place) as swarm:
        life = Life(swarm, base)
        try:
            with life.empty_loops:
                life.restart_empty_loops()
                live(life)
        except PeerdError as error:
            life.missed.append(str(error))
    peaks = [(each.name, peer, share) for each in life.moments for peer, share in each.peaks.items()]
    life.missed += [f"{each.name}: {each.together_gb:.1f} GB in all" for each in life.moments if each.together_gb > MOST_GB]
    life.missed += [f"{name}: peer {peer} at {share:.2f} of its estimate" for name, peer, share in peaks if share > OVER]
    life.missed += [each.words for each in life.lateness if each.above_s > MOST_LATE_S]
    told = {
        "parameters": sum(numbers),
        "base_gb": round(base / 1e9, 3),
        "estimates_gb": [round(each / 1e9, 3) for each in estimates],
        "lateness": [asdict(each) for each in life.lateness],
        "moments": [asdict(each) for each in life.moments],
        "missed": life.missed,
    }
    if as_json:
        print(json.dumps({"schema": SCHEMA, **told}))
    else:
        print_life(told, life)
    return 1 if life.missed else 0


def print_life(told: dict[str, object], life: Life) -> None:
    print(f"{told['parameters']} parameters; estimates {told['estimates_gb']} GB, and {told['base_gb']} GB for a daemon itself")
    for each in life.moments:
        worst = max(each.peaks.values(), default=0.0)
        print(f"{each.name:<16} {each.seconds:>7.0f} s  peak / estimate at most {worst:.2f}  together {each.together_gb:.1f} GB")
    for late in life.lateness:
        print(late.words)
    for line in life.missed:
        print(line, file=sys.stderr)


def _size(shape: tuple[int, ...]) -> int:
    found = 1
    for length in shape:
        found *= length
    return found
