"""What the members of a round say that came of it, and what one of them makes of that: rule 18 (certify) in groups. Pure.

No record shows what came of the round of a group, or of one for a section. So each member signs the id that the sum has there with its
numbers, and tells the others. It goes by the sum once more than half of the members say the same. A member that says something else shows
the slices that it holds: they prove that a reducer has signed two, or they do not lead to what it says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from peerd.policy.step.certificates import SignedSlice, Slices, average_id_of, is_confirmed, told_twice
from peerd.policy.step.judging import NUM_JUDGES
from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId, PeerId, RunId

OUTCOME = b"peerd outcome of a round\0"
"""What every text begins with that a member signs of what came of its round."""


@dataclass(frozen=True, slots=True)
class SignedOutcome:
    """What came of a round at one of its members, as that member signed it. `signature` is checked where it comes in."""

    member: PeerId
    average_id: AverageId
    """Of the round's sum with its numbers (`average_id_of`)."""
    signature: bytes
    slices: Slices = ()
    """Those that the member holds, where members say unlike things; otherwise empty."""

    def statement(self, run: RunId, round_id: AverageId) -> bytes:
        """The text that the member signs. It signs one of a round."""
        return OUTCOME + round_id + self.average_id + run.encode() + b"\0" + self.member.encode()

    @property
    def bare(self) -> SignedOutcome:
        """The same without the slices."""
        return replace(self, slices=()) if self.slices else self


@dataclass(frozen=True, slots=True)
class RoundProof:
    """What proves the numbers of a section to those that were not in its round."""

    roster: Roster
    slices: Slices = ()
    outcomes: tuple[SignedOutcome, ...] = ()
    """The words of its members that say the same."""

    @property
    def id(self) -> AverageId:
        """Its id covers the numbers where the run certifies; otherwise it is that of the section's round."""
        return average_id_of(self.roster, self.slices)

    @property
    def confirmed_by(self) -> frozenset[PeerId]:
        """The members that have signed that these numbers came of the round."""
        return frozenset(each.member for each in self.outcomes if each.average_id == self.id)

    @property
    def is_certified(self) -> bool:
        return are_most(self.confirmed_by, self.roster)


def are_most(confirmed_by: Collection[PeerId], roster: Roster) -> bool:
    """Whether these are more than half of a round's members."""
    return 2 * len({*roster.peers}.intersection(confirmed_by)) > len(roster.entries)


def mute_members(told: Collection[PeerId], complete_since_s: Mapping[PeerId, float], now_s: float, patience_s: float) -> list[PeerId]:
    """The members that have had all sums of a round for longer than `patience_s`, and have not said what came of it."""
    return sorted(peer for peer, since_s in complete_since_s.items() if peer not in told and now_s - since_s > patience_s)


class RoundOutcomes:
    """The words of one round's members at one of them. Times are seconds on the caller's monotonic clock."""

    def __init__(self, roster: Roster, averaging_s: float) -> None:
        self._roster = roster
        self._averaging_s = averaging_s
        self._mine: SignedOutcome | None = None
        self._mine_since_s = 0.0
        self.told: dict[PeerId, SignedOutcome] = {}
        """By member, its first word, with the slices that it has shown for it."""
        self._told_s: dict[PeerId, float] = {}
        self._complete_since_s: dict[PeerId, float] = {}
        self._told_twice: set[PeerId] = set()
        """Members that have signed two outcomes of this round."""

    def hold(self, outcome: SignedOutcome, now_s: float) -> None:
        """All sums are here, and this is what came of them, with the slices."""
        self._mine, self._mine_since_s = outcome, now_s
        self.hear(outcome, now_s)

    def hear(self, outcome: SignedOutcome, now_s: float) -> bool:
        """Take a member's word, whose signatures have been checked. Its first one counts. Returns whether it says anything new.

        Slices that do not lead to what the member says show nothing.
        """
        if outcome.slices and average_id_of(self._roster, outcome.slices) != outcome.average_id:
            outcome = outcome.bare
        known = self.told.get(outcome.member)
        if known is None:
            self.told[outcome.member] = outcome
            self._told_s[outcome.member] = self._complete_since_s[outcome.member] = now_s
            return True
        if known.average_id != outcome.average_id:
            is_new = outcome.member not in self._told_twice
            self._told_twice.add(outcome.member)
            return is_new
        if outcome.slices and not known.slices:
            self.told[outcome.member] = outcome
            return True
        return False

    def complete(self, member: PeerId, now_s: float) -> None:
        """A member says that it has all sums."""
        self._complete_since_s.setdefault(member, now_s)

    def settled(self) -> bool | None:
        """Whether more than half of the members say what this peer says; None while that may still be, or this peer lacks sums."""
        if self._mine is None:
            return None
        words = {member: each.average_id for member, each in self.told.items() if member not in self._told_twice}
        return is_confirmed(self._mine.average_id, words, self._roster)

    @property
    def is_disputed(self) -> bool:
        """Whether members say unlike things, so that each has to show what it holds."""
        return len({each.average_id for each in self.told.values()}) > 1

    @property
    def agreeing(self) -> tuple[SignedOutcome, ...]:
        """The words of the members that say the same as this peer, by member."""
        mine = self._mine
        found = sorted(self.told.items()) if mine is not None else []
        return tuple(each.bare for _, each in found if mine is not None and each.average_id == mine.average_id)

    @property
    def contradiction(self) -> tuple[SignedSlice, SignedSlice] | None:
        """Two slices that one reducer has signed, of what members have shown; None if there are none."""
        first = next((each.slices for each in self.told.values() if each.slices), ())
        pairs = (told_twice(first, each.slices) for each in self.told.values() if each.slices)
        return next((pair for pair in pairs if pair is not None), None)

    def at_fault(self, now_s: float, rank: int) -> tuple[PeerId, str] | None:
        """The member without which a judge of this rank ends the round, and why; None while nobody holds it up.

        A judge of rank k waits k averaging times longer than the first.
        """
        if self._mine is None or self.settled():
            return None
        if self._told_twice:
            return min(self._told_twice), "it has signed two outcomes of the round"
        if (pair := self.contradiction) is not None:
            return pair[0].reducer, "it has signed two slices of the round"
        patience_s = (1 + rank) * self._averaging_s
        for member, each in sorted(self.told.items()):
            is_other = each.average_id != self._mine.average_id and not each.slices
            if is_other and now_s - max(self._told_s[member], self._mine_since_s) > patience_s:
                return member, "it does not show what it says that it holds of the round"
        mute = mute_members(self.told, self._complete_since_s, now_s, patience_s)
        return (mute[0], "it does not say what came of the round") if mute else None

    def is_given_up(self, now_s: float) -> bool:
        """Whether this peer leaves the round: most members hold something else of it, and each judge has had its turn."""
        return self.settled() is False and now_s - self._mine_since_s > (1 + NUM_JUDGES) * self._averaging_s
