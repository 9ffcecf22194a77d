"""The cost of narrower boundaries in quality: a small version of SWARM's table 7, on the standard library's sources.

The run trains in one process, over the real stages and codecs: `none`, 8 bits a value, a bottleneck and maxout of half the width, and
subspaces of half and an eighth of it, an eighth beside the token, on the same text. The loss is the mean of the last steps, on text not
seen before; "steps" is the number of steps to the loss that all methods reached, relative to `none`. With several seeds the table shows
means and the spread between seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from peerd.config.codec import parse_codec
from peerd.config.manifest import ComputeConfig, DataConfig, Manifest, ModelConfig, TrainConfig, WireConfig
from peerd.config.paths import cache_folder
from peerd.data.sources import STDLIB
from peerd.data.tokens import prepare_tokens
from peerd.reference import train_reference
from peerd.train.corpus import Corpus
from scripts.benchmarks._report import SCHEMA, progress, run

WINDOW = 20
"""Steps over which losses are averaged."""
INT8 = WireConfig(activations="int8", activation_gradients="int8")
METHODS: dict[str, tuple[dict[str, Any], WireConfig]] = {
    "none": ({}, WireConfig()),
    "8-bit": ({}, INT8),
    "bottleneck": ({"boundary": "bottleneck"}, WireConfig()),
    "maxout": ({"boundary": "maxout"}, WireConfig()),
    "maxout, 8-bit": ({"boundary": "maxout"}, INT8),
    "subspace, 1/2": ({"boundary": "subspace", "boundary_rank": 2}, WireConfig()),
    "subspace, 1/8": ({"boundary": "subspace", "boundary_rank": 8}, WireConfig()),
    "residual, 1/8": ({"boundary": "token-residual", "boundary_rank": 8}, WireConfig()),
}
"""The model's settings, in which a rank is a share of the width, and the codecs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    num_stages: int
    steps: int
    seeds: int
    d_model: int
    as_json: bool

    def manifest(self, method: str, seed: int) -> Manifest:
        model, wire = METHODS[method]
        if "boundary_rank" in model:
            model = model | {"boundary_rank": self.d_model // model["boundary_rank"]}
        return Manifest(
            seed=seed,
            model=ModelConfig(num_layers=4, d_model=self.d_model, num_heads=4, d_ff=4 * self.d_model, **model),
            data=DataConfig(source=STDLIB),
            train=TrainConfig(num_stages=self.num_stages, microbatches_per_step=1, microbatch_size=8, learning_rate=2e-3, warmup_steps=20),
            compute=ComputeConfig(threads=torch.get_num_threads()),
            wire=wire,
        )


@dataclass(slots=True)
class Side:
    name: str
    losses: list[list[float]] = field(default_factory=list)
    """Losses of all steps, by seed."""
    seconds: list[float] = field(default_factory=list)

    def smooth(self, seed: int) -> list[float]:
        """Moving averages of the loss over WINDOW steps."""
        losses = self.losses[seed]
        return [statistics.fmean(losses[end - WINDOW : end]) for end in range(WINDOW, len(losses) + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    method: str
    loss: float
    """Nats per token."""
    spread: float
    """Difference between the largest and the smallest loss of the seeds."""
    perplexity: float
    steps: float
    """Steps to the loss that all methods reached, relative to `none`."""
    transfer: float
    """Bytes over a boundary, relative to `none`."""
    seconds: float


def train(plan: Plan, side: Side, seed: int) -> None:
    manifest = plan.manifest(side.name, seed)
    corpus = Corpus(prepare_tokens(STDLIB, cache_folder()), manifest)
    began_s = time.monotonic()
    side.losses.append([entry.loss for entry in train_reference(manifest, corpus, plan.steps).history])
    side.seconds.append((time.monotonic() - began_s) / plan.steps)
    progress(f"{side.name}, seed {seed}: loss {side.smooth(-1)[-1]:.4f}, {side.seconds[-1]:.2f} s a step")


def steps_to(side: Side, seed: int, loss: float) -> int:
    return next(number for number, value in enumerate(side.smooth(seed), WINDOW) if value <= loss)


def lines_of(plan: Plan, sides: list[Side]) -> list[Line]:
    reached = [max(side.smooth(seed)[-1] for side in sides) for seed in range(plan.seeds)]
    plain = [steps_to(sides[0], seed, loss) for seed, loss in enumerate(reached)]
    lines = []
    for side in sides:
        manifest = plan.manifest(side.name, 0)
        wire = (manifest.wire.activations, manifest.wire.activation_gradients)
        sent = sum(parse_codec(name).num_bytes(manifest.boundary_bytes // 4) for name in wire)
        ends = [side.smooth(seed)[-1] for seed in range(plan.seeds)]
        steps = [steps_to(side, seed, loss) / plain[seed] for seed, loss in enumerate(reached)]
        lines.append(
            Line(
                method=side.name,
                loss=statistics.fmean(ends),
                spread=max(ends) - min(ends),
                perplexity=2.718281828459045 ** statistics.fmean(ends),
                steps=statistics.fmean(steps),
                transfer=sent / (2 * plan.manifest("none", 0).boundary_bytes),
                seconds=statistics.fmean(side.seconds),
            )
        )
    return lines


def report(plan: Plan, lines: list[Line]) -> None:
    if plan.as_json:
        print(json.dumps({"schema": SCHEMA, "steps": plan.steps, "rows": [dataclasses.asdict(line) for line in lines]}))
        return
    print(f"{plan.num_stages} stages of width {plan.d_model}, after {plan.steps} steps, {plan.seeds} seed(s); tokens are bytes of text")
    print(f"{'boundary':<14} {'loss':>7} {'spread':>7} {'ppl':>6} {'steps':>6} {'transfer':>8} {'s a step':>8}")
    for line in lines:
        print(
            f"{line.method:<14} {line.loss:>7.4f} {line.spread:>7.4f} {line.perplexity:>6.2f} {line.steps:>5.2f}x {line.transfer:>7.2f}x"
            f" {line.seconds:>8.2f}"
        )


def parse() -> Plan:
    parser = argparse.ArgumentParser(prog="scripts/bench boundary", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps of each run (default 200)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each kind (default 1)")
    parser.add_argument("--stages", type=int, choices=[2, 4], default=2, help="stages of four layers in all (default 2)")
    parser.add_argument("--d-model", type=int, default=64, metavar="N", help="width of the model, a multiple of 8 (default 64)")
    given = parser.parse_args()
    if given.steps < WINDOW or given.seeds < 1 or given.d_model < 8 or given.d_model % 8:
        parser.error(f"--steps must be at least {WINDOW}, --seeds at least 1 and --d-model a multiple of 8")
    return Plan(num_stages=given.stages, steps=given.steps, seeds=given.seeds, d_model=given.d_model, as_json=given.json)


def main() -> int:
    plan = parse()
    sides = [Side(name) for name in METHODS]
    for seed in range(plan.seeds):
        for side in sides:
            train(plan, side, seed)
    report(plan, lines_of(plan, sides))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
