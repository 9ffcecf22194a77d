"""What an open round has of the peer that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from peerd.averaging.host import RoundHost
from peerd.averaging.slices import Signatures
from peerd.policy.round.debts import AtFault
from peerd.policy.round.edges import PastEdges
from peerd.policy.step.roster import Roster
from peerd.stage.executor import Executor
from peerd.table.record import PeerId
from peerd.timeline.spans import SpanRing
from peerd.wire.clients import AveragingClient


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the rounds of one stage have in common at this peer."""

    signatures: Signatures
    executor: Executor
    """Computes sums, and encodes."""
    client: AveragingClient
    host: RoundHost
    clock: Callable[[], float]
    """Monotonic, in seconds."""
    averaging_s: float
    spans: SpanRing
    past_edges: PastEdges
    num_microbatches: int
    """Of a step."""

    @property
    def me(self) -> PeerId:
        return self.signatures.me


class Outcome(Protocol):
    """Hears how a round ends before it is done."""

    def judged(self, roster: Roster, ruling: AtFault) -> None:
        """This member, as a judge, ends the round without a member."""

    def broken_by(self, roster: Roster, peer: PeerId, reason: str) -> None:
        """A member sent something that breaks the rules."""

    def given_up(self, roster: Roster, reason: str) -> None:
        """This member leaves the round, and nobody is to blame."""
