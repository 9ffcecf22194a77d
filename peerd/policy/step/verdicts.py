"""What comes of an accusation, and which peers stand: rule 20 (audit).

A peer whose replay of an item differs opens a case. One mate, which a hash draws, computes the item again. If it agrees, or the accuser
insists, all mates that stand do. More than half of them decide; the audited peer's own word counts. The audited peer or a false accuser
loses its standing, so nobody accuses falsely twice. Where no majority comes together the case is disputed: the run goes on, and both are
watched.

Nobody loses its standing for a word that an honest peer may have said. A lie can be so small that exact devices see it and others do not.
So a word is a measured deviation, and only one that contradicts the words of more than half of those that stand is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import zip_longest

from peerd.policy.hashing import digest
from peerd.policy.step.auditing import NEWCOMER_STEPS, RIGHT, AuditWord, Item, Rates, chance
from peerd.table.record import PeerId, PeerRecord

FEWEST_JUDGES = 3
"""Of fewer peers, the audited one included, no majority can say which of them is wrong."""
MOST_DOUBLED = 8
PAUSE_STEPS = 8
"""After a case of its own that convicted nobody an auditor opens none for so many steps, twice as many after each further one. Both peers
of a disputed case are watched for so many steps."""
MOST_CASES = 256
"""Cases that a peer remembers, the last ones, and convictions that it is told at once."""
TELLERS = 4
"""Answers that a peer wants when it begins and asks for convictions. With a third of liars, none of four is honest in 1 of 80 cases."""
MOST_KNOWN = 20_000
"""Peers that are remembered, the last ones."""
MOST_NOTED = 2_048
"""Peers whose standing is noted on disk, the last ones."""
StandingNote = tuple[PeerId, int, bool, int, int, int]
"""What outlasts the daemon of a peer: its id, clean steps, whether it is a founder, its cases in a row that convicted nobody, and until
which steps it may open no case and is watched. Whether it has lost its standing is not in it: its case says that."""


@dataclass(frozen=True, slots=True)
class Case:
    """An item that an auditor has found wrong, and what others say of it. `words` has the accuser's."""

    item: Item
    accuser: PeerId
    words: Mapping[PeerId, AuditWord]
    insists: bool = False
    """The accuser has computed the item once more after another judge had found nothing."""
    two_faced: frozenset[PeerId] = frozenset()
    """Judges that have signed two words of which one must be a lie."""

    def with_word(self, judge: PeerId, word: AuditWord) -> Case:
        """The case with one more word. Of two words of a judge the first counts, unless they contradict each other: then none does."""
        if judge == self.item.audited:
            return self
        if judge not in self.words:
            return replace(self, words={**self.words, judge: word})
        return self if self.words[judge].agrees_with(word) else replace(self, two_faced=self.two_faced | {judge})

    def merged(self, other: Case) -> Case:
        """What two peers know of one case."""
        found = replace(self, insists=self.insists or other.insists, two_faced=self.two_faced | other.two_faced)
        for judge, word in other.words.items():
            found = found.with_word(judge, word)
        return found


class Ruling(Enum):
    OPEN = "open"
    CONVICTED = "convicted"
    """More than half of those that stand have found it wrong."""
    CLEARED = "cleared"
    """More than half of those that stand, the audited peer among them, have found it right."""
    DISPUTED = "disputed"
    """Nobody else can judge, or too few have said anything in time."""


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """What has come of a case so far."""

    ruling: Ruling
    losers: frozenset[PeerId] = frozenset()
    """Those that lose their standing."""
    sets_aside: bool = False
    """A second peer has found the item wrong: the audited one's ledger of the present step is done anew by others."""


def judges_in_turn(case: Case, standing: Collection[PeerId]) -> list[PeerId]:
    """The mates that may judge a case, in an order that the item draws: the first one confirms or denies before all others are asked."""
    others = (peer for peer in standing if peer not in (case.item.audited, case.accuser))
    return sorted(others, key=lambda peer: digest("judge", case.item.id, peer, size=8))


def asked(case: Case, standing: Collection[PeerId], num_silent: int = 0) -> list[PeerId]:
    """The mates that are to compute the item again now and have not said anything yet.

    `num_silent`: how many times the judges that were asked have had their time. Then the next in turn is asked.
    """
    turn = judges_in_turn(case, standing)
    is_for_all = case.insists or any(case.words[judge].differs for judge in turn if judge in case.words)
    return [judge for judge in (turn if is_for_all else turn[: 1 + num_silent]) if judge not in case.words]


