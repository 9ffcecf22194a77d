"""What one peer holds of its stage: parameters of this step and the last, optimizer, accumulator, ledger and average.

Every method is a job for the executor's thread, which makes it the critical section of the step protocol. The record's
step fields (phase, done, ledger number, average id, lineage) change here and nowhere else; other threads read the
frozen record.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from peerd.config.codec import parse_allowed
from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, PeerGoneError, WrongStateError
from peerd.models.stages import StageModule, build_stage
from peerd.policy.ledger import may_accumulate
from peerd.policy.norms import KEPT_NORMS
from peerd.policy.roster import Roster, lineage_after, lineage_skipped, why_inexact, why_refuse
from peerd.stage.accumulator import Accumulator, all_finite
from peerd.stage.ahead import Ahead
from peerd.stage.evaluated import EvaluatedStep
from peerd.stage.export import HistoryEntry
from peerd.stage.optimizer import Optimizer
from peerd.stage.parameters import by_kind, check_fits, copy_parameters, flat_parameters, set_mean_parameters, set_parameters
from peerd.stage.passes import Passes
from peerd.stage.precision import norm_tensors, norms_from
from peerd.stage.update import apply_means
from peerd.stage.values import HeldAverage, Outcome, Ticket
from peerd.table.record import NO_AVERAGE, AverageId, Lineage, PeerRecord, Phase, StepNorm, Void, check_transition
from peerd.table.view import LiveView
from peerd.timeline.spans import Kind, SpanRing

__all__ = ["HeldAverage", "Outcome", "StageState", "Ticket"]

MAX_HISTORY = 100_000
_PHASES = {Phase.ACCUMULATING: Kind.ACCUMULATING, Phase.AVERAGING: Kind.AVERAGING, Phase.AVERAGED: Kind.AVERAGED}


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
        self._ahead = Ahead(self.module) if manifest.train.delayed_updates else None
        self.optimizer = Optimizer(manifest, dict(self.module.named_parameters()))
        dtype = torch.float64 if manifest.train.accumulate == "float64" else torch.float32
        shapes = {name: parameter.shape for name, parameter in self.module.named_parameters()}
        holds_doubles = dtype is torch.float32 or device.type != "mps"  # Apple's GPUs have no double precision
        self.passes = Passes(manifest)
        place = device if holds_doubles else torch.device("cpu")
        self.accumulator = Accumulator(shapes, dtype, place, overflows=self.passes.may_overflow)
        self.average: HeldAverage | None = None
        """The finished average of this step."""
        self.history: list[HistoryEntry] = []
        self.gradient_norms: dict[int, float] = {}
        """By step, where the run shares norms: of those I finished and those that came with a state."""
        self.weight_codecs = parse_allowed(manifest.wire.weight_gradients)
        """What mates of this stage send each other's gradients as."""
        self.keep_graph = manifest.compute.recompute == "never" if keep_graph is None else keep_graph
        self._generation = 0
        self.evaluated = EvaluatedStep(manifest)
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
                return self._compute(module, ticket)
        if not module.is_first:
            ticket.inputs.requires_grad_()
        ticket.output = self._compute(module, ticket)
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
        return self._compute(module, ticket)

    def _compute(self, module: StageModule, ticket: Ticket) -> Tensor:
        assert ticket.inputs is not None
        return self.passes.forward(module, ticket.step, ticket.index, ticket.inputs, ticket.labels)

    def _finish(self, ticket: Ticket, output: Tensor, gradient: Tensor | None, loss: float | None) -> Outcome:
        module = self._module_at(ticket.step)
        assert ticket.inputs is not None
        parameters = list(module.parameters())
        wanted = parameters if module.is_first else [ticket.inputs, *parameters]
        gradients = self.passes.backward(output, wanted, gradient, late=ticket.step != self.record.step)
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

    def evaluate(self, step: int, inputs: Tensor, labels: Tensor) -> Tensor:
        """Forward only, with the parameters of an evaluated step: activations, or from the last stage the loss."""
        return self.evaluated.forward(step, (self.record.step, self.module), inputs, labels)

    # The life of a step

    def open_round(self, roster: Roster) -> tuple[str, Tensor | None]:
        """Freeze the ledger and hand out a CPU copy of the accumulator; or the reason why not."""
        reason = why_refuse(self.record, roster, self._manifest.train.microbatches_per_step)
        if reason is not None:
            return reason, None
        self._move(Phase.AVERAGING)
        share = self.accumulator.flat.detach().to("cpu", copy=True)
        return "", torch.cat([share, flat_parameters(self.module, share.dtype)]) if self._averages_parameters(roster.step) else share

    def average_length(self, step: int) -> int:
        """Elements of an average of my stage: the accumulator's, and at some steps the parameters after them."""
        length = self.accumulator.flat.numel()
        return length + sum(parameter.numel() for parameter in self.module.parameters()) if self._averages_parameters(step) else length

    def _averages_parameters(self, step: int) -> bool:
        every = self._manifest.train.average_parameters_every_steps
        return every > 0 and (step + 1) % every == 0

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
        train = self._manifest.train
        gradients = flat_sum[: self.accumulator.flat.numel()]
        norm = self.accumulator.norm(gradients, train.microbatches_per_step) if train.shares_norms else None
        self._move(Phase.AVERAGED, average_id=roster.average_id, gradient_norm=norm)

    def check_average(self, roster: Roster, flat_sum: Tensor, step: int) -> None:
        """BadMessageError unless this is an exact average of my stage's `step`."""
        reason = why_inexact(roster.entries, self._manifest.train.microbatches_per_step)
        if (roster.stage, roster.step) != (self.record.stage, step):
            reason = "it is of another stage or step"
        if flat_sum.shape != (self.average_length(step),) or flat_sum.dtype != self.accumulator.flat.dtype:
            reason = "it has another length than the stage's parameters"
        elif not all_finite([flat_sum]):
            reason = "it is not finite"
        if reason is not None:
            raise BadMessageError(f"the average is refused: {reason}")

    @property
    def newest(self) -> StageModule:
        """The parameters that all updates lead to; with delayed updates those of the next step."""
        return self.module if self._ahead is None else self._ahead.wait()

    def commit(self, norm: float | None = None) -> HeldAverage:
        """Optimizer step; t+1 begins with an empty ledger. Returns what goes into the log.

        `norm` is the whole model's gradient norm of the step, given exactly where the run shares norms.
        """
        assert self.average is not None
        assert self.record.phase is Phase.AVERAGED
        held = self.average
        self._apply(held.roster, held.flat_sum, norm)
        began_s = time.monotonic()
        self._begin(self.record.step + 1, lineage_after(self.record.lineage, held.roster.average_id, norm))
        self._move(Phase.ACCUMULATING)
        self.spans.add(Kind.COMMIT, began_s, held.roster.step)
        return held

    def catch_up(self, roster: Roster, flat_sum: Tensor, norm: float | None = None) -> HeldAverage:
        """A joiner applies a mate's logged average to what it downloaded, with the norm that the mate applied."""
        assert self.record.phase is Phase.JOINING
        held = HeldAverage(roster, self.record.lineage, flat_sum)
        self._apply(roster, flat_sum, norm)
        self._begin(self.record.step + 1, lineage_after(self.record.lineage, roster.average_id, norm))
        return held

    def _apply(self, roster: Roster, flat_sum: Tensor, norm: float | None) -> None:
        self.evaluated.set_aside(self.record.step, self.module)
        began_s = time.monotonic()
        train = self._manifest.train
        assert (norm is not None) == train.shares_norms
        num_microbatches, length = train.microbatches_per_step, self.accumulator.flat.numel()
        if self._ahead is None:
            self.previous = copy.deepcopy(self.module) if self.previous is None else self.previous
            copy_parameters(self.module, self.previous)
            if self._averages_parameters(roster.step):
                set_mean_parameters(self.module, flat_sum[length:], len(roster.entries))
        flat_sum = flat_sum[:length]

        def update() -> None:
            sums = flat_sum.to(self.accumulator.flat.device)
            apply_means(train, self.optimizer, roster.step, self.accumulator.means(sums, num_microbatches), norm)

        if self._ahead is None:
            update()
        else:
            self._turn(self._ahead, update)
        self._generation += 1
        if self.module.is_last:
            loss = float(flat_sum[-1]) / num_microbatches
            self._remember(HistoryEntry(step=roster.step, loss=loss, tokens=self._manifest.tokens_per_step_at(roster.step)))
        self.passes.finish_step(norm)
        if norm is not None:
            self._note_norm(StepNorm(roster.step, norm))
        self.spans.add(Kind.OPTIMIZER, began_s, roster.step)

    def _turn(self, ahead: Ahead, update: Callable[[], None]) -> None:
        """The next step computes with what was made during this one; meanwhile this step's update is made."""
        ahead.wait()
        spare = self.previous if self.previous is not None else copy.deepcopy(self.module)
        self.optimizer.move_to(dict(spare.named_parameters()))
        self.previous, self.module = self.module, ahead.advance(spare, update)

    def _note_norm(self, applied: StepNorm) -> None:
        self.record = replace(self.record, norms=(*self.record.norms, applied)[-KEPT_NORMS:])
        self.gradient_norms[applied.step] = applied.norm
        self.gradient_norms.pop(applied.step - MAX_HISTORY, None)

    def skip_step(self) -> None:
        """Rule 11: the step is given up as inexact; the parameters stay as they are."""
        self.evaluated.set_aside(self.record.step, self.module)
        lineage = lineage_skipped(self.record.lineage, self.record.step)
        self.previous = copy.deepcopy(self.module)
        self.passes.finish_step(None)
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

    def _move(self, phase: Phase, average_id: AverageId = NO_AVERAGE, gradient_norm: float | None = None) -> None:
        check_transition(self.record.phase, phase)
        self._note_phase()
        if phase is not Phase.AVERAGED:
            self.average = None
        self.record = replace(self.record, phase=phase, average_id=average_id, gradient_norm=gradient_norm)

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
        if self._ahead is not None:
            found |= {f"ahead/{name}": value for name, value in self._ahead.wait().named_parameters()}
        if not parameters_only:
            found |= {f"optimizer/{name}": value for name, value in self.optimizer.tensors().items()}
        found |= {f"norms/{name}": value for name, value in norm_tensors(self.record.norms).items()}
        found |= {f"loss_scale/{name}": value for name, value in self.passes.tensors().items()}
        return {name: value.detach().to("cpu", copy=True) for name, value in found.items()}

    def load(self, tensors: Mapping[str, Tensor], step: int, lineage: Lineage, history: Sequence[HistoryEntry]) -> None:
        """Take over a downloaded state; BadMessageError, with nothing changed, when it does not fit this stage."""
        kinds = ["parameters", "previous", "optimizer"] + ["norms"] * self._manifest.train.shares_norms
        kinds += ["loss_scale"] * self.passes.may_overflow + ["ahead"] * (self._ahead is not None)
        groups = by_kind(tensors, kinds)
        check_fits(self.module, groups["parameters"])
        for kind in ("previous", "ahead"):
            if groups.get(kind):
                check_fits(self.module, groups[kind])
        if not all_finite(tensor for name, tensor in tensors.items() if not name.startswith("norms/")):
            raise BadMessageError("the state is not finite")
        ahead = self._ahead.wait() if self._ahead is not None else None
        try:
            norms = norms_from(groups.get("norms", {}))
            passes = Passes(self._manifest)
            passes.load(groups.get("loss_scale", {}))
            self.optimizer.load(groups["optimizer"])
        except ValueError as error:
            raise BadMessageError(f"the state does not fit: {error}") from None
        set_parameters(self.module, groups["parameters"])
        if ahead is not None:
            set_parameters(ahead, groups["ahead"] or groups["parameters"])
        if groups["previous"]:
            self.previous = self.previous or copy.deepcopy(self.module)
            set_parameters(self.previous, groups["previous"])
        else:
            self.previous = None
        self.history = list(history)
        self.record, self.passes = replace(self.record, norms=norms), passes
        self.gradient_norms |= {known.step: known.norm for known in norms}
        self.evaluated.forget()
        self._generation += 1
        self._begin(step, lineage)
