"""Steps of a pipeline: peerd against GPipe of torch.distributed.pipelining over gloo, and against one process.

All sides train the same model on the same microbatches with the same stage modules and AdamW, in turns of a step or two: while
one works the others are frozen, so each ratio compares neighbours in time. Only ratios within one run mean anything on a shared
machine. peerd's side is real daemons on loopback with tensors through the encrypted tunnel; GPipe's is plain TCP. With
recompute, peerd recomputes in all stages but the last, which goes backward at once; GPipe has to in every stage. Neither side
writes checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig, dump
from peerd.errors import ExitCode, PeerdError
from scripts.benchmarks._report import Row, interrupt, paired_ratio, print_json, print_table, progress
from scripts.benchmarks._turns import Contender, Peers, Workers, guard, thawed_at_exit
from scripts.benchmarks._workers import Job

LOSS_TOLERANCE = 1e-4
"""Sums of float32 gradients in different orders differ in their last bits, which a few steps of AdamW do not raise above this."""
LONG_ENOUGH_S = 300.0
"""Between announcements, so that a frozen daemon does not count as gone; announcing more often costs nothing measurable."""
GRAPHS = {"never": "graphs kept", "always": "recomputing"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run of this benchmark measures."""

    num_stages: int
    rounds: int
    warmup: int
    steps: int
    """Per turn."""
    recompute: tuple[str, ...]
    as_json: bool

    @property
    def total_steps(self) -> int:
        return self.warmup + self.rounds * self.steps

    def manifest(self, recompute: str) -> Manifest:
        return Manifest(
            name="bench",
            model=ModelConfig(num_layers=4, d_model=512, num_heads=8, d_ff=2048, vocab_size=256),
            train=TrainConfig(
                num_stages=self.num_stages, microbatches_per_step=16, microbatch_size=4, sequence_length=128, learning_rate=3e-4
            ),
            compute=ComputeConfig(threads=1, recompute="always" if recompute == "always" else "never"),
            swarm=SwarmConfig(announce_period_s=LONG_ENOUGH_S, checkpoint_every_steps=0),
        )


@dataclass(slots=True)
class Side:
    """One contender's figures."""

    contender: Contender
    baseline: str | None
    seconds: list[float] = field(default_factory=list)
    """Per step, by round."""

    @property
    def name(self) -> str:
        return self.contender.name


def sides_of(plan: Plan, folder: Path) -> list[Side]:
    """In the order in which they are run and printed; baselines are named by the sides that are compared with them."""
    sides = []
    two_threads = "one process, 2 threads, graphs kept"
    for recompute in plan.recompute:
        run_file = folder / f"{recompute}.toml"
        run_file.write_text(dump(plan.manifest(recompute)), encoding="utf-8")
        store = Path(tempfile.mkdtemp(dir=folder))
        ranks = [Job(run_file=str(run_file), threads=1, rank=rank, folder=str(store)) for rank in range(plan.num_stages)]
        gpipe = f"GPipe over gloo, {GRAPHS[recompute]}"
        sides.append(Side(Contender(f"peerd, {GRAPHS[recompute]}", Peers(plan.manifest(recompute))), gpipe))
        sides.append(Side(Contender(gpipe, Workers(ranks, store / "report")), two_threads))
    run_file = folder / f"{plan.recompute[0]}.toml"
    for threads, name in ((1, "one process, 1 thread, graphs kept"), (2, two_threads)):
        workers = Workers([Job(run_file=str(run_file), threads=threads)], folder / f"report-{threads}")
        sides.append(Side(Contender(name, workers), None if name == two_threads else two_threads))
    return sides


def measure(plan: Plan, sides: list[Side]) -> tuple[list[Row], dict[str, dict[str, int]]]:
    """All rounds: forth in even ones and back in odd ones, lest a side always follows the same other."""
    with contextlib.ExitStack() as stack:
        for side in sides:
            stack.enter_context(side.contender.team)
        keeper = stack.enter_context(thawed_at_exit([side.contender for side in sides]))
        for side in sides:
            progress(f"warming up {side.name}")
            side.contender.warm_up(plan.warmup)
            guard(keeper, side.contender)
        for number in range(plan.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                side.seconds.append(side.contender.turn(plan.steps))
                progress(f"round {number + 1}  {side.name}: {side.seconds[-1]:.3f} s a step")
        return [_row(plan, side, sides) for side in sides], {side.name: _hitches(side) for side in sides}


def _row(plan: Plan, side: Side, sides: list[Side]) -> Row:
    baseline = next((other for other in sides if other.name == side.baseline), None)
    return Row(
        name=side.name,
        median=statistics.median(side.seconds),
        ratio=paired_ratio(baseline.seconds, side.seconds) if baseline is not None else None,
        baseline=side.baseline,
        loss=side.contender.steps[plan.total_steps - 1].loss,
    )


def _hitches(side: Side) -> dict[str, int]:
    """Work that peerd did twice; nothing of the kind can befall the others."""
    if not isinstance(side.contender.team, Peers):
        return {}
    side.contender.thaw()
    return {name: count for name, count in side.contender.team.counters().items() if count}


def parse() -> Plan:
    parser = argparse.ArgumentParser(prog="scripts/bench pipeline", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds, in each of which every side has one turn (default 5)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="steps per turn (default 2)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before those (default 2)")
    parser.add_argument("--recompute", choices=["both", *GRAPHS], default="both", help="which pairs to run (default both)")
    parser.add_argument("--stages", type=int, choices=[2, 4], default=2, help="stages and peers (default 2)")
    given = parser.parse_args()
    if min(given.rounds, given.steps, given.warmup) < 1:
        parser.error("--rounds, --steps and --warmup must be at least 1")
    return Plan(
        num_stages=given.stages,
        rounds=given.rounds,
        warmup=given.warmup,
        steps=given.steps,
        recompute=tuple(GRAPHS) if given.recompute == "both" else (given.recompute,),
        as_json=given.json,
    )


def main() -> int:
    plan = parse()
    for kind in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="peerd-bench-") as folder:
            rows, hitches = measure(plan, sides_of(plan, Path(folder)))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except PeerdError as error:
        print(f"pipeline: error: {error}", file=sys.stderr)
        return error.exit_code
    losses = [row.loss for row in rows if row.loss is not None]
    spread = max(losses) - min(losses)
    if plan.as_json:
        print_json(rows, loss_spread=spread, loss_tolerance=LOSS_TOLERANCE, hitches=hitches)
    else:
        print_table(
            f"{plan.num_stages} stages of 1 peer and 1 thread; medians of {plan.rounds} turns of {plan.steps} steps", "s a step", rows
        )
        print(f"losses after {plan.total_steps} steps agree within {spread:.1e} (tolerance {LOSS_TOLERANCE:g})")
        print("".join(f"{name}: {counts}\n" for name, counts in hitches.items() if counts), end="")
    if spread > LOSS_TOLERANCE:
        print(f"the losses differ by {spread:.1e}: the sides did not do the same work", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