def verdict_on(case: Case, standing: Collection[PeerId], is_late: bool = False) -> CaseVerdict:
    """What has come of a case. `is_late`: the judges have had their time."""
    audited = case.item.audited
    heard = {judge: word for judge, word in case.words.items() if judge not in case.two_faced} | {audited: RIGHT}
    counted = {judge: word for judge, word in heard.items() if judge in standing or judge == audited}
    num_voters = len({*standing, audited})
    wrong = sum(word.differs for word in counted.values())
    right = len(counted) - wrong
    sets_aside = wrong >= 2
    if num_voters >= FEWEST_JUDGES and 2 * wrong > num_voters:
        return CaseVerdict(Ruling.CONVICTED, case.two_faced | contradicted(heard, counted, num_voters) | {audited}, True)
    if num_voters >= FEWEST_JUDGES and 2 * right > num_voters:
        return CaseVerdict(Ruling.CLEARED, case.two_faced | (contradicted(heard, counted, num_voters) - {audited}))
    if is_late or num_voters < FEWEST_JUDGES:
        return CaseVerdict(Ruling.DISPUTED, case.two_faced, sets_aside)
    return CaseVerdict(Ruling.OPEN, case.two_faced, sets_aside)


def contradicted(words: Mapping[PeerId, AuditWord], counted: Mapping[PeerId, AuditWord], num_voters: int) -> frozenset[PeerId]:
    """The judges whose words contradict those of more than half of `num_voters`. `counted`: the words that count.

    A judge has signed its word whether it counts or not, and peers of other stages do not know who has a vote (hole 57). No two honest
    words contradict each other. So as long as less than half of the voters lie, all who are found have lied, or their devices compute
    wrongly.
    """
    found = (judge for judge, word in words.items() if 2 * sum(not word.agrees_with(other) for other in counted.values()) > num_voters)
    return frozenset(found)


def why_unheard(case: Case, standing: Collection[PeerId], open_cases: Iterable[Case], is_due: bool, is_paused: bool) -> str:
    """Why a peer does not judge a case; empty if it does. `is_due`: the coins of the accuser say that it had to audit the item."""
    word = case.words.get(case.accuser)
    if case.accuser not in standing:
        return "the accuser does not stand"
    if case.accuser == case.item.audited or word is None or not word.accuses:
        return "it accuses nobody of anything"
    if not is_due:
        return "the accuser's coins did not draw this item"
    if is_paused:
        return "the last case of this accuser came to no end"
    if any(other.accuser == case.accuser and other.item != case.item for other in open_cases):
        return "another case of this accuser is open"
    return ""


def tellers(me: PeerId, mates: Iterable[PeerRecord], others: Iterable[PeerRecord]) -> list[PeerId]:
    """The peers to ask for convictions, in turn: mates and others alternately, in an order that is this peer's own.

    Each is asked once at most. One honest peer among the TELLERS that answer is enough, as evidence speaks for itself.
    """
    near, far = (
        sorted({each.peer for each in group} - {me}, key=lambda peer: digest("teller", me, peer, size=8)) for group in (mates, others)
    )
    return list(dict.fromkeys(peer for pair in zip_longest(near, far) for peer in pair if peer is not None))


def is_convicting(case: Case | None, voters: Collection[PeerId]) -> bool:
    """Whether the words of a case, by themselves, cost somebody its standing. None: there is no case without a word of the accuser."""
    return case is not None and bool(verdict_on(case, voters).losers)


def confirms(case: Case, voters: Collection[PeerId], me: PeerId) -> bool:
    """Whether a member of the item's average that has no vote, as it is new, computes the item again, too: somebody is convicted.

    Peers of other stages do not know who stood there, so they want the words of more than half of all that serve there.
    """
    is_judge = me in voters or me in case.words or me in (case.item.audited, case.accuser)
    return not is_judge and is_convicting(case, voters)


@dataclass(slots=True)
class _Known:
    """What this peer knows of a mate."""

    clean_steps: int = 0
    is_founder: bool = False
    num_vain: int = 0
    """Cases that it opened in a row and that convicted nobody."""
    has_lost: bool = False
    paused_until: int = -1
    watched_until: int = -1


