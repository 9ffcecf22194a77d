"""The acts that a peer can choose from in the life of a step: one small class for each act, with the data that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId, Lineage, PeerId, PeerRecord


@dataclass(frozen=True, slots=True)
class _Reasoned:
    """The base of every act: it states its reason."""

    verb: ClassVar[str]
    reason: str

    def __str__(self) -> str:
        return f"{self.verb}: {self.reason}"


# The life of a step


@dataclass(frozen=True, slots=True)
class Wait(_Reasoned):
    verb = "wait"


@dataclass(frozen=True, slots=True)
class Working(Wait):
    """Nothing to decide: the stage's microbatches of the step are being computed, and the reason counts them."""

    verb = "working"


@dataclass(frozen=True, slots=True)
class Propose(_Reasoned):
    """Propose a round over this roster, and lead it."""

    verb = "propose a roster"
    roster: Roster


@dataclass(frozen=True, slots=True)
class Commit(_Reasoned):
    """Apply this peer's average and go on to the next step.

    `norm` is the whole model's gradient norm of the step, if the run shares norms; `tied_sum` is the sum that a tied weight gets.
    """

    verb = "commit"
    norm: float | None = None
    tied_sum: AverageId | None = None


# What a peer gets from another


@dataclass(frozen=True, slots=True)
class FetchAverage(_Reasoned):
    """Fetch a mate's average of `step`. A joiner applies it at once, with the norm and the tied sum that the mate applied."""

    verb = "fetch the average"
    peer: PeerId
    step: int
    others: tuple[PeerId, ...] = ()
    """Mates that have the same one: each is asked for a part of it."""


@dataclass(frozen=True, slots=True)
class FetchSection(_Reasoned):
    """Fetch a section of the average of `step` from a mate, while others are fetched."""

    verb = "fetch a section of the average"
    peer: PeerId
    step: int
    section: int


@dataclass(frozen=True, slots=True)
class FetchTied(_Reasoned):
    """Fetch from `peer` what is missing to the sum `wanted` of `step`: `given` is that sum, or the other stage's share of it."""

    verb = "fetch the tied weight's gradients"
    peer: PeerId
    step: int
    wanted: AverageId
    given: AverageId
    others: tuple[PeerId, ...] = ()
    """Other peers that hold what is given."""
    least: int = 1
    """So many peers have to tell the same of it, `peer` among them."""


@dataclass(frozen=True, slots=True)
class CopyTied(_Reasoned):
    """Replace this peer's copy of a tied weight with the copy of a peer of the other stage."""

    verb = "copy the tied weight"
    peer: PeerId
    stage: int


@dataclass(frozen=True, slots=True)
class FetchPrevious(_Reasoned):
    """Fetch the parameters of the step before this peer's from mates at its step; `peer` is asked first."""

    verb = "fetch the previous parameters"
    peer: PeerId
    step: int
    """This peer's own step."""


@dataclass(frozen=True, slots=True)
class Reload(_Reasoned):
    """Download the stage's state, at `step` or later, and drop both ledgers for it; this mate is asked first."""

    verb = "download the state"
    peer: PeerId
    step: int = 0
    lineage: Lineage | None = None
    """The one that is wanted at this peer's step; None: any that is better."""

    def is_met_by(self, step: int, lineage: Lineage, mine: PeerRecord) -> bool:
        """Whether a state with this step and lineage is worth the ledgers. Lineages alone do not tell copies of a tied weight apart."""
        is_better = lineage < mine.lineage or mine.tied != Lineage() if self.lineage is None else lineage == self.lineage
        return step >= self.step and (step > mine.step or is_better)

    def is_claimed_by(self, mate: PeerRecord, mine: PeerRecord) -> bool:
        """Whether a mate claims such a state."""
        is_better = mate.worth < mine.worth if self.lineage is None else mate.lineage == self.lineage
        return mate.peer != mine.peer and mate.step >= self.step and (mate.step > mine.step or is_better)


@dataclass(frozen=True, slots=True)
class GiveUpState(_Reasoned):
    """Hold the downloaded state no more, which is not that of the stage, and ask none of those that gave it for a while."""

    verb = "give the downloaded state up"


# What ends a round, a ledger or a step


@dataclass(frozen=True, slots=True)
class CloseRound(_Reasoned):
    verb = "close the round"


@dataclass(frozen=True, slots=True)
class GiveUpAverage(_Reasoned):
    """Hold this average no more, and accumulate the step again with the ledger of before."""

    verb = "give the average up"


@dataclass(frozen=True, slots=True)
class DropSums(_Reasoned):
    """Drop these sums of this step's ledger (asides.py); the main one has this peer's own id."""

    verb = "drop a part of the ledger"
    names: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class SealBatch(_Reasoned):
    """Update this peer's own parameters with this open batch (batches.py), whose microbatches then belong to the main sum."""

    verb = "seal a batch"
    name: PeerId


@dataclass(frozen=True, slots=True)
class SkipStep(_Reasoned):
    verb = "give the step up as inexact"


@dataclass(frozen=True, slots=True)
class StepBack(_Reasoned):
    """Serve no more, and join again with the checkpoint of `step`."""

    verb = "go back to a checkpoint"
    step: int


# How a joiner begins to serve


@dataclass(frozen=True, slots=True)
class Serve(_Reasoned):
    verb = "serve"


@dataclass(frozen=True, slots=True)
class LoadCheckpoint(_Reasoned):
    verb = "load a checkpoint"
    step: int
    is_lossless: bool = True
    """False: some stage gives a step up as inexact because of it, so this is a last resort."""
    is_lasting: bool = True
    """False: it is of use only now, and costs nobody anything, so it is loaded at once: rule J6 (return)."""


@dataclass(frozen=True, slots=True)
class LoadStart(_Reasoned):
    verb = "load the state that the run begins from"


Act = (
    Wait
    | Propose
    | Commit
    | FetchAverage
    | FetchSection
    | FetchTied
    | CopyTied
    | FetchPrevious
    | Reload
    | CloseRound
    | GiveUpAverage
    | GiveUpState
    | DropSums
    | SealBatch
    | SkipStep
    | StepBack
    | Serve
    | LoadCheckpoint
    | LoadStart
)
