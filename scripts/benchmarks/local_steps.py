"""What local steps cost in loss at equal tokens: inner rate, outer rate and momentum, updates between averages, synchronous beginning.

Everything is computed in one process: --replicas copies of each of two stages, of which each microbatch passes one, by chance. They compute
together (_together.py), which a test compares with the reference; a run with a synchronous beginning is the reference's own.

A synchronous run makes an update of as many microbatches as all copies of a stage have in one update of their own. So after the same tokens
both have made as many updates. The loss is that of the averaged model on evaluation text.

The table also has the time to a loss at 20 Mbit/s and 60 ms: that of the best synchronous rate after a share of its tokens (--target). How
long a step takes there is simulated by peerd's own policies, for two swarms: `own` is that of the table, with its model and its peers;
`home` has 8 stages of some 130 million parameters, two peers each, as in `scripts/bench race`. Boundaries are in int8 there, and so are
averages of synchronous steps, which costs their loss nothing here, unless --boundary and --synchronous name other codecs, with which they
are trained. `at least` compares with the same synchronous run, if its averages came in the smallest codec and that cost its loss nothing.

Each result is appended to --results as it is there, and what is there is not computed again: a table may be made in pieces. A training that
was stopped goes on from the file beside it (.part).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from peerd.config.codec import parse_averaged
from peerd.config.manifest import ComputeConfig, DataConfig, Manifest, ModelConfig, TrainConfig, WireConfig
from peerd.config.paths import cache_folder
from peerd.data.sources import STDLIB
from peerd.data.tokens import prepare_tokens
from peerd.models.stages import initial_parameter_spec
from peerd.planner.contenders import NUM_REPLICAS
from peerd.reference import train_reference
from peerd.train.corpus import Corpus
from scripts.benchmarks._race import HomeSize, Link, step_s
from scripts.benchmarks._race_lines import reaches_at
from scripts.benchmarks._report import SCHEMA, progress, run
from scripts.benchmarks._together import train_together

SEQUENCES, SEQUENCE_LENGTH = 4, 128
"""Of a microbatch."""
NUM_STAGES = 2
MARKS = 8
"""Evaluations of a run, at equal distances in tokens."""
LINE = Link(20, 60)
SMALLEST = "powersgd:4"
"""The codec of synchronous averages with the fewest bytes."""
Swarm = Literal["own", "home"]
SWARMS: tuple[Swarm, ...] = ("own", "home")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """The settings of one run. `updates` is 0 for a synchronous run, else the number of a peer's own updates between averages."""

    rate: float
    updates: int = 0
    outer_rate: float = 0.0
    outer_momentum: float = 0.0
    after: float = 0.0
    """Share of the tokens with which a synchronous beginning trains."""
    codec: str = "none"
    """Of averages. Where time counts, those of a synchronous run with "none" are in int8, which costs their loss nothing here."""
    boundary: str = "none"
    """Codec of activations and their gradients between the stages. Where time counts, "none" is int8."""
    seed: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: float = 0.0
    """Share of the steps in which the rate rises."""

    @property
    def name(self) -> str:
        rate = f"rate {self.rate:g}" + (f" {self.schedule}" if self.schedule != "constant" else "")
        rate += f" after {self.warmup:.0%} of rising" if self.warmup else ""
        codec = f", {self.codec}" if self.codec != "none" else ""
        codec += f", boundaries {self.boundary}" if self.boundary != "none" else ""
        if not self.updates:
            return f"synchronous, {rate}{codec}"
        is_plain = (self.outer_rate, self.outer_momentum) == (1.0, 0.0)
        outer = "plain averaging" if is_plain else f"outer {self.outer_rate:g}, {self.outer_momentum:g}"
        begins = f", after {self.after:.0%}" if self.after else ""
        return f"H {self.updates}, {rate}, {outer}{begins}{codec}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What all runs of a table have in common."""

    d_model: int
    layers: int
    replicas: int
    local_batch: int
    tokens: int

    def manifest(self, cell: Cell) -> Manifest:
        """The run, with about as many tokens as wanted."""
        microbatches = self.replicas * self.local_batch * max(1, cell.updates)
        between = max(1, round(self.tokens / (microbatches * SEQUENCES * SEQUENCE_LENGTH * MARKS)))
        return Manifest(
            seed=cell.seed,
            model=ModelConfig(num_layers=self.layers, d_model=self.d_model, num_heads=4, d_ff=4 * self.d_model, vocab_size=256),
            data=DataConfig(source=STDLIB, evaluation_fraction=0.05),
            train=TrainConfig(
                num_stages=NUM_STAGES,
                microbatches_per_step=microbatches,
                microbatch_size=SEQUENCES,
                sequence_length=SEQUENCE_LENGTH,
                learning_rate=cell.rate,
                schedule=cell.schedule,
                warmup_steps=math.ceil(cell.warmup * MARKS * between),
                steps=MARKS * between,
                evaluate_every_steps=between,
                evaluation_microbatches=32,
                local_batch=self.local_batch if cell.updates else 0,
                local_steps_after=round(cell.after * MARKS * between) if cell.updates else 0,
                outer_learning_rate=cell.outer_rate,
                outer_momentum=cell.outer_momentum,
            ),
            compute=ComputeConfig(threads=1),
            wire=WireConfig(activations=cell.boundary, activation_gradients=cell.boundary, weight_gradients=cell.codec),
        )


