"""How many steps Muon takes to reach the loss that AdamW ends with, each at its own best learning rate, and what its updates cost.

One process trains the built-in decoder on real text. A first seed tries all the rates with both optimizers; the best rate of each is the
one with the lowest last loss. The other seeds run at these rates. Losses are means over the last steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from peerd.config.manifest import ComputeConfig, DataConfig, Manifest, ModelConfig, TrainConfig
from peerd.config.paths import cache_folder
from peerd.data.sources import STDLIB
from peerd.data.tokens import prepare_tokens
from peerd.models.stages import build_stage
from peerd.reference import train_reference
from peerd.stage.optimizer import Optimizer
from peerd.train.corpus import Corpus
from scripts.benchmarks._report import SCHEMA, progress, run

Kind = Literal["adamw", "muon"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WINDOW = 20
"""Steps over which losses are averaged."""
UPDATES = 10
"""Updates that are timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    steps: int
    seeds: int
    d_model: int
    layers: int
    rates: tuple[float, ...]
    as_json: bool

    def manifest(self, kind: Kind, rate: float, seed: int) -> Manifest:
        return Manifest(
            seed=seed,
            model=ModelConfig(num_layers=self.layers, d_model=self.d_model, num_heads=4, d_ff=4 * self.d_model),
            data=DataConfig(source=STDLIB),
            train=TrainConfig(
                num_stages=1,
                microbatches_per_step=2,
                microbatch_size=4,
                optimizer=kind,
                learning_rate=rate,
                warmup_steps=20,
                weight_decay=0.1,
                steps=self.steps,
                schedule="cosine",
                final_learning_rate=rate / 10,
            ),
            compute=ComputeConfig(threads=1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    kind: Kind
    rate: float
    seed: int
    losses: list[float]
    """Mean over the last `WINDOW` steps, for each step from the first full window on."""

    def steps_to(self, loss: float) -> int | None:
        """The number of steps until the mean is at most this loss; None if it never is."""
        return next((number + WINDOW for number, found in enumerate(self.losses) if found <= loss), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    seed: int
    adamw_loss: float
    muon_loss: float
    share: float | None
    """Steps of Muon to AdamW's last loss, by AdamW's steps to it. None: it does not get there."""


def trained(plan: Plan, kind: Kind, rate: float, seed: int, corpus: Corpus) -> Trained:
    began_s = time.monotonic()
    history = train_reference(plan.manifest(kind, rate, seed), corpus, plan.steps).history
    losses = [statistics.fmean(entry.loss for entry in history[end - WINDOW : end]) for end in range(WINDOW, len(history) + 1)]
    progress(f"{kind} at {rate:g}, seed {seed}: loss {losses[-1]:.4f}, {time.monotonic() - began_s:.0f} s")
    return Trained(kind=kind, rate=rate, seed=seed, losses=losses)


def update_s(plan: Plan, kind: Kind) -> float:
    """Median time of one update of the whole model."""
    manifest = plan.manifest(kind, 1e-3, 0)
    parameters = dict(build_stage(manifest, 0, "cpu").named_parameters())
    optimizer, gradients = Optimizer(manifest, parameters), {name: torch.randn(value.shape) for name, value in parameters.items()}
    found = []
    for step in range(UPDATES):
        began_s = time.monotonic()
        optimizer.update(step, gradients)
        found.append(time.monotonic() - began_s)
    return statistics.median(found)


def rows_of(found: Sequence[Trained], best: dict[Kind, float]) -> list[Row]:
    at_best = {(each.kind, each.seed): each for each in found if each.rate == best[each.kind]}
    rows = []
    for seed in sorted({each.seed for each in found}):
        adamw, muon = (at_best[kind, seed] for kind in KINDS)
        target = adamw.losses[-1]
        reached, needed = muon.steps_to(target), adamw.steps_to(target)
        share = reached / needed if reached is not None and needed is not None else None
        rows.append(Row(seed=seed, adamw_loss=target, muon_loss=muon.losses[-1], share=share))
    return rows


def parse() -> Plan:
    parser = argparse.ArgumentParser(prog="scripts/bench muon", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps of each run (default 300)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="runs at the best rates (default 2)")
    parser.add_argument("--d-model", type=int, default=128, metavar="N", help="width of the model, a multiple of 8 (default 128)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="(default 4)")
    parser.add_argument("--rates", default="1e-3,3e-3,1e-2", metavar="LIST", help="learning rates to try (default 1e-3,3e-3,1e-2)")
    given = parser.parse_args()
    if given.steps <= 2 * WINDOW or given.seeds < 1 or given.d_model < 8 or given.d_model % 8 or given.layers < 1:
        parser.error(f"--steps must be above {2 * WINDOW}, --seeds and --layers at least 1 and --d-model a multiple of 8")
    rates = tuple(float(rate) for rate in given.rates.split(","))
    return Plan(steps=given.steps, seeds=given.seeds, d_model=given.d_model, layers=given.layers, rates=rates, as_json=given.json)


def main() -> int:
    plan = parse()
    torch.set_num_threads(1)
    tokens, found, best = prepare_tokens(STDLIB, cache_folder()), list[Trained](), dict[Kind, float]()
    for kind in KINDS:
        tried = [trained(plan, kind, rate, 0, Corpus(tokens, plan.manifest(kind, rate, 0))) for rate in plan.rates]
        best[kind] = min(tried, key=lambda each: each.losses[-1]).rate
        found += tried
    for seed in range(1, plan.seeds):
        found += [trained(plan, kind, best[kind], seed, Corpus(tokens, plan.manifest(kind, best[kind], seed))) for kind in KINDS]
    rows, seconds = rows_of(found, best), {kind: update_s(plan, kind) for kind in KINDS}
    if plan.as_json:
        told = [dataclasses.asdict(row) for row in rows]
        print(json.dumps({"schema": SCHEMA, "best_rates": best, "update_s": seconds, "rows": told}))
        return 0
    print(f"width {plan.d_model}, {plan.layers} layers, {plan.steps} steps; tokens are bytes of text")
    print(f"best rates: {', '.join(f'{kind} {rate:g}' for kind, rate in best.items())}")
    print(f"one update: {', '.join(f'{kind} {1000 * taken:.1f} ms' for kind, taken in seconds.items())}")
    print(f"{'seed':>4}  {'adamw':>7}  {'muon':>7}  {'steps of muon to the loss of adamw':>34}")
    for row in rows:
        share = f"{row.share:.2f}" if row.share is not None else "never"
        print(f"{row.seed:>4}  {row.adamw_loss:>7.4f}  {row.muon_loss:>7.4f}  {share:>34}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
