"""Steps of a pipeline: peerd against GPipe of torch.distributed.pipelining over gloo, and against one process.

All sides train the same model on the same microbatches with the same stage modules and AdamW, one after another within a
round, so that each ratio compares neighbours in time: only ratios within one run mean anything on a shared machine. peerd's
side is real daemons on loopback, tensors through the encrypted tunnel; GPipe's is plain TCP. With recompute, peerd recomputes
in all stages but the last, which goes backward at once; GPipe has to in every stage.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_plan import DemoPlan
from peerd.cli.launch import module_command
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, TrainConfig, dump
from scripts.benchmarks._report import Row, paired_ratio, print_json, print_table, progress
from scripts.benchmarks._workers import Job

LOSS_TOLERANCE = 1e-4
"""Sums of float32 gradients in different orders differ in their last bits; a few steps of AdamW make this of it at most."""
SILENCE_S = 600.0
POLL_S = 0.5
RECOMPUTE = {"never": "graphs kept", "always": "recomputed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run of this benchmark measures."""

    num_stages: int
    rounds: int
    warmup: int
    steps: int
    """Per round and side, after the warm-up."""
    recompute: tuple[str, ...]

    @property
    def total_steps(self) -> int:
        return self.warmup + self.steps

    def manifest(self, recompute: str) -> Manifest:
        return Manifest(
            name="bench",
            model=ModelConfig(num_layers=4, d_model=512, num_heads=8, d_ff=2048, vocab_size=256),
            train=TrainConfig(
                num_stages=self.num_stages,
                microbatches_per_step=16,
                microbatch_size=4,
                sequence_length=128,
                learning_rate=3e-4,
                steps=self.total_steps,
            ),
            compute=ComputeConfig(threads=1, recompute="always" if recompute == "always" else "never"),
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """One side in one round."""

    seconds_per_step: float
    """Mean over the steps after the warm-up."""
    loss: float
    """Of the last step."""


@dataclass(slots=True)
class Side:
    """One side over all rounds."""

    name: str
    rounds: list[Timed] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [timed.seconds_per_step for timed in self.rounds]

    def row(self, baseline: Side | None) -> Row:
        ratio = paired_ratio(baseline.seconds, self.seconds) if baseline is not None else None
        name = baseline.name if baseline is not None else None
        return Row(name=self.name, median=statistics.median(self.seconds), ratio=ratio, baseline=name, loss=self.rounds[-1].loss)


def time_peerd(plan: Plan, recompute: str) -> Timed:
    """One daemon per stage trains the whole run; steps are timed by the last stage's commits."""
    demo = DemoPlan(manifest=plan.manifest(recompute), num_peers=plan.num_stages, slow={}, kills=(), stand_in_ms=0.0)
    with DemoSwarm(demo, lambda _text: None) as swarm:
        swarm.start()
        silent_since, heard = time.monotonic(), swarm.heard()
        while not swarm.finished or len(swarm.steps) < plan.total_steps:
            time.sleep(POLL_S)
            swarm.poll()
            swarm.require_every_stage()
            if swarm.heard() != heard:
                silent_since, heard = time.monotonic(), swarm.heard()
            elif time.monotonic() - silent_since > SILENCE_S:
                raise SystemExit("peerd: nothing done for ten minutes")
        ends = [step["time_s"] for step in swarm.steps]
        return Timed((ends[-1] - ends[plan.warmup - 1]) / plan.steps, swarm.steps[-1]["loss"])


def time_workers(plan: Plan, jobs: list[Job]) -> Timed:
    """Run workers to their end; the last one reports."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_worker(job)) for job in jobs]
        reporting = workers[-1]
        assert reporting.stdout is not None
        line = reporting.stdout.readline()
        for worker in workers:
            if worker.wait(SILENCE_S) != 0:
                raise SystemExit(f"a worker ended with exit code {worker.returncode}")
    return _timed(plan, line)


def _timed(plan: Plan, line: bytes) -> Timed:
    import json

    report = json.loads(line)
    return Timed(statistics.fmean(report["seconds"][plan.warmup :]), report["losses"][-1])


@contextlib.contextmanager
def _worker(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        module_command("scripts.benchmarks._workers", job.to_json()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # so that Ctrl-C reaches the benchmark alone
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def time_gpipe(plan: Plan, recompute: str, folder: Path) -> Timed:
    store = Path(tempfile.mkdtemp(dir=folder))
    job = Job(run_file=str(folder / f"{recompute}.toml"), steps=plan.total_steps, threads=1, folder=str(store))
    return time_workers(plan, [replace(job, rank=rank) for rank in range(plan.num_stages)])


def time_alone(plan: Plan, threads: int, folder: Path) -> Timed:
    run_file = str(folder / f"{plan.recompute[0]}.toml")
    return time_workers(plan, [Job(run_file=run_file, steps=plan.total_steps, threads=threads)])


def measure(plan: Plan, folder: Path) -> list[Row]:
    """All rounds. Each pair is run A B in even rounds and B A in odd ones, lest the first always has the colder machine."""
    for recompute in plan.recompute:
        (folder / f"{recompute}.toml").write_text(dump(plan.manifest(recompute)), encoding="utf-8")
    pairs = {r: (Side(f"peerd, {RECOMPUTE[r]}"), Side(f"GPipe over gloo, {RECOMPUTE[r]}")) for r in plan.recompute}
    alone = {threads: Side(f"one process, {threads} thread{'s' * (threads > 1)}, graphs kept") for threads in (1, 2)}
    for number in range(plan.rounds):
        for recompute, (ours, theirs) in pairs.items():
            order = (ours, theirs) if number % 2 == 0 else (theirs, ours)
            for side in order:
                _note(side, number, time_peerd(plan, recompute) if side is ours else time_gpipe(plan, recompute, folder))
        for threads, side in alone.items():
            _note(side, number, time_alone(plan, threads, folder))
    rows = [row for ours, theirs in pairs.values() for row in (ours.row(theirs), theirs.row(None))]
    first = pairs[plan.recompute[0]][0]
    return [*rows, *(side.row(alone[2] if side is alone[1] else None) for side in alone.values()), _against_alone(first, alone[2])]


def _against_alone(ours: Side, alone: Side) -> Row:
    row = ours.row(alone)
    return replace(row, name=f"{row.name} (again)")


def _note(side: Side, number: int, timed: Timed) -> None:
    side.rounds.append(timed)
    progress(f"round {number + 1}  {side.name}: {timed.seconds_per_step:.3f} s a step, loss {timed.loss:.6f}")


def spread_of_losses(rows: list[Row]) -> float:
    losses = [row.loss for row in rows if row.loss is not None]
    return max(losses) - min(losses)


def plan_of(arguments: argparse.Namespace) -> Plan:
    recompute = ("never", "always") if arguments.recompute == "both" else (arguments.recompute,)
    return Plan(
        num_stages=arguments.stages, rounds=arguments.rounds, warmup=arguments.warmup, steps=arguments.steps, recompute=recompute
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds in which every side runs once (default 5)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps timed per round and side (default 4)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before those (default 2)")
    parser.add_argument("--recompute", choices=["both", *RECOMPUTE], default="both", help="which of the two pairs to run (default both)")
    parser.add_argument("--stages", type=int, choices=[2, 4], default=2, help="stages and peers (default 2)")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.steps, arguments.warmup) < 1:
        parser.error("--rounds, --steps and --warmup must be at least 1")
    return arguments


def interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    arguments = parse()
    plan = plan_of(arguments)
    for kind in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="peerd-bench-") as folder:
            rows = measure(plan, Path(folder))
    except KeyboardInterrupt:
        return 130
    spread = spread_of_losses(rows)
    if arguments.json:
        print_json(rows, loss_spread=spread, loss_tolerance=LOSS_TOLERANCE)
    else:
        print_table(f"{plan.num_stages} stages of 1 peer and 1 thread; medians of {plan.rounds} rounds of {plan.steps} steps", "s a step", rows)
        print(f"losses after {plan.total_steps} steps agree within {spread:.1e} (tolerance {LOSS_TOLERANCE:g})")
    if spread > LOSS_TOLERANCE:
        print(f"the losses differ by {spread:.1e}: the sides did not do the same work", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
