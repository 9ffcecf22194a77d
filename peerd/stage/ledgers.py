"""The ledgers of a stage's steps and the sums behind them: what is added to them, what is sealed, and what is dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import structlog
from torch import Tensor

from peerd.policy.step.asides import dropped, merged, other_holder, sums, to_merge
from peerd.policy.step.batches import batch_for, open_dropped
from peerd.policy.step.ledger import both_dropped, ledger_dropped, marked, may_accumulate
from peerd.stage.averages import StageAverages
from peerd.stage.own_updates import OwnUpdates
from peerd.stage.results import HeldMicrobatch, Ticket
from peerd.stage.sections import HeldSections
from peerd.stage.sums import Sums
from peerd.table.record import NO_AVERAGE, PeerId, Phase
from peerd.wire.messages import MOST_TOLD_BYTES, ToldMoves

LOG = structlog.get_logger()


class StageLedgers(StageAverages):
    """What `StageState` does with its ledgers. Every method is a job for the executor's thread."""

    own: OwnUpdates | None
    """Where steps are local."""
    num_own_updates: int = 0
    """How many this peer has made since it serves the stage."""
    sections: HeldSections | None

    def accumulate(self, ticket: Ticket, gradients: Sequence[Tensor], loss: float | None, overflowed: bool = False) -> str:
        """Rule W3 (accumulate): add, then set the bit (hole 9). Returns the reason for a refusal, or an empty string."""
        if reason := self.why_not_accumulate(ticket):
            return reason
        with self._whole_or_dropped(ticket.step) as held:
            other = self._begin_aside(held, ticket) if self.updating is None else self._begin_batch(held)
            grown = marked(self.record, ticket.step, ticket.index, other)
            held.of(other).add(gradients, loss, overflowed)
        if self.updating is not None and other is not None:
            self.updating.moves.add(self.record, ticket.index, other, ticket.versions)
        self.record = grown
        return ""

    def why_not_accumulate(self, ticket: Ticket) -> str:
        """Why the gradients of a microbatch are not added now; empty if they are."""
        if not ticket.accumulate or ticket.cancelled:
            return "the caller gave the call up" if ticket.accumulate else "not asked to"
        return may_accumulate(self.record, self._live(), step=ticket.step, index=ticket.index, accept_mark=ticket.accept_mark) or ""

    @contextlib.contextmanager
    def _whole_or_dropped(self, step: int) -> Iterator[Sums]:
        """The sums of a step's ledger. The ledger is dropped if the block fails in the middle of an addition."""
        held = self._sums[step - self.record.step]
        held.make_whole()
        try:
            yield held
        except BaseException as error:
            if held.is_void:
                lost = (self.record.done if step == self.record.step else self.record.next_done).bit_count()
                LOG.error("ledger dropped: an addition to it failed half way", step=step, microbatches=lost, error=repr(error))
                if self.updating is not None:
                    self.updating.moves.drop([aside.other for aside in self.record.asides])
                    self.updating.take_back()
                self.record = ledger_dropped(self.record, step)
                held.void()
            raise

    def _begin_aside(self, held: Sums, ticket: Ticket) -> PeerId | None:
        """Make room to sum apart what another peer may hold as well; None if there is none, or no memory for it."""
        other = other_holder(self.record, self._live(), step=ticket.step, index=ticket.index, again=ticket.again)
        if other is None:
            return None
        if (spare := to_merge(self.record, ticket.step, other)) is not None:
            held.merge(spare)
            self.record = merged(self.record, ticket.step, spare)
        return other if held.begin(other) else None

    # Local steps

    @property
    def updating(self) -> OwnUpdates | None:
        """This peer's own updates, if it makes any in the present step."""
        return self.own if self._manifest.train.is_local_at(self.record.step) else None

    @property
    def keeps_versions(self) -> bool:
        """Whether an update of this peer's own has to wait (`OwnUpdates`). Any thread may ask."""
        own = self.own
        return own is not None and own.keeps_versions

    def moves_since(self, incarnation: int, first: int) -> ToldMoves:
        """Return this peer's moves from number `first` on, or from the first on if its log is of another incarnation."""
        if self.own is None:
            return ToldMoves()
        moves = self.own.moves
        return ToldMoves(moves.incarnation, *moves.since(first if moves.incarnation == incarnation else 0, MOST_TOLD_BYTES))

    def note_version(self, batch: HeldMicrobatch) -> None:
        """Note with which version a microbatch is computed forward, and keep that for its backward pass."""
        if self.updating is not None and batch.ticket.step == self.record.step:
            version = self.updating.version()
            batch.ticket.version = version.name
            if batch.ticket.backward:
                version.hold_for(batch)

    def _begin_batch(self, held: Sums) -> PeerId:
        """Make room in memory for the open batch of the next gradient."""
        name = batch_for(self.record, self._manifest.train.local_batch)
        held.begin_in_memory(name)
        return name

    def seal_batch(self, name: PeerId) -> None:
        """Rule 19 (seal): update this peer's own parameters with an open batch. It stays open while the update has to wait."""
        own = self.updating
        if own is not None and self.record.phase is Phase.ACCUMULATING:
            own.look()
            if not own.keeps_versions:
                self._seal(own, name)

    def _seal(self, own: OwnUpdates, name: PeerId) -> None:
        step, num_microbatches = self.record.step, sums(self.record).get(name, 0).bit_count()
        if not num_microbatches:
            return
        with self._whole_or_dropped(step) as held:
            batch = held.batch(name)
            with held.main.changing():
                own.update(self.record, name, batch.sums(batch.flat), num_microbatches)
                held.main.flat[-batch.num_exact :] += batch.flat[-batch.num_exact :]
            held.drop([name])
        self.num_own_updates += 1
        self.record = merged(self.record, step, name)

    def _make_one(self, step: int) -> None:
        """Make all of a ledger one sum. With local steps open batches are sealed, and the sum is the change of the parameters."""
        own = self.updating
        if own is None:
            with self._whole_or_dropped(step) as held:
                held.merge_all()
            return
        own.end()
        for aside in self.record.asides:
            self._seal(own, aside.other)
        if self.record.group == NO_AVERAGE:  # else it is the sum of a group already
            with self._whole_or_dropped(step) as held, held.main.changing():
                own.put_change(held.main, self.record.done.bit_count())
                own.moves.give(self.record)

    # What is dropped

    def drop_sums(self, names: Sequence[PeerId]) -> None:
        """Rule 6 (reset): drop these sums of this step's ledger; what they held is missing again."""
        if self.record.phase is not Phase.ACCUMULATING:
            return
        self.record = dropped(self.record, names)
        self._drop_apart(names)
        if self.record.peer in names:
            self.accumulator.is_void = True
            self.accumulator.zero()
            if self.updating is not None:
                self.updating.take_back()

    def _drop_for_fence(self) -> None:
        """Drop what a fence drops: with local steps the open batches alone, unless a group's sum is held."""
        if self.updating is None or self.record.group != NO_AVERAGE:
            self._drop_ledgers()
        else:
            names = [aside.other for aside in self.record.asides]
            self.record = open_dropped(self.record)
            self._drop_apart(names)

    def _drop_apart(self, names: Sequence[PeerId]) -> None:
        """Drop asides, or open batches."""
        self._sums[0].drop(names)
        if self.updating is not None:
            self.updating.moves.drop(names)

    def _drop_ledgers(self) -> None:
        """Empty the ledger of this step and, where steps overlap, of the next."""
        self.sections = None
        for held in self._sums:
            held.void()
        self.record = both_dropped(self.record)
        if self.own is not None:
            self.own.begin()
        for held in self._sums:
            held.make_whole()
