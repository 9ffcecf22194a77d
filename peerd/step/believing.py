"""What a peer believes of the averages that mates give it: rule 18 (certify) of docs/protocol.md."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from peerd.averaging.rounds import Rounds
from peerd.errors import BadMessageError, HopelessError, UnbelievedError
from peerd.policy.step.certificates import (
    Distrust,
    can_count,
    is_upheld,
    told_twice,
    voters,
    why_distrust,
    why_distrust_section,
    words_on,
)
from peerd.policy.step.certifying import holding_alone
from peerd.policy.step.confirming import RoundProof
from peerd.policy.step.part_sizes import WHY_TOO_LARGE
from peerd.policy.step.roster import Roster
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.stage.results import HeldAverage
from peerd.stage.sections import SectionOfAverage
from peerd.stage.state import StageState
from peerd.swarm.clock import clock_s
from peerd.swarm.membership import Membership
from peerd.table.record import NO_AVERAGE, AverageId, PeerId, Phase
from peerd.table.swarm_view import CONDEMNED_LIVES

LOG = structlog.get_logger()


class Belief:
    """In a run that does not certify it believes everything."""

    def __init__(self, state: StageState, membership: Membership, rounds: Rounds, rules: StepRules) -> None:
        self._state = state
        self._membership = membership
        self._rounds = rounds
        self._rules = rules

    @property
    def refuted(self) -> Roster | None:
        """The roster of the average that this peer holds, if one of its reducers has signed two slices of it."""
        held = self._state.average if self._rules.certifies else None
        return held.roster if held is not None and held.roster.average_id in self._membership.contradictions.refuted else None

    def by_header(self, mate: PeerId) -> Callable[[Roster, AverageId], None]:
        """What raises for the header of an average that a mate gives and this peer does not take: BadMessageError if it is a lie.

        It is called on another thread, and goes by what this peer knows now.
        """
        mine = self._state.record
        if not self._rules.certifies or mine.phase is Phase.JOINING:
            return lambda _roster, _id: None
        joined, refuted = frozenset(self._rounds.joined), frozenset(self._membership.contradictions.refuted)
        live = self._membership.live()
        words, voting = words_on(mine, live), voters(mine, live)

        def check(roster: Roster, average_id: AverageId) -> None:
            distrust = why_distrust(roster, True, mine, words.certify(average_id), joined, refuted)
            if distrust is None:
                return
            if distrust.is_lie:
                raise BadMessageError(distrust.reason)
            raise (UnbelievedError if can_count(average_id, roster, mate, mine, voting) else HopelessError)(distrust.reason)

        def believe(roster: Roster, average_id: AverageId) -> None:
            if not roster.parts and roster.average_id not in joined:  # of others `takes` says more, once they are here
                check(roster, average_id)

        return believe

    def told_by(self, mate: PeerId) -> AverageId:
        """The average of this peer's step that a mate says that it holds, where the run certifies; NO_AVERAGE if it holds none."""
        record = self._membership.live().find(mate) if self._rules.certifies else None
        return record.average_id if record is not None and record.step == self._state.record.step else NO_AVERAGE

    def takes(self, mate: PeerId, found: HeldAverage) -> bool:
        """Whether this peer takes an average of its step that a mate gives it, whose slices are signed.

        One that proves a lie costs its giver a ban, and one of which two copies are signed its reducer.
        """
        mine = self._state.record
        if not self._rules.certifies or mine.phase is Phase.JOINING:
            return True
        live, refuted = self._membership.live(), self._membership.contradictions.refuted
        if found.roster.parts:  # what proves its sections was checked as it came
            takes = words_on(mine, live).certify(found.id) or not any(map(self._distrusts, found.sections))
            if not takes:
                self.disbelieves(mate)
            return takes
        round_id = found.roster.average_id
        pair = told_twice(self._rounds.joined.get(round_id, ()), found.slices)
        if pair is not None:
            one, other = ((each.statement(self._membership.run, round_id), each.signature) for each in pair)
            self._membership.convict(one, other)
        counts = is_upheld(found.id, found.roster, mine, live) if round_id in refuted else words_on(mine, live).certify(found.id)
        distrust = why_distrust(found.roster, True, mine, counts, self._rounds.joined, refuted)
        if distrust is None and found.is_too_large and not (counts or self._rounds.large.spares(found.roster)):
            distrust = Distrust(WHY_TOO_LARGE, is_lie=False)  # whoever holds it may have computed nothing, and know of nothing usual
        if distrust is None:
            return True
        if distrust.is_lie:
            self.caught(mate, distrust.reason)
        else:
            self.disbelieves(mate)
        return False

    def takes_section(self, mate: PeerId, found: SectionOfAverage) -> bool:
        """Whether this peer takes a section of its step's average that a mate gives it, which most members of its round have signed."""
        if not self._rules.certifies:
            return True
        distrust = self._distrusts(found.proof)
        if distrust is not None and distrust.is_lie:
            self.caught(mate, distrust.reason)
        elif distrust is not None:
            self.disbelieves(mate)
        return distrust is None

    def _distrusts(self, proof: RoundProof) -> Distrust | None:
        mine = self._state.record
        group = self._rounds.sums.members_of(mine.group)
        return why_distrust_section(proof.roster, proof.is_certified, proof.confirmed_by, mine, group, self._rules.num_microbatches)

    def is_better(self, found: HeldAverage) -> bool | None:
        """Whether an average is to take the place of the one that this peer holds; None where the smaller id decides."""
        mine, rounds = self._state.record, self._rounds
        if not self._rules.certifies or mine.phase is not Phase.AVERAGED:
            return None
        own = OwnState(record=mine, joined=frozenset(rounds.joined), refuted=self.refuted)
        return Situation(own, self._membership.live(), clock_s(), self._rules).is_better(found.id)

    def caught(self, mate: PeerId, reason: str) -> None:
        """A mate has given an average that breaks the protocol: its calls are refused, and it counts for nothing here, for a while."""
        if self._rules.certifies:
            LOG.warning("a mate gives an average that is made up; it is banned", mate=mate, reason=reason)
            self._membership.bans.add(mate, CONDEMNED_LIVES * self._membership.view.ttl_s)
            self._membership.doubt(mate)
            self._rounds.absences.sidelining.lied(mate)

    def look(self, now: Situation) -> None:
        """Count mates that hold an average alone, whatever they give to those who ask."""
        for mate in holding_alone(now):
            self.disbelieves(mate)

    def kept_back(self, mate: PeerId) -> None:
        """A mate was asked for the average that it tells, and has shown none that could come to count."""
        mine = self._state.record
        if not self._rules.certifies or mine.phase is Phase.JOINING:
            return
        now = Situation(OwnState(record=mine, refuted=self.refuted), self._membership.live(), clock_s(), self._rules)
        if mate in holding_alone(now) and self._rounds.absences.sidelining.kept_back(mate, clock_s()):
            LOG.warning("member left out of the next steps: it shows nobody the average that it tells", member=mate, step=mine.step)
            self._membership.wake()

    def disbelieves(self, mate: PeerId) -> None:
        """A mate holds an average that is of no use here. That does not go on for long where it is honest."""
        is_judged = self._rules.certifies and self._state.record.phase is not Phase.JOINING
        if is_judged and self._rounds.absences.sidelining.disbelieved(mate, self._rules.averaging_s, clock_s()):
            LOG.warning("a mate holds an average that nobody else has", mate=mate)
            self._membership.doubt(mate)
