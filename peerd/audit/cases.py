"""The cases that this peer knows, and what comes of them: rule 20 (audit). It decides nothing itself: verdicts.py does.

A peer hears a case of its own stage with the voters of the item's step. It believes what another stage has decided once more than half of
the peers that it knows there have signed so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from peerd.policy.step.auditing import Item, was_due
from peerd.policy.step.coins import Commitments
from peerd.policy.step.evidence import Evidence
from peerd.policy.step.verdicts import (
    MOST_CASES,
    Case,
    CaseVerdict,
    Ruling,
    Standing,
    asked,
    confirms,
    is_convicting,
    verdict_on,
    why_unheard,
)
from peerd.policy.step.withholding import Withholding
from peerd.table.record import PeerId, RunId

CASE_TIMES = 4
"""A case that nobody has decided after so many times as long as a judge has is disputed."""


@dataclass(slots=True)
class KnownCase:
    """One case as this peer knows it."""

    evidence: Evidence
    case: Case
    voters: frozenset[PeerId]
    """Those that stand and may judge it."""
    opened_at_s: float
    is_of_known: bool = True
    """It concerns peers that this one knows, and not keys that nobody may have met."""
    is_asked: bool = False
    """This peer computes the item, or has."""
    is_computing: bool = False
    ruling: Ruling = Ruling.OPEN
    losers: frozenset[PeerId] = frozenset()

    @property
    def item(self) -> Item:
        return self.case.item

    @property
    def is_open(self) -> bool:
        return self.ruling is Ruling.OPEN


@dataclass(frozen=True, slots=True)
class CaseNews:
    """What has just come of a case."""

    known: KnownCase
    verdict: CaseVerdict
    fresh: frozenset[PeerId]
    """Those that lose their standing by it."""


@dataclass(slots=True)
class Cases:
    """All cases. Times are seconds on the caller's clock."""

    me: PeerId
    run: RunId
    standing: Standing = field(default_factory=Standing)
    commitments: Commitments = field(default_factory=Commitments)
    withholding: Withholding = field(default_factory=Withholding)
    known: OrderedDict[bytes, KnownCase] = field(default_factory=OrderedDict)
    """By the id of the item."""

    def hear(self, evidence: Evidence, voters: Collection[PeerId] | None, now_s: float, is_of_known: bool = True) -> KnownCase | None:
        """Take a case whose signatures have been checked, or more words on one. Returns it; None if it cannot be a case.

        `voters`: those that may judge it; None: as known before.
        """
        item = evidence.item(self.run)
        known = self.known.get(item.id)
        merged = evidence if known is None else known.evidence.merged(evidence)
        case = merged.case(self.run)
        if case is None:
            return None
        if known is None:
            known = self.known[item.id] = KnownCase(merged, case, frozenset(voters or ()), now_s, is_of_known)
            if len(self.known) > MOST_CASES:
                del self.known[self._least_needed()]
        elif voters is not None and known.is_open:
            known.voters = frozenset(voters)
        known.evidence, known.case = merged, case
        return known

    def _least_needed(self) -> bytes:
        """The case to forget: one that has cost nobody anything, or one of keys that this peer has not met; otherwise the oldest."""
        idle = (each for each, old in self.known.items() if not (old.losers or old.is_open))
        of_unknown = (each for each, old in self.known.items() if not old.is_of_known)
        return next(idle, next(of_unknown, next(iter(self.known))))

    def restore(self, evidence: Evidence, voters: Collection[PeerId]) -> bool:
        """Take a conviction that this peer has heard before, with those that could vote then. Its signatures have been checked.

        Returns False if it convicts nobody.
        """
        case = evidence.case(self.run)
        if case is None or not is_convicting(case, voters):
            return False
        verdict = verdict_on(case, voters, is_late=True)
        known = KnownCase(evidence, case, frozenset(voters), 0.0, is_asked=True, ruling=verdict.ruling, losers=verdict.losers)
        self.known[case.item.id] = known
        self.standing.closed(case, verdict, case.item.step)
        return True

    def why_unheard(self, evidence: Evidence, voters: Collection[PeerId], its_chance: float, step: int) -> str:
        """Why this peer computes nothing for a case of its own stage; empty if it does."""
        case = evidence.case(self.run)
        if case is None:
            return "it has no word of the accuser"
        has_committed = case.accuser == self.me or self.commitments.has_committed(case.accuser, evidence.coins, case.item.step)
        is_due = has_committed and was_due(evidence.coins, case.item, its_chance)
        others = [each.case for each in self.known.values() if each.is_open]
        return why_unheard(case, voters, others, is_due, self.standing.is_paused(case.accuser, step))

    def to_judge(self, now_s: float, judge_s: float) -> list[KnownCase]:
        """The cases that this peer is to judge now, or to confirm. It is asked once for each."""
        found = []
        for known in self.known.values():
            silent = int((now_s - known.opened_at_s) / judge_s)
            is_judge = known.is_open and self.me in asked(known.case, known.voters, silent)
            if not known.is_asked and (is_judge or confirms(known.case, known.voters, self.me)):
                known.is_asked = known.is_computing = True
                found.append(known)
        return found

    def steps_needed(self) -> set[int]:
        """The steps whose parameters this peer needs for cases."""
        return {known.item.step for known in self.known.values() if known.is_open or known.is_computing}

    def to_insist(self) -> list[KnownCase]:
        """This peer's own cases on which all that were asked have spoken: it computes the item once more."""
        own = (known for known in self.known.values() if known.is_open and known.case.accuser == self.me and not known.case.insists)
        return [known for known in own if not asked(known.case, known.voters)]

    def rule(self, now_s: float, judge_s: float, step: int) -> list[CaseNews]:
        """What has come of all cases since the last look. Later words may name more losers, but change no ruling."""
        found = []
        for known in self.known.values():
            late = now_s - known.opened_at_s >= CASE_TIMES * judge_s
            verdict = verdict_on(known.case, known.voters, is_late=late)
            fresh = verdict.losers - known.losers
            if known.is_open and verdict.ruling is not Ruling.OPEN:
                known.ruling = verdict.ruling
            elif not fresh:
                continue
            self.standing.closed(known.case, verdict, step)
            known.losers |= verdict.losers
            found.append(CaseNews(known, verdict, fresh))
        return found

    @property
    def losers(self) -> frozenset[PeerId]:
        """All that have lost their standing by a case that is remembered."""
        return frozenset(peer for each in self.known.values() for peer in each.losers)

    @property
    def own_fault(self) -> str:
        """Why this peer has lost its standing, in words; empty if it has not."""
        found = next((each for each in self.known.values() if self.me in each.losers), None)
        if found is None:
            return ""
        item, words = found.item, [word for word in found.case.words.values() if word.differs]
        if item.audited != self.me:
            whose = "a mate's part" if item.index is None else f"microbatch {item.index}"
            return f"what this peer found of {whose} of step {item.step} contradicts most of its mates"
        off = max((word.distance for word in words), default=0.0)
        what = f"{'part' if item.index is None else f'microbatch {item.index}'} of step {item.step}"
        return f"{len(words)} mates computed this peer's {what} again and got something else: it is {off:.2g} off, in proportion"

    def convictions(self, known: Collection[bytes] = ()) -> list[Evidence]:
        """The cases that cost somebody its standing, without those whose ids are known."""
        return [each.evidence for item_id, each in self.known.items() if each.losers and item_id not in known]
