"""A device as peerd uses it: a stage's microbatch against plain PyTorch on the same device, each part's time, memory, and what binds.

A stage in the middle of a decoder takes activations as bytes, computes, gives bytes, takes a gradient, computes back, gives bytes. Plain
PyTorch has the same module with its tensors on the device already. Both recompute nothing unless --recompute. Sides take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from peerd.checkup.device import measures
from peerd.config.codec import parse_codec
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, TrainConfig, WireConfig
from peerd.daemon.device import choose_device, describe, give_back_memory, has_own_memory, memory_of
from peerd.models.stages import estimate_forward_flops, estimate_stage_memory
from peerd.planner.memory import Placing
from peerd.policy.step.roster import Roster, entry_of
from peerd.stage.arriving import Arriving
from peerd.stage.checkpoints import CheckpointStore
from peerd.stage.executor import Pace
from peerd.stage.jobs import StageJobs
from peerd.stage.precision import run_module, set_products
from peerd.stage.results import Ticket
from peerd.stage.snapshots import Downloaded
from peerd.stage.state import StageState
from peerd.table.record import PeerId, PeerRecord
from peerd.table.view import LiveView
from peerd.transfers import to_device, to_host
from peerd.wire.messages import Call
from peerd.wire.tensors import Parcel, decode, encode
from scripts.benchmarks._report import SCHEMA, paired_interval, paired_ratio, run

STAGE, NUM_STAGES = 1, 3
GOAL = 0.9
"""Of plain PyTorch's speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a microbatch or of a step. Seconds are the median's."""

    name: str
    seconds: float
    in_step: float
    """Its share of a step."""


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
    compute = ComputeConfig(recompute="always" if given.recompute else "never")
    return Manifest(
        seed=1, model=model, train=train, compute=compute, wire=WireConfig(activations=given.codec, activation_gradients=given.codec)
    )


class Stage:
    """A peer of the middle stage, without its network."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.manifest, self.device = manifest, device
        self.state = StageState(manifest, PeerRecord(peer=PeerId("me"), incarnation=1, stage=STAGE), device, self.live)
        self.state.serve()
        self.jobs = StageJobs(manifest, self.state)
        train, codec = manifest.train, parse_codec(manifest.wire.activations)
        shape = manifest.boundary_shape(STAGE, train.sequence_length)
        chance = torch.Generator().manual_seed(0)
        self.inputs, self.gradient = torch.randn(shape, generator=chance), torch.randn(shape, generator=chance) * 1e-3
        self.sent = encode(self.inputs, codec)
        self.given = encode(self.gradient, codec)
        self.labels = encode(torch.zeros(train.microbatch_size, train.sequence_length, dtype=torch.int32))

    def live(self) -> LiveView:
        return LiveView(me=self.state.record.peer, records=(self.state.record,))

    def microbatch(self, index: int) -> None:
        record = self.state.record
        bare = self.sent.with_chunks(()), self.labels.with_chunks(())
        every = frozenset(range(NUM_STAGES))
        call = Call(call_id=bytes(16), stage=STAGE, step=record.step, index=index, accumulate=every, inputs=bare[0], labels=bare[1])
        ticket = Ticket(record.step, index, (record.incarnation, record.ledger_no), accumulate=True)
        inputs, gradient = Arriving(self.sent, self.device), Arriving(self.given, self.device)
        for arriving in (inputs, gradient):
            arriving.start()
        batch, _, _ = self.jobs.forward(call, ticket, (*self.sent.chunks, *self.labels.chunks), Pace(), inputs)
        outcome, _ = self.jobs.backward(call, batch, gradient, Pace())
        assert not outcome.refused, outcome.refused

    def round(self) -> None:
        entry = entry_of(self.state.record)
        roster = Roster(STAGE, self.state.record.step, 0, entry.peer, (entry,))
        reason, copy = self.state.open_round(roster)
        assert copy is not None, reason
        self.state.take_average(roster, copy)

    def commit(self) -> None:
        self.state.commit()
        self.state.applied = None

    def checkpoint(self, folder: Path) -> None:
        state = self.state
        lease = state.holdings.lend(state.record)
        CheckpointStore(folder, NUM_STAGES).save(STAGE, Downloaded(state.record.step, state.record.lineage, lease.tensors, ()), lease.end)


class Plain:
    """The same module, as a tutorial would train it."""

    def __init__(self, stage: Stage) -> None:
        self._train, self._module = stage.manifest.train, stage.state.holdings.module
        self._inputs, self._gradient = (to_device(each, stage.device) for each in (stage.inputs, stage.gradient))
        self._parameters = list(self._module.parameters())
        self._sums = [torch.zeros_like(each) for each in self._parameters]

    def microbatch(self) -> None:
        output = run_module(self._train, self._module, self._inputs.detach().requires_grad_())
        torch._foreach_add_(self._sums, list(torch.autograd.grad(output, self._parameters, self._gradient)))


