"""A device as peerd uses it: a stage's microbatch against plain PyTorch on the same device, each part's time, memory, and what binds.

A stage in the middle of a decoder takes activations as bytes, computes, gives bytes, takes a gradient, computes back, gives bytes. It has
several microbatches in hand, as a daemon's has, with a next stage that answers at once. Plain PyTorch has the same module with its tensors
on the device already. Neither recomputes unless --recompute. Sides take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from peerd.checkup.device import measures
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, TrainConfig, WireConfig
from peerd.daemon.device import choose_device, describe, give_back_memory, memory_of
from peerd.models.stages import estimate_forward_flops, estimate_stage_memory
from peerd.planner.memory import Placing
from peerd.stage.arriving import Arriving
from peerd.stage.checks import Checks
from peerd.stage.leaving import Leaving
from peerd.stage.precision import set_products
from peerd.transfers import has_own_memory, to_device
from scripts.benchmarks._lone_stage import NUM_STAGES, STAGE, Plain, Stage
from scripts.benchmarks._report import SCHEMA, paired_interval, paired_ratio, run

GOAL = 0.9
"""Of plain PyTorch's speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a microbatch or of a step. Seconds are the median's."""

    name: str
    seconds: float
    in_step: float
    """Its share of a step."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends a step, in seconds."""

    round_s: float
    """The copy of the sum for a round."""
    commit_s: float


class Peaks:
    """The most memory of a device that is in use, and that torch has taken for it, from now on. 0 where it is the machine's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if has_own_memory(device) else None
        if self._device is not None:
            torch.get_device_module(device).reset_peak_memory_stats(device)

    @property
    def live(self) -> int:
        return int(torch.get_device_module(self._device).max_memory_allocated(self._device)) if self._device is not None else 0

    @property
    def reserved(self) -> int:
        return int(torch.get_device_module(self._device).max_memory_reserved(self._device)) if self._device is not None else 0


def manifest_of(given: argparse.Namespace) -> Manifest:
    """About `millions` parameters in the stage: 12 width^2 in each layer."""
    width = 64 * max(2, round(math.sqrt(given.millions * 1e6 / (12 * given.layers)) / 64))
    train = TrainConfig(
        num_stages=NUM_STAGES,
        microbatches_per_step=given.microbatches,
        microbatch_size=given.batch,
        sequence_length=given.sequence,
        precision=given.precision,
    )
    model = ModelConfig(num_layers=NUM_STAGES * given.layers, d_model=width, num_heads=max(1, width // 64), d_ff=4 * width * 2 // 3)
    compute = ComputeConfig(recompute="always" if given.recompute else "never", slots=given.slots)
    return Manifest(
        seed=1, model=model, train=train, compute=compute, wire=WireConfig(activations=given.codec, activation_gradients=given.codec)
    )


def timed(work: Callable[[], object], device: torch.device) -> float:
    measures.wait(device)
    began_s = time.perf_counter()
    work()
    measures.wait(device)
    return time.perf_counter() - began_s


def median_s(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    return statistics.median(timed(work, device) for _ in range(rounds))


def parts_of(stage: Stage, ours_s: float, plain_s: float, ends: Ends, folder: Path) -> list[Part]:
    """A step's parts. Computing is what plain PyTorch takes; tensors of microbatches come and go beside it where the device can do both."""
    device, rounds, count = stage.device, 5, stage.manifest.train.microbatches_per_step
    output: Tensor = to_device(stage.inputs, device)

    def into() -> None:
        arriving = Arriving(stage.sent, device)
        arriving.start()
        arriving.take()

    def out() -> None:
        leaving = Leaving(stage.sent.codec)
        leaving.send(output, Checks())
        leaving.wait()

    alone = {"tensors in, alone": 2 * median_s(into, device, rounds), "tensors out, alone": 2 * median_s(out, device, rounds)}
    computing_s = min(plain_s, ours_s)
    whole_s = count * ours_s + ends.round_s + ends.commit_s
    named = {
        "computing": count * computing_s,
        "not hidden beside it": count * (ours_s - computing_s),
        "copy for the round": ends.round_s,
        "optimizer": ends.commit_s,
    }
    found = [Part(name=name, seconds=seconds, in_step=seconds / whole_s) for name, seconds in named.items()]
    beside = {name: count * seconds for name, seconds in alone.items()}
    beside |= {"checkpoint, written and hashed": timed(lambda: stage.checkpoint(folder)(), device)}
    return [*found, *(Part(name=name, seconds=seconds, in_step=0.0) for name, seconds in beside.items())]


