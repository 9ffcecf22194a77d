"""Delayed updates: how long is it from a peer's last gradient of a step to its first pass of the next, with and without them?

Both sides are swarms of real daemons on loopback that train the same run with LAMB, in turns: while one works, the other is
frozen. A microbatch sleeps until it has taken --compute-stand-in, because on a GPU it would leave the processor to averaging and
update. The times come from every peer's timeline. Below zero, the next step began before the last gradient of this one came.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, field, replace

from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.control.protocol import TraceReply
from peerd.errors import PeerdError
from peerd.timeline.spans import COMPUTE, SpanKind
from scripts.benchmarks._report import Row, paired_ratio, print_json, print_table, progress, run
from scripts.benchmarks._turns import Contender, Peers, warmed_up
from scripts.benchmarks.pipeline import LONG_ENOUGH_S

UNSETTLED = 1
"""Steps at the beginning of a turn that are not counted: peers were frozen in the middle of the first."""


@dataclass(slots=True)
class Side:
    contender: Contender
    peers: Peers
    gaps_s: list[float] = field(default_factory=list)
    """For each turn the median over peers and steps of the time from a peer's last gradient to its next step's first pass."""
    ends_s: list[float] = field(default_factory=list)
    """Likewise for the time from a peer's last gradient until its step was applied."""
    step_s: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.contender.name

    def turn(self, num_steps: int) -> None:
        self.contender.thaw()
        reply = self.peers.trace(num_steps + UNSETTLED + 1)
        self.contender.freeze()
        gaps, ends, steps = times_of(reply)
        for found, of_turn in ((self.gaps_s, gaps), (self.ends_s, ends), (self.step_s, steps)):
            found.append(statistics.median(of_turn))


def times_of(reply: TraceReply) -> tuple[list[float], list[float], list[float]]:
    """For every peer and counted step, in seconds: gap, end and length."""
    gaps, ends, lengths = [], [], []
    for peer in reply["peers"]:
        spans = [(SpanKind(kind), began / 1e6, (began + took) / 1e6, step) for kind, began, took, step, *_ in peer["spans"]]
        for step in range(reply["first_step"] + UNSETTLED, reply["last_step"]):
            last = max((ended for kind, _, ended, at in spans if kind is SpanKind.BACKWARD and at == step), default=None)
            first = min((began for kind, began, _, at in spans if kind in COMPUTE and at == step + 1), default=None)
            commits = {at: ended for kind, _, ended, at in spans if kind is SpanKind.COMMIT}
            if last is None or first is None or not {step - 1, step} <= commits.keys():
                continue  # the peer had no microbatch in one of the two steps
            gaps.append(first - last)
            ends.append(commits[step] - last)
            lengths.append(commits[step] - commits[step - 1])
    if not gaps:
        raise PeerdError("no peer had microbatches of two steps: ask for more --microbatches")
    return gaps, ends, lengths


def side_of(name: str, manifest: Manifest, given: argparse.Namespace) -> Side:
    peers = Peers(manifest, observed=False, per_stage=given.peers, stand_in_ms=given.compute_stand_in)
    return Side(Contender(name, peers), peers)


def manifest_of(given: argparse.Namespace) -> Manifest:
    return Manifest(
        name="bench",
        model=ModelConfig(num_layers=given.layers * given.stages, d_model=512, num_heads=8, d_ff=2048, vocab_size=256),
        train=TrainConfig(
            num_stages=given.stages,
            microbatches_per_step=given.microbatches,
            microbatch_size=1,
            sequence_length=16,
            optimizer="lamb",
            learning_rate=1e-3,
        ),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(announce_period_s=LONG_ENOUGH_S, checkpoint_every_steps=0, rebalance_period_s=0),
    )


def measure(given: argparse.Namespace) -> list[Side]:
    manifest = manifest_of(given)
    late = replace(manifest, train=replace(manifest.train, delayed_updates=True))
    sides = [side_of("at once", manifest, given), side_of("delayed", late, given)]
    with warmed_up([side.contender for side in sides], given.warmup):
        for number in range(given.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                side.turn(given.steps)
                progress(f"round {number + 1}  {side.name}: {side.gaps_s[-1]:.3f} s, a step {side.step_s[-1]:.3f} s")
    return sides


def rows_of(plain: Side, late: Side) -> list[Row]:
    rows = []
    figures = (
        ("to the next first pass", plain.gaps_s, late.gaps_s),
        ("until it is applied", plain.ends_s, late.ends_s),
        ("whole step", plain.step_s, late.step_s),
    )
    for name, theirs, ours in figures:
        rows.append(Row(name=f"{plain.name}: {name}", median=statistics.median(theirs)))
        ratio = paired_ratio(theirs, ours) if min(ours) > 0 else None
        rows.append(Row(name=f"{late.name}: {name}", median=statistics.median(ours), ratio=ratio, baseline=plain.name))
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench delayed", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds, in each of which both sides have a turn (default 5)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps counted per turn (default 3)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before the first turn (default 2)")
    parser.add_argument("--stages", type=int, default=1, metavar="N", help="stages (default 1)")
    parser.add_argument("--peers", type=int, default=2, metavar="N", help="per stage (default 2)")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="per stage, of 4.2 million parameters each (default 2)")
    parser.add_argument("--microbatches", type=int, default=16, metavar="N", help="per step (default 16)")
    parser.add_argument(
        "--compute-stand-in", type=float, default=200.0, metavar="MS", help="a microbatch takes at least so long (default 200)"
    )
    given = parser.parse_args()
    least = (given.rounds, given.steps, given.warmup, given.stages, given.peers, given.layers, given.microbatches)
    if min(least) < 1 or given.compute_stand_in < 0:
        parser.error("--compute-stand-in must be 0 or more, all other numbers at least 1")
    return given


def main() -> int:
    given = parse()
    sides = measure(given)
    rows = rows_of(*sides)
    if given.json:
        print_json(rows, compute_stand_in_ms=given.compute_stand_in)
    else:
        title = f"after a peer's last gradient; {given.stages} stages of {given.peers} peers and {given.layers} layers, "
        print_table(f"{title}{given.microbatches} microbatches of {given.compute_stand_in:g} ms a step", "seconds", rows)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
