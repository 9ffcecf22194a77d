"""What the rules of a step judge by: the run's numbers, my exact state, and who else is there at this moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from peerd.policy.step.norms import norm_of_step
from peerd.policy.step.roster import Roster
from peerd.policy.step.tied import WantedSum, other_end, sum_of_step
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """Numbers the rules need. `averaging_s`, the averaging time, is shorter than the TTL."""

    num_stages: int
    num_microbatches: int
    ttl_s: float
    averaging_s: float
    lost_after_s: float = 40.0
    last_step: int = 0
    """The run ends at this step; 0: never."""
    shares_norms: bool = False
    """An average is applied with the whole model's gradient norm of its step (norms.py)."""
    ties_stages: bool = False
    """The first and the last stage apply the sum of their gradients to a weight that both hold (tied.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """My exact state: the record as it is now, and what the record does not say."""

    record: PeerRecord
    round_roster: Roster | None = None
    round_since_s: float = 0.0
    """When the open round began or last made progress."""
    propose_after_s: float = 0.0
    """Not before this may I propose again (a round of mine has just failed)."""
    attempt: int = 0
    lost_since_s: float | None = None
    """Since when the stage has looked lost at every tick, without a fence and without a gradient added meanwhile."""
    back_since_s: float | None = None
    """Since when rule 14 (step back) has named the same step at every look."""
    refused: frozenset[tuple[PeerId, int]] = frozenset()
    """(mate, step) that said it has no such average for me. The caller forgets these after a while."""
    unanswered: frozenset[tuple[PeerId, int]] = frozenset()
    """(mate, step) that did not answer when asked for its average: others are asked first (hole 19)."""
    has_start: bool = True
    """False: the run begins from a state that I do not hold yet, so my parameters are nobody's."""


@dataclass(frozen=True)
class Situation:
    """All that a rule takes."""

    own: OwnState
    live: LiveView
    now_s: float
    rules: StepRules

    @property
    def mine(self) -> PeerRecord:
        return self.own.record

    @cached_property
    def mates(self) -> list[PeerRecord]:
        """Other live peers that serve my stage."""
        return [record for record in self.live.serving(self.mine.stage) if record.peer != self.mine.peer]

    @property
    def round_is_slow(self) -> bool:
        """A round without progress for one averaging time."""
        return self.mine.phase is Phase.AVERAGING and self.now_s - self.own.round_since_s > self.rules.averaging_s

    @property
    def may_take_average(self) -> bool:
        """Whether a mate's average of my step is of use, and no round is about to give it to me."""
        return self.mine.phase is Phase.ACCUMULATING or self.round_is_slow

    @property
    def is_tied(self) -> bool:
        """Whether my stage holds a weight that another holds, too."""
        return self.rules.ties_stages and other_end(self.mine.stage, self.rules.num_stages) is not None

    def willing(self, mates: Sequence[PeerRecord]) -> list[PeerRecord]:
        """Those of these that have not refused to help me with my step."""
        return [mate for mate in mates if (mate.peer, self.mine.step) not in self.own.refused]

    def first_to_ask(self, mates: Sequence[PeerRecord]) -> PeerRecord:
        """A mate that answered so far, then the smallest average."""
        return min(mates, key=lambda m: ((m.peer, self.mine.step) in self.own.unanswered, m.average_id, m.peer))

    def averaged_like_me(self) -> list[PeerRecord]:
        """Mates whose average of my step was computed with my very parameters."""
        mine = self.mine
        return [m for m in self.mates if m.step == mine.step and m.phase is Phase.AVERAGED and m.lineage == mine.lineage]

    def norm(self) -> float | None:
        """The whole model's gradient norm of my step; None while it is not known, and where the run shares none."""
        return norm_of_step(self.mine, self.live, self.rules.num_stages) if self.rules.shares_norms else None

    def wanted_sum(self) -> WantedSum | None:
        """The sum that a tied weight gets at my step; None while it is not known, and where my stage holds no such weight."""
        return sum_of_step(self.mine, self.live, self.rules.num_stages) if self.is_tied else None

    def lacks_norm(self) -> bool:
        return self.rules.shares_norms and self.norm() is None

    def lacks_tied(self) -> bool:
        """Whether my average cannot be applied to a tied weight yet."""
        wanted = self.wanted_sum()
        return self.is_tied and (wanted is None or wanted.id != self.mine.tied_sum)
