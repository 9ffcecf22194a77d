"""One peer's state in the step protocol: its record with the ledger, the accumulated gradients, the average, and its holdings.

Every method is a job for the executor's thread, which makes it the critical section of the step protocol. The record's
step fields (phase, done, ledger number, average id, lineage) change here and in ledgers.py and nowhere else; other
threads read the frozen record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
import torch
from torch import Tensor

from peerd.config.codec import averaged_codecs
from peerd.config.manifest import Manifest
from peerd.errors import WrongStateError
from peerd.models.stages import StageModule
from peerd.policy.step.asides import all_merged
from peerd.policy.step.certificates import Slices
from peerd.policy.step.confirming import RoundProof
from peerd.policy.step.ledger import at_next_step, full, with_overlap, with_sum
from peerd.policy.step.norms import TOLD_STEPS
from peerd.policy.step.roster import Roster, group_within, lineage_after, lineage_skipped, union_of, why_refuse
from peerd.policy.step.tied import history_after, lineage_replaced
from peerd.stage.accumulator import accumulators_of
from peerd.stage.evaluated import EvaluatedStep
from peerd.stage.history import HistoryEntry, entry_after
from peerd.stage.holdings import Holdings, history_of
from peerd.stage.ledgers import StageLedgers
from peerd.stage.moves import MoveLog
from peerd.stage.own_updates import OwnUpdates
from peerd.stage.phase_spans import PhaseSpans, UpdateSpans
from peerd.stage.results import HeldAverage, HeldMicrobatch, TiedGradients
from peerd.stage.sections import HeldSections, SectionOfAverage
from peerd.stage.spool import Spools
from peerd.stage.sums import Sums
from peerd.stage.update import apply_sums
from peerd.table.record import NO_AVERAGE, AverageId, Lineage, PeerRecord, Phase, StepNorm, TiedSum, Void, check_transition
from peerd.table.view import LiveView
from peerd.timeline.spans import SpanKind, SpanRing
from peerd.transfers import DeviceTime

LOG = structlog.get_logger()
MAX_HISTORY = 100_000


class StageState(StageLedgers):
    """See the module's promise. `live` returns the current view of the swarm and is safe from any thread.

    With `keep_graph` a microbatch's graph is kept from forward to backward; without it the forward pass is repeated. `spools`: for asides.
    """

    def __init__(
        self,
        manifest: Manifest,
        record: PeerRecord,
        device: torch.device,
        live: Callable[[], LiveView],
        keep_graph: bool | None = None,
        spans: SpanRing | None = None,
        offloads: bool = False,
        spools: Spools | None = None,
    ) -> None:
        self._manifest, self._live = manifest, live
        self.num_microbatches, self.microbatch_size = manifest.train.microbatches_per_step, manifest.train.microbatch_size
        self.num_stages = manifest.train.num_stages
        self.record = with_overlap(record) if manifest.train.overlaps_steps else record
        self.holdings = Holdings(manifest, record.stage, device, offloads)
        self.spools = spools or Spools()
        self.own = OwnUpdates(manifest, self.holdings, MoveLog(record)) if manifest.train.local_batch else None
        self._sums = [Sums(accumulator, self.spools) for accumulator in accumulators_of(manifest, self.holdings.module, device)]
        """Those of this step's ledger and, where steps overlap, of the next step's."""
        self.average: HeldAverage | None = None
        self.applied: HeldAverage | None = None
        """The average of the step before, from its commit until it is kept elsewhere (`KeptAverages`)."""
        self.sections: HeldSections | None = None
        """Sections of the average of this step that are here; those that the record does not name do not count."""
        self.round: Roster | None = None
        """The round that this peer is AVERAGING in; None in every other phase."""
        self.history: list[HistoryEntry] = []
        self.gradient_norms: dict[int, float] = {}
        """Gradient norms by step, where the run shares norms: of steps finished here and those that came with a state."""
        self.weight_codecs = averaged_codecs(manifest.wire.weight_gradients, manifest.train.local_steps_after)
        """The codec in which peers of this stage send each other gradients."""
        self.keep_graph = manifest.compute.recompute == "never" if keep_graph is None else keep_graph
        self.evaluated = EvaluatedStep(manifest, self.holdings.places)
        self.spans = spans or SpanRing(0)
        self._phases, self.update_spans = PhaseSpans(self.spans, record.step), UpdateSpans(self.spans)

    def module_at(self, step: int) -> StageModule:
        """The module to compute with now. Raises WrongStateError if the parameters of that step are not here."""
        steps_ahead = step - self.record.step
        if self.updating is not None and not steps_ahead:
            return self.holdings.places.to_compute(self.updating.version().module)
        module = self.holdings.of_step(steps_ahead) if steps_ahead < len(self._sums) else None
        if module is None:
            raise WrongStateError(f"this peer is at step {self.record.step}")
        return module

    def module_of(self, batch: HeldMicrobatch) -> StageModule:
        """The module to compute a microbatch with: that of its forward pass, if it is under way. Raises WrongStateError if that is gone."""
        return self.module_at(batch.ticket.step) if batch.version is None else batch.version.module

    def keep_moves(self, folder: Path) -> None:
        """Write from now on what this peer does to its own parameters into a file in this folder, where steps are local."""
        if self.own is not None:
            self.own.moves = MoveLog(self.record, folder)

    def evaluate(self, step: int, inputs: Tensor, labels: Tensor) -> Tensor:
        """Run forward only, with the parameters of an evaluated step. Returns activations; the last stage returns the loss."""
        return self.evaluated.forward(step, (self.record.step, self.holdings.module), inputs, labels)

    # The life of a step

    def open_round(self, roster: Roster) -> tuple[str, Tensor | None]:
        """Freeze the ledger and return a CPU copy of the accumulator, or the reason for a refusal.

        The round's memory is that of the asides, which end here.
        """
        if (reason := why_refuse(self.record, roster, *self.averages_by) or self.why_not_averaged(roster)) is not None:
            return reason, None
        for ahead in range(len(self._sums)):
            self._make_one(roster.step + ahead)
        self.record = all_merged(self.record)
        self.holdings.fetch_drift()
        share = self.contribution(roster)
        self.update_spans.look()
        self.round = roster
        self._move(Phase.AVERAGING)
        return "", share

    def close_round(self, average_id: AverageId, void: Void | None = None) -> None:
        """This round failed: the ledger is kept. `void` leaves a member out of further rounds of this step (hole 19)."""
        if void is not None and void.step == self.record.step:
            self.record = replace(self.record, voids=(*self.record.voids, void))
        if self.round is not None and self.round.average_id == average_id:
            self._move(Phase.ACCUMULATING)
            self._put_together()

    def take_section(self, one: SectionOfAverage, whole: Tensor | None = None) -> None:
        """Hold a section of the average. It is ignored if this peer has moved on meanwhile. `whole`: memory for all sections."""
        mine, roster = self.record, one.roster
        if mine.phase in (Phase.ACCUMULATING, Phase.AVERAGING) and (roster.stage, roster.step) == (mine.stage, mine.step):
            whole = one.values.new_empty(self.round_length(roster)) if whole is None else whole
            held = self.sections if mine.sections else None
            self.sections = (held or HeldSections(mine.lineage, whole, len(self.accumulator.flat))).with_one(one)
            self.record = replace(mine, sections=mine.sections | 1 << roster.section)
            self._put_together()

    def _put_together(self) -> None:
        """All sections are the average. In a round for one of them this peer stays until that is over."""
        held, mine = self.sections, self.record
        if held is not None and mine.sections == full(self.averages_by[2]) and mine.phase is Phase.ACCUMULATING:
            roster, flat_sum, proofs = held.whole
            self.take_average(roster, flat_sum, sections=proofs if self.certifies else ())

    def take_sum(self, roster: Roster, flat_sum: Tensor) -> None:
        """Hold the sum of the round that this peer is in, which is that of its group, in place of its own ledger."""
        with self._whole_or_dropped(roster.step) as sums, sums.main.changing():
            sums.main.flat.copy_(flat_sum)
        self.record = with_sum(self.record, roster.average_id, union_of(roster.entries))
        self._move(Phase.ACCUMULATING)

    def take_average(
        self,
        roster: Roster,
        flat_sum: Tensor,
        tied: TiedGradients | None = None,
        slices: Slices = (),
        *,
        sections: tuple[RoundProof, ...] = (),
        is_better: bool | None = None,
    ) -> None:
        """Take an average of this step; a mate that finished the step adds `tied`. It is ignored if this peer has moved on meanwhile.

        `is_better`: than the one that this peer holds, if it does; None: if its id is smaller.
        """
        mine = self.record
        held = HeldAverage(roster, mine.lineage, flat_sum, tied, None, group_within(roster, mine), slices, sections)
        stale = mine.phase is Phase.JOINING or (roster.stage, roster.step) != (mine.stage, mine.step)
        if stale or (mine.phase is Phase.AVERAGED and not (held.id < mine.average_id if is_better is None else is_better)):
            return
        self.average = held
        self._move(Phase.AVERAGED, held.id, *self._known_of(held))

    def give_up_average(self) -> None:
        """Rule 18 (certify): hold it no more, and accumulate the step again with the ledger of before."""
        if self.record.phase is Phase.AVERAGED:
            self._move(Phase.ACCUMULATING)

    def take_tied(self, average_id: AverageId, wanted: AverageId, given: AverageId, values: Tensor) -> None:
        """Take what the average lacks: the sum `wanted` itself, or the other stage's share, which is then added to this stage's.

        The first stage's share comes first in the sum, so both stages have the same bits. It is ignored if this peer has moved on.
        """
        held = self.average
        if held is None or held.id != average_id:
            return
        if given != wanted:
            mine = self.accumulator.tied_of(held.flat_sum)
            values = mine + values if self.holdings.module.is_first else values + mine
        self.average = replace(held, tied=TiedGradients(wanted, values))
        norm, tied_sum = self._known_of(self.average)
        self.record = replace(self.record, gradient_norm=norm, tied_sum=tied_sum)

    def commit(self, norm: float | None = None, tied_sum: AverageId | None = None) -> HeldAverage:
        """Run the optimizer and move on to step t+1. Returns what goes into the log.

        `norm` is the whole model's gradient norm of the step, given exactly where the run shares norms; `tied_sum` says which
        sum is applied to a tied weight. Raises WrongStateError, with nothing changed, if this peer holds another sum by now.
        """
        held = self.average
        if held is None or tied_sum != (held.tied.id if held.tied else None):
            raise WrongStateError("this peer does not hold the average that is to be applied")
        held = self.applied = replace(held, norm=norm)
        self._apply(held)
        took = DeviceTime(self.holdings.device)
        self._begin_after(held)
        self._move(Phase.ACCUMULATING)
        self.update_spans.end(SpanKind.COMMIT, held.roster.step, took)
        return held

    def catch_up(self, held: HeldAverage) -> None:
        """As a joiner, apply a mate's logged average to the downloaded state, with the norm and tied sum that the mate applied.

        Raises WrongStateError, with nothing changed, if that mate has not finished the step, or if the average does not go with this state.
        """
        mine, roster = self.record, held.roster
        assert mine.phase is Phase.JOINING
        if (roster.stage, roster.step, held.lineage) != (mine.stage, mine.step, mine.lineage):
            raise WrongStateError("that average was made with other parameters than this peer holds")
        if not self._is_finished(held):
            raise WrongStateError("that peer has not finished the step")
        self._apply(held)
        self._begin_after(held)

    def _is_finished(self, held: HeldAverage) -> bool:
        """Whether everything is known with which this average is applied."""
        return (held.tied is not None, held.norm is not None) == (bool(self.holdings.tied_names), self._manifest.train.shares_norms)

    def _apply(self, held: HeldAverage) -> None:
        roster, flat_sum, tied, norm = held.roster, held.flat_sum, held.tied, held.norm
        module, optimizer, train = self.holdings.module, self.holdings.optimizer, self._manifest.train
        assert self._is_finished(held)
        self.evaluated.set_aside(self.record.step, module)
        took = DeviceTime(self.holdings.device)
        accumulator, length, num_microbatches = self.accumulator, self.accumulator.flat.numel(), train.microbatches_per_step

        def update() -> None:
            sums = accumulator.sums(flat_sum[:length], tied.values if tied else None)
            apply_sums(train, optimizer, roster.step, sums, num_microbatches, norm)
            if roster.averages_parameters:
                means = flat_sum[length:] / len(roster.entries)
                self.holdings.average(means, self.parameter_bounds(roster.step)[0], train.average_parameters_every_steps)

        self.holdings.advance(update)
        if module.is_last:
            loss = accumulator.mean_loss(flat_sum[:length], num_microbatches)
            self.history.append(entry_after(self.history, roster.step, loss, self._manifest.tokens_per_step_at(roster.step)))
            del self.history[:-MAX_HISTORY]
        self.holdings.passes.finish_step(norm)
        if norm is not None:
            self.record = replace(self.record, norms=(*self.record.norms, StepNorm(roster.step, norm))[-TOLD_STEPS:])
            self.gradient_norms[roster.step] = norm
            self.gradient_norms.pop(roster.step - MAX_HISTORY, None)
        if tied is not None:
            self.record = replace(self.record, tied_sums=(*self.record.tied_sums, TiedSum(roster.step, tied.id))[-TOLD_STEPS:])
        self.update_spans.end(SpanKind.OPTIMIZER, roster.step, took)

    def skip_step(self) -> None:
        """Rule 11 (skip): give the step up as inexact; the parameters do not change."""
        self.evaluated.set_aside(self.record.step, self.holdings.module)
        lineage = lineage_skipped(self.record.lineage, self.record.step)
        if self.own is not None:
            self.own.moves.apply(self.record, lineage, {})
        self.holdings.advance(partial(self.holdings.optimizer.skip, self.record.step))
        self.holdings.passes.finish_step(None)
        self._begin_next(lineage, lineage_skipped(self.record.tied, self.record.step) if self.holdings.tied_names else self.record.tied)
        self._move(Phase.ACCUMULATING)

    def forget_sum(self, step: int) -> None:
        """Note that this peer can no longer give the tied sum of `step`."""
        self.record = replace(self.record, tied_sums=tuple(known for known in self.record.tied_sums if known.step != step))

    def copy_tied(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Replace this stage's copy of a tied weight by the other stage's, whose history is better; the step begins anew.

        Raises WrongStateError if it is of another step or has no better history, BadMessageError if it does not fit. Then nothing changed.
        """
        mine, history = self.record, history_of(tensors)
        if mine.phase is not Phase.ACCUMULATING or mine.step != step or not history < mine.tied:
            raise WrongStateError("this copy is of another step, or its history is no better")
        self.holdings.take_over_copy(tensors)
        self.evaluated.forget()
        self.record = replace(mine, lineage=lineage_replaced(mine.lineage, history), tied=history, tied_sums=())
        self._drop_ledgers()

    def fence(self, incarnation: int) -> None:
        """T3 (fence): begin a new incarnation. A finished average is a fact and stays; the ledger is a claim and goes."""
        if self.round is not None:
            self._move(Phase.ACCUMULATING)
        self.record = replace(self.record, incarnation=incarnation)
        self._drop_for_fence()

    def begin_joining(self) -> None:
        """Take no part in the step until the state is downloaded."""
        if self.record.phase is not Phase.JOINING:
            self._drop_ledgers()
            self._move(Phase.JOINING)

    def give_up_state(self, first_step: int) -> None:
        """Join again as a peer that has just come, with the first weights: the run resumes from an older step than this one (hole 70)."""
        self.begin_joining()
        self.holdings.begin_anew()
        self.history, self.gradient_norms = [], {}
        self.evaluated.forget()
        if self.own is not None:
            self.own.forget()
        self.record = replace(self.record, step=first_step, lineage=Lineage(), tied=Lineage(), norms=(), tied_sums=(), voids=())

    def offer_checkpoints(self, steps: Sequence[int]) -> None:
        """Tell the swarm which steps of this stage are on this peer's disk."""
        self.record = replace(self.record, checkpoints=tuple(steps))

    def serve(self) -> None:
        """Take part in the step. Later checkpoints on this peer's disk are of steps that the run has given up."""
        self.offer_checkpoints([step for step in self.record.checkpoints if step <= self.record.step])
        self._drop_ledgers()
        self._move(Phase.ACCUMULATING)

    def _begin_after(self, held: HeldAverage) -> None:
        """Begin the step after the one that this average finished."""
        mine, tied_sum = self.record, held.tied.id if held.tied else None
        lineage = lineage_after(mine.lineage, held.id, held.norm, tied_sum)
        if self.own is not None:
            self.own.moves.apply(mine, lineage, held.roster.computed)
        self._begin_next(lineage, history_after(mine.tied, tied_sum, held.norm) if tied_sum is not None else mine.tied)

    def _begin_next(self, lineage: Lineage, tied: Lineage) -> None:
        """Begin the next step, with the part of it that is already computed."""
        self.sections = None
        self._sums[0].zero()
        if self.own is not None:
            self.own.begin()
        self._sums = [*self._sums[1:], self._sums[0]]  # at once: other threads read it
        self.record = replace(at_next_step(self.record), lineage=lineage, tied=tied, voids=())

    def _move(
        self, phase: Phase, average_id: AverageId = NO_AVERAGE, gradient_norm: float | None = None, tied_sum: AverageId = NO_AVERAGE
    ) -> None:
        check_transition(self.record.phase, phase)
        self._phases.ended(self.record.phase, self.record.step)
        if phase is not Phase.AVERAGED:
            self.average = None
        self.record = replace(self.record, phase=phase, average_id=average_id, gradient_norm=gradient_norm, tied_sum=tied_sum)
        if phase is not Phase.AVERAGING:
            self.round = None

    def release(self) -> None:
        """Free all tensors; the record and the history stay. This is the last job of the stage."""
        self.update_spans.look()
        self.holdings.release()
        self.evaluated.forget()
        self._sums.clear()
        self.own = None
        self.average = self.applied = self.sections = None

    def load(self, tensors: Mapping[str, Tensor], step: int, lineage: Lineage, history: Sequence[HistoryEntry]) -> None:
        """Take over a downloaded state. Raises BadMessageError, with nothing changed, if it does not fit this stage."""
        norms, tied = self.holdings.take_over(tensors)
        self.history = list(history)
        self.record = replace(self.record, norms=norms, tied_sums=())
        self.gradient_norms |= {known.step: known.norm for known in norms}
        self.evaluated.forget()
        self._drop_ledgers()
        if self.own is not None:
            self.own.forget()
        self.record = replace(self.record, step=step, lineage=lineage, tied=tied, voids=())
