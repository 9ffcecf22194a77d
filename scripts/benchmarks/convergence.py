"""The cost of codecs and of 8-bit moments in quality: losses on real text, from several seeds whose spread is the noise.

The run trains in one process, over the real stages, codecs and compression with its error feedback: each of two peers of a stage
computes half of the microbatches, and they exchange sums slice by slice, as a round does. `auto` is what the policy chooses for a link:
for a home link, where raw activations travel as long as a microbatch computes, and for a slow link, where they take four times as long.
Naive top-k discards what it does not send.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from peerd.averaging.compression import Compression, Residual
from peerd.config.codec import LADDER, parse_averaged
from peerd.config.manifest import ComputeConfig, DataConfig, Manifest, ModelConfig, TrainConfig, WireConfig
from peerd.config.paths import cache_folder
from peerd.data.sources import STDLIB
from peerd.data.tokens import prepare_tokens
from peerd.models.stages import StageModule, build_stage, initial_parameter_spec
from peerd.policy.route.compressing import choose_rung
from peerd.reference import backpropagate
from peerd.stage.optimizer import Optimizer
from peerd.stage.update import apply_sums
from peerd.table.record import AverageId
from peerd.train.corpus import Corpus
from scripts.benchmarks._report import SCHEMA, progress, run

WINDOW = 20
"""Steps over which losses are averaged."""
NUM_PEERS = 2
HOME_LOAD, SLOW_LOAD = 1.0, 4.0
"""Time that raw activations take over the link, divided by the time that computing takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    boundary: str = "none"
    """Codec of activations and their gradients."""
    weights: str = "none"
    feedback: bool = True
    optimizer_bits: Literal[32, 8] = 32
    within_noise: bool = False
    """True if the method should be as good as `none`."""


def chosen(load: float) -> str:
    """The codec that `auto` chooses for a link with this load of raw values."""
    sizes = [codec.num_bytes(1 << 18) for codec in LADDER]
    return str(LADDER[choose_rung(sizes, float(sizes[0]), 1 / load).rung])