def loss_of(size: Size, cell: Cell, part: Path | None) -> dict[str, object]:
    """Train a cell, or go on with what is in the file `part`. Returns the losses of its evaluations, by the tokens before each."""
    manifest, began_s = size.manifest(cell), time.monotonic()
    corpus = Corpus(prepare_tokens(STDLIB, cache_folder(), manifest.data), manifest)
    if cell.after:
        evaluations = train_reference(manifest, corpus, manifest.train.steps, num_replicas=size.replicas).evaluations
    else:
        evaluations = train_together(manifest, corpus, size.replicas, part)
    losses = [[each.step * manifest.tokens_per_step, each.loss] for each in evaluations]
    return {"losses": losses, "took_s": round(time.monotonic() - began_s, 1)}


@functools.lru_cache
def step_in_s(swarm: Swarm, size: Size, updates: int, boundary: str, codec: str, is_local: bool) -> float:
    """Seconds of a step with `updates` times the microbatches of a synchronous run; `codec`: of averages."""
    home = HomeSize()
    if swarm == "own":
        run, replicas, in_update = size.manifest(Cell(rate=1.0)), size.replicas, size.replicas * size.local_batch
    else:
        run, replicas, in_update = home.run, NUM_REPLICAS, home.microbatches
    local_batch = in_update // replicas if is_local else 0
    train = dataclasses.replace(run.train, microbatches_per_step=in_update * max(1, updates), local_batch=local_batch)
    wire = WireConfig(activations=boundary, activation_gradients=boundary, weight_gradients=codec)
    return step_s(dataclasses.replace(run, train=train, wire=wire), home.flops, LINE, replicas)


def seconds_in(swarm: Swarm, size: Size, cell: Cell, tokens: float, codec: str = "int8") -> float:
    """Seconds in which so many tokens would be trained. `codec`: of synchronous averages where the cell names none."""
    manifest = size.manifest(cell)
    steps = tokens / manifest.tokens_per_step
    exact = min(steps, float(manifest.train.local_steps_after)) if cell.updates else steps
    local = steps - exact
    codec = cell.codec if not cell.updates and cell.codec != "none" else codec
    boundary = cell.boundary if cell.boundary != "none" else "int8"
    found = exact * step_in_s(swarm, size, cell.updates, boundary, codec, False) if exact else 0.0
    return found + (local * step_in_s(swarm, size, cell.updates, boundary, cell.codec, True) if local else 0.0)


