"""The time of beginnings: from an address to serving a stage of 50 MB, from `peerd demo` to its first step, and of `peerd status`.

A joiner starts its daemon, meets the swarm, downloads the stage from the one peer that serves it, which keeps training, and
catches up. The baseline is the minimum for any daemon: an interpreter that imports torch, gRPC and hivemind.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_plan import DemoFlags, DemoPlan, plan_of
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.errors import PeerdError, TimedOutError
from scripts.benchmarks._checkouts import Checkout, add_options, checkouts, rows_against
from scripts.benchmarks._report import Row, paired_ratio, print_json, print_table, progress, run

POLL_S = 0.02
PATIENCE_S = 120.0
IMPORTS = "an interpreter that imports torch, gRPC and hivemind"
TARGETS_S = {"address to serving": 6.0, "demo to its first step's end": 12.0, "peerd status": 0.25}


@dataclass(slots=True)
class Side:
    """One figure of one checkout."""

    name: str
    seconds: list[float] = field(default_factory=list)
    loss: float | None = None


def one_stage_plan() -> DemoPlan:
    """Three million parameters: 50 MB with two moments and the previous values. One peer trains without end."""
    manifest = Manifest(
        name="bench",
        model=ModelConfig(num_layers=4, d_model=256, num_heads=8, d_ff=1024),
        train=TrainConfig(num_stages=1, microbatches_per_step=8, microbatch_size=1, sequence_length=64, learning_rate=3e-4),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(announce_period_s=1.0, checkpoint_every_steps=0),
    )
    return DemoPlan(manifest=manifest, num_peers=1, slow={}, kills=(), chaos=None, stand_in_ms=0.0)


class Joining:
    """A swarm of one peer, to which each join adds one for a while."""

    def __init__(self, swarm: DemoSwarm, checkout: Checkout) -> None:
        self._swarm = swarm
        self._checkout = checkout
        self.num_bytes = 0
        """Bytes that the last joiner received."""

    def join(self) -> tuple[float, None]:
        ready = self._swarm.daemons[0].ready
        assert ready is not None
        began_s = time.monotonic()
        self._swarm.spawn_another(0, ready.join)
        joiner = self._swarm.daemons[-1]
        while joiner.ready is None:
            if not joiner.alive or time.monotonic() - began_s > PATIENCE_S:
                raise TimedOutError(f"the joiner could not be reached within {PATIENCE_S:.0f} s: {joiner.log_tail()[-300:]}")
            time.sleep(POLL_S)
        joiner.client.request("wait", serving=True, timeout_s=PATIENCE_S, silence_s=PATIENCE_S)
        took_s = time.monotonic() - began_s
        self.num_bytes = joiner.client.request("status")["counters"]["bytes_received"]
        joiner.client.request("leave", now=True)
        joiner.process.wait(PATIENCE_S)
        return took_s, None

    def status(self) -> tuple[float, None]:
        """Run the command as a user does, including the interpreter's start."""
        peerd = [*self._checkout.command, str(Path(sys.executable).with_name("peerd"))]
        return _timed([*peerd, "--home", str(self._swarm.daemons[0].home.folder), "status", "--json"]), None


def imports() -> tuple[float, None]:
    return _timed([sys.executable, "-c", "import torch, grpc, hivemind"]), None


def _timed(command: list[str]) -> float:
    began_s = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, check=False, timeout=PATIENCE_S, env={**os.environ, "HIVEMIND_LOGLEVEL": "CRITICAL"}
    )
    if done.returncode:
        raise PeerdError(f"{' '.join(command[:4])} failed: {done.stderr.decode(errors='replace')[-300:]}")
    return time.monotonic() - began_s


def first_step(checkout: Checkout) -> tuple[float, float]:
    """Run the demo without flags, and end it after a step."""
    flags = DemoFlags(
        stages=None, peers=None, steps=1, run_file=None, seed=None, accumulate=None, slow=(), kill=(), chaos=None, stand_in_ms=0.0
    )
    began = time.time()
    with DemoSwarm(plan_of(flags), lambda _text: None, place=checkout.place) as swarm:
        swarm.start()
        while not swarm.steps:
            if time.time() - began > PATIENCE_S:
                raise TimedOutError(f"no step within {PATIENCE_S:.0f} s")
            time.sleep(POLL_S)
            swarm.poll()
        step = swarm.steps[0]
    return step["time_s"] - began, step["loss"]


def measure(checkout: Checkout, sides: Sequence[Side], backwards: bool) -> int:
    """Time every side once, in a new swarm. Returns the bytes that the joiner received."""
    with DemoSwarm(one_stage_plan(), lambda _text: None, place=checkout.place) as swarm:
        swarm.start()
        swarm.daemons[0].client.request("wait", step=1, timeout_s=PATIENCE_S, silence_s=PATIENCE_S)
        joining = Joining(swarm, checkout)
        measures: list[Callable[[], tuple[float, float | None]]] = [joining.join, lambda: first_step(checkout), joining.status, imports]
        in_turn = [*zip(sides, measures, strict=True)]
        for side, look in reversed(in_turn) if backwards else in_turn:
            took_s, side.loss = look()
            side.seconds.append(took_s)
            progress(f"{side.name}{checkout.suffix}: {took_s:.2f} s")
        return joining.num_bytes


def rows_of(sides: Sequence[Side]) -> Iterator[Row]:
    floor = sides[-1]
    for side in sides:
        yield Row(
            name=side.name,
            median=statistics.median(side.seconds),
            ratio=None if side is floor else paired_ratio(floor.seconds, side.seconds),
            baseline=None if side is floor else floor.name,
            loss=side.loss,
        )


def figures(sides: Sequence[Side]) -> dict[str, list[float]]:
    """Time all figures that depend on the checkout."""
    return {side.name: side.seconds for side in sides[:-1]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench join", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    add_options(parser, "rounds, in each of which everything is timed once")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    with checkouts(given.against) as found:
        sides = [[Side(name) for name in (*TARGETS_S, IMPORTS)] for _ in found]
        turns = [*zip(found, sides, strict=True)]
        for number in range(given.rounds):
            backwards = number % 2 == 1
            for checkout, of_it in reversed(turns) if backwards else turns:
                num_bytes = measure(checkout, of_it, backwards)
    rows = [*rows_of(sides[0])]
    for checkout, theirs in turns[1:]:
        rows += rows_against(figures(sides[0]), figures(theirs), checkout.suffix)
    if given.json:
        print_json(rows, joiner_received_bytes=num_bytes, targets_s=TARGETS_S)
    else:
        print_table(f"medians of {given.rounds}; a joiner received {num_bytes / 1e6:.1f} MB", "s", rows)
    return 1 if any(row.median > TARGETS_S.get(row.name, float("inf")) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(run(main))
