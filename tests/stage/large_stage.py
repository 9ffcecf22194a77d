"""A child process that is one peer of a large stage for some steps, and tells what memory that took.

`python -m tests.stage.large_stage NAME`, of RUNS, prints one JSON object: bytes before the stage was built, at most while it was built, at
most in the steps and their checkpoints, the estimate, and the bytes of the whole model's parameters.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from peerd.averaging.compression import Compression
from peerd.averaging.exchange import Exchange
from peerd.averaging.layout import RoundLayout
from peerd.averaging.slices import Signatures
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, TrainConfig
from peerd.link.links import CHUNK_BYTES
from peerd.models.hf.manifest_model import choose_model
from peerd.models.stages import build_stage, estimate_stage_memory, initial_parameter_spec
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.checkpoints import CheckpointStore
from peerd.stage.executor import Executor
from peerd.stage.malloc import keep_freed_memory, limit_arenas
from peerd.stage.microbatches import backward, forward
from peerd.stage.results import HeldMicrobatch, Ticket
from peerd.stage.snapshots import Downloaded
from peerd.stage.state import StageState
from peerd.table.record import NO_AVERAGE, PeerId, PeerRecord
from peerd.wire.messages import Frame
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
    "muon": (decoder(optimizer="muon"), 2),
    "sgd": (decoder(optimizer="sgd"), 2),
    "sgd without momentum": (decoder(optimizer="sgd", momentum=0.0), 2),
    "delayed updates": (decoder(delayed_updates=True), 3),
    "clipping": (decoder(max_gradient_norm=1e-3), 2),
    "8 bits": (decoder(optimizer_bits=8), 2),
    "float64": (decoder(accumulate="float64"), 2),
}
"""Name -> the run, and how many steps of it are made: what it holds from step to step is there in the second, or with delays the third."""


def train_stage(run: Manifest, stage: int, steps: int, folder: Path) -> None:
    me = PeerId("me")
    state = StageState(run, PeerRecord(peer=me, incarnation=1, stage=stage), torch.device("cpu"), lambda: view_of(state.record))
    state.serve()
    for _ in range(steps):
        train_one_step(run, state, folder)
    assert state.holdings.newest is not None  # and what is made in the background is made


def train_one_step(run: Manifest, state: StageState, folder: Path) -> None:
    """Two microbatches, a round with a mate, the update, and a checkpoint."""
    for index in range(SLOTS):
        batch = _batch(run, state.record, index)
        output = forward(state, batch)
        assert backward(state, batch, torch.ones_like(output)).refused == ""
    del batch, output
    record = state.record
    mine = RosterEntry(record.peer, record.incarnation, record.ledger_no, (1 << SLOTS) - 1)
    alone = Roster(record.stage, record.step, 0, record.peer, (mine,))
    reason, own = state.open_round(alone)
    assert own is not None, reason
    mate = RosterEntry(PeerId("mate"), 1, 1, 0)
    chunks = -(-own.nbytes // 2 // CHUNK_BYTES)
    with_mate = replace(alone, entries=(mine, mate), num_chunks=chunks)
    asyncio.run(_exchanged(state, with_mate, own))
    state.take_average(alone, own)
    del own
    state.commit(state.record.gradient_norm)
    state.applied = None
    lease = state.holdings.lend(state.record)
    CheckpointStore(folder, run.train.num_stages).save(record.stage, Downloaded(state.record.step, state.record.lineage, lease.tensors, ()))
    lease.end()


async def _exchanged(state: StageState, roster: Roster, own: Tensor) -> None:
    """Exchange chunks with a mate whose parts and sums are zeros, one chunk after another."""
    sums, me = state.accumulator, roster.peers.index(state.record.peer)
    compression, of_mate = (Compression(state.weight_codecs, own.dtype, sums.shapes, sums.num_exact) for _ in range(2))
    layout = RoundLayout(roster, own.numel(), compression, 2 * [state.weight_codecs.most_exact])
    executor = Executor("sums")
    exchange = Exchange(roster, own, compression, layout, executor, Signatures(state.record.peer, lambda _: b"", lambda *_: True))
    mate = 1 - me
    for number in range(layout.num_chunks):
        for reducer in (me, mate):
            where = layout.piece(reducer, number, mate)
            sent = of_mate.sent(of_mate.parts, NO_AVERAGE, where, torch.zeros(where.end - where.start, dtype=own.dtype))[1]
            of_mate.parts.pending.clear()
            if reducer == mate:
                await exchange.frame(mate, me, number, mate)
            await exchange.take(Frame(reducer, mate, number, me, chunks=tuple(map(bytes, sent))))
        await exchange.frame(me, me, number, mate)
    assert exchange.is_done
    executor.close()


def _batch(run: Manifest, record: PeerRecord, index: int) -> HeldMicrobatch:
    inputs = torch.randn(run.boundary_shape(1))
    labels = torch.zeros(run.train.microbatch_size, run.train.sequence_length, dtype=torch.int64)
    return HeldMicrobatch(Ticket(record.step, index, (record.incarnation, record.ledger_no), True), inputs, labels)


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(name: str) -> None:
    limit_arenas()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.nn.Linear(64, 64)(torch.randn(8, 64)).sum().backward()  # torch's kernels are loaded, and count to what it takes itself
    make, steps = RUNS[name]
    run = make()
    num_stages = run.train.num_stages
    stage = num_stages // 2
    estimate = estimate_stage_memory(run, stage, SLOTS).device
    shapes = [shape for each in range(num_stages) for shape in initial_parameter_spec(run, each).values()]
    before = max(peak_bytes(), psutil.Process().memory_info().rss)
    build_stage(run, stage, "cpu")
    built = peak_bytes()
    with tempfile.TemporaryDirectory() as folder:
        train_stage(run, stage, steps, Path(folder))
    whole = 4 * sum(math.prod(shape) for shape in shapes)
    print(json.dumps({"before": before, "built": built, "peak": peak_bytes(), "estimate": estimate, "whole": whole}))


if __name__ == "__main__":
    main(sys.argv[1])
