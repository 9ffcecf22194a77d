"""A child process that is one peer of a large stage for some steps, and tells what memory that took.

`python -m tests.stage.large_stage NAME`, of RUNS, prints one JSON object: bytes before the stage was built, at most while it was built, at
most in the steps, the estimate, and the bytes of the whole model's parameters.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable
from typing import Any

import psutil
import torch

from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, TrainConfig
from peerd.models.hf.manifest_model import choose_model
from peerd.models.stages import build_stage, estimate_stage_memory_bytes, initial_parameter_spec
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.microbatches import backward, forward
from peerd.stage.results import HeldMicrobatch, Ticket
from peerd.stage.state import StageState
from peerd.table.record import PeerId, PeerRecord
from tests.strategies import view_of

LLAMA_SIZES = {
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "intermediate_size": 5504,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
SLOTS = 2


def llama() -> Manifest:
    """1.3 billion parameters, of which a stage has two layers."""
    train = TrainConfig(num_stages=12, microbatches_per_step=SLOTS, microbatch_size=1, sequence_length=512)
    model = choose_model("llama", {}, LLAMA_SIZES)
    return Manifest(seed=1, model=model, train=train, compute=ComputeConfig(threads=1, recompute="never"))


def decoder(**train: Any) -> Callable[[], Manifest]:
    """42 million parameters in each of three stages, no tensor of which is large beside them."""
    settings = TrainConfig(num_stages=3, microbatches_per_step=SLOTS, microbatch_size=1, sequence_length=64, **train)
    model = ModelConfig(num_layers=30, d_model=512, num_heads=8, d_ff=2048)
    return lambda: Manifest(seed=1, model=model, train=settings, compute=ComputeConfig(threads=1, recompute="never"))


RUNS: dict[str, tuple[Callable[[], Manifest], int]] = {
    "llama": (llama, 1),
    "adamw": (decoder(), 2),
    "lamb": (decoder(optimizer="lamb"), 2),
    "sgd": (decoder(optimizer="sgd"), 2),
    "sgd without momentum": (decoder(optimizer="sgd", momentum=0.0), 2),
    "delayed updates": (decoder(delayed_updates=True), 3),
}
"""Name -> the run, and how many steps of it are made: what it holds from step to step is there in the second, or with delays the third."""


def train_stage(run: Manifest, stage: int, steps: int) -> None:
    me = PeerId("me")
    state = StageState(run, PeerRecord(peer=me, incarnation=1, stage=stage), torch.device("cpu"), lambda: view_of(state.record))
    state.serve()
    for _ in range(steps):
        train_one_step(run, state)
    assert state.holdings.newest is not None  # and what is made in the background is made


def train_one_step(run: Manifest, state: StageState) -> None:
    """Two microbatches in hand at once, their backward passes, a round with what a mate sends, and the update."""
    batches = [_batch(run, state.record, index) for index in range(SLOTS)]
    outputs = [forward(state, batch) for batch in batches]
    for batch, output in zip(batches, outputs, strict=True):
        assert backward(state, batch, torch.ones_like(output)).refused == ""
    record = state.record
    entry = RosterEntry(record.peer, record.incarnation, record.ledger_no, (1 << SLOTS) - 1)
    roster = Roster(record.stage, record.step, 0, record.peer, (entry,))
    reason, own = state.open_round(roster)
    assert own is not None, reason
    received = own.clone()
    state.take_average(roster, own + received)
    state.commit()
    assert received.numel() == own.numel()


def _batch(run: Manifest, record: PeerRecord, index: int) -> HeldMicrobatch:
    inputs = torch.randn(run.boundary_shape(1))
    labels = torch.zeros(run.train.microbatch_size, run.train.sequence_length, dtype=torch.int64)
    return HeldMicrobatch(Ticket(record.step, index, (record.incarnation, record.ledger_no), True), inputs, labels)


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(name: str) -> None:
    torch.set_num_threads(1)
    make, steps = RUNS[name]
    run = make()
    num_stages = run.train.num_stages
    stage = num_stages // 2
    estimate = estimate_stage_memory_bytes(run, stage, SLOTS)
    shapes = [shape for each in range(num_stages) for shape in initial_parameter_spec(run, each).values()]
    before = max(peak_bytes(), psutil.Process().memory_info().rss)
    build_stage(run, stage, "cpu")
    built = peak_bytes()
    train_stage(run, stage, steps)
    whole = 4 * sum(math.prod(shape) for shape in shapes)
    print(json.dumps({"before": before, "built": built, "peak": peak_bytes(), "estimate": estimate, "whole": whole}))


if __name__ == "__main__":
    main(sys.argv[1])