def in_turns(stage: Stage, whole: Callable[[], None], plain: Callable[[], None], rounds: int) -> tuple[list[float], list[float], Ends]:
    """What a microbatch takes in each round, here and with plain PyTorch, and what ends a step. Seconds."""
    count = stage.manifest.train.microbatches_per_step
    ours, theirs, rounds_s, commits_s = list[float](), list[float](), list[float](), list[float]()
    for number in range(1 + rounds):  # the first one only warms up
        sides = [(ours, whole), (theirs, plain)]
        for times, work in sides if number % 2 else reversed(sides):
            times.append(timed(work, stage.device) / count)
        rounds_s.append(timed(stage.round, stage.device))
        commits_s.append(timed(stage.commit, stage.device))
    return ours[1:], theirs[1:], Ends(statistics.median(rounds_s), statistics.median(commits_s))


def beside_checkpoint(stage: Stage, step: Callable[[], None], folder: Path, rounds: int) -> tuple[float, float]:
    """What a step takes alone, and while the state before it is written and hashed: medians in seconds."""
    alone_s, beside_s = list[float](), list[float]()
    with ThreadPoolExecutor(1) as writer:
        for _ in range(rounds):
            alone_s.append(timed(step, stage.device))
            written = writer.submit(stage.checkpoint(folder))
            beside_s.append(timed(step, stage.device))
            written.result()
    return statistics.median(alone_s), statistics.median(beside_s)


def what_binds(parts: list[Part], used_flops: float, best_flops: float) -> str:
    first = max(parts, key=lambda part: part.in_step)
    if first.name != "computing":
        return f"{first.name}: {first.in_step:.0%} of a step"
    share = used_flops / best_flops
    why = "matrix products" if share > 0.5 else "memory, small kernels and their launches: a larger microbatch or width would use it better"
    return f"computing, {first.in_step:.0%} of a step, at {share:.0%} of what matrix products reach: {why}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench device", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default auto)")
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32", "bfloat16", "float16"))
    parser.add_argument("--codec", default="none", help="of activations and their gradients (default none)")
    parser.add_argument("--millions", type=float, default=10.0, metavar="P", help="parameters of the stage (default 10)")
    parser.add_argument("--layers", type=int, default=4, help="of the stage (default 4)")
    parser.add_argument("--batch", type=int, default=2, help="sequences in a microbatch (default 2)")
    parser.add_argument("--sequence", type=int, default=256, help="tokens in a sequence (default 256)")
    parser.add_argument("--microbatches", type=int, default=12, help="in a step (default 12)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="steps that both sides compute (default 5)")
    parser.add_argument("--slots", type=int, default=4, help="microbatches in hand at once (default 4)")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write what a step's microbatches do on the device, for chrome://tracing"
    )
    parser.add_argument("--recompute", action="store_true", help="the stage keeps no graphs")
    given = parser.parse_args()
    if given.rounds < 1 or given.microbatches < 2:
        parser.error("--rounds must be at least 1, and --microbatches at least 2")
    device, manifest = choose_device(given.device), manifest_of(given)
    with tempfile.TemporaryDirectory() as folder:
        report = measured(manifest, device, given.rounds, Path(folder), given.trace)
    print(json.dumps({"schema": SCHEMA, **report})) if given.json else print_report(report)
    return 0


