"""The input of the rules of a step: the run's numbers, this peer's exact state, and the live peers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from peerd.policy.hashing import turn_of
from peerd.policy.step.certificates import Words, is_upheld, words_on
from peerd.policy.step.ledger import stage_step
from peerd.policy.step.norms import norm_by_most, norm_of_step
from peerd.policy.step.roster import Roster
from peerd.policy.step.tied import WantedSum, other_end, sum_by_most, sum_of_step
from peerd.table.record import AverageId, PeerId, PeerRecord, Phase
from peerd.table.view import TTL_PERIODS, LiveView

LATE_SHARE = 0.25
"""The share of a step's time, and of the round's, for which members that lack the average are waited for, where that is longer than the
averaging time: on slow lines the last chunks of a long round come to some members much later than to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """Numbers of the run that the rules need. `averaging_s`, the averaging time, is shorter than `ttl_s`, a record's life."""

    num_stages: int
    num_microbatches: int
    ttl_s: float
    averaging_s: float
    lost_after_s: float = 40.0
    """How long peers that hold what is missing may take to start again, at least."""
    last_step: int = 0
    """The step at which the run ends; 0: it has no end."""
    shares_norms: bool = False
    """An average is applied with the whole model's gradient norm of its step (norms.py)."""
    averages_in_state: int = 3
    """So many averages are no more bytes than the state that a joiner downloads."""
    ties_stages: bool = False
    """The first and the last stage apply the sum of their gradients to a weight that both hold (tied.py)."""

    group_size: int = 0
    """The most members of a stage that average in one round; larger stages do in two levels (groups.py). 0: all do in one."""
    num_sections: int = 1
    """The number of sections of an average that is made in two levels."""
    local_batch: int = 0
    """Steps are local: a peer updates its own parameters after so many of its microbatches (batches.py); 0: they are not."""
    local_after: int = 0
    """The first step of which this holds: a run may begin with steps of averaged gradients."""
    certifies: bool = False
    """An average counts once more than half of the voters hold it (certificates.py). The stages of such a run have no groups."""

    def batch_at(self, step: int) -> int:
        """After how many microbatches a peer updates its own parameters in this step; 0: it does not."""
        return self.local_batch if step >= self.local_after else 0

    @property
    def seal_after_s(self) -> float:
        """How long a peer's record tells an open batch before it is sealed: two announce periods."""
        return 2 * self.ttl_s / TTL_PERIODS

    def tied_to(self, stage: int) -> int | None:
        """The stage that holds the other copy of this stage's tied weight; None if there is none."""
        return other_end(stage, self.num_stages) if self.ties_stages else None

    @property
    def lost_wait_s(self) -> float:
        """How long peers that hold what is missing may take to come back, before something is given up for good."""
        return max(self.lost_after_s, 3 * self.ttl_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """This peer's exact state: its present record, and what the record does not say. Times are seconds on the caller's clock."""

    record: PeerRecord
    round_roster: Roster | None = None
    """The round that this peer is AVERAGING in, if a task of this peer runs it."""
    round_still_s: float = 0.0
    """Seconds since the open round began, or this peer was last told of progress of any member in it, its own included."""
    judge_silent_s: float = math.inf
    """Seconds since a judge of the open round, other than this peer, last said anything; infinite where none says anything."""
    round_lost: frozenset[PeerId] = frozenset()
    """Members of the open round of which nothing has been heard for so long that they count as gone (`lost_after_s`). Others whose records
    have expired may be behind a link that is dead for a while."""
    joined: frozenset[AverageId] = frozenset()
    """The rounds of this step in which this peer has been, also where they failed, or its ledger has gone since."""
    refuted: Roster | None = None
    """The roster of the average that this peer holds, if one of its reducers has signed two slices of it; None: none has."""
    giving_to: frozenset[PeerId] = frozenset()
    """Members of this peer's last round to which it still sends sums that they lack."""
    open_since_s: tuple[tuple[PeerId, float], ...] = ()
    """By open batch: the time since which it has been as it is, at every look."""
    keeps_versions: bool = False
    """With local steps: an update must wait, because microbatches on their way need as many versions of the parameters as are kept."""
    propose_after_s: float = 0.0
    """The earliest time of the next proposal, after a round that this peer led has failed."""
    attempt: int = 0
    last_in_turn: tuple[PeerId, ...] = ()
    """Members that propose after all others, because rounds that they led, or were in, have failed (`Sidelining`)."""
    complete_since_s: float | None = None
    """The time since which the stage has been complete, and in no round of this step (`is_complete`), less the time in which it was not: a
    round of this peer's begins it anew. None: it is not."""
    averaged_since_s: float | None = None
    """The time since which every stage has had the average of this peer's step, or been past it, at every look; None: this peer or a stage
    has none."""
    step_s: float | None = None
    """How long a step takes, as this peer has measured it; None: it has finished too few."""
    round_s: float | None = None
    """How long the round lasted that gave this peer the average of its step; None: it was in none."""
    lost_since_s: float | None = None
    """The time since which the stage has looked lost at every look, without a fence or an added gradient; None: it does not look lost."""
    back_since_s: float | None = None
    """The time since which rule 14 (step back) has named the same step at every look; None: it names no step."""
    outlived_since_s: float | None = None
    """The time since which the run looks as if it had gone back without this peer, at every look; None: it does not."""
    later_since_s: float | None = None
    """The time since which this joiner has held later checkpoints than its stage serves, at every look; None: it holds none."""
    refused: frozenset[tuple[PeerId, int]] = frozenset()
    """(mate, step): this mate has refused to give the average of this step. The caller forgets these after a while."""
    unbelieved: frozenset[tuple[PeerId, AverageId]] = frozenset()
    """(mate, average): this mate was asked for the average of this step that it tells, and did not give it, or this peer did not believe
    it. The caller forgets these after a while: until then it is asked again only if the average counts."""
    unanswered: frozenset[tuple[PeerId, int]] = frozenset()
    """(mate, step): this mate did not answer when asked for the average of this step. Others are asked first (hole 19)."""
    fetching: frozenset[tuple[PeerId, int]] = frozenset()
    """(mate, section): sections of the average that are on their way from mates."""
    reloads_in_vain: bool = False
    """No peer of the stage has given the header of a state of use lately: a reload would cost the ledgers, and bring nothing."""
    lacks_previous: bool = False
    """This joiner has a downloaded state, and not the parameters of the step before: it takes no work of that step (hole 15)."""
    previous_s: float = 0.0
    """How long fetching them would take, in seconds."""
    lacking_since_s: float | None = None
    """The time since which this joiner has lacked them at its present step, at every look; None: it lacks none."""
    cannot_catch_up: str = ""
    """Why this joiner asks its mates for nothing now: averages reach it more slowly than its stage makes them; empty: they do not."""
    unproven: str = ""
    """Why this joiner does not serve with the state that it has downloaded yet: rule 21 (prove); empty: nothing speaks against it."""
    disproved: str = ""
    """Why its state is not that of its stage; empty: nothing shows that."""
    has_start: bool = True
    """False: the run begins from a state that this peer does not hold yet, so its parameters do not count."""


@dataclass(frozen=True)
class Situation:
    """The argument of every rule."""

    own: OwnState
    live: LiveView
    now_s: float
    rules: StepRules

    @property
    def mine(self) -> PeerRecord:
        return self.own.record

    @cached_property
    def mates(self) -> list[PeerRecord]:
        """The other live peers that serve this stage."""
        return [record for record in self.live.serving(self.mine.stage) if record.peer != self.mine.peer]

    @property
    def round_is_slow(self) -> bool:
        """Whether nobody has made progress in this peer's round for one averaging time, as far as this peer was told."""
        return self.mine.phase is Phase.AVERAGING and self.own.round_still_s > self.rules.averaging_s

    @property
    def is_late(self) -> bool:
        """Whether the average of this step has stood for so long that nobody waits any more for members that lack it."""
        since_s, longest_s = self.own.averaged_since_s, max(self.own.step_s or 0.0, self.own.round_s or 0.0)
        return since_s is not None and self.now_s - since_s >= max(self.rules.averaging_s, LATE_SHARE * longest_s)

    @property
    def may_take_average(self) -> bool:
        """Whether a mate's average of this step is useful: this peer has none, and no round is about to produce one."""
        return self.mine.phase is Phase.ACCUMULATING or self.round_is_slow

    @property
    def is_tied(self) -> bool:
        """Whether this stage holds a weight that another stage holds as well."""
        return self.rules.tied_to(self.mine.stage) is not None

    @property
    def other_end_step(self) -> int | None:
        """The newest step of the stage that holds the other copy of this stage's tied weight; None if nobody serves it."""
        other = self.rules.tied_to(self.mine.stage)
        return None if other is None else stage_step(self.live, other)

    def willing(self, mates: Sequence[PeerRecord]) -> list[PeerRecord]:
        """Those of `mates` that this peer can call and that have not refused a request for this step."""
        if not self.own.refused and not self.unreached:
            return [*mates]
        return [mate for mate in mates if (mate.peer, self.mine.step) not in self.own.refused and mate.peer not in self.unreached]

    @cached_property
    def unreached(self) -> frozenset[PeerId]:
        """Peers that this peer cannot call, though they may be live."""
        published = self.live.mine
        return frozenset(published.unreached if published is not None else ())

    def first_to_ask(self, mates: Sequence[PeerRecord]) -> PeerRecord:
        """The mate to ask first: one that has not failed to answer, and among these the one with the smallest average id."""
        return min(mates, key=lambda m: ((m.peer, self.mine.step) in self.own.unanswered, m.average_id, turn_of(self.mine.peer, m.peer)))

    @cached_property
    def words(self) -> Words:
        """What the voters say of the averages of this peer's step."""
        return words_on(self.mine, self.live)

    def counts(self, average_id: AverageId) -> bool:
        """Whether more than half of the voters hold this average of this peer's step: rule 18 (certify)."""
        if self.own.refuted is not None and average_id == self.mine.average_id:
            return is_upheld(average_id, self.own.refuted, self.mine, self.live)
        return not self.rules.certifies or self.words.certify(average_id, self.is_late)

    def may_ask(self, mate: PeerRecord) -> bool:
        """Whether this peer asks for the average that a mate tells: to take it, or to see that it is made up (hole 53).

        One that does not count is asked for now and then, and of no mate that is left out of the stage.
        """
        told = (mate.peer, mate.average_id)
        return self.counts(mate.average_id) or (told not in self.own.unbelieved and mate.peer not in self.live.sidelined(mate.stage))

    def not_left_out(self, mates: Sequence[PeerRecord]) -> list[PeerRecord]:
        """Those of `mates` that are not sidelined: T6 (sideline)."""
        left_out = self.live.sidelined(self.mine.stage)
        return [mate for mate in mates if mate.peer not in left_out]

    def may_believe(self, average_id: AverageId) -> bool:
        """Whether this peer may take this average: it counts, or may be that of a round in which this peer was."""
        return bool(self.own.joined) or self.counts(average_id)

    def is_better(self, average_id: AverageId) -> bool:
        """Whether this peer, which holds an average of its step, takes another one in its place: the smaller id, of those that count."""
        mine = self.mine.average_id
        rank, own_rank = (not self.counts(average_id), average_id), (not self.counts(mine), mine)
        return rank < own_rank and self.may_believe(average_id)

    def is_worth_asking(self, mate: PeerRecord) -> bool:
        """Whether this peer asks for another average than its own: to take it, or to see what its reducers have signed."""
        mine, told = self.mine.average_id, mate.average_id
        return self.may_ask(mate) and (self.is_better(told) or (told != mine and not self.counts(mine)))

    def others_to_ask(self, mates: Sequence[PeerRecord]) -> tuple[PeerId, ...]:
        """Those of `mates` that answer and have the average of the first one to ask: of a finished step, all of one lineage have."""
        first, step = self.first_to_ask(mates), self.mine.step
        same = [m for m in mates if m.peer != first.peer and (m.step > step or m.average_id == first.average_id)]
        answering = [m.peer for m in same if (m.peer, step) not in self.own.unanswered]
        return tuple(sorted(answering, key=lambda peer: turn_of(self.mine.peer, peer)))

    def averaged_like_me(self) -> list[PeerRecord]:
        """The mates that have an average of this step, computed with the same parameters as this peer's."""
        mine = self.mine
        return [m for m in self.mates if m.step == mine.step and m.phase is Phase.AVERAGED and m.lineage == mine.lineage]

    def norm(self) -> float | None:
        """The whole model's gradient norm of this step; None while it is unknown, or if the run shares no norms."""
        if not self.rules.shares_norms:
            return None
        if self.rules.certifies:
            return norm_by_most(self.mine, self.live, self.rules.num_stages, self.is_late)
        return norm_of_step(self.mine, self.live, self.rules.num_stages)

    def wanted_sum(self) -> WantedSum | None:
        """The sum for the tied weight at this step; None while it is unknown, or if this stage holds no tied weight."""
        of_step = sum_by_most if self.rules.certifies else sum_of_step
        return of_step(self.mine, self.live, self.rules.num_stages) if self.is_tied else None

    def lacks_norm(self) -> bool:
        return self.rules.shares_norms and self.norm() is None

    def lacks_tied(self) -> bool:
        """Whether the average cannot be applied yet, because this peer does not hold the tied weight's sum."""
        wanted = self.wanted_sum()
        return self.is_tied and (wanted is None or wanted.id != self.mine.tied_sum)
