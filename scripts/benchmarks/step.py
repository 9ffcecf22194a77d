"""The cost of a step's end and its parts: the time from the last gradient of a step to the first forward pass of the next.

Two stages of two peers, or as many as are asked for. The times come from the daemons' own timelines, put on one clock. Only steps in which
every peer averaged count: peers join one after the other, and a round of four takes a quarter of the bytes of one of eight. On a distant
link every message is delayed inside the tunnel (see _distant.py); with delayed updates the next step does not wait for the end of the last
one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_plan import DemoPlan
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.errors import PeerdError
from peerd.timeline.spans import COMPUTE, SpanKind
from scripts.benchmarks._checkouts import Checkout, add_options, checkouts, rows_against
from scripts.benchmarks._distant import ONE_WAY_MS
from scripts.benchmarks._report import Row, paired_ratio, print_json, print_table, progress, run
from scripts.benchmarks._swarms import SILENCE_S, looks

MICROBATCHES = 16
"""Of a step, and at least two for each peer of a stage."""
WARMUP = 2
"""Steps in which connections are opened and response times learnt."""
TRACED_WITHIN_S = 600.0
"""A trace waits for the steps that it shows."""
MOST_TIMES = 20
"""Steps of a run, in units of those that are looked at: peers that have not joined by then join too slowly."""
MOST_LOOPBACK_MS, MOST_ROUND_TRIPS = 40.0, 3.0
LOOPBACK, DELAYED = "loopback", "loopback, delayed updates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The parts of one step's end, in milliseconds."""

    whole: float
    until_averaging: float
    """Time from the last gradient until the round of the last stage is open."""
    averaging: float
    """Duration of the longest round."""
    until_committed: float
    """Time from the end of the last round until a peer has applied the step."""
    until_forward: float


@dataclass(slots=True)
class Side:
    name: str
    one_way_ms: float = 0.0
    delayed_updates: bool = False
    stages: int = 2
    replicas: int = 2
    """Peers of a stage."""
    checkout: Checkout = field(default_factory=Checkout)
    gaps: list[Gap] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    """The parts of every step, by round."""
    loss: float = 0.0

    @property
    def title(self) -> str:
        return self.name + self.checkout.suffix

    def median(self, part: str) -> float:
        return float(statistics.median(getattr(gap, part) for gap in self.gaps))

    def plan(self, steps: int) -> DemoPlan:
        manifest = Manifest(
            name="bench",
            model=ModelConfig(num_layers=4, d_model=128, num_heads=4, d_ff=512),
            train=TrainConfig(
                num_stages=self.stages,
                microbatches_per_step=max(MICROBATCHES, 2 * self.replicas),
                microbatch_size=4,
                sequence_length=128,
                steps=WARMUP + MOST_TIMES * steps + 1,
                delayed_updates=self.delayed_updates,
            ),
            compute=ComputeConfig(threads=1),
            swarm=SwarmConfig(checkpoint_every_steps=0, rebalance_period_s=0),
        )
        return DemoPlan(manifest=manifest, num_peers=self.stages * self.replicas, slow={}, kills=(), chaos=None, stand_in_ms=0.0)


def gaps_of(reply: Any, num_peers: int) -> Iterator[Gap]:
    """The parts of every step in which so many peers averaged, and of which the next step is known, too."""
    spans = [span for peer in reply["peers"] for span in peer["spans"]]
    averaged = Counter(step for peer in reply["peers"] for step in {span[3] for span in peer["spans"] if span[0] == SpanKind.AVERAGING})
    steps = sorted({span[3] for span in spans})
    for step in (step for step in steps if step + 1 in steps and averaged[step] >= num_peers):
        ends = [began + took for kind, began, took, at, *_ in spans if at == step and kind in COMPUTE]
        begins = [began for kind, began, _, at, *_ in spans if at == step + 1 and kind == SpanKind.FORWARD]
        rounds = [(began, began + took) for kind, began, took, at, *_ in spans if at == step and kind == SpanKind.AVERAGING]
        commits = [began + took for kind, began, took, at, *_ in spans if at == step and kind == SpanKind.COMMIT]
        if not (ends and begins and rounds and commits):
            continue
        last, opened, closed = max(ends), max(began for began, _ in rounds), max(ended for _, ended in rounds)
        yield Gap(
            whole=(min(begins) - last) / 1000,
            until_averaging=(opened - last) / 1000,
            averaging=max(ended - began for began, ended in rounds) / 1000,
            until_committed=(min(commits) - closed) / 1000,
            until_forward=(min(begins) - min(commits)) / 1000,
        )


@contextlib.contextmanager
def _delay(one_way_ms: float) -> Iterator[None]:
    """Environment variables of the daemons."""
    os.environ[ONE_WAY_MS] = str(one_way_ms)
    try:
        yield
    finally:
        del os.environ[ONE_WAY_MS]


