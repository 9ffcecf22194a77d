"""Lives the whole life of two stages on the device, and compares its numbers with those of the processor in float32."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, TrainConfig
from peerd.errors import PeerdError
from peerd.policy.step.norms import combine
from peerd.policy.step.roster import Roster, entry_of
from peerd.stage.microbatches import backward, forward, forward_backward
from peerd.stage.precision import set_products
from peerd.stage.results import HeldMicrobatch, Ticket
from peerd.stage.state import StageState
from peerd.table.record import PeerId, PeerRecord
from peerd.table.view import LiveView
from peerd.transfers import to_device, to_host

STEPS = 2
TOLERANCES = {"float32": 1e-4, "tf32": 5e-3, "bfloat16": 3e-2, "float16": 1e-2}
"""The largest difference of a loss that rounding explains, as a share of it."""
CHANGES = {"float32": 0.02, "tf32": 0.1, "bfloat16": 0.3, "float16": 0.1}
"""The same of the parameters' changes. AdamW divides by a gradient's size, which makes rounding large where that is small."""


def manifest_of(precision: str) -> Manifest:
    """A decoder of two stages, small enough for any machine."""
    sizes = {"num_stages": 2, "microbatches_per_step": 3, "microbatch_size": 2, "sequence_length": 64}
    train = TrainConfig(**sizes, precision=precision, loss_scale=2.0**8)  # type: ignore[arg-type]
    model = ModelConfig(num_layers=4, d_model=128, num_heads=4, d_ff=256)
    return Manifest(seed=11, model=model, train=train, compute=ComputeConfig(recompute="always"))


@dataclass(frozen=True, slots=True)
class Lived:
    """What came of it."""

    losses: list[float]
    changes: dict[str, Tensor]
    """How each parameter changed, in the machine's memory."""
    took_s: float


def live(manifest: Manifest, device: torch.device, *, keep_graph: bool) -> Lived:
    """Load, compute, average alone, commit, give the state away, take it over, and release everything."""
    began_s = time.monotonic()
    set_products(manifest.train)
    states = [_stage(manifest, stage, device, keep_graph) for stage in range(2)]
    first = _parameters(states)
    for step in range(STEPS):
        if step == 1:  # go on with what another peer would download
            given = [(state.holdings.tensors(state.record), state.record, state.history) for state in states]
            for state in states:
                state.release()
            states = [_stage(manifest, stage, device, keep_graph) for stage in range(2)]
            for state, (tensors, record, history) in zip(states, given, strict=True):
                state.begin_joining()
                state.load(tensors, record.step, record.lineage, history)
                state.serve()
        for index in range(manifest.train.microbatches_per_step):
            _microbatch(manifest, states, device, step, index)
        _average(states)
    changes = {name: value - first[name] for name, value in _parameters(states).items()}
    losses = [entry.loss for entry in states[-1].history]
    for state in states:
        state.release()
    return Lived(losses, changes, time.monotonic() - began_s)


def fault(found: Lived, expected: Lived, precision: str) -> str:
    """Return where the device's numbers differ from the processor's, in words; empty if they agree."""
    most = TOLERANCES[precision]
    for step, (loss, right) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if not abs(loss - right) <= most * abs(right):
            return f"the loss of step {step} is {loss:.6g} in place of {right:.6g}"
    mine, theirs = (torch.cat([value.flatten() for value in lived.changes.values()]).double() for lived in (found, expected))
    apart = float((mine - theirs).norm() / theirs.norm())
    if not apart <= CHANGES[precision]:
        return f"the parameters' changes differ by {apart:.1%} of their size"
    return ""


def _stage(manifest: Manifest, stage: int, device: torch.device, keep_graph: bool) -> StageState:
    record = PeerRecord(peer=PeerId(f"stage{stage}"), incarnation=1, stage=stage)

    def live_view() -> LiveView:
        return LiveView(me=state.record.peer, records=(state.record,))

    state = StageState(manifest, record, device, live_view, keep_graph)
    state.serve()
    return state


def _parameters(states: list[StageState]) -> dict[str, Tensor]:
    named = {name: value for state in states for name, value in state.holdings.module.named_parameters()}
    return {name: value.clone() for name, value in zip(named, to_host(*named.values()), strict=True)}


def _microbatch(manifest: Manifest, states: list[StageState], device: torch.device, step: int, index: int) -> None:
    train, vocabulary = manifest.train, manifest.model.vocab_size
    chance = torch.Generator().manual_seed(1000 * step + index)
    rows = 2, train.microbatch_size, train.sequence_length
    inputs, labels = to_device(torch.randint(0, vocabulary, rows, generator=chance), device).unbind(0)
    batches = []
    for state in states:
        record = state.record
        ticket = Ticket(step, index, (record.incarnation, record.ledger_no), accumulate=True)
        batches.append(HeldMicrobatch(ticket, inputs, labels))
        if not state.holdings.module.is_last:
            inputs = forward(state, batches[-1])
    outcome = forward_backward(states[-1], batches[-1])
    if outcome.gradient is not None:
        outcome = backward(states[0], batches[0], outcome.gradient)
    if outcome.refused:
        raise PeerdError(f"a microbatch was not added: {outcome.refused}")


def _average(states: list[StageState]) -> None:
    for state in states:
        entry = entry_of(state.record)
        roster = Roster(state.record.stage, state.record.step, 0, entry.peer, (entry,))
        reason, copy = state.open_round(roster)
        if copy is None:
            raise PeerdError(f"no round could be opened: {reason}")
        state.take_average(roster, copy)
    told = [state.record.gradient_norm for state in states]
    norm = combine([each for each in told if each is not None]) if None not in told else None
    for state in states:
        state.commit(norm)
        state.applied = None
