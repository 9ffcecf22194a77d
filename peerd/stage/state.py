"""What one peer holds of its stage: parameters of this step and the last, optimizer, accumulator, ledger and average.

Every method is a job for the executor's thread, which makes it the critical section of the step protocol. The record's
step fields (phase, done, ledger number, average id, lineage) change here and nowhere else; other threads read the
frozen record.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peerd.config.codec import parse_codec
from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, PeerGoneError, WrongStateError
from peerd.models.stages import StageModule, build_stage
from peerd.policy.ledger import may_accumulate
from peerd.policy.roster import Roster, lineage_after, lineage_skipped, why_inexact, why_refuse
from peerd.stage.accumulator import Accumulator, all_finite
from peerd.stage.export import HistoryEntry
from peerd.stage.optimizer import AdamW
from peerd.table.record import NO_AVERAGE, AverageId, Lineage, PeerRecord, Phase, Void, check_transition
from peerd.table.view import LiveView
from peerd.timeline.spans import Kind, SpanRing

MAX_HISTORY = 100_000
_PHASES = {Phase.ACCUMULATING: Kind.ACCUMULATING, Phase.AVERAGING: Kind.AVERAGING, Phase.AVERAGED: Kind.AVERAGED}


@dataclass(slots=True)
class Ticket:
    """One microbatch held by this stage between its forward and backward pass."""

    step: int
    index: int
    accept_mark: tuple[int, int]
    """(incarnation, ledger number) when it was accepted."""
    accumulate: bool
    cancelled: bool = False
    inputs: Tensor | None = None
    labels: Tensor | None = None
    output: Tensor | None = None
    """With its graph, where graphs are kept."""
    generation: int = -1
    """Which parameters the graph was built with."""
    queued_s: float = 0.0
    """How long it has waited for the executor."""
    passes: tuple[tuple[Kind, float], ...] = ()
    """Which passes the last job made, and when each was over."""


@dataclass(frozen=True, slots=True)
class HeldAverage:
    """A finished average: the summed vector on the CPU, whose ledgers it sums, and with which parameters they were computed."""

    roster: Roster
    lineage: Lineage
    flat_sum: Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a backward pass gave: the gradient of the inputs, and why it was not accumulated (empty when it was)."""

    gradient: Tensor | None
    refused: str


