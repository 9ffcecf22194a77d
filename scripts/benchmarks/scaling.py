"""Two and four peers per stage against one: how much faster is a step with more peers of the same speed?

A stand-in sleeps in place of work, so that peers share two cores without disturbing one another: the times show how work is shared
and what the end of a step costs, not how fast anything computes. The arithmetic is tiny and real, and all sides' losses are the same.
At the beginning and end of a step some peers are idle, in sum for the time of one microbatch. Of 128 microbatches each of four peers
computes 32, so four peers can be at most 3.91 times as fast.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, field

from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_plan import DemoPlan
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from scripts.benchmarks._report import Row, paired_ratio, print_json, print_table, progress, run
from scripts.benchmarks._swarms import until_done

NUM_STAGES = 2
WARMUP = 3
"""Steps in which response times are learnt."""
TARGETS = {2: 1.9, 4: 3.7}
LOSS_TOLERANCE = 1e-4


@dataclass(slots=True)
class Side:
    per_stage: int
    seconds: list[float] = field(default_factory=list)
    """Per step, by round."""
    loss: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.per_stage} per stage"


def plan_of(side: Side, given: argparse.Namespace) -> DemoPlan:
    manifest = Manifest(
        name="bench",
        model=ModelConfig(num_layers=4, d_model=32, num_heads=2, d_ff=64),
        train=TrainConfig(
            num_stages=NUM_STAGES,
            microbatches_per_step=given.microbatches,
            microbatch_size=1,
            sequence_length=32,
            steps=WARMUP + given.steps,
        ),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(checkpoint_every_steps=0, rebalance_period_s=0),
    )
    num_peers = NUM_STAGES * side.per_stage
    return DemoPlan(manifest=manifest, num_peers=num_peers, slow={}, kills=(), chaos=None, stand_in_ms=given.stand_in)


def run_swarm(side: Side, given: argparse.Namespace) -> None:
    with DemoSwarm(plan_of(side, given), lambda _text: None) as swarm:
        swarm.start()
        until_done(swarm, WARMUP + given.steps)
        ends = [step["time_s"] for step in swarm.steps]
        side.seconds.append((ends[-1] - ends[WARMUP - 1]) / given.steps)
        side.loss = swarm.steps[-1]["loss"]
    progress(f"{side.name}: {side.seconds[-1]:.3f} s a step")


def report(sides: list[Side], given: argparse.Namespace) -> int:
    one = sides[0]
    rows = [
        Row(
            name=side.name,
            median=statistics.median(side.seconds),
            ratio=None if side is one else paired_ratio(one.seconds, side.seconds),
            baseline=None if side is one else one.name,
            loss=side.loss,
        )
        for side in sides
    ]
    note = "a stand-in sleeps in place of work"
    if given.json:
        print_json(rows, compute_stand_in_ms=given.stand_in, note=note)
    else:
        print_table(f"{NUM_STAGES} stages, {given.microbatches} microbatches a step, {given.stand_in:g} ms each: {note}", "s a step", rows)
    missed = [row for row, side in zip(rows, sides, strict=True) if row.ratio is not None and row.ratio < TARGETS[side.per_stage]]
    apart = max(side.loss for side in sides) - min(side.loss for side in sides) > LOSS_TOLERANCE
    return 1 if missed or apart else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench scaling", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds, in each of which every side runs (default 5)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps timed per round and side (default 5)")
    parser.add_argument("--microbatches", type=int, default=128, metavar="N", help="per step (default 128)")
    parser.add_argument("--compute-stand-in", dest="stand_in", type=float, default=300.0, metavar="MS", help="per microbatch (default 300)")
    given = parser.parse_args()
    if min(given.rounds, given.steps, given.microbatches, given.stand_in) < 1:
        parser.error("--rounds, --steps, --microbatches and --compute-stand-in must be at least 1")
    sides = [Side(per_stage) for per_stage in (1, *TARGETS)]
    for number in range(given.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            run_swarm(side, given)
    return report(sides, given)


if __name__ == "__main__":
    sys.exit(run(main))