def sent_bytes(size: Size, cell: Cell) -> float:
    """Bytes that a peer of the larger stage sends for averages, by butterfly: its part to all others, and its sum to all others."""
    manifest = size.manifest(cell)
    numbers = max(sum(map(_numel, initial_parameter_spec(manifest, stage).values())) for stage in range(NUM_STAGES))
    exact = manifest.train.local_steps_after if cell.updates else 0
    plain, codec = 4 * numbers, parse_averaged(cell.codec).most_exact.num_bytes(numbers)
    share = 2 * (size.replicas - 1) / size.replicas
    return share * (exact * plain + (manifest.train.steps - exact) * codec)


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def cells_of(given: argparse.Namespace) -> list[Cell]:
    """All combinations, seed by seed, the synchronous ones first."""
    outer = [tuple(map(float, text.split(":"))) for text in given.outer]
    found = []
    for seed in range(given.seeds):
        plain = [Cell(rate=0.0, seed=seed, boundary=boundary, schedule=given.schedule, warmup=given.warmup) for boundary in given.boundary]
        found += [
            dataclasses.replace(each, rate=rate, codec=codec)
            for each, codec, rate in itertools.product(plain, given.synchronous, given.rate)
        ]
        found += [
            dataclasses.replace(each, rate=rate, updates=updates, outer_rate=outer_rate, outer_momentum=momentum, after=after, codec=codec)
            for each, updates, (outer_rate, momentum), after, codec, rate in itertools.product(
                plain, given.updates, outer, given.after, given.codec, given.rate
            )
        ]
    return found