class StageState:
    """See the module's promise. `live` gives the swarm view of the moment and is safe from any thread.

    With `keep_graph` a microbatch's graph is kept from forward to backward; without, it is computed again.
    """

    def __init__(
        self, manifest: Manifest, record: PeerRecord, device: torch.device, live: Callable[[], LiveView], keep_graph: bool | None = None
    ) -> None:
        self._manifest = manifest
        self._live = live
        self.device = device
        self.record = record
        self.module: StageModule = build_stage(manifest, record.stage, device)
        self.previous: StageModule | None = None
        self.optimizer = AdamW(manifest, dict(self.module.named_parameters()))
        dtype = torch.float64 if manifest.train.accumulate == "float64" else torch.float32
        shapes = {name: parameter.shape for name, parameter in self.module.named_parameters()}
        holds_doubles = dtype is torch.float32 or device.type != "mps"  # Apple's GPUs have no double precision
        self.accumulator = Accumulator(shapes, dtype, device if holds_doubles else torch.device("cpu"))
        self.average: HeldAverage | None = None
        """The finished average of this step."""
        self.history: list[HistoryEntry] = []
        self.weight_codec = parse_codec(manifest.wire.weight_gradients)
        """What mates of this stage send each other's gradients as."""
        self.keep_graph = manifest.compute.recompute == "never" if keep_graph is None else keep_graph
        self._generation = 0
        self._evaluated: tuple[int, StageModule] | None = None
        """The parameters of the last evaluated step that was left behind, until the next one is."""
        self.spans = SpanRing(0)
        self._phase_since: tuple[float, int] = (time.monotonic(), record.step)
        """When this phase began, and of which step it is."""

    # Microbatches

    def forward(self, ticket: Ticket) -> Tensor:
        """The activations for the next stage. WrongStateError when the step's parameters are gone."""
        assert ticket.inputs is not None
        module = self._module_at(ticket.step)
        if not self.keep_graph:
            with torch.no_grad():
                output: Tensor = module(ticket.inputs)
            return output
        if not module.is_first:
            ticket.inputs.requires_grad_()
        ticket.output = module(ticket.inputs)
        ticket.generation = self._generation
        return ticket.output.detach()

    def backward(self, ticket: Ticket, gradient: Tensor) -> Outcome:
        """Backward pass from the gradient of this stage's output; accumulates when the ledger allows."""
        output = ticket.output
        ticket.passes = ()
        if output is None or ticket.generation != self._generation:
            output = self._recompute(ticket)
            ticket.passes = ((Kind.RECOMPUTE, time.monotonic()),)
        elif ticket.step != self.record.step:
            raise WrongStateError(f"I am at step {self.record.step}")
        return self._finish(ticket, output, gradient, None)

    def forward_backward(self, ticket: Ticket) -> Outcome:
        """The last stage: loss and backward at once."""
        output = self._recompute(ticket)
        loss = float(output.detach())
        ticket.passes = ((Kind.FORWARD, time.monotonic()),)
        if not torch.isfinite(output).all():
            raise PeerGoneError("the loss of this microbatch is not finite: the run has diverged, or an earlier stage lies")
        return self._finish(ticket, output, None, loss)

    def _recompute(self, ticket: Ticket) -> Tensor:
        assert ticket.inputs is not None
        module = self._module_at(ticket.step)
        if not module.is_first:
            ticket.inputs = ticket.inputs.detach().requires_grad_()
        output: Tensor = module(ticket.inputs, ticket.labels) if module.is_last else module(ticket.inputs)
        return output

    def _finish(self, ticket: Ticket, output: Tensor, gradient: Tensor | None, loss: float | None) -> Outcome:
        module = self._module_at(ticket.step)
        assert ticket.inputs is not None
        parameters = list(module.parameters())
        wanted = parameters if module.is_first else [ticket.inputs, *parameters]
        gradients = list(torch.autograd.grad(output, wanted, gradient))
        ticket.output = None
        input_gradient = None if module.is_first else gradients.pop(0)
        return Outcome(input_gradient, self._accumulate(ticket, gradients, loss))

    def _accumulate(self, ticket: Ticket, gradients: Sequence[Tensor], loss: float | None) -> str:
        """Add, then set the bit (hole 9). Returns why not, or an empty string."""
        if not ticket.accumulate:
            return "not asked to"
        if ticket.cancelled:
            return "the caller gave the call up"
        reason = may_accumulate(self.record, self._live(), step=ticket.step, index=ticket.index, accept_mark=ticket.accept_mark)
        if reason is not None:
            return reason
        self.accumulator.add(gradients, loss)
        self.record = replace(self.record, done=self.record.done | 1 << ticket.index)
        return ""

    def _module_at(self, step: int) -> StageModule:
        if step == self.record.step:
            return self.module
        if step == self.record.step - 1 and self.previous is not None:
            return self.previous
        raise WrongStateError(f"I am at step {self.record.step}")

    # Evaluation

    @property
    def evaluated_step(self) -> int | None:
        """The step whose parameters are set aside for its evaluation."""
        return self._evaluated[0] if self._evaluated else None

    def evaluate(self, step: int, inputs: Tensor, labels: Tensor) -> Tensor:
        """Forward only, with the parameters of an evaluated step: activations, or from the last stage the loss.

        Touches neither accumulator nor ledger. WrongStateError when the step's parameters are gone.
        """
        kept_step, kept = self._evaluated or (-1, self.module)
        if step not in (self.record.step, kept_step):
            raise WrongStateError(f"I do not hold the parameters of step {step}")
        module = self.module if step == self.record.step else kept
        with torch.no_grad():
            output: Tensor = module(inputs, labels) if module.is_last else module(inputs)
        return output

    def _set_aside(self) -> None:
        """Before the parameters of an evaluated step change: training does not wait for its evaluation."""
        if self._manifest.train.evaluates_at(self.record.step):
            self._evaluated = (self.record.step, copy.deepcopy(self.module))

    # The life of a step

    def open_round(self, roster: Roster) -> tuple[str, Tensor | None]:
        """Freeze the ledger and hand out a CPU copy of the accumulator; or the reason why not."""
        reason = why_refuse(self.record, roster, self._manifest.train.microbatches_per_step)
        if reason is not None:
            return reason, None
        self._move(Phase.AVERAGING)
        return "", self.accumulator.flat.detach().to("cpu", copy=True)

    def close_round(self) -> None:
        """The round failed: the ledger is kept."""
        if self.record.phase is Phase.AVERAGING:
            self._move(Phase.ACCUMULATING)

    def void(self, void: Void) -> None:
        """Leave a member out of further rounds of this step (hole 19)."""
        if void.step == self.record.step:
            self.record = replace(self.record, voids=(*self.record.voids, void))

    def take_average(self, roster: Roster, flat_sum: Tensor) -> None:
        """An average of this step, my own round's or a mate's. Ignored when this peer has moved on meanwhile."""
        mine = self.record
        stale = mine.phase is Phase.JOINING or (roster.stage, roster.step) != (mine.stage, mine.step)
        if stale or (mine.phase is Phase.AVERAGED and mine.average_id <= roster.average_id):
            return
        self.average = HeldAverage(roster, mine.lineage, flat_sum)
        self._move(Phase.AVERAGED, average_id=roster.average_id)

    def check_average(self, roster: Roster, flat_sum: Tensor, step: int) -> None:
        """BadMessageError unless this is an exact average of my stage's `step`."""
        reason = why_inexact(roster.entries, self._manifest.train.microbatches_per_step)
        if (roster.stage, roster.step) != (self.record.stage, step):
            reason = "it is of another stage or step"
        if flat_sum.shape != self.accumulator.flat.shape or flat_sum.dtype != self.accumulator.flat.dtype:
            reason = "it has another length than the stage's parameters"
        elif not all_finite([flat_sum]):
            reason = "it is not finite"
        if reason is not None:
            raise BadMessageError(f"the average is refused: {reason}")

    def commit(self) -> HeldAverage:
        """Optimizer step; t+1 begins with an empty ledger. Returns what goes into the log."""
        assert self.average is not None
        assert self.record.phase is Phase.AVERAGED
        held = self.average
        self._apply(held.roster, held.flat_sum)
        began_s = time.monotonic()
        self._begin(self.record.step + 1, lineage_after(self.record.lineage, held.roster.average_id))
        self._move(Phase.ACCUMULATING)
        self.spans.add(Kind.COMMIT, began_s, held.roster.step)
        return held

    def catch_up(self, roster: Roster, flat_sum: Tensor) -> HeldAverage:
        """A joiner applies a mate's logged average to what it downloaded."""
        assert self.record.phase is Phase.JOINING
        held = HeldAverage(roster, self.record.lineage, flat_sum)
        self._apply(roster, flat_sum)
        self._begin(self.record.step + 1, lineage_after(self.record.lineage, roster.average_id))
        return held

    def _apply(self, roster: Roster, flat_sum: Tensor) -> None:
        self._set_aside()
        began_s = time.monotonic()
        if self.previous is None:
            self.previous = copy.deepcopy(self.module)
        else:
            _copy_parameters(self.module, self.previous)
        num_microbatches = self._manifest.train.microbatches_per_step
        sums = flat_sum.to(self.accumulator.flat.device)
        gradients = {name: mean.float() for name, mean in self.accumulator.means(sums, num_microbatches).items()}
        self.optimizer.update(roster.step, gradients)
        self._generation += 1
        if self.module.is_last:
            loss = float(flat_sum[-1]) / num_microbatches
            self._remember(HistoryEntry(step=roster.step, loss=loss, tokens=self._manifest.tokens_per_step_at(roster.step)))
        self.spans.add(Kind.OPTIMIZER, began_s, roster.step)

    def skip_step(self) -> None:
        """Rule 11: the step is given up as inexact; the parameters stay as they are."""
        self._set_aside()
        lineage = lineage_skipped(self.record.lineage, self.record.step)
        self.previous = copy.deepcopy(self.module)
        self._begin(self.record.step + 1, lineage)
        self._move(Phase.ACCUMULATING)

    def reset_ledger(self) -> None:
        """Rule 6, and part of a fence: what the accumulator held is missing again."""
        self.accumulator.zero()
        self.record = replace(self.record, done=0, ledger_no=self.record.ledger_no + 1)

    def fence(self, incarnation: int) -> None:
        """T3: a new incarnation. A finished average is a fact and stays; the ledger is a claim and goes."""
        self.close_round()
        self.record = replace(self.record, incarnation=incarnation)
        self.reset_ledger()

    def begin_joining(self) -> None:
        """Out of the step until the state is downloaded."""
        if self.record.phase is not Phase.JOINING:
            self.reset_ledger()
            self._move(Phase.JOINING)

    def offer_checkpoints(self, steps: Sequence[int]) -> None:
        """Tell the swarm, while joining, which steps of this stage are on my disk."""
        self.record = replace(self.record, checkpoints=tuple(steps))

    def serve(self) -> None:
        self.offer_checkpoints(())
        self.reset_ledger()
        self._move(Phase.ACCUMULATING)

    def _begin(self, step: int, lineage: Lineage) -> None:
        """At `step` with an empty ledger."""
        self.accumulator.zero()
        self.record = replace(self.record, step=step, lineage=lineage, done=0, ledger_no=self.record.ledger_no + 1, voids=())

    def _move(self, phase: Phase, average_id: AverageId = NO_AVERAGE) -> None:
        check_transition(self.record.phase, phase)
        self._note_phase()
        if phase is not Phase.AVERAGED:
            self.average = None
        self.record = replace(self.record, phase=phase, average_id=average_id)

    def _note_phase(self) -> None:
        """The phase that ends now, but for joining, which is no part of a step."""
        (since_s, step), self._phase_since = self._phase_since, (time.monotonic(), self.record.step)
        kind = _PHASES.get(self.record.phase)
        if kind is not None:
            self.spans.add(kind, since_s, step)

    def _remember(self, entry: HistoryEntry) -> None:
        self.history.append(entry)
        del self.history[:-MAX_HISTORY]

    def release(self) -> None:
        """Let go of all tensors; the record and the history stay. The last job of this stage."""
        del self.module, self.previous, self.optimizer, self.accumulator, self.average

    # Snapshots

    def tensors(self, parameters_only: bool) -> dict[str, Tensor]:
        """Copies on the CPU, so that what is sent never changes under way (hole 10)."""
        found: dict[str, Tensor] = {f"parameters/{name}": value for name, value in self.module.named_parameters()}
        if self.previous is not None:
            found |= {f"previous/{name}": value for name, value in self.previous.named_parameters()}
        if not parameters_only:
            found |= {f"optimizer/{name}": value for name, value in self.optimizer.tensors().items()}
        return {name: value.detach().to("cpu", copy=True) for name, value in found.items()}

    def load(self, tensors: Mapping[str, Tensor], step: int, lineage: Lineage, history: Sequence[HistoryEntry]) -> None:
        """Take over a downloaded state; BadMessageError, with nothing changed, when it does not fit this stage."""
        groups: dict[str, dict[str, Tensor]] = {"parameters": {}, "previous": {}, "optimizer": {}}
        for name, value in tensors.items():
            kind, _, rest = name.partition("/")
            if kind not in groups:
                raise BadMessageError(f"unknown tensor {name[:80]} in the state")
            groups[kind][rest] = value
        _check_fits(self.module, groups["parameters"])
        if groups["previous"]:
            _check_fits(self.module, groups["previous"])
        if not all_finite(tensors.values()):
            raise BadMessageError("the state is not finite")
        try:
            self.optimizer.load(groups["optimizer"])
        except ValueError as error:
            raise BadMessageError(f"the state does not fit: {error}") from None
        _set_parameters(self.module, groups["parameters"])
        if groups["previous"]:
            self.previous = self.previous or copy.deepcopy(self.module)
            _set_parameters(self.previous, groups["previous"])
        else:
            self.previous = None
        self.history = list(history)
        self._evaluated = None  # it may descend from another lineage
        self._generation += 1
        self._begin(step, lineage)


def _check_fits(module: StageModule, tensors: Mapping[str, Tensor]) -> None:
    wanted = {name: (parameter.shape, parameter.dtype) for name, parameter in module.named_parameters()}
    if {name: (given.shape, given.dtype) for name, given in tensors.items()} != wanted:
        raise BadMessageError("the state's parameters are not this stage's")


def _set_parameters(module: StageModule, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(tensors[name])


def _copy_parameters(source: StageModule, target: StageModule) -> None:
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
            ours.copy_(theirs)