def measured(manifest: Manifest, device: torch.device, rounds: int, folder: Path, trace: Path | None) -> dict[str, object]:
    before, train = memory_of(device).held, manifest.train
    set_products(train)
    stage = Stage(manifest, device)
    plain, loop = Plain(stage), asyncio.new_event_loop()
    count = train.microbatches_per_step

    def whole() -> None:
        loop.run_until_complete(stage.microbatches(range(count)))

    ours, theirs, ends = in_turns(stage, whole, partial(plain.microbatches, count), rounds)
    del plain
    if trace is not None:
        with torch.profiler.profile() as profile:
            whole()
        profile.export_chrome_trace(str(trace))
        stage.round()
        stage.commit()

    def step() -> None:
        whole()
        stage.round()
        stage.commit()

    alone_s, beside_s = beside_checkpoint(stage, step, folder, 3)
    give_back_memory(device)
    peaks = Peaks(device)
    loop.run_until_complete(stage.all_slots())
    live, reserved = peaks.live, peaks.reserved
    parts = parts_of(stage, statistics.median(ours), statistics.median(theirs), ends, folder)
    flops = 3 * estimate_forward_flops(manifest, STAGE) / statistics.median(theirs)
    best = measures.flops(device, getattr(torch, train.precision, torch.float32))
    tokens = train.microbatch_size * train.sequence_length
    num_parameters = sum(each.numel() for each in stage.state.holdings.module.parameters())
    stage.close(loop)
    left = give_back_memory(device) - before
    return {
        "device": describe(device),
        "precision": train.precision,
        "parameters": num_parameters,
        "slots": stage.service.slots,
        "tokens_per_second": tokens / statistics.median(ours),
        "plain_tokens_per_second": tokens / statistics.median(theirs),
        "of_plain": paired_ratio(theirs, ours),
        "interval": paired_interval(theirs, ours),
        "tflops": flops / 1e12,
        "best_tflops": best / 1e12,
        "parts": [asdict(part) for part in parts],
        "step_s": alone_s,
        "step_beside_checkpoint_s": beside_s,
        "peak_bytes": live,
        "reserved_bytes": reserved,
        "estimate_bytes": estimate_stage_memory(manifest, STAGE, stage.service.slots, Placing.DEVICE).device if live else 0,
        "left_bytes": left,
        "binds": what_binds(parts, flops, best),
    }


def print_report(report: dict[str, object]) -> None:
    parts = report["parts"]
    assert isinstance(parts, list)
    print(f"{report['device']}, {report['precision']}, a stage of {report['parameters']:,} parameters")
    speeds = f"{report['tokens_per_second']:,.0f}, plain PyTorch {report['plain_tokens_per_second']:,.0f}"
    print(f"tokens/s {speeds}: {report['of_plain']:.2f} of it (goal {GOAL})")
    print(f"plain PyTorch reaches {report['tflops']:.3g} TFLOP/s, matrix products alone {report['best_tflops']:.3g}")
    for part in parts:
        print(f"  {part['name']:<30} {1000 * part['seconds']:>9.2f} ms a step  {part['in_step']:>5.0%}")
    alone_s, beside_s = report["step_s"], report["step_beside_checkpoint_s"]
    assert isinstance(alone_s, float)
    assert isinstance(beside_s, float)
    print(f"a step takes {alone_s:.2f} s, and {beside_s:.2f} s while a checkpoint is written and hashed: {beside_s / alone_s:.2f} times")
    if report["peak_bytes"]:
        print(f"with {report['slots']} microbatches in hand at most {report['peak_bytes']:,} bytes, estimated {report['estimate_bytes']:,}")
        print(f"torch took {report['reserved_bytes']:,} bytes for it, and keeps {report['left_bytes']:,} when all is left")
    print(f"what binds: {report['binds']}")


if __name__ == "__main__":
    sys.exit(run(main))