def known_in(path: Path | None, size: Size) -> dict[Cell, dict[str, object]]:
    """The results of this size that a file holds."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    told = [json.loads(line) for line in lines]
    return {Cell(**each["cell"]): each["found"] for each in told if each["size"] == dataclasses.asdict(size)}


Row = dict[str, Any]
"""A line of the table, as --json prints it."""
Curve = list[tuple[float, float]]
"""Evaluation losses, with the tokens before each."""


def curves_of(known: dict[Cell, dict[str, object]]) -> dict[Cell, list[Curve]]:
    """The curves of all seeds of each setting."""
    found: dict[Cell, list[Curve]] = {}
    for cell, told in sorted(known.items()):
        curve = [(float(tokens), float(loss)) for tokens, loss in told["losses"]]  # type: ignore[attr-defined]
        found.setdefault(dataclasses.replace(cell, seed=0), []).append(curve)
    return found


def mean_of(curves: Sequence[Curve]) -> Curve:
    return [(at[0][0], statistics.fmean(loss for _, loss in at)) for at in zip(*curves, strict=True)]


def loss_after(curve: Curve, tokens: float) -> float:
    """By linear interpolation between evaluations."""
    for (before, higher), (after, lower) in itertools.pairwise(curve):
        if tokens <= after:
            return higher + (lower - higher) * (tokens - before) / (after - before)
    return curve[-1][1]


def table_of(size: Size, known: dict[Cell, dict[str, object]], target: float) -> list[Row]:
    """A row for each setting: the mean curve of its seeds, how far its end is from the best synchronous one, and its time to the target.

    `target`: a share of the tokens, after which the best synchronous rate has the loss that counts.
    """
    groups = curves_of(known)
    means = {cell: mean_of(curves) for cell, curves in groups.items()}
    best = min((cell for cell in means if not cell.updates), key=lambda cell: means[cell][-1][1], default=None)
    wanted = -math.inf if best is None else loss_after(means[best], target * means[best][-1][0])

    def hours(swarm: Swarm, cell: Cell, codec: str = "int8") -> float:
        tokens = reaches_at(means[cell], wanted)
        return seconds_in(swarm, size, cell, tokens, codec) / 3600 if math.isfinite(tokens) else math.inf

    def times(swarm: Swarm, cell: Cell) -> dict[str, float | None]:
        took, synchronous = hours(swarm, cell), [each for each in means if not each.updates]
        if not math.isfinite(took) or not synchronous:
            return {"hours": None, "sooner": None, "at_least": None}
        usual, smallest = (min(hours(swarm, each, codec) for each in synchronous) for codec in ("int8", SMALLEST))
        return {"hours": took, "sooner": usual / took, "at_least": min(usual, smallest) / took}

    return [
        {
            **dataclasses.asdict(cell),
            "name": cell.name,
            "seeds": len(groups[cell]),
            "losses": [loss for _, loss in curve],
            "behind": None if best is None else curve[-1][1] / means[best][-1][1] - 1,
            "sent_bytes": sent_bytes(size, cell),
            "target": wanted if math.isfinite(wanted) else None,
            **{swarm: times(swarm, cell) for swarm in SWARMS},
        }
        for cell, curve in sorted(means.items(), key=lambda item: (item[0].updates > 0, item[1][-1][1]))
    ]


def print_rows(size: Size, rows: Sequence[Row]) -> None:
    print(
        f"{NUM_STAGES} stages of {size.replicas} peers, {size.layers} layers of width {size.d_model}, {size.tokens:,} tokens; evaluation "
        f"losses at equal distances; hours to {rows[0]['target']} at {LINE.name}"
    )
    width = max(len(str(row["name"])) for row in rows)

    def words(swarm: Swarm, row: Row) -> str:
        told = row[swarm]
        if told["hours"] is None:
            return f"{swarm}: never"
        return f"{swarm}: {told['hours']:.2f} h, {told['sooner']:.2f} times sooner, at least {told['at_least']:.2f}"

    for row in rows:
        losses = "  ".join(f"{loss:.4f}" for loss in row["losses"][-MARKS:])
        behind = "" if row["behind"] is None else f"{row['behind']:+7.2%}"
        time = "; ".join(words(swarm, row) for swarm in SWARMS)
        sent = f"{float(str(row['sent_bytes'])) / 1e6:9.1f} MB sent"
        print(f"{row['name']:<{width}}  seeds {row['seeds']}  {losses}  {behind}  {sent}  {time}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench local_steps", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--tokens", type=int, default=200_000, metavar="N", help="of each run (default 200000)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each kind (default 1)")
    parser.add_argument("--d-model", type=int, default=96, metavar="N", help="width of the model, a multiple of 8 (default 96)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="of both stages together (default 4)")
    parser.add_argument("--replicas", type=int, default=4, metavar="N", help="peers of each stage (default 4)")
    parser.add_argument("--local-batch", type=int, default=1, metavar="N", help="microbatches of a peer's own update (default 1)")
    parser.add_argument("--rate", type=float, nargs="+", default=[2e-3], metavar="X", help="learning rates (default 2e-3)")
    parser.add_argument("--schedule", choices=["constant", "linear", "cosine"], default="constant", help="of the rate (default constant)")
    parser.add_argument("--warmup", type=float, default=0.0, metavar="SHARE", help="of the steps, in which the rate rises (default 0)")
    parser.add_argument("--updates", type=int, nargs="+", default=[8], metavar="H", help="a peer's updates between averages (default 8)")
    parser.add_argument("--outer", nargs="+", default=["0.7:0.9"], metavar="RATE:MOMENTUM", help="of the averages (default 0.7:0.9)")
    parser.add_argument("--after", type=float, nargs="+", default=[0.0], metavar="SHARE", help="synchronous beginnings (default 0)")
    parser.add_argument("--codec", nargs="+", default=["none"], metavar="CODEC", help="of the averaged changes (default none)")
    parser.add_argument("--synchronous", nargs="+", default=["none"], metavar="CODEC", help="of their averages (default none)")
    parser.add_argument("--boundary", nargs="+", default=["none"], metavar="CODEC", help="between the stages (default none)")
    parser.add_argument("--target", type=float, default=0.75, metavar="SHARE", help="of the best synchronous run's tokens (default 0.75)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="append results here, and do not compute again what is there")
    given = parser.parse_args()
    if min(given.tokens, given.seeds, given.replicas, given.local_batch, *given.updates) < 1 or given.d_model % 8 or given.layers < 2:
        parser.error("all numbers must be at least 1, --d-model a multiple of 8 and --layers at least 2")
    if not 0 < given.target <= 1:
        parser.error("--target must be between 0 and 1")
    return given


def main() -> int:
    given = parse()
    size = Size(d_model=given.d_model, layers=given.layers, replicas=given.replicas, local_batch=given.local_batch, tokens=given.tokens)
    known = known_in(given.results, size)
    part = given.results.with_name(f"{given.results.name}.part") if given.results is not None else None
    for cell in cells_of(given):
        if cell in known:
            continue
        known[cell] = found = loss_of(size, cell, part)
        progress(f"seed {cell.seed}  {cell.name}: {found['losses']} in {found['took_s']} s")
        if given.results is not None:
            with given.results.open("a") as file:
                file.write(json.dumps({"size": dataclasses.asdict(size), "cell": dataclasses.asdict(cell), "found": found}) + "\n")
    rows = table_of(size, known, given.target)
    if given.json:
        print(json.dumps({"schema": SCHEMA, **dataclasses.asdict(size), "rows": rows}))
    else:
        print_rows(size, rows)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
