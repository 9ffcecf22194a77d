"""Steps of a pipeline: peerd against GPipe and 1F1B of torch.distributed.pipelining over gloo, against a pipeline that goes through its
trainer (hivemind.moe as published), and against one process.

All sides train the same model on the same microbatches with the same stage modules and AdamW, in turns of a step or two: while
one works the others are frozen, so each ratio compares neighbours in time. Only ratios within one run mean anything on a shared
machine. peerd's side is real daemons on loopback with tensors through the encrypted tunnel; GPipe's and 1F1B's is plain TCP. With
recompute, peerd recomputes in all stages except the last, which goes backward at once; the others recompute in every stage, and
hivemind always does. No side writes checkpoints. At the end peerd trains alone for a while, to measure the delay of its event loop and
the composition of its critical path.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peerd.cli.render_trace import summary
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig, dump
from peerd.errors import PeerdError
from scripts.benchmarks._checkouts import Checkout, add_rounds, checkouts
from scripts.benchmarks._report import Row, paired_interval, paired_ratio, print_json, print_table, progress, run
from scripts.benchmarks._turns import POLL_S, SILENCE_S, Contender, Peers, Workers, warmed_up
from scripts.benchmarks._workers import Job, Kind

LOSS_TOLERANCE = 1e-4
"""Sums of float32 gradients in different orders differ in their last bits, which a few steps of AdamW do not raise above this."""
LONG_ENOUGH_S = 300.0
"""Time between announcements, so that a frozen daemon does not count as dead; more frequent ones cost nothing measurable."""
GRAPHS = {"never": "graphs kept", "always": "recomputing"}
OTHERS: dict[Kind, str] = {"gpipe": "GPipe over gloo", "1f1b": "1F1B over gloo", "mediated": "through the trainer (hivemind.moe)"}
ALONE = "one process"
READ_TIMEOUT_S = 5.0
TRACED_STEPS = 5
LAG = re.compile(r'^peerd_event_loop_lag_quantile_seconds\{.*?share="([0-9.]+)".*?\} ([0-9.e+-]+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of one run of this benchmark."""

    stages: tuple[int, ...]
    against: tuple[Kind, ...]
    code: str
    """Another checkout or commit to compare with; empty: none."""
    large: bool
    """True: activations four times as large, and half as many microbatches."""
    lag_steps: int
    rounds: int
    warmup: int
    steps: int
    """Steps per turn."""
    recompute: tuple[str, ...]
    as_json: bool

    @property
    def total_steps(self) -> int:
        return self.warmup + self.rounds * self.steps

    def manifest(self, num_stages: int, recompute: str) -> Manifest:
        return Manifest(
            name="bench",
            model=ModelConfig(num_layers=4, d_model=512, num_heads=8, d_ff=2048, vocab_size=256),
            train=TrainConfig(
                num_stages=num_stages,
                microbatches_per_step=8 if self.large else 16,
                microbatch_size=8 if self.large else 4,
                sequence_length=256 if self.large else 128,
                learning_rate=3e-4,
            ),
            compute=ComputeConfig(threads=1, recompute="always" if recompute == "always" else "never"),
            swarm=SwarmConfig(announce_period_s=LONG_ENOUGH_S, checkpoint_every_steps=0),
        )


@dataclass(slots=True)
class Side:
    """One contender and its figures."""

    contender: Contender
    seconds: list[float] = field(default_factory=list)
    """Seconds per step, by round."""

    @property
    def name(self) -> str:
        return self.contender.name


