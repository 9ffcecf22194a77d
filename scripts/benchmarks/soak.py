"""A long run under mixed chaos: does a surviving daemon keep its size?

Chaos strikes a swarm repeatedly with every kind of fault, except that it wipes no stage, and replaces the killed peers. One peer of each
stage is spared from kills, but not from other faults, so that it lives from beginning to end; its memory, open files, threads, tasks and
child processes are sampled. Over the last half the least-squares slope of its memory must stay below one percent, and nothing else may
grow. Memory is the minimum resident size of each minute: a daemon keeps freed memory for the next microbatch and returns it once a
minute, and the amount that it keeps in between varies by five percent. The slope of all samples is also shown. A stand-in sleeps in
place of work, so that the machine stays usable.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import psutil

from peerd.cli.demo_chaos import Chaos, FaultKind
from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_plan import DemoPlan
from peerd.cli.demo_process import DemoDaemon
from peerd.cli.demo_strikes import Strikes
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.errors import PeerdError
from scripts.benchmarks._report import SCHEMA, progress, run
from scripts.benchmarks._swarms import looks

POLL_S = 0.5
ALL_SAMPLES = "memory of all samples"
SAMPLE_S = 5.0
MINUTE_S = 60.0
COURSE_S = 180.0
SILENCE_S = 180.0
ENDLESS = 10**9
MOST_GROWTH = 0.01
"""Allowed growth of a daemon's memory, along the least-squares line over the last half."""
WOBBLE = {"files": 4, "threads": 1, "tasks": 8, "children": 0}
"""The amount by which the median of the last quarter may exceed that of the quarter before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    minutes: float
    num_stages: int
    num_peers: int
    stand_in_ms: float
    every_s: float
    seed: int
    as_json: bool

    def swarm(self) -> DemoPlan:
        return DemoPlan(
            manifest=Manifest(
                name="soak",
                seed=self.seed,
                model=ModelConfig(num_layers=self.num_stages, d_model=128, num_heads=4, d_ff=512),
                train=TrainConfig(num_stages=self.num_stages, microbatch_size=1, sequence_length=64, steps=ENDLESS),
                compute=ComputeConfig(threads=1),
                swarm=SwarmConfig(announce_period_s=1.0),
            ),
            num_peers=self.num_peers,
            slow={},
            kills=(),
            chaos=Chaos(kind=FaultKind.MIXED, every_s=self.every_s, respawn=True),
            stand_in_ms=self.stand_in_ms,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One daemon, its keeper and p2pd at one moment."""

    at_s: float
    memory: int
    p2pd_memory: int
    files: int
    threads: int
    tasks: int
    children: int


@dataclass(slots=True)
class Watched:
    """A daemon that is spared from kills, and its samples."""

    daemon: DemoDaemon
    samples: list[Sample] = field(default_factory=list)

    def sample(self, at_s: float) -> None:
        """Take a sample, unless the daemon is disturbed or does not answer: its figures would be old."""
        if self.daemon.disturbed or not self.daemon.answers or self.daemon.status is None:
            return
        process = psutil.Process(self.daemon.process.pid)
        try:
            children = process.children(recursive=True)
            p2pd_memory = max((child.memory_info().rss for child in children), default=0)
            memory, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
        except psutil.NoSuchProcess:  # p2pd is being restarted
            return
        self.samples.append(Sample(at_s, memory, p2pd_memory, files, threads, self.daemon.status["tasks"], len(children)))

    @property
    def last_half(self) -> list[Sample]:
        middle_s = (self.samples[0].at_s + self.samples[-1].at_s) / 2
        return [sample for sample in self.samples if sample.at_s >= middle_s]

    def rise(self, what: Callable[[Sample], int]) -> float:
        """Rise of the median from the last quarter but one to the last."""
        half = self.last_half
        quarter = len(half) // 2
        return statistics.median(map(what, half[quarter:])) - statistics.median(map(what, half[:quarter]))

    def problems(self) -> list[str]:
        judged = {name: share for name, share in self.growths().items() if name != ALL_SAMPLES}
        found = [f"{name} grew by {share:.1%}" for name, share in judged.items() if share > MOST_GROWTH]
        rises = {name: self.rise(lambda sample, name=name: getattr(sample, name)) for name in WOBBLE}  # type: ignore[misc]
        return found + [f"{name} rose by {rise:g}" for name, rise in rises.items() if rise > WOBBLE[name]]

    def growths(self) -> dict[str, float]:
        return {
            "memory": growth(least_by(MINUTE_S, self.last_half), lambda sample: sample.memory),
            ALL_SAMPLES: growth(self.last_half, lambda sample: sample.memory),
            "p2pd's memory": growth(self.last_half, lambda sample: sample.p2pd_memory),
        }


