"""How many bits an ideal entropy coder would take for what crosses a boundary in int4, int5 or int6.

A small decoder is trained on the standard library's sources; then the activations and gradients at its cuts are quantised as on the wire.
The table has bits a value: what the codec takes now, with its scales; the empirical entropy of the codes with one table of frequencies for
each tensor (and that table's own bytes); and with a table for each of CLASSES kinds of blocks, by how large their values are beside the
largest, which a coder would know from 3 bits a block. No coder can be below the entropy for its tables; real ones are 0 to 2 % above.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from peerd.config.codec import SCALE_BYTES, parse_codec
from peerd.config.manifest import ComputeConfig, DataConfig, Manifest, ModelConfig, TrainConfig
from peerd.config.paths import cache_folder
from peerd.data.sources import STDLIB
from peerd.data.tokens import prepare_tokens
from peerd.models.stages import build_stage
from peerd.reference import train_reference
from peerd.train.corpus import Corpus
from peerd.wire.codecs import through
from scripts.benchmarks._report import SCHEMA, progress, run

NAMES = ("int4", "int5", "int6")
CLASSES = 8
TENSORS = ("activations", "gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Bits a value, means over cuts and microbatches."""

    step: int
    tensor: str
    codec: str
    now: float
    one_table: float
    by_class: float

    @property
    def saved(self) -> float:
        """The share of the bytes that the better of both would save."""
        return 1 - min(self.one_table, self.by_class) / self.now


def codes_of(values: Tensor, name: str) -> Tensor:
    """The codes of a flat tensor, int64 [blocks, block]. What does not fill a block is left out."""
    spec = parse_codec(name).spec
    values = values[: values.numel() // spec.block * spec.block]
    blocks = through(parse_codec(name), values).view(-1, spec.block)
    largest = (1 << spec.bits - 1) - 1
    scales = values.view(-1, spec.block).abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / largest
    return (blocks / scales).round().long() + largest


def entropy(codes: Tensor) -> float:
    """Of the empirical frequencies, in bits a value."""
    shares = torch.bincount(codes.flatten()).double() / codes.numel()
    shares = shares[shares > 0]
    return float(-(shares * shares.log2()).sum())


def bits_of(values: Tensor, name: str) -> tuple[float, float, float]:
    """Bits a value: now, with one table, and with a table for each class of blocks."""
    spec, length = parse_codec(name).spec, values.numel()
    codes = codes_of(values, name)
    scales = 8 * SCALE_BYTES / spec.block
    table = 16 * 2**spec.bits / length
    spread = (codes - (1 << spec.bits - 1) + 1).double().square().mean(dim=1)
    bounds = torch.quantile(spread, torch.linspace(0, 1, CLASSES + 1, dtype=torch.float64)[1:-1])
    classes = torch.bucketize(spread, bounds)
    apart = [codes[classes == each] for each in range(CLASSES)]
    by_class = sum(entropy(part) * part.numel() for part in apart if part.numel()) / codes.numel()
    told = math.log2(CLASSES) / spec.block + CLASSES * table
    return 8 * parse_codec(name).num_bytes(length) / length, entropy(codes) + scales + table, by_class + scales + told


def crossing(manifest: Manifest, parameters: dict[str, Tensor], microbatch: tuple[Tensor, Tensor]) -> dict[str, list[Tensor]]:
    """Activations and their gradients at each cut, flat."""
    stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]
    inputs, labels = microbatch
    received, hidden = list[Tensor](), inputs
    for stage in stages:
        with torch.no_grad():
            for name, value in stage.named_parameters():
                value.copy_(parameters[name])
        hidden = stage(hidden, labels if stage.needs_labels else None)
        if not stage.is_last:
            hidden.retain_grad()
            received.append(hidden)
    hidden.backward()  # type: ignore[no-untyped-call]
    gradients = [each.grad.flatten() for each in received if each.grad is not None]
    return {"activations": [each.detach().flatten() for each in received], "gradients": gradients}


def measure(manifest: Manifest, steps: int) -> list[Line]:
    corpus = Corpus(prepare_tokens(STDLIB, cache_folder()), manifest)
    trained = train_reference(manifest, corpus, steps)
    progress(f"{steps} steps: loss {trained.history[-1].loss:.4f}")
    seen = [crossing(manifest, dict(trained.parameters), corpus.microbatch(steps, index)) for index in range(2)]
    lines = []
    for tensor in TENSORS:
        flat = [each for crossed in seen for each in crossed[tensor]]
        for name in NAMES:
            now, one_table, by_class = (statistics.fmean(column) for column in zip(*(bits_of(each, name) for each in flat), strict=True))
            lines.append(Line(step=steps, tensor=tensor, codec=name, now=now, one_table=one_table, by_class=by_class))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench entropy", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 300], metavar="N", help="when to look (default 20 and 300)")
    parser.add_argument("--d-model", type=int, default=128, metavar="N", help="width, a multiple of 8 (default 128)")
    given = parser.parse_args()
    if min(given.steps) < 1 or given.d_model < 8 or given.d_model % 8:
        parser.error("--steps must be at least 1 and --d-model a multiple of 8")
    width = given.d_model
    manifest = Manifest(
        model=ModelConfig(num_layers=6, d_model=width, num_heads=4, d_ff=4 * width),
        data=DataConfig(source=STDLIB),
        train=TrainConfig(num_stages=3, microbatches_per_step=2, microbatch_size=4, learning_rate=2e-3, warmup_steps=20),
        compute=ComputeConfig(threads=torch.get_num_threads()),
    )
    lines = [line for steps in given.steps for line in measure(manifest, steps)]
    if given.json:
        print(json.dumps({"schema": SCHEMA, "rows": [dataclasses.asdict(line) | {"saved": line.saved} for line in lines]}))
        return 0
    print(f"{'steps':>5} {'tensor':<12} {'codec':<6} {'now':>6} {'one table':>10} {'by class':>9} {'saved':>6}   (bits a value)")
    for line in lines:
        bits = f"{line.now:>6.3f} {line.one_table:>10.3f} {line.by_class:>9.3f}"
        print(f"{line.step:>5} {line.tensor:<12} {line.codec:<6} {bits} {line.saved:>6.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
