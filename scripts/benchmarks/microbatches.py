"""Processor time per microbatch with many microbatches a step against few, and what two wrong suspicions cost.

Two stages of two peers and a tiny model, so that what is measured is peerd. In a step of the side with many, a peer of each stage is
stopped until another one suspects it, and then goes on. It fails above 1.3 times the processor time of the side with few, or if more
than 2 % of the microbatches are computed again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_plan import DemoPlan
from peerd.cli.demo_process import DemoDaemon
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.errors import PeerdError, TimedOutError
from scripts.benchmarks._report import Row, paired_ratio, print_json, print_table, progress, run
from scripts.benchmarks._swarms import looks

NUM_STAGES, NUM_PEERS = 2, 4
MOST_TIMES, MOST_AGAIN = 1.3, 0.02
SUSPECTED_WITHIN_S = 11.0
"""A peer that stands still for longer fences itself, and drops what it holds."""
LOOK_S = 0.1


@dataclass(slots=True)
class Side:
    name: str
    microbatches: int
    spent_ms: list[float] = field(default_factory=list)
    """Processor time of all processes per microbatch, by round."""
    again: list[float] = field(default_factory=list)
    """Share of the microbatches that was computed again, by round."""
    loss: float = 0.0

    def plan(self, steps: int) -> DemoPlan:
        manifest = Manifest(
            name="bench",
            model=ModelConfig(num_layers=2, d_model=32, num_heads=2, d_ff=64),
            train=TrainConfig(
                num_stages=NUM_STAGES, microbatches_per_step=self.microbatches, microbatch_size=1, sequence_length=16, steps=steps
            ),
            compute=ComputeConfig(threads=1),
            swarm=SwarmConfig(checkpoint_every_steps=0, rebalance_period_s=0),
        )
        return DemoPlan(manifest=manifest, num_peers=NUM_PEERS, slow={}, kills=(), chaos=None, stand_in_ms=0.0)


def processes(swarm: DemoSwarm) -> list[psutil.Process]:
    mains = [psutil.Process(daemon.process.pid) for daemon in swarm.daemons]
    return [each for main in mains for each in (main, *main.children(recursive=True))]


def spent_s(found: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in found)


def until(swarm: DemoSwarm, condition: Callable[[], bool]) -> None:
    for _ in looks(swarm):
        if condition():
            return


def held(daemon: DemoDaemon) -> int:
    return int(daemon.client.request("status")["counters"]["accumulated_microbatches"])


def suspect_wrongly(victim: DemoDaemon, witness: DemoDaemon) -> None:
    """Stop a peer until another one suspects it, and let it go on."""
    peer = victim.client.request("status")["peer"]["id"]
    process, began_s = psutil.Process(victim.process.pid), time.monotonic()
    process.suspend()
    try:
        while time.monotonic() - began_s < SUSPECTED_WITHIN_S:
            rows = [row for stage in witness.client.request("peers")["stages"] for row in stage["peers"] if row["id"] == peer]
            if any(row["suspect"] for row in rows):
                progress(f"suspected wrongly after {time.monotonic() - began_s:.1f} s")
                return
            time.sleep(LOOK_S)
    finally:
        process.resume()
    raise TimedOutError(f"nobody suspected {peer} within {SUSPECTED_WITHIN_S:.0f} s")


def run_swarm(side: Side, steps: int, suspicions: bool) -> None:
    """The first step opens connections and is not counted."""
    with DemoSwarm(side.plan(steps + 1), lambda _text: None) as swarm:
        swarm.start()
        until(swarm, lambda: len(swarm.steps) >= 1)
        found, daemons = processes(swarm), swarm.daemons
        before_s, left = spent_s(found), steps + 1 - len(swarm.steps)
        if left < 1:
            raise PeerdError("the run was over before it was looked at", "take more microbatches")
        if suspicions:
            for victim, witness in ((daemons[2], daemons[0]), (daemons[3], daemons[1])):
                least = held(victim) + side.microbatches // 16
                until(swarm, lambda least=least, victim=victim: held(victim) >= least)  # type: ignore[misc]
                suspect_wrongly(victim, witness)
        until(swarm, lambda: swarm.finished and len(swarm.steps) >= steps + 1)
        side.spent_ms.append(1000 * (spent_s(found) - before_s) / (left * side.microbatches))
        again = sum(map(held, daemons)) - NUM_STAGES * (steps + 1) * side.microbatches
        side.again.append(again / (NUM_STAGES * steps * side.microbatches))
        side.loss = swarm.steps[-1]["loss"]
        counters = [daemon.client.request("status")["counters"] for daemon in daemons]
        wrong = {name: sum(each[name] for each in counters) for name in ("duplicate_microbatches", "lost_microbatches", "inexact_steps")}
    progress(f"{side.name}: {side.spent_ms[-1]:.2f} ms per microbatch, {100 * side.again[-1]:.2f} % computed again")
    if any(wrong.values()):
        raise PeerdError(f"the run was not exact: {wrong}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench microbatches", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds, in each of which both sides run (default 3)")
    parser.add_argument("--few", type=int, default=64, metavar="N", help="microbatches a step (default 64)")
    parser.add_argument("--many", type=int, default=4096, metavar="N", help="microbatches a step (default 4096)")
    given = parser.parse_args()
    if given.rounds < 1 or not 0 < given.few <= given.many:
        parser.error("--rounds and --few must be at least 1, and --many not less than --few")
    few, many, disturbed = (
        Side(f"{given.few} a step", given.few),
        Side(f"{given.many} a step", given.many),
        Side(f"{given.many} a step, two wrong suspicions", given.many),
    )
    for number in range(given.rounds):
        for side in (few, many) if number % 2 == 0 else (many, few):
            run_swarm(side, given.many // side.microbatches, suspicions=False)
        run_swarm(disturbed, 1, suspicions=True)
    rows = [Row(name=few.name, median=statistics.median(few.spent_ms), loss=few.loss)]
    for side in (many, disturbed):
        ratio = paired_ratio(few.spent_ms, side.spent_ms)
        rows.append(Row(name=side.name, median=statistics.median(side.spent_ms), ratio=ratio, baseline=few.name, loss=side.loss))
    again = statistics.median(disturbed.again)
    if given.json:
        print_json(rows, computed_again=again)
    else:
        print_table("processor time of all daemons per microbatch, 2 stages of 2 peers, a tiny model", "ms", rows)
        print(f"{disturbed.name}: {100 * again:.2f} % computed again")
    return 1 if rows[1].median > MOST_TIMES * rows[0].median or again > MOST_AGAIN else 0


if __name__ == "__main__":
    sys.exit(run(main))