@dataclass(slots=True)
class Standing:
    """Which mates stand, as one peer sees it: their words and their work count. It belongs to the key.

    Those that serve before the first commit stand. A newcomer stands once ten steps with its work have ended and nothing was found wrong.
    """

    rates: Rates = field(default_factory=Rates)
    _known: dict[PeerId, _Known] = field(default_factory=dict)

    def notes(self) -> list[StandingNote]:
        """What outlasts the daemon, of the last MOST_NOTED peers."""
        last = list(self._known.items())[-MOST_NOTED:]
        return [
            (peer, known.clean_steps, known.is_founder, known.num_vain, known.paused_until, known.watched_until) for peer, known in last
        ]

    def restore(self, notes: Iterable[StandingNote]) -> None:
        """Take what an earlier daemon of this home has noted."""
        for peer, clean_steps, is_founder, num_vain, paused_until, watched_until in notes:
            known = self._of(peer)
            known.clean_steps, known.is_founder = clean_steps, is_founder
            known.num_vain, known.paused_until, known.watched_until = num_vain, paused_until, watched_until

    def found(self, peers: Iterable[PeerId]) -> None:
        """Note the peers that serve before the first commit."""
        for peer in peers:
            self._of(peer).is_founder = True

    def finished(self, peers: Iterable[PeerId], step: int) -> None:
        """Note a step that ended with the work of these peers. A step in which a peer is watched is not clean."""
        for peer in peers:
            known = self._of(peer)
            known.clean_steps += step > known.watched_until

    def stands(self, peer: PeerId) -> bool:
        known = self._known.get(peer, _UNKNOWN)
        return not known.has_lost and (known.is_founder or known.clean_steps >= NEWCOMER_STEPS)

    def standing(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Those of some peers that stand."""
        return frozenset(peer for peer in peers if self.stands(peer))

    def has_lost(self, peer: PeerId) -> bool:
        return self._known.get(peer, _UNKNOWN).has_lost

    def has_worked(self, peer: PeerId) -> bool:
        """Whether steps have ended with the work of a peer."""
        known = self._known.get(peer, _UNKNOWN)
        return known.is_founder or known.clean_steps > 0

    def not_lost(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Those of some peers that have not lost their standing: the voters of a stage whose averages this peer does not know."""
        return frozenset(peer for peer in peers if not self.has_lost(peer))

    def may_audit(self, item: Item, me: PeerId, stage: int, step: int, members: Collection[PeerId]) -> bool:
        """Whether this peer may compute an item again. `members`: of the average of this step, which it has finished with them."""
        is_here = (item.stage, item.step) == (stage, step) and item.audited in members
        return is_here and item.audited != me and not self.has_lost(item.audited)

    def most_chance(self, members: Collection[PeerId]) -> float:
        """The chance of an audit as an accuser among these may know it: to one that is new here all mates are newcomers."""
        return chance(self.rates.newcomer, len(self.standing(members)) - 1)

    def rate_of(self, peer: PeerId, step: int, is_odd: bool = False) -> float:
        """The share of a peer's work of this step that all auditors together compute again."""
        known = self._known.get(peer, _UNKNOWN)
        return self.rates.rate(known.clean_steps, is_odd, step <= known.watched_until)

    def is_paused(self, accuser: PeerId, step: int) -> bool:
        """Whether a peer may open no case at this step."""
        return step <= self._known.get(accuser, _UNKNOWN).paused_until

    def closed(self, case: Case, verdict: CaseVerdict, step: int) -> None:
        """Note how a case ended at this step."""
        for peer in verdict.losers:
            self._of(peer).has_lost = True
        accuser, audited = self._of(case.accuser), self._of(case.item.audited)
        if verdict.ruling is Ruling.CONVICTED:
            accuser.num_vain = 0
            return
        accuser.paused_until = step + PAUSE_STEPS * 2 ** min(accuser.num_vain, MOST_DOUBLED)
        accuser.num_vain += 1
        if verdict.ruling is Ruling.DISPUTED:
            for known in (accuser, audited):
                known.watched_until = max(known.watched_until, step + PAUSE_STEPS)

    def _of(self, peer: PeerId) -> _Known:
        known = self._known[peer] = self._known.pop(peer, _Known())  # and it is the last one now
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return known


_UNKNOWN = _Known()
