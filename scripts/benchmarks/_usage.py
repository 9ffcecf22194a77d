"""Measures idle daemons: processor and memory of each daemon and its p2pd, after a run of one step has ended."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import psutil

from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_plan import DemoPlan
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.errors import PeerdError
from scripts.benchmarks._report import progress
from scripts.benchmarks._swarms import until_done

SETTLES_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The cost of one daemon: medians of its turns."""

    daemon_share: float
    """Share of one core."""
    p2pd_share: float
    daemon_bytes: int
    p2pd_bytes: int


def tiny_plan(num_peers: int, num_stages: int, announce_period_s: float) -> DemoPlan:
    manifest = Manifest(
        name="bench",
        model=ModelConfig(num_layers=max(4, num_stages), d_model=32, num_heads=2, d_ff=64),
        train=TrainConfig(num_stages=num_stages, microbatches_per_step=4, microbatch_size=1, sequence_length=16, steps=1),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(announce_period_s=announce_period_s, checkpoint_every_steps=0),
    )
    return DemoPlan(manifest=manifest, num_peers=num_peers, slow={}, kills=(), chaos=None, stand_in_ms=0.0)


def wait_until_idle(swarm: DemoSwarm) -> float:
    """Wait until the one step is done and the daemons have settled. Returns its loss."""
    until_done(swarm, 1)
    time.sleep(SETTLES_S)
    return float(swarm.steps[-1]["loss"])


def watch(swarm: DemoSwarm, turn_s: float, turns: int) -> list[Usage]:
    """Measure the daemons for `turns` turns of `turn_s` seconds, in which they get no request."""
    pairs = [_processes(daemon.process.pid) for daemon in swarm.daemons]
    shares: list[list[tuple[float, float]]] = [[] for _ in pairs]
    for number in range(turns):
        before, began = [_spent(pair) for pair in pairs], time.monotonic()
        time.sleep(turn_s)
        took_s = time.monotonic() - began
        for told, was, pair in zip(shares, before, pairs, strict=True):
            now = _spent(pair)
            told.append(((now[0] - was[0]) / took_s, (now[1] - was[1]) / took_s))
        progress(f"turn {number + 1}: {100 * statistics.median(told[-1][0] for told in shares):.2f} % of a core")
    if len(swarm.living) < len(swarm.daemons):
        raise PeerdError(f"{len(swarm.daemons) - len(swarm.living)} daemons have ended meanwhile")
    return [
        Usage(
            daemon_share=statistics.median(daemon for daemon, _ in told),
            p2pd_share=statistics.median(p2pd for _, p2pd in told),
            daemon_bytes=pair[0].memory_info().rss,
            p2pd_bytes=sum(child.memory_info().rss for child in pair[1:]),
        )
        for told, pair in zip(shares, pairs, strict=True)
    ]


def _processes(pid: int) -> list[psutil.Process]:
    daemon = psutil.Process(pid)
    return [daemon, *daemon.children(recursive=True)]


def _spent(pair: list[psutil.Process]) -> tuple[float, float]:
    """Processor time in seconds of the daemon, and of its children."""
    own, *others = (sum(process.cpu_times()[:2]) for process in pair)
    return own, sum(others)
