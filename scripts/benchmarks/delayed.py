"""Delayed updates: how long does a step hold the compute thread after its last gradient, with and without them?

One stage of many parameters and few tokens, so that its update takes as long as its microbatches. Both sides train the same run
in turns of a step, through the very state and executor that a peer has. With --compute-stand-in a microbatch sleeps until it has
taken so long, as one on a GPU leaves the processor to the update.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, field, replace

import torch

from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, TrainConfig
from peerd.policy.roster import Roster, entry_of
from peerd.stage.executor import Executor, Pace, Priority
from peerd.stage.state import StageState, Ticket
from peerd.table.record import PeerId, PeerRecord
from peerd.table.view import LiveView
from scripts.benchmarks._report import Row, paired_ratio, print_json, print_table, progress

WARMUP = 2


@dataclass(slots=True)
class Side:
    name: str
    state: StageState
    executor: Executor
    held_s: list[float] = field(default_factory=list)
    """By step: from the last gradient until the next microbatch can begin."""
    step_s: list[float] = field(default_factory=list)


def side_of(name: str, manifest: Manifest) -> Side:
    record = PeerRecord(peer=PeerId("bench"))
    state = StageState(manifest, record, torch.device("cpu"), lambda: LiveView(me=record.peer, records=()))
    state.serve()
    return Side(name, state, Executor())


async def train_step(side: Side, manifest: Manifest, pace: Pace) -> None:
    state, rows = side.state, (manifest.train.microbatch_size, manifest.train.sequence_length)
    step, chance = state.record.step, torch.Generator().manual_seed(state.record.step)
    began_s = time.monotonic()
    for index in range(manifest.train.microbatches_per_step):
        tokens = torch.randint(0, manifest.model.vocab_size, rows, generator=chance)
        mark = (state.record.incarnation, state.record.ledger_no)
        ticket = Ticket(step, index, mark, accumulate=True, inputs=tokens, labels=tokens)

        def work(ticket: Ticket = ticket) -> None:
            started_s = time.monotonic()
            state.forward_backward(ticket)
            pace.hold(started_s, 1.0)

        await side.executor.run(Priority.BACKWARD, work)
    ended_s = time.monotonic()
    entry = entry_of(state.record)
    roster = Roster(0, step, 0, entry.peer, (entry,))
    _, share = await side.executor.run(Priority.CONTROL, lambda: state.open_round(roster))
    assert share is not None
    await side.executor.run(Priority.CONTROL, lambda: state.take_average(roster, share))
    await side.executor.run(Priority.CONTROL, state.commit)
    side.held_s.append(time.monotonic() - ended_s)
    side.step_s.append(time.monotonic() - began_s)


async def measure(given: argparse.Namespace) -> list[Side]:
    train = TrainConfig(num_stages=1, microbatches_per_step=given.microbatches, microbatch_size=1, sequence_length=16, optimizer="lamb")
    model = ModelConfig(num_layers=given.layers, d_model=512, num_heads=8, d_ff=2048, vocab_size=256)
    manifest = Manifest(model=model, train=train, compute=ComputeConfig(threads=1))
    torch.set_num_threads(1)
    late = replace(manifest, train=replace(train, delayed_updates=True))
    sides = [side_of("at once", manifest), side_of("delayed", late)]
    for number in range(WARMUP + given.steps):
        for side in sides:
            await train_step(side, manifest, Pace(stand_in_s=given.compute_stand_in / 1000))
        if number >= WARMUP:
            progress(f"step {number - WARMUP + 1}: held {', '.join(f'{side.held_s[-1]:.3f} s {side.name}' for side in sides)}")
    for side in sides:
        side.executor.close()
    return sides


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench delayed", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps timed per side (default 10)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="of 4.2 million parameters each (default 4)")
    parser.add_argument("--microbatches", type=int, default=8, metavar="N", help="per step (default 8)")
    parser.add_argument("--compute-stand-in", type=float, default=0.0, metavar="MS", help="a microbatch takes at least so long (default 0)")
    given = parser.parse_args()
    if min(given.steps, given.layers, given.microbatches) < 1 or given.compute_stand_in < 0:
        parser.error("--steps, --layers and --microbatches must be at least 1, --compute-stand-in 0 or more")
    plain, late = asyncio.run(measure(given))
    rows = []
    for name, ours, theirs in (("held after the last gradient", late.held_s, plain.held_s), ("whole step", late.step_s, plain.step_s)):
        ours, theirs = ours[WARMUP:], theirs[WARMUP:]
        rows.append(Row(name=f"{plain.name}: {name}", median=statistics.median(theirs)))
        ratio = paired_ratio(theirs, ours)
        rows.append(Row(name=f"{late.name}: {name}", median=statistics.median(ours), ratio=ratio, baseline=plain.name))
    if given.json:
        print_json(rows, compute_stand_in_ms=given.compute_stand_in)
    else:
        print_table(f"{given.layers} layers, {given.microbatches} microbatches a step, LAMB, one thread each", "seconds", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
