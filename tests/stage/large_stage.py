"""A child process that is one peer of a stage of a large model for a step, and tells what memory that took.

`python -m tests.stage.large_stage` prints one JSON object: bytes before the stage was built, at most while it was built, at most in
the step, the estimate, and the bytes of the whole model's parameters.
"""

from __future__ import annotations

import json
import math
import resource
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from peerd.config.manifest import ComputeConfig, Manifest, TrainConfig
from peerd.models.hf.taking_in import choose_model
from peerd.models.stages import build_stage, estimate_stage_memory_bytes, initial_parameter_spec
from peerd.policy.roster import Roster, RosterEntry
from peerd.stage.state import StageState, Ticket
from peerd.table.record import PeerId, PeerRecord
from tests.strategies import view_of

SIZES = {
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "intermediate_size": 5504,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
STAGE, NUM_STAGES, SLOTS = 5, 12, 2
ROWS = (1, 512)


def manifest() -> Manifest:
    train = TrainConfig(num_stages=NUM_STAGES, microbatches_per_step=SLOTS, microbatch_size=ROWS[0], sequence_length=ROWS[1])
    return Manifest(model=choose_model("llama", {}, SIZES), train=train, compute=ComputeConfig(threads=1, recompute="never"))


def train_one_step(run: Manifest) -> None:
    """Two microbatches in hand at once, their backward passes, a round with what a mate sends, and the update."""
    me = PeerId("me")
    state = StageState(run, PeerRecord(peer=me, incarnation=1, stage=STAGE), torch.device("cpu"), lambda: view_of(state.record))
    state.serve()
    tickets = [_ticket(state, index) for index in range(SLOTS)]
    outputs = [state.forward(ticket) for ticket in tickets]
    for ticket, output in zip(tickets, outputs, strict=True):
        assert state.backward(ticket, torch.ones_like(output)).refused == ""
    record = state.record
    roster = Roster(STAGE, 0, 0, me, (RosterEntry(me, record.incarnation, record.ledger_no, (1 << SLOTS) - 1),))
    reason, own = state.open_round(roster)
    assert own is not None, reason
    received = own.clone()
    state.take_average(roster, own + received)
    state.commit()
    assert received.numel() == own.numel()


def _ticket(state: StageState, index: int) -> Ticket:
    record = state.record
    inputs = torch.randn(*ROWS, SIZES["hidden_size"])
    return Ticket(
        record.step, index, (record.incarnation, record.ledger_no), True, inputs=inputs, labels=torch.zeros(ROWS, dtype=torch.int64)
    )


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    torch.set_num_threads(1)
    run = manifest()
    estimate = estimate_stage_memory_bytes(run, STAGE, SLOTS)
    shapes = [shape for stage in range(NUM_STAGES) for shape in initial_parameter_spec(run, stage).values()]
    before = max(peak_bytes(), psutil.Process().memory_info().rss)
    build_stage(run, STAGE, "cpu")
    built = peak_bytes()
    train_one_step(replace(run, seed=1))
    whole = 4 * sum(math.prod(shape) for shape in shapes)
    print(json.dumps({"before": before, "built": built, "peak": peak_bytes(), "estimate": estimate, "whole": whole}))


if __name__ == "__main__":
    assert Path(__file__).name == "large_stage.py"
    main()
