"""Unequal peers in one stage: one of two is three times slower. How are microbatches shared, and how much does the slow peer help?

A stand-in sleeps in place of work, so that peers share two cores without disturbing one another. The arithmetic is tiny and real, and
the times show how work is shared, not how fast anything computes. The fast peer should get 2.2 to 3.8 times the slow one's
microbatches, and a step with both should take 3/4 of a step with the fast one alone.
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

SLOW_FACTOR = 3.0
FAIR_SHARE = (2.2, 3.8)
WARMUP = 2
"""Steps in which response times are learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    num_stages: int
    rounds: int
    steps: int
    stand_in_ms: float
    as_json: bool

    def swarm(self, with_slow: bool) -> DemoPlan:
        """Peers take the stages in turn, so the first peer after one per stage joins stage 0; it is the slow one.

        Stage 0 has a fast and a slow peer. The other stages have two fast peers, so that they are not the bottleneck.
        """
        num_peers = self.num_stages * (2 if with_slow else 1)
        return DemoPlan(
            manifest=Manifest(
                name="bench",
                model=ModelConfig(num_layers=4, d_model=64, num_heads=2, d_ff=128),
                train=TrainConfig(num_stages=self.num_stages, microbatch_size=2, sequence_length=64, steps=WARMUP + self.steps),
                compute=ComputeConfig(threads=1),
                swarm=SwarmConfig(announce_period_s=1.0),
            ),
            num_peers=num_peers,
            slow={self.num_stages: SLOW_FACTOR} if with_slow else {},
            kills=(),
            chaos=None,
            stand_in_ms=self.stand_in_ms,
        )


@dataclass(slots=True)
class Side:
    name: str
    with_slow: bool
    seconds: list[float] = field(default_factory=list)
    """Per step, by round."""
    shares: list[tuple[int, int]] = field(default_factory=list)
    """Microbatches of the fast and the slow peer after the warm-up, by round."""
    loss: float = 0.0


def run_swarm(plan: Plan, side: Side) -> None:
    with DemoSwarm(plan.swarm(side.with_slow), lambda _text: None) as swarm:
        swarm.start()
        before: tuple[int, int] | None = None

        def look() -> None:
            nonlocal before
            if before is None and swarm.step >= WARMUP:
                before = _done(swarm, plan)

        until_done(swarm, WARMUP + plan.steps, look)
        ends = [step["time_s"] for step in swarm.steps]
        assert before is not None
        fast, slow = (now - then for now, then in zip(_done(swarm, plan), before, strict=True))
        side.seconds.append((ends[-1] - ends[WARMUP - 1]) / plan.steps)
        side.shares.append((fast, slow))
        side.loss = swarm.steps[-1]["loss"]
    progress(f"{side.name}: {side.seconds[-1]:.3f} s a step, microbatches {side.shares[-1]}")


def _done(swarm: DemoSwarm, plan: Plan) -> tuple[int, int]:
    """Microbatches that the first and the second peer of stage 0 have accumulated."""
    done = [daemon.done[1] for daemon in swarm.daemons if daemon.stage == 0]
    return (done[0], done[1] if len(done) > 1 else 0)


def report(plan: Plan, both: Side, alone: Side) -> int:
    fast, slow = (sum(counts) for counts in zip(*both.shares, strict=True))
    share = fast / slow if slow else float("inf")
    gain = paired_ratio(alone.seconds, both.seconds)
    rows = [
        Row(name=both.name, median=statistics.median(both.seconds), ratio=gain, baseline=alone.name, loss=both.loss),
        Row(name=alone.name, median=statistics.median(alone.seconds), loss=alone.loss),
    ]
    note = f"the fast peer got {share:.2f} times the slow one's microbatches ({fast} to {slow}); fair is {FAIR_SHARE[0]} to {FAIR_SHARE[1]}"
    if plan.as_json:
        print_json(rows, share=share, compute_stand_in_ms=plan.stand_in_ms, note="a stand-in sleeps in place of work")
    else:
        print_table(f"{plan.num_stages} stages, {plan.stand_in_ms:g} ms of stand-in a microbatch", "s a step", rows)
        print(note)
    return 0 if FAIR_SHARE[0] <= share <= FAIR_SHARE[1] and gain > 1 else 1


def parse() -> Plan:
    parser = argparse.ArgumentParser(prog="scripts/bench wiring", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds, in each of which both sides run (default 3)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps timed per round and side (default 8)")
    parser.add_argument("--stages", type=int, choices=[1, 2], default=1, help="stages (default 1)")
    parser.add_argument("--compute-stand-in", type=float, default=100.0, metavar="MS", help="sleep per microbatch (default 100)")
    given = parser.parse_args()
    if min(given.rounds, given.steps, given.compute_stand_in) < 1:
        parser.error("--rounds, --steps and --compute-stand-in must be at least 1")
    return Plan(num_stages=given.stages, rounds=given.rounds, steps=given.steps, stand_in_ms=given.compute_stand_in, as_json=given.json)


def main() -> int:
    plan = parse()
    both, alone = Side("fast and slow peer", True), Side("fast peer alone", False)
    for number in range(plan.rounds):
        for side in (both, alone) if number % 2 == 0 else (alone, both):
            run_swarm(plan, side)
    return report(plan, both, alone)


if __name__ == "__main__":
    sys.exit(run(main))