METHODS = {
    "none": Method(),
    "8-bit": Method(boundary="int8", weights="int8", within_noise=True),
    "8-bit moments": Method(optimizer_bits=8, within_noise=True),
    "auto, home link": Method(boundary=chosen(HOME_LOAD), weights="int8", within_noise=True),
    "auto, slow link": Method(boundary=chosen(SLOW_LOAD), weights="int8", within_noise=True),
    "top-k, a tenth": Method(weights="topk:0.1"),
    "a tenth, naive": Method(weights="topk:0.1", feedback=False),
    "top-k, a hundredth": Method(weights="topk:0.01"),
    "a hundredth, naive": Method(weights="topk:0.01", feedback=False),
    "PowerSGD, rank 1": Method(weights="powersgd:1"),
    "PowerSGD, rank 4": Method(weights="powersgd:4"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    steps: int
    seeds: int
    d_model: int
    beta2: float
    methods: tuple[str, ...]
    as_json: bool

    def manifest(self, method: Method, seed: int) -> Manifest:
        return Manifest(
            seed=seed,
            model=ModelConfig(num_layers=4, d_model=self.d_model, num_heads=4, d_ff=4 * self.d_model),
            data=DataConfig(source=STDLIB),
            train=TrainConfig(
                num_stages=2,
                microbatches_per_step=NUM_PEERS,
                microbatch_size=4,
                learning_rate=2e-3,
                warmup_steps=20,
                beta2=self.beta2,
                optimizer_bits=method.optimizer_bits,
            ),
            compute=ComputeConfig(threads=1),
            wire=WireConfig(activations=method.boundary, activation_gradients=method.boundary, weight_gradients=method.weights),
        )


class Group:
    """The peers of one stage, whose gradients are averaged as a round does it."""

    def __init__(self, shapes: Sequence[Sequence[int]], method: Method) -> None:
        """`shapes` are those of the parameters. Their gradients lie one after another, followed by the loss."""
        allowed = parse_averaged(method.weights)
        self._peers = [Compression(allowed, torch.float32, shapes) for _ in range(NUM_PEERS)]
        self.length = sum(map(math.prod, shapes)) + 1
        bounds = pairwise(self.length * number // NUM_PEERS for number in range(NUM_PEERS + 1))
        self._slices = [self._peers[0].piece(self.length, start, end, allowed.most_exact) for start, end in bounds]
        self._feedback = method.feedback

    @property
    def num_bytes(self) -> int:
        """Encoded bytes of all slices."""
        return sum(map(self._peers[0].num_bytes, self._slices))

    def average(self, step: int, sums: Sequence[Tensor]) -> Tensor:
        """float32 [length] of each peer -> their sum, as all peers receive it."""
        average_id, pieces = AverageId(step.to_bytes(8, "little")), []
        for reducer, where in enumerate(self._slices):
            parts = []
            for number, (peer, values) in enumerate(zip(self._peers, sums, strict=True)):
                mine = values[where.start : where.end]
                if number == reducer:
                    parts.append(peer.kept(peer.parts, average_id, where, mine))
                else:
                    parts.append(peer.sent(peer.parts, average_id, where, mine)[0])
            total, reducing = sum(parts[1:], parts[0].clone()), self._peers[reducer]
            pieces.append(reducing.sent(reducing.sums, average_id, where, total)[0])
        for peer in self._peers:
            if self._feedback:
                peer.applied([average_id])
            else:
                peer.parts, peer.sums = Residual(), Residual()
        return torch.cat(pieces)


def gradients_of(stages: Sequence[StageModule], manifest: Manifest, corpus: Corpus, step: int, peer: int) -> list[Tensor]:
    """The gradients of a peer's microbatch: one vector per stage, with the loss at its end."""
    tokens, labels = corpus.microbatch(step, peer)
    loss = backpropagate(stages, tokens, labels, manifest.wire, manifest.train)
    found = []
    for stage in stages:
        gradients = [parameter.grad for parameter in stage.parameters()]
        found.append(torch.cat([gradient.flatten() for gradient in gradients if gradient is not None] + [torch.tensor([loss])]))
        stage.zero_grad()
    return found


def train(manifest: Manifest, method: Method, corpus: Corpus, steps: int) -> list[float]:
    """The loss of every step."""
    stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]
    optimizers = [Optimizer(manifest, dict(stage.named_parameters())) for stage in stages]
    groups = [Group([parameter.shape for parameter in stage.parameters()], method) for stage in stages]
    losses = []
    for step in range(steps):
        by_peer = [gradients_of(stages, manifest, corpus, step, peer) for peer in range(NUM_PEERS)]
        for number, (stage, optimizer, group) in enumerate(zip(stages, optimizers, groups, strict=True)):
            mean = group.average(step, [of_peer[number] for of_peer in by_peer]) / NUM_PEERS
            pieces = torch.split(mean[:-1], [parameter.numel() for parameter in stage.parameters()])
            named = {name: piece.view_as(value) for (name, value), piece in zip(stage.named_parameters(), pieces, strict=True)}
            apply_sums(manifest.train, optimizer, step, named, 1, None)
        losses.append(float(mean[-1]))
    return losses


def share_of(manifest: Manifest, method: Method) -> float:
    """Bytes of averaged gradients, by those of raw ones."""
    shapes = [list(initial_parameter_spec(manifest, stage).values()) for stage in range(manifest.train.num_stages)]
    groups = [Group(of_stage, method) for of_stage in shapes]
    return sum(group.num_bytes for group in groups) / sum(4 * group.length for group in groups)


@dataclass(slots=True)
class Side:
    name: str
    ends: list[float] = field(default_factory=list)
    """Mean loss of the last steps, by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    method: str
    boundary: str
    weights: str
    share: float
    """Bytes of averaged gradients, by those of raw ones."""
    loss: float
    """Nats per token."""
    spread: float
    """Standard deviation between seeds."""
    above: float | None
    """Mean over seeds of the difference to `none` with the same seed."""


def lines_of(plan: Plan, sides: Sequence[Side]) -> list[Line]:
    plain = next(side for side in sides if side.name == "none")
    return [
        Line(
            method=side.name,
            boundary=METHODS[side.name].boundary,
            weights=METHODS[side.name].weights,
            share=share_of(plan.manifest(METHODS[side.name], 0), METHODS[side.name]),
            loss=statistics.fmean(side.ends),
            spread=statistics.stdev(side.ends) if plan.seeds > 1 else 0.0,
            above=None if side is plain else statistics.fmean(mine - theirs for mine, theirs in zip(side.ends, plain.ends, strict=True)),
        )
        for side in sides
    ]


def report(plan: Plan, lines: Sequence[Line]) -> int:
    noise = lines[0].spread
    worse = [line for line in lines if METHODS[line.method].within_noise and (line.above or 0.0) > noise]
    if plan.as_json:
        print(json.dumps({"schema": SCHEMA, "steps": plan.steps, "noise": noise, "rows": [dataclasses.asdict(line) for line in lines]}))
    else:
        print(
            f"2 stages of {NUM_PEERS} peers, width {plan.d_model}, after {plan.steps} steps, {plan.seeds} seeds; tokens are bytes of text"
        )
        print(f"{'method':<20} {'boundary':<10} {'gradients':<10} {'bytes':>6} {'loss':>7} {'spread':>7} {'above none':>10}")
        for line in lines:
            above = "" if line.above is None else f"{line.above:+.4f}"
            share = "all" if line.share == 1 else f"1/{1 / line.share:.0f}"
            print(f"{line.method:<20} {line.boundary:<10} {line.weights:<10} {share:>6} {line.loss:>7.4f} {line.spread:>7.4f} {above:>10}")
        print(f"the noise is none's spread, {noise:.4f}")
    for line in worse:
        print(f"{line.method} is {line.above:.4f} above none, more than the noise", file=sys.stderr)
    return 1 if worse else 0


def parse() -> Plan:
    parser = argparse.ArgumentParser(prog="scripts/bench convergence", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps of each run (default 300)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each kind, at least 2 (default 3)")
    parser.add_argument("--d-model", type=int, default=64, metavar="N", help="width of the model, a multiple of 8 (default 64)")
    parser.add_argument("--beta2", type=float, default=0.95, metavar="X", help="of AdamW (default 0.95)")
    parser.add_argument("--only", action="append", choices=[*METHODS][1:], metavar="METHOD", help="beside none; may be repeated")
    given = parser.parse_args()
    if given.steps < WINDOW or given.seeds < 2 or given.d_model < 8 or given.d_model % 8:
        parser.error(f"--steps must be at least {WINDOW}, --seeds at least 2 and --d-model a multiple of 8")
    methods = tuple(name for name in METHODS if name == "none" or not given.only or name in given.only)
    return Plan(steps=given.steps, seeds=given.seeds, d_model=given.d_model, beta2=given.beta2, methods=methods, as_json=given.json)


def main() -> int:
    plan = parse()
    torch.set_num_threads(1)
    sides = [Side(name) for name in plan.methods]
    tokens = prepare_tokens(STDLIB, cache_folder())
    for seed in range(plan.seeds):
        for side in sides:
            began_s, method = time.monotonic(), METHODS[side.name]
            manifest = plan.manifest(method, seed)
            side.ends.append(statistics.fmean(train(manifest, method, Corpus(tokens, manifest), plan.steps)[-WINDOW:]))
            progress(f"{side.name}, seed {seed}: loss {side.ends[-1]:.4f}, {time.monotonic() - began_s:.0f} s")
    return report(plan, lines_of(plan, sides))


if __name__ == "__main__":
    sys.exit(run(main))
