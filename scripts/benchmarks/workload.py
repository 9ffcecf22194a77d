"""Is the estimate right? Each stage's planned share of the work, beside its measured share of the time.

All stages run in one process, forward and backward on the same microbatches in turns, with an even cut and with a cut by cost. The
model's vocabulary makes the last stage slow. Exits with 1 if a stage's measured share is more than a tenth off its planned share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, TrainConfig
from peerd.models.stages import StageModule, build_stage, layers_of, model_loads
from peerd.planner.workload import stage_flops, stage_load
from scripts.benchmarks._report import SCHEMA

TOLERANCE = 0.10
WARMUP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    cut: str
    stage: int
    layers: int
    planned: float
    """Share of the pipeline's floating-point operations."""
    measured: float
    """Share of the pipeline's time."""
    seconds: float

    @property
    def off(self) -> float:
        return self.measured / self.planned - 1


def manifest_of(cut: Literal["even", "cost"], num_stages: int, d_model: int) -> Manifest:
    return Manifest(
        model=ModelConfig(num_layers=8, d_model=d_model, num_heads=8, d_ff=4 * d_model, vocab_size=8192),
        train=TrainConfig(num_stages=num_stages, cut=cut, microbatch_size=2, sequence_length=128),
        compute=ComputeConfig(threads=1, recompute="never"),
    )


def clock_s() -> float:
    """Clock of this thread's processor time, so that other load of the machine does not count."""
    return time.thread_time()


def pass_through(stages: list[StageModule], tokens: Tensor) -> list[float]:
    """Run one microbatch forward and backward. Returns the seconds of each stage."""
    took, inputs, outputs = [0.0] * len(stages), [tokens], []
    for number, stage in enumerate(stages):
        began_s = clock_s()
        outputs.append(stage(inputs[-1], tokens if stage.is_last else None))
        took[number] += clock_s() - began_s
        inputs.append(outputs[-1].detach().requires_grad_())
    gradient: Tensor | None = None
    for number in reversed(range(len(stages))):
        wanted = [*([] if stages[number].is_first else [inputs[number]]), *stages[number].parameters()]
        began_s = clock_s()
        gradient = torch.autograd.grad(outputs[number], wanted, gradient)[0]
        took[number] += clock_s() - began_s
    return took


def measure(cut: Literal["even", "cost"], num_stages: int, d_model: int, rounds: int) -> list[Line]:
    manifest = manifest_of(cut, num_stages, d_model)
    layers = [layers_of(manifest, stage) for stage in range(num_stages)]
    stages = [build_stage(manifest, stage, "cpu") for stage in range(num_stages)]
    loads = model_loads(manifest)
    flops = [stage_flops(manifest, stage_load(manifest, loads, each), each is layers[-1]) for each in layers]
    shape = (manifest.train.microbatch_size, manifest.train.sequence_length)
    tokens = torch.randint(0, manifest.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    passes = [pass_through(stages, tokens) for _ in range(WARMUP + rounds)][WARMUP:]
    seconds = [statistics.median(each) for each in zip(*passes, strict=True)]
    return [
        Line(
            cut=cut,
            stage=stage,
            layers=len(layers[stage]),
            planned=flops[stage] / sum(flops),
            measured=seconds[stage] / sum(seconds),
            seconds=seconds[stage],
        )
        for stage in range(num_stages)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench workload", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="microbatches timed (default 10)")
    parser.add_argument("--stages", type=int, default=3, choices=range(2, 9), metavar="N", help="stages of eight layers in all (default 3)")
    parser.add_argument("--d-model", type=int, default=256, metavar="N", help="width, a multiple of 16 (default 256)")
    given = parser.parse_args()
    if given.rounds < 1 or given.d_model < 16 or given.d_model % 16:
        parser.error("--rounds must be at least 1 and --d-model a multiple of 16")
    torch.set_num_threads(1)
    cuts: tuple[Literal["even", "cost"], ...] = ("even", "cost")
    lines = [line for cut in cuts for line in measure(cut, given.stages, given.d_model, given.rounds)]
    if given.json:
        print(json.dumps({"schema": SCHEMA, "rows": [{**asdict(line), "off": line.off} for line in lines]}))
    else:
        print(f"8 layers of width {given.d_model}, vocabulary 8192: share of the work and of the time")
        print(f"{'cut':<5} {'stage':>5} {'layers':>6} {'planned':>8} {'measured':>8} {'off':>7} {'ms':>8}")
        for line in lines:
            print(
                f"{line.cut:<5} {line.stage:>5} {line.layers:>6} {line.planned:>8.3f} {line.measured:>8.3f} {line.off:>+7.1%}"
                f" {1000 * line.seconds:>8.1f}"
            )
    return 0 if all(abs(line.off) <= TOLERANCE for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
