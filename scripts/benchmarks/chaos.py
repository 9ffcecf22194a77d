"""The cost of deaths: nine peers in three stages, one killed every ten seconds and replaced, against nine that live.

A stand-in sleeps in place of work, so that nine peers can share two cores. Steps overlap (delayed updates) by default. The allowed
rate at a moment is that of the slowest stage's serving peers, each at full speed; a joiner that is starting or downloading does not
count. A side's ratio is its work, divided by the time integral of the allowed rate. With deaths it should be 0.80 or more; without
deaths it shows the cost of the ends of steps alone.

What a peer has added to a step dies with it, on average half of its share: the longer the steps, the more a death costs. A step
of 18 microbatches divides evenly among three peers of a stage and among two.

Others need root: `scripts/bench chaos asymmetric` (a link between mates that is dead in one direction), and `nat-rebind`,
`address-change`, `slow-join` and `busy-uplink`, which `scripts/bench chaos nat-rebind --help` explains. `scripts/bench chaos seeds`
compares runs under the demo's chaos with one process, on loopback or with each link at so many Mbit/s; `scripts/bench chaos unreliable`
lets a share of twelve peers come and go.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from dataclasses import dataclass, field

from peerd.cli.demo_chaos import Chaos, FaultKind
from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_plan import DemoPlan
from peerd.cli.demo_strikes import Strikes
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from scripts.benchmarks._asymmetric import asymmetric
from scripts.benchmarks._changed import KINDS, changed
from scripts.benchmarks._report import Row, print_json, print_table, progress, run
from scripts.benchmarks._seeds import seeds
from scripts.benchmarks._swarms import looks
from scripts.benchmarks._unreliable import unreliable

NUM_STAGES, NUM_PEERS = 3, 9
WARMUP = 2
"""Steps in which peers meet and response times are learnt."""
POLL_S = 0.5
WANTED = 0.80


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    rounds: int
    steps: int
    microbatches: int
    stand_in_ms: float
    every_s: float
    overlap: bool
    as_json: bool

    def swarm(self, chaos: Chaos | None, seed: int) -> DemoPlan:
        return DemoPlan(
            manifest=Manifest(
                name="bench",
                seed=seed,
                model=ModelConfig(num_layers=NUM_STAGES, d_model=64, num_heads=2, d_ff=128),
                train=TrainConfig(
                    num_stages=NUM_STAGES,
                    microbatches_per_step=self.microbatches,
                    microbatch_size=1,
                    sequence_length=32,
                    steps=WARMUP + self.steps,
                    delayed_updates=self.overlap,
                ),
                compute=ComputeConfig(threads=1),
                swarm=SwarmConfig(announce_period_s=1.0),
            ),
            num_peers=NUM_PEERS,
            slow={},
            kills=(),
            chaos=chaos,
            stand_in_ms=self.stand_in_ms,
        )


@dataclass(slots=True)
class Side:
    name: str
    chaos: Chaos | None
    rates: list[float] = field(default_factory=list)
    """Microbatches a second, by round."""
    shares: list[float] = field(default_factory=list)
    """Work as a share of what was allowed, by round."""
    deaths: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    loss: float = 0.0


@dataclass(slots=True)
class Allowance:
    """Samples of the rate that the peers serving at a moment allow, in microbatches a second, and their integral."""

    rate_per_peer: float
    samples: list[tuple[float, float]] = field(default_factory=list)

    def sample(self, swarm: DemoSwarm) -> None:
        serving = [daemon.stage for daemon in swarm.living if daemon.phase not in ("starting", "joining")]
        self.samples.append((time.time(), min(serving.count(stage) for stage in range(NUM_STAGES)) * self.rate_per_peer))

    def between(self, begin_s: float, end_s: float) -> float:
        """Microbatches allowed from `begin_s` to `end_s`, wall clock; each sample holds until the next."""
        ends = [at_s for at_s, _ in self.samples[1:]] + [end_s]
        spans = ((max(at_s, begin_s), min(until_s, end_s), rate) for (at_s, rate), until_s in zip(self.samples, ends, strict=True))
        return sum((until_s - at_s) * rate for at_s, until_s, rate in spans if until_s > at_s)


def run_swarm(plan: Plan, side: Side, seed: int) -> None:
    allowance = Allowance(1000 / plan.stand_in_ms)
    with DemoSwarm(plan.swarm(side.chaos, seed), lambda _text: None) as swarm:
        swarm.start()
        strikes: Strikes | None = None
        for _ in looks(swarm, POLL_S):
            if swarm.num_steps_told >= WARMUP + plan.steps:
                break
            allowance.sample(swarm)
            if side.chaos is not None and strikes is None and swarm.num_steps_told >= WARMUP:
                strikes = Strikes(swarm, side.chaos, seed)
            if strikes is not None:
                strikes.tick()
        swarm.poll()
        begin_s, end_s = swarm.steps[WARMUP - 1]["time_s"], swarm.steps[-1]["time_s"]
        done = plan.steps * plan.microbatches
        side.rates.append(done / (end_s - begin_s))
        side.shares.append(done / allowance.between(begin_s, end_s))
        side.deaths += len(swarm.faults)
        side.loss = swarm.steps[-1]["loss"]
        told = [dict(daemon.status["counters"]) for daemon in swarm.daemons if daemon.status is not None]
        for name in ("replayed_microbatches", "duplicate_microbatches", "lost_microbatches", "inexact_steps"):
            side.counts[name] = side.counts.get(name, 0) + sum(int(counters[name]) for counters in told)  # type: ignore[call-overload]
    progress(f"{side.name}: {side.rates[-1]:.1f} microbatches/s, {side.shares[-1]:.3f} of what was allowed, {side.deaths} deaths so far")


def report(plan: Plan, sides: list[Side]) -> int:
    rows = [
        Row(name=side.name, median=statistics.median(side.rates), ratio=statistics.median(side.shares), baseline="allowed", loss=side.loss)
        for side in sides
    ]
    share = statistics.median(sides[0].shares)
    if plan.as_json:
        note = "a stand-in sleeps in place of work"
        print_json(
            rows, deaths=sides[0].deaths, counts=sides[0].counts, compute_stand_in_ms=plan.stand_in_ms, overlap=plan.overlap, note=note
        )
    else:
        print_table(f"{NUM_PEERS} peers in {NUM_STAGES} stages, {plan.stand_in_ms:g} ms of stand-in a microbatch", "per second", rows)
        print(f"{sides[0].deaths} deaths; " + ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sides[0].counts.items()))
    exact = not any(sides[0].counts[name] for name in ("duplicate_microbatches", "lost_microbatches", "inexact_steps"))
    return 0 if share >= WANTED and exact else 1


def parse() -> Plan:
    parser = argparse.ArgumentParser(prog="scripts/bench chaos", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds, in each of which both sides run (default 3)")
    parser.add_argument("--steps", type=int, default=36, metavar="N", help="steps timed per round and side (default 36)")
    parser.add_argument("--microbatches", type=int, default=18, metavar="B", help="microbatches a step (default 18)")
    parser.add_argument("--compute-stand-in", type=float, default=300.0, metavar="MS", help="sleep per microbatch (default 300)")
    parser.add_argument("--every", type=float, default=10.0, metavar="S", help="seconds between deaths (default 10)")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True, help="delayed updates (default)")
    given = parser.parse_args()
    if min(given.rounds, given.steps, given.microbatches, given.compute_stand_in, given.every) < 1:
        parser.error("every number must be at least 1")
    return Plan(
        rounds=given.rounds,
        steps=given.steps,
        microbatches=given.microbatches,
        stand_in_ms=given.compute_stand_in,
        every_s=given.every,
        overlap=given.overlap,
        as_json=given.json,
    )


def main() -> int:
    kind = "".join(sys.argv[1:2])
    if kind == "asymmetric":
        return asymmetric(sys.argv[2:])
    if kind == "seeds":
        return seeds(sys.argv[2:])
    if kind == "unreliable":
        return unreliable(sys.argv[2:])
    if kind in KINDS:
        return changed(kind, sys.argv[2:])
    plan = parse()
    dying = Side(f"one of {NUM_PEERS} killed every {plan.every_s:g} s", Chaos(kind=FaultKind.KILL, every_s=plan.every_s, respawn=True))
    living = Side("nobody dies", None)
    for number, side in itertools.product(range(plan.rounds), (dying, living)):
        run_swarm(plan, side, seed=number)
    return report(plan, [dying, living])


if __name__ == "__main__":
    sys.exit(run(main))
