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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from peerd.checkup.device import measures
from peerd.config.codec import parse_codec
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, TrainConfig, WireConfig
from peerd.daemon.device import choose_device, describe, give_back_memory, has_own_memory, memory_of
from peerd.errors import UsageError
from peerd.link.links import Bytes
from peerd.models.stages import estimate_forward_flops, estimate_stage_memory
from peerd.planner.memory import Placing
from peerd.policy.step.roster import Roster, entry_of
from peerd.stage.arriving import Arriving
from peerd.stage.calls import StageService
from peerd.stage.checkpoints import CheckpointStore
from peerd.stage.checks import Checks
from peerd.stage.executor import Executor, Pace
from peerd.stage.leaving import Leaving
from peerd.stage.precision import run_module, set_products
from peerd.stage.snapshots import Downloaded
from peerd.stage.state import StageState
from peerd.table.record import PeerId, PeerRecord, RawRecord
from peerd.table.view import LiveView
from peerd.transfers import to_device
from peerd.wire.messages import Call, CallResult
from peerd.wire.tensors import encode
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


class Alone:
    """The host of a stage that has no network."""

    is_committing = False

    async def until_committed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    def cannot_compute(self) -> None:
        raise UsageError("the device has no memory for this stage", "use a smaller --batch, --sequence or --millions, or --recompute")

    def own_records(self) -> tuple[RawRecord, ...]:
        return ()

    def absorb(self, records: Sequence[RawRecord], sender: PeerId) -> None: ...

    def ledger_grew(self) -> None: ...


class Stage:
    """A peer of the middle stage, without its network."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.manifest, self.device = manifest, device
        self.state = StageState(manifest, PeerRecord(peer=PeerId("me"), incarnation=1, stage=STAGE), device, self.live)
        self.state.serve()
        self.executor = Executor()
        self._all: asyncio.Barrier | None = None
        self.service = StageService(manifest, self.state, self.executor, self, Pace(), Alone())
        train, codec = manifest.train, parse_codec(manifest.wire.activations)
        shape = manifest.boundary_shape(STAGE, train.sequence_length)
        chance = torch.Generator().manual_seed(0)
        self.inputs, self.gradient = torch.randn(shape, generator=chance), torch.randn(shape, generator=chance) * 1e-3
        self.sent = encode(self.inputs, codec)
        self.given = encode(self.gradient, codec)
        self.labels = encode(torch.zeros(train.microbatch_size, train.sequence_length, dtype=torch.int32))

    def live(self) -> LiveView:
        return LiveView(me=self.state.record.peer, records=(self.state.record,))

    async def send(self, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        """Be the next stage: it answers at once, unless all are waited for."""
        on_forwarded(call.stage, PeerId("next"))
        if self._all is not None:
            await self._all.wait()
        return CallResult(gradient=self.given, downstream_s=0.0, records=())

    def distrust(self, call: Call, peer: PeerId) -> None:
        raise AssertionError(f"a gradient of {peer} was refused for microbatch {call.index}")

    async def microbatch(self, index: int) -> None:
        """Take one through the service of calls, as a daemon does."""

        async def receive() -> tuple[Bytes, ...]:
            return (*self.sent.chunks, *self.labels.chunks)

        bare = self.sent.with_chunks(()), self.labels.with_chunks(())
        call = Call(
            call_id=index.to_bytes(16, "little"),
            stage=STAGE,
            step=self.state.record.step,
            index=index,
            accumulate=frozenset(range(NUM_STAGES)),
            inputs=bare[0],
            labels=bare[1],
        )
        await self.service.backpropagate(PeerId("caller"), call, receive, lambda _stage, _peer: None)

    async def all_slots(self) -> None:
        """Take as many microbatches through as there are slots, so that all are in hand before the first gradient comes."""
        count = min(self.service.slots, self.manifest.train.microbatches_per_step)
        self._all = asyncio.Barrier(count)
        await self.microbatches(range(count))

    async def microbatches(self, indices: range) -> None:
        """Take these through with as many in hand as the run's slots."""
        slots = asyncio.Semaphore(self.service.slots)

        async def one(index: int) -> None:
            async with slots:
                await self.microbatch(index)

        await asyncio.gather(*map(one, indices))

    def round(self) -> None:
        entry = entry_of(self.state.record)
        roster = Roster(STAGE, self.state.record.step, 0, entry.peer, (entry,))
        reason, copy = self.state.open_round(roster)
        assert copy is not None, reason
        self.state.take_average(roster, copy)

    def commit(self) -> None:
        self.state.commit()
        self.state.applied = None

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of everything."""
        self.executor.close()
        loop.run_until_complete(self.executor.ended())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        self.state.release()

    def checkpoint(self, folder: Path) -> None:
        state = self.state
        lease = state.holdings.lend(state.record)
        CheckpointStore(folder, NUM_STAGES).save(STAGE, Downloaded(state.record.step, state.record.lineage, lease.tensors, ()), lease.end)


class Plain:
    """The same module, as a tutorial would train it."""

    def __init__(self, stage: Stage) -> None:
        self._train, self._module = stage.manifest.train, stage.state.holdings.module
        self._recomputes = stage.manifest.compute.recompute == "always"
        self._inputs, self._gradient = (to_device(each, stage.device) for each in (stage.inputs, stage.gradient))
        self._parameters = list(self._module.parameters())
        self._sums = [torch.zeros_like(each) for each in self._parameters]

    def microbatches(self, count: int) -> None:
        for _ in range(count):
            if self._recomputes:
                with torch.no_grad():
                    run_module(self._train, self._module, self._inputs)
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
    beside = {name: count * seconds for name, seconds in alone.items()} | {"checkpoint": timed(lambda: stage.checkpoint(folder), device)}
    return [*found, *(Part(name=name, seconds=seconds, in_step=0.0) for name, seconds in beside.items())]


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
    ours, theirs, rounds_s, commits_s = list[float](), list[float](), list[float](), list[float]()

    def whole() -> None:
        loop.run_until_complete(stage.microbatches(range(count)))

    for number in range(1 + rounds):  # the first one only warms up
        sides: list[tuple[list[float], Callable[[], object]]] = [(ours, whole), (theirs, partial(plain.microbatches, count))]
        for times, work in sides if number % 2 else reversed(sides):
            times.append(timed(work, device) / count)
        rounds_s.append(timed(stage.round, device))
        commits_s.append(timed(stage.commit, device))
    ours, theirs = ours[1:], theirs[1:]
    del plain, sides, work
    if trace is not None:
        with torch.profiler.profile() as profile:
            whole()
        profile.export_chrome_trace(str(trace))
        stage.round()
        stage.commit()
    give_back_memory(device)
    peaks = Peaks(device)
    loop.run_until_complete(stage.all_slots())
    live, reserved = peaks.live, peaks.reserved
    ends = Ends(statistics.median(rounds_s), statistics.median(commits_s))
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
    if report["peak_bytes"]:
        print(f"with {report['slots']} microbatches in hand at most {report['peak_bytes']:,} bytes, estimated {report['estimate_bytes']:,}")
        print(f"torch took {report['reserved_bytes']:,} bytes for it, and keeps {report['left_bytes']:,} when all is left")
    print(f"what binds: {report['binds']}")


if __name__ == "__main__":
    sys.exit(run(main))