def sides_of(plan: Plan, folder: Path, found: Sequence[Checkout]) -> list[Side]:
    """The sides, in the order in which they run and are printed. A side names the baselines that it is compared with.

    peerd's own side of each number of stages and kind of graphs comes first, and every other is what it is compared with; more
    stages are compared with fewer, too, in a second row. Against another checkout alone, one process takes no turns.
    """
    sides: list[Side] = []
    two_threads = f"{ALONE}, 2 threads, graphs kept"
    for num_stages, recompute in itertools.product(plan.stages, plan.recompute):
        manifest = plan.manifest(num_stages, recompute)
        run_file = folder / f"{num_stages}-{recompute}.toml"
        run_file.write_text(dump(manifest), encoding="utf-8")
        of_these = f"{num_stages} stages, {GRAPHS[recompute]}"
        for checkout in found:
            sides.append(Side(Contender(f"peerd{checkout.suffix}, {of_these}", Peers(manifest, place=checkout.place))))
        for kind in plan.against:
            if kind == "mediated" and recompute == "never" and "always" in plan.recompute:
                continue  # it always recomputes: one side of it is enough
            store = Path(tempfile.mkdtemp(dir=folder))
            num_processes = num_stages + (kind == "mediated")
            jobs = [Job(run_file=str(run_file), threads=1, kind=kind, rank=rank, folder=str(store)) for rank in range(num_processes)]
            kept = GRAPHS["always"] if kind == "mediated" else GRAPHS[recompute]
            sides.append(Side(Contender(f"{OTHERS[kind]}, {num_stages} stages, {kept}", Workers(jobs, store / "report"))))
    if plan.code and not plan.against:
        return sides
    run_file = folder / f"{plan.stages[0]}-{plan.recompute[0]}.toml"
    for threads, name in ((1, f"{ALONE}, 1 thread, graphs kept"), (2, two_threads)):
        workers = Workers([Job(run_file=str(run_file), threads=threads)], folder / f"report-{threads}")
        sides.append(Side(Contender(name, workers)))
    return sides


