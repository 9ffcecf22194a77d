"""Inputs and results of a stage's state: a microbatch, the result of its backward pass, a finished average."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from peerd.models.module import StageModule
from peerd.policy.step.certificates import Slices, average_id_of
from peerd.policy.step.confirming import RoundProof
from peerd.policy.step.receipts import SignedPass
from peerd.policy.step.roster import Roster
from peerd.stage.checks import Checks
from peerd.table.record import NO_AVERAGE, AverageId, Lineage
from peerd.timeline.spans import SpanKind
from peerd.transfers import DeviceTime

if TYPE_CHECKING:
    from peerd.stage.own_updates import Version


@dataclass(slots=True)
class Ticket:
    """A call for one microbatch, from its acceptance by this stage until the reply."""

    step: int
    index: int
    accept_mark: tuple[int, int]
    """(incarnation, ledger number) when the call was accepted."""
    accumulate: bool
    backward: bool = True
    """Whether a backward pass will follow."""
    is_here: bool = False
    """Whether its tensors have come."""
    cancelled: bool = False
    again: bool = False
    """Another peer may have added it, too."""
    waits: bool = False
    """Whether it waits for the executor."""
    queued_s: float = 0.0
    """The time that it has waited for the executor."""
    computed_s: float = 0.0
    """The time that the device has worked on it."""
    may_go_ahead: bool = False
    """Whether the thread that computes may give the device more work before that has finished its pass."""
    passing: DeviceTime | None = None
    """The time of its last pass."""
    ahead: DeviceTime | None = None
    """The forward pass that the device had not finished when its job ended."""
    above: tuple[bytes, ...] = ()
    """With local steps, the names of the versions with which the stages before this one have computed it (moves.py)."""
    version: bytes = b""
    """That of this stage's own; empty: what the step began with."""
    below: tuple[bytes, ...] = ()
    """Those of the stages after this one, once their gradient is here."""
    launched: bytes = b""
    """Where peers audit each other, at the second stage, the hash of the tokens that the first one got."""
    signed_below: SignedPass | None = None
    """Where peers audit each other, what the peer of the next stage has signed of its part of the microbatch."""

    def given(self) -> None:
        """Note that the device has been given all of the pass. What comes now is another's, if the thread may go on."""
        if self.may_go_ahead and self.passing is not None:
            self.passing.end()

    @property
    def versions(self) -> tuple[bytes, ...]:
        """Those of all stages, in order."""
        return *self.above, self.version, *self.below


@dataclass(slots=True, weakref_slot=True, eq=False)
class HeldMicrobatch:
    """The tensors of one microbatch that this stage holds between its forward and backward pass."""

    ticket: Ticket
    inputs: Tensor
    labels: Tensor
    digest: bytes = b""
    """The hash of the inputs' and labels' bytes."""
    output: Tensor | None = None
    """The output with its graph, if graphs are kept."""
    module: StageModule | None = None
    """The module with whose parameters the graph was built."""
    version: Version | None = None
    """Where steps are local, the parameters of the forward pass, which the backward pass needs (own_updates.py)."""
    generation: int = -1
    """The holdings' generation at the forward pass. It rises when a state is loaded."""
    passes: tuple[tuple[SpanKind, float], ...] = ()
    """The passes that the last job ran, each with the time when it ended."""
    checks: Checks = field(default_factory=Checks)
    """What is still to be looked at."""


@dataclass(frozen=True, slots=True)
class TiedGradients:
    """The gradients of a tied weight summed over both stages, [num_tied] on the CPU; the id names the two averages."""

    id: AverageId
    values: Tensor


@dataclass(frozen=True, slots=True)
class HeldAverage:
    """A finished average: its roster, the lineage of the parameters that it was computed with, and the summed vector on the CPU."""

    roster: Roster
    lineage: Lineage
    flat_sum: Tensor
    tied: TiedGradients | None = None
    """The sum that is applied to a tied weight, in place of this stage's gradients; None until the other stage's share has come."""
    norm: float | None = None
    """The whole model's gradient norm with which it was applied, where the run shares norms; None until it is applied."""
    group: AverageId = NO_AVERAGE
    """The group whose sum, which is in the average, this peer held when it took the average."""
    slices: Slices = ()
    """As its reducers signed them, where the run certifies."""
    sections: tuple[RoundProof, ...] = ()
    """What proves the sections of an average that was made by some, where the run certifies."""
    is_too_large: bool = False
    """Whether a mate gave it, and its sum is too large beside this peer's own part: rule 22 (size)."""

    @property
    def id(self) -> AverageId:
        """With the numbers, where the run certifies; otherwise that of its round."""
        return average_id_of(self.roster, self.slices)

    @property
    def rounds(self) -> tuple[AverageId, ...]:
        """The ids of the rounds that made it."""
        return tuple(proof.roster.average_id for proof in self.sections) or self.roster.rounds


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """The result of a backward pass: the gradient of the inputs, unless it leaves by itself, and why the gradients were not added.

    An empty reason: they were.
    """

    gradient: Tensor | None
    refused: str