def least_by(period_s: float, samples: Iterable[Sample]) -> list[Sample]:
    """The sample with the least memory of each period."""
    periods = itertools.groupby(samples, lambda sample: sample.at_s // period_s)
    return [min(group, key=lambda sample: sample.memory) for _, group in periods]


def growth(samples: Sequence[Sample], what: Callable[[Sample], int]) -> float:
    """Growth along the least-squares line, as a share of the mean."""
    values = [what(sample) for sample in samples]
    line = statistics.linear_regression([sample.at_s for sample in samples], values)
    return line.slope * (samples[-1].at_s - samples[0].at_s) / statistics.fmean(values)


def soak(plan: Plan) -> tuple[list[Watched], DemoSwarm]:
    """Run the swarm to its end. Only the figures of the returned swarm are of use."""
    with DemoSwarm(plan.swarm(), progress) as swarm:
        swarm.start()
        watched = [Watched(daemon) for daemon in swarm.daemons[: plan.num_stages]]
        assert swarm.plan.chaos is not None
        strikes = Strikes(swarm, swarm.plan.chaos, plan.seed, spared=frozenset(each.daemon.peer for each in watched))
        began_s, sampled_s = time.monotonic(), 0.0
        for _ in looks(swarm, POLL_S, SILENCE_S):
            if (now_s := time.monotonic() - began_s) >= plan.minutes * 60:
                break
            strikes.tick()
            if now_s - sampled_s >= SAMPLE_S:
                sampled_s = now_s
                for each in watched:
                    each.sample(now_s)
        swarm.poll()
        dead = [each.daemon.peer for each in watched if not each.daemon.alive]
        if dead:
            raise PeerdError(f"peer {dead[0]} has ended without being killed")
    return watched, swarm


def report(plan: Plan, watched: Sequence[Watched], swarm: DemoSwarm) -> int:
    kinds = [fault.kind for fault in swarm.faults]
    told = [dict(daemon.status["counters"]) for daemon in swarm.daemons if daemon.status is not None]
    names = ("replayed_microbatches", "duplicate_microbatches", "lost_microbatches", "inexact_steps")
    counts = {name: sum(int(counters[name]) for counters in told) for name in names}  # type: ignore[call-overload]
    problems = [f"peer {each.daemon.peer}: {problem}" for each in watched for problem in each.problems()]
    problems += [f"{name} is {counts[name]}" for name in names[1:] if counts[name]]
    rows = [_row(each) for each in watched]
    if plan.as_json:
        happened = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
        print(json.dumps({"schema": SCHEMA, "rows": rows, "steps": _steps(swarm), "faults": happened, **counts, "problems": problems}))
    else:
        faults = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in sorted(set(kinds)))
        print(f"{plan.minutes:g} minutes, {_steps(swarm)} steps, {faults}")
        for row in rows:
            print("  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()))
        print(", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items()))
        print("\n".join(problems) or "nothing grew")
    return 1 if problems else 0


def _steps(swarm: DemoSwarm) -> int:
    return max(daemon.step for daemon in swarm.daemons)


def _row(each: Watched) -> dict[str, float | int | str | list[float]]:
    last = each.samples[-1]
    growths = {f"{name} growth %": 100 * share for name, share in each.growths().items()}
    sizes = {"memory MB": last.memory / 1e6, "files": last.files, "threads": last.threads, "tasks": last.tasks, "children": last.children}
    course = [round(sample.memory / 1e6, 1) for sample in least_by(COURSE_S, each.samples)]
    return {"peer": each.daemon.peer, "samples": len(each.samples), **sizes, **growths, "course of memory MB": course}


def parse() -> Plan:
    parser = argparse.ArgumentParser(prog="scripts/bench soak", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="M", help="how long (default 60)")
    parser.add_argument("--stages", type=int, default=2, metavar="S", help="stages (default 2)")
    parser.add_argument("--peers", type=int, default=6, metavar="P", help="peers (default 6)")
    parser.add_argument("--compute-stand-in", type=float, default=150.0, metavar="MS", help="sleep per microbatch (default 150)")
    parser.add_argument("--every", type=float, default=15.0, metavar="S", help="seconds between faults (default 15)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which fault strikes whom (default 0)")
    given = parser.parse_args()
    if given.minutes < 1 or given.compute_stand_in < 1 or given.every < 1 or given.stages < 1 or given.peers <= given.stages:
        parser.error("numbers must be at least 1, and there must be more peers than stages")
    return Plan(
        minutes=given.minutes,
        num_stages=given.stages,
        num_peers=given.peers,
        stand_in_ms=given.compute_stand_in,
        every_s=given.every,
        seed=given.seed,
        as_json=given.json,
    )


def main() -> int:
    plan = parse()
    return report(plan, *soak(plan))


if __name__ == "__main__":
    sys.exit(run(main))