def measure(plan: Plan, sides: list[Side]) -> tuple[list[Row], dict[str, dict[str, int]]]:
    """Run all rounds, in reverse order in odd ones, so that a side does not always follow the same other side."""
    with warmed_up([side.contender for side in sides], plan.warmup):
        for number in range(plan.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                side.seconds.append(side.contender.turn(plan.steps))
                progress(f"round {number + 1}  {side.name}: {side.seconds[-1]:.3f} s a step")
        return list(_rows(plan, sides)), {side.name: _hitches(side) for side in sides}


def _rows(plan: Plan, sides: list[Side]) -> Iterator[Row]:
    """The rows: one per side, and for peerd's sides one per baseline."""
    by_name = {side.name: side for side in sides}
    for side in sides:
        baselines: list[str | None] = [*_baselines(side.name, list(by_name))]
        for baseline in baselines or [None]:
            yield Row(
                name=side.name,
                median=statistics.median(side.seconds),
                ratio=paired_ratio(by_name[baseline].seconds, side.seconds) if baseline is not None else None,
                interval=paired_interval(by_name[baseline].seconds, side.seconds) if baseline is not None else None,
                baseline=baseline,
                loss=side.contender.steps[plan.total_steps - 1].loss,
            )


def _baselines(name: str, others: list[str]) -> list[str]:
    """The sides that peerd's is compared with: the same stages and graphs, hivemind, peerd with fewer stages, one process."""
    if not name.startswith("peerd, "):
        return []
    _, stages, graphs = name.split(", ")
    same = [other for other in others if other.endswith(f"{stages}, {graphs}") and other != name]
    mediated = [other for other in others if other.startswith(OTHERS["mediated"]) and stages in other and other not in same]
    fewer = [other for other in others if other.startswith("peerd, ") and other.endswith(graphs) and other.split(", ")[1] < stages]
    return same + mediated + fewer + [other for other in others if other.startswith(f"{ALONE}, 2")]


def _hitches(side: Side) -> dict[str, int]:
    """Counts of work that peerd repeated; the other sides cannot repeat work."""
    if not isinstance(side.contender.team, Peers):
        return {}
    side.contender.thaw()
    return {name: count for name, count in side.contender.team.counters().items() if count}


def watch_alone(plan: Plan) -> tuple[dict[str, float], dict[str, Any]]:
    """Let peerd train without turns. Returns quantiles of the delay of the first stage's event loop, and a trace's summary."""
    with Peers(plan.manifest(plan.stages[0], plan.recompute[0])) as peers:
        peers.start()
        num_steps, seen_s = 0, time.monotonic()
        while num_steps < plan.lag_steps:
            time.sleep(POLL_S)
            if len(peers.steps()) > num_steps:
                num_steps, seen_s = len(peers.steps()), time.monotonic()
            elif time.monotonic() - seen_s > SILENCE_S:
                raise PeerdError(f"no step ended within {SILENCE_S:.0f} s after {num_steps} steps")
        with urllib.request.urlopen(f"{peers.dashboard}metrics", timeout=READ_TIMEOUT_S) as reply:  # noqa: S310 - a daemon of this benchmark
            text = reply.read().decode()
        traced = summary(peers.trace(TRACED_STEPS))
    found = {share: 1000 * float(seconds) for share, seconds in LAG.findall(text)}
    if not found:
        raise PeerdError("the daemon's metrics do not tell by how much its event loop is late")
    return found, traced


def print_path(traced: dict[str, Any]) -> None:
    """Print the composition of a trace's critical path, and of each stage's time."""
    steps = traced["last_step"] - traced["first_step"] + 1
    rows = [("critical path", traced["critical_path"]), *((f"stage {each['stage']}", each) for each in traced["stages"])]
    for name, shares in rows:
        parts = ", ".join(f"{what.replace('_', ' ')} {shares[what]:.1%}" for what in ("compute", "wait", "wire", "step_end"))
        print(f"{name} of {steps} steps alone: {parts}")


def parse() -> Plan:
    parser = argparse.ArgumentParser(prog="scripts/bench pipeline", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    add_rounds(parser, "rounds, in each of which every side has one turn")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="steps per turn (default 2)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before those (default 2)")
    parser.add_argument("--recompute", choices=["both", *GRAPHS], default="both", help="which pairs to run (default both)")
    parser.add_argument("--stages", type=int, nargs="+", choices=[2, 4], default=[2], help="stages and peers, one or both (default 2)")
    parser.add_argument(
        "--against",
        nargs="*",
        metavar="WHAT",
        default=[*OTHERS],
        help=f"what to compare with: some of {', '.join(OTHERS)} (default all of these), or another checkout of the project, or a commit",
    )
    parser.add_argument("--large", action="store_true", help="activations four times as large, in half as many microbatches")
    parser.add_argument(
        "--lag-steps",
        type=int,
        default=45,
        metavar="N",
        help="steps of peerd alone, whose event loop and critical path are told; 0: none (default 45)",
    )
    given = parser.parse_args()
    code = [what for what in given.against if what not in OTHERS]
    if len(code) > 1:
        parser.error(f"--against takes one other checkout, not {' and '.join(code)}")
    if min(given.rounds, given.steps, given.warmup) < 1 or given.lag_steps < 0:
        parser.error("--rounds, --steps and --warmup must be at least 1, and --lag-steps not negative")
    return Plan(
        stages=tuple(sorted(set(given.stages))),
        against=tuple(kind for kind in OTHERS if kind in given.against),
        code=next(iter(code), ""),
        large=given.large,
        lag_steps=given.lag_steps,
        rounds=given.rounds,
        warmup=given.warmup,
        steps=given.steps,
        recompute=tuple(GRAPHS) if given.recompute == "both" else (given.recompute,),
        as_json=given.json,
    )


def main() -> int:
    plan = parse()
    with tempfile.TemporaryDirectory(prefix="peerd-bench-") as folder, checkouts(plan.code) as found:
        rows, hitches = measure(plan, sides_of(plan, Path(folder), found))
    lag_ms, traced = watch_alone(plan) if plan.lag_steps else ({}, {})
    losses = [row.loss for row in rows if row.loss is not None]
    spread = max(losses) - min(losses)
    if plan.as_json:
        print_json(rows, loss_spread=spread, loss_tolerance=LOSS_TOLERANCE, hitches=hitches, loop_lag_ms=lag_ms, alone=traced)
    else:
        print_table(f"stages of 1 peer and 1 thread; medians of {plan.rounds} turns of {plan.steps} steps", "s a step", rows)
        print(f"losses after {plan.total_steps} steps agree within {spread:.1e} (tolerance {LOSS_TOLERANCE:g})")
        if lag_ms:
            print("the event loop is late by " + ", ".join(f"{lag:.1f} ms ({share})" for share, lag in lag_ms.items()))
            print_path(traced)
        print("".join(f"{name}: {counts}\n" for name, counts in hitches.items() if counts), end="")
    if spread > LOSS_TOLERANCE:
        print(f"the losses differ by {spread:.1e}: the sides did not do the same work", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
