"""What a stage's state takes and gives: a microbatch, what its backward pass gave, a finished average."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from peerd.models.module import StageModule
from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId, Lineage
from peerd.timeline.spans import SpanKind


@dataclass(slots=True)
class Ticket:
    """A call for one microbatch, from when this stage accepted it until its reply."""

    step: int
    index: int
    accept_mark: tuple[int, int]
    """(incarnation, ledger number) when it was accepted."""
    accumulate: bool
    backward: bool = True
    """Whether a backward pass will follow."""
    cancelled: bool = False
    queued_s: float = 0.0
    """How long it has waited for the executor."""
    computed_s: float = 0.0
    """How long the executor has worked on it."""


@dataclass(slots=True)
class HeldMicrobatch:
    """The tensors of one microbatch that this stage holds between its forward and backward pass."""

    ticket: Ticket
    inputs: Tensor
    labels: Tensor
    digest: bytes = b""
    """Of the inputs' and labels' bytes."""
    output: Tensor | None = None
    """With its graph, where graphs are kept."""
    module: StageModule | None = None
    """Whose parameters the graph was built with."""
    generation: int = -1
    """The holdings' generation at the forward pass. It rises when a state is loaded."""
    passes: tuple[tuple[SpanKind, float], ...] = ()
    """Which passes the last job made, and when each was over."""


@dataclass(frozen=True, slots=True)
class TiedGradients:
    """The gradients of a tied weight summed over both stages that hold it, [num_tied] on the CPU; the id says of which averages."""

    id: AverageId
    values: Tensor


@dataclass(frozen=True, slots=True)
class HeldAverage:
    """A finished average: the summed vector on the CPU, whose ledgers it sums, and with which parameters they were computed."""

    roster: Roster
    lineage: Lineage
    flat_sum: Tensor
    tied: TiedGradients | None = None
    """What is applied to a tied weight in place of this stage's own share, once the other stage's has come."""


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """What a backward pass gave: the gradient of the inputs, and why it was not accumulated (empty when it was)."""

    gradient: Tensor | None
    refused: str