def timed(work: Callable[[], object], device: torch.device) -> float:
    measures.wait(device)
    began_s = time.perf_counter()
    work()
    measures.wait(device)
    return time.perf_counter() - began_s


def median_s(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    return statistics.median(timed(work, device) for _ in range(rounds))


def parts_of(stage: Stage, rounds: int, ours_s: float, plain_s: float, folder: Path) -> list[Part]:
    """A step's parts. Computing is what plain PyTorch takes; what is left of a microbatch are looks, sums and the calls of Python."""
    device, train = stage.device, stage.manifest.train
    output: Tensor = to_device(stage.inputs, device)

    def out() -> None:
        parcel = Parcel(stage.sent.codec)
        parcel.encoded(*to_host(parcel.pack(output)))

    into_s = 2 * median_s(lambda: decode(stage.sent, device), device, rounds)
    out_s = 2 * median_s(out, device, rounds)
    round_s, commit_s = timed(stage.round, device), timed(stage.commit, device)
    count = train.microbatches_per_step
    whole_s = count * ours_s + round_s + commit_s
    rest_s = max(0.0, ours_s - plain_s - into_s - out_s)
    named = {
        "computing": count * min(plain_s, ours_s),
        "tensors in: decode and copy": count * into_s,
        "tensors out: encode and copy": count * out_s,
        "looks, sums, Python": count * rest_s,
        "copy for the round": round_s,
        "optimizer": commit_s,
    }
    found = [Part(name=name, seconds=seconds, in_step=seconds / whole_s) for name, seconds in named.items()]
    return [*found, Part(name="checkpoint, beside training", seconds=timed(lambda: stage.checkpoint(folder), device), in_step=0.0)]


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
    parser.add_argument("--microbatches", type=int, default=16, help="in a step (default 16)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="rounds, in each of which both sides compute (default 9)")
    parser.add_argument("--recompute", action="store_true", help="the stage keeps no graphs")
    given = parser.parse_args()
    if given.rounds < 1 or given.microbatches < given.rounds + 2:
        parser.error("--rounds must be at least 1, and --microbatches at least 2 more")
    device, manifest = choose_device(given.device), manifest_of(given)
    with tempfile.TemporaryDirectory() as folder:
        report = measured(manifest, device, given.rounds, Path(folder))
    print(json.dumps({"schema": SCHEMA, **report})) if given.json else print_report(report)
    return 0


def measured(manifest: Manifest, device: torch.device, rounds: int, folder: Path) -> dict[str, object]:
    before, train = memory_of(device).held, manifest.train
    set_products(train)
    stage = Stage(manifest, device)
    plain = Plain(stage)
    stage.microbatch(0)
    plain.microbatch()
    ours, theirs = list[float](), list[float]()
    for number in range(rounds):
        sides: list[tuple[list[float], Callable[[], object]]] = [(ours, partial(stage.microbatch, number + 1)), (theirs, plain.microbatch)]
        for times, work in sides if number % 2 else reversed(sides):
            times.append(timed(work, device))
    del plain, sides, work
    if has_own_memory(device):
        torch.get_device_module(device).reset_peak_memory_stats(device)
    for index in range(rounds + 1, train.microbatches_per_step):
        stage.microbatch(index)
    parts = parts_of(stage, rounds, statistics.median(ours), statistics.median(theirs), folder)
    peak = torch.get_device_module(device).max_memory_allocated(device) if has_own_memory(device) else 0
    flops = 3 * estimate_forward_flops(manifest, STAGE) / statistics.median(theirs)
    best = measures.flops(device, getattr(torch, train.precision, torch.float32))
    tokens = train.microbatch_size * train.sequence_length
    num_parameters = sum(each.numel() for each in stage.state.holdings.module.parameters())
    stage.state.release()
    left = give_back_memory(device) - before
    return {
        "device": describe(device),
        "precision": train.precision,
        "parameters": num_parameters,
        "tokens_per_second": tokens / statistics.median(ours),
        "plain_tokens_per_second": tokens / statistics.median(theirs),
        "of_plain": paired_ratio(theirs, ours),
        "interval": paired_interval(theirs, ours),
        "tflops": flops / 1e12,
        "best_tflops": best / 1e12,
        "parts": [asdict(part) for part in parts],
        "peak_bytes": peak,
        "estimate_bytes": estimate_stage_memory(manifest, STAGE, 1, Placing.DEVICE).device if peak else 0,
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
    if report["peak_bytes"]:
        print(f"peak memory {report['peak_bytes']:,} bytes, estimated {report['estimate_bytes']:,}; left {report['left_bytes']:,}")
    print(f"what binds: {report['binds']}")


if __name__ == "__main__":
    sys.exit(run(main))