def run_swarm(side: Side, steps: int) -> None:
    module = "scripts.benchmarks._distant" if side.one_way_ms else "peerd.daemon"
    found: list[Gap] = []
    with _delay(side.one_way_ms), DemoSwarm(side.plan(steps), lambda _text: None, module, side.checkout.place) as swarm:
        swarm.start()
        for _ in looks(swarm):
            if len(swarm.steps) < WARMUP:
                continue
            reply = swarm.daemons[0].client.request("trace", steps=steps + 1, timeout_s=TRACED_WITHIN_S, silence_s=SILENCE_S)
            found += gaps_of(reply, swarm.plan.num_peers)
            if len(found) >= steps or swarm.finished:
                break
        swarm.poll()
        side.loss = swarm.steps[WARMUP + steps]["loss"]
    if len(found) < steps:
        raise PeerdError(f"{side.title}: all {swarm.plan.num_peers} peers averaged in {len(found)} of {len(swarm.steps)} steps")
    side.gaps += found
    side.medians.append(statistics.median(gap.whole for gap in found))
    progress(f"{side.title}: {side.medians[-1]:.1f} ms")


def report(sides: Sequence[Side], others: Sequence[Side], distance_ms: float, as_json: bool) -> int:
    """`others` are the other checkout's, one for each of `sides`, or none."""
    near = sides[0]
    rows = [
        Row(
            name=side.name,
            median=statistics.median(side.medians),
            ratio=None if side is near else paired_ratio(near.medians, side.medians),
            baseline=None if side is near else near.name,
            loss=side.loss,
        )
        for side in sides
    ]
    if others:
        ours, theirs = ({side.name: side.medians for side in found if not side.delayed_updates} for found in (sides, others))
        rows += rows_against(ours, theirs, others[0].checkout.suffix)
    parts = {side.title: {part: side.median(part) for part in Gap.__slots__} for side in (*sides, *others)}
    if as_json:
        print_json(rows, parts_ms=parts)
    else:
        peers = f"{near.stages} {'stage' if near.stages == 1 else 'stages'} of {near.replicas} peers"
        print_table(f"from the last gradient to the next step's first forward pass, {peers}", "ms", rows)
        for name, of_side in parts.items():
            print(f"{name}: " + ", ".join(f"{part.replace('_', ' ')} {value:.1f} ms" for part, value in of_side.items() if part != "whole"))
    missed = near.replicas == 2 and rows[0].median > MOST_LOOPBACK_MS
    for side in (side for side in sides if side.one_way_ms):
        trips = (side.median("whole") - side.median("averaging")) / distance_ms
        print(f"{side.name}: {trips:.2f} round trips beside the averaging", file=sys.stderr if as_json else sys.stdout)
        missed |= trips > MOST_ROUND_TRIPS
    return 1 if missed else 0


def sides_of(checkout: Checkout, round_trip_ms: float, stages: int, replicas: int) -> Iterator[Side]:
    yield Side(LOOPBACK, stages=stages, replicas=replicas, checkout=checkout)
    if replicas > 2:
        return
    yield Side(DELAYED, delayed_updates=True, stages=stages, replicas=replicas, checkout=checkout)
    if round_trip_ms:
        name = f"round trips of {round_trip_ms:g} ms"
        yield Side(name, one_way_ms=round_trip_ms / 2, stages=stages, replicas=replicas, checkout=checkout)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench step", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    add_options(parser, "rounds, in each of which every side runs")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps looked at per round (default 8)")
    parser.add_argument(
        "--round-trip", type=float, default=50.0, metavar="MS", help="of the distant side's links; 0: without it (default 50)"
    )
    parser.add_argument("--stages", type=int, default=2, metavar="N", help="stages (default 2)")
    parser.add_argument(
        "--replicas", type=int, default=2, metavar="N", help="peers of a stage (default 2); with more only the side on loopback runs"
    )
    given = parser.parse_args()
    if min(given.rounds, given.steps, given.stages, given.replicas) < 1 or given.round_trip < 0:
        parser.error("--rounds, --steps, --stages and --replicas must be at least 1 and --round-trip not negative")
    with checkouts(given.against) as found:
        sides, *others = ([*sides_of(checkout, given.round_trip, given.stages, given.replicas)] for checkout in found)
        in_turn = [side for pair in zip(sides, *others, strict=True) for side in pair]
        for number in range(given.rounds):
            for side in in_turn if number % 2 == 0 else reversed(in_turn):
                run_swarm(side, given.steps)
    return report(sides, [*itertools.chain(*others)], given.round_trip, given.json)


if __name__ == "__main__":
    sys.exit(run(main))
