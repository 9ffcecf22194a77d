"""Groups of a large stage: who averages with whom, in two levels.

A round over hundreds of members seldom ends, since each death restarts it. So the members of a stage with more than `group_size` first make
the sums of their groups, in rounds of their own: whoever has been in one holds the group's sum in place of its own ledger, as all others of
the group do, under one id. Then holders of the sums make the average of the stage. It has as many sections as a group may have members: one
holder of each sum makes a section with the others, in a round like any other, and other holders make the other sections meanwhile. Mates
then fetch from each other what they lack. Nobody needs to agree on the groups: a roster proves what it sums, and two sums that meet are
settled by rule 6 (reset).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

from peerd.policy.hashing import REMEMBERED_RANKS, digest
from peerd.table.record import PeerId, PeerRecord, Phase

_RANKS = 1 << 64
MAX_SECTIONS = 512
STEPS_TOGETHER = 64
"""Steps for which a group keeps its members, who make sections with the same members of other groups: each mate is a connection to keep.
After that they are others, so nobody can choose a group for long by making up keys."""
LEAST_HOLDERS = 2
"""Members that say that they hold a section: it is made again where fewer do, as the word of one may be wrong."""


def forms_groups(members: Sequence[PeerRecord], group_size: int) -> bool:
    """Whether a stage with these members averages in two levels. `group_size`: the most members of a stage that do not; 0: none does."""
    return 0 < group_size < len(members)


def num_sections_of(group_size: int) -> int:
    """The number of sections of an average. Groups have more than half of `group_size` members on average, so each makes one or two."""
    return min(max(1, group_size), MAX_SECTIONS)


def section_bounds(length: int, number: int, num_sections: int, behind: int = 0) -> tuple[int, int]:
    """Which elements of an average of so many a section is: from, to. The last section has the elements `behind` them, too."""
    is_last = number == num_sections - 1
    return length * number // num_sections, length * (number + 1) // num_sections + is_last * behind


class SectionMakers:
    """The makers of each section of an average: one holder of each sum.

    A sum of fewer holders than sections has some that make several, the lower number first.
    """

    def __init__(self, sums: Sequence[Sequence[PeerRecord]]) -> None:
        self._ordered = [sorted(holders, key=_place_of) for holders in sums if holders[0].done]
        self._sizes = {len(holders) for holders in self._ordered}

    def of(self, number: int) -> list[PeerRecord]:
        """The makers of this section."""
        return [holders[number % len(holders)] for holders in self._ordered]

    def before(self, number: int) -> int:
        """The sections, as bits, that some maker of this one makes before it. So a member is wanted for one at a time, and no two
        proposals meet."""
        found = 0
        for size in self._sizes:
            for before in range(number % size, number, size):
                found |= 1 << before
        return found


def sections_held(members: Sequence[PeerRecord]) -> int:
    """The sections, as bits, that are not to be made again."""
    at_least = [0] * (LEAST_HOLDERS + 1)
    at_least[0] = -1
    for member in members:
        if member.sections:
            for number in range(LEAST_HOLDERS, 0, -1):
                at_least[number] |= at_least[number - 1] & member.sections
    return at_least[LEAST_HOLDERS]


def by_sum(members: Sequence[PeerRecord]) -> list[list[PeerRecord]]:
    """The members by what they hold: those that hold the sum of one group together, and each other member alone."""
    found: dict[tuple[bytes, int] | PeerId, list[PeerRecord]] = {}
    for member in members:
        found.setdefault(_sum_of(member), []).append(member)
    return list(found.values())


def _sum_of(member: PeerRecord) -> tuple[bytes, int] | PeerId:
    """What names the sum that a member holds: that of a group, or its own ledger."""
    return (member.group, member.done) if member.group else member.peer


@lru_cache(maxsize=REMEMBERED_RANKS)
def _place(peer: PeerId, stage: int, era: int) -> int:
    return int.from_bytes(digest("group", peer, stage, era, size=8))


def _place_of(member: PeerRecord) -> int:
    """The place of a member in its stage, by which groups are formed; it is another one every `STEPS_TOGETHER` steps."""
    return _place(member.peer, member.stage, member.step // STEPS_TOGETHER)


def _num_groups(num_members: int, group_size: int) -> int:
    """The number of ranges of hashes, a power of two: the members of one are a group.

    So one that comes or goes changes the group of no other, but where their number passes such a power times the size.
    """
    return 1 << (-(-num_members // group_size) - 1).bit_length()


def _group_number(member: PeerRecord, num_groups: int) -> int:
    """The group of a member: the range that its own hash falls in."""
    return _place_of(member) * num_groups // _RANKS


class Levels:
    """The sums that the members of a stage hold, and the next rounds of its average. Each answer is found once, as a look asks for it
    several times."""

    def __init__(self, members: Sequence[PeerRecord], group_size: int) -> None:
        self.members = members
        self._group_size = group_size

    @cached_property
    def sums(self) -> list[list[PeerRecord]]:
        """The holders of each sum."""
        return by_sum(self.members)

    @cached_property
    def groups(self) -> dict[int, list[PeerRecord]]:
        """The groups that have yet to make their sums, by number; none where the stage's sums go into one round."""
        members, size = self.members, self._group_size
        if not forms_groups(members, size) or len(self.sums) <= size:
            return {}
        found, num_groups = dict[int, list[PeerRecord]](), _num_groups(len(members), size)
        for member in members:
            if not member.group:
                found.setdefault(_group_number(member, num_groups), []).append(member)
        return found if any(len(group) > 1 for group in found.values()) else {}

    @property
    def makes_sections(self) -> bool:
        """Whether the members hold the sums of which the sections of the average are made."""
        return forms_groups(self.members, self._group_size) and not self.groups

    def are_exact(self, whole: int) -> bool:
        """Whether each microbatch of `whole` is in one of the sums, and no other is."""
        found = 0
        for holders in self.sums:
            if found & holders[0].done:
                return False
            found |= holders[0].done
        return found == whole

    @cached_property
    def makers(self) -> SectionMakers:
        return SectionMakers(self.sums)

    @cached_property
    def held(self) -> int:
        """The sections, as bits, that are not to be made again."""
        return sections_held(self.members)

    def round_mates(self, mine: PeerRecord) -> list[list[PeerRecord]]:
        """The sums that a round with this member adds up, each with the members that hold it.

        All of the stage's; or those of this member's group, as long as some group with two members or more has not made its sum. None
        where this member has to wait for other groups.
        """
        if not self.groups:
            return self.sums
        own = [] if mine.group else self.groups.get(_group_number(mine, _num_groups(len(self.members), self._group_size)), [])
        return [[member] for member in own] if len(own) > 1 else []


class StageMembers:
    """The members of a stage at a step, as rule 7 (propose) sees them: as their records say, and this peer as it is."""

    def __init__(self, mine: PeerRecord, published: Sequence[PeerRecord], group_size: int) -> None:
        self.published = published
        self.members = [mine if m.peer == mine.peer else m for m in published]
        self.levels = Levels(self.members, group_size)
        self._mine = mine

    @cached_property
    def done(self) -> int:
        """The microbatches that any of them holds."""
        found = 0
        for member in self.members:
            found |= member.done
        return found

    @cached_property
    def can_average(self) -> bool:
        """Whether this peer is one of them, all hold sums of one lineage, and nobody has the average yet.

        Of two lineages one peer first downloads the state of the other.
        """
        lineage = self._mine.lineage
        alike = all(m.phase is not Phase.AVERAGED and (m.lineage is lineage or m.lineage == lineage) for m in self.members)
        return alike and any(m is self._mine for m in self.members)


def groups_of(members: Sequence[PeerRecord], group_size: int) -> dict[int, list[PeerRecord]]:
    """The groups that have yet to make their sums, by number; none where the stage's sums go into one round."""
    return Levels(members, group_size).groups


def mates_to_tell(mine: PeerRecord, members: Sequence[PeerRecord], group_size: int) -> list[PeerRecord]:
    """The members whose rounds wait for what this one says: those of its group in a large stage, and everybody in a smaller one."""
    if not forms_groups(members, group_size):
        return list(members)
    num_groups = _num_groups(len(members), group_size)
    own = _group_number(mine, num_groups)
    return [m for m in members if _group_number(m, num_groups) == own]


def alone_in_rounds(members: Sequence[PeerRecord], group_size: int) -> frozenset[PeerId]:
    """Members in a round, where fewer than half of the sums that it adds up have a holder in one, or no other does."""
    groups = groups_of(members, group_size)
    rounds = [[[member] for member in group] for group in groups.values()]
    rounds.append(by_sum([m for m in members if m.group or not groups]))
    alone: list[PeerId] = []
    for sums in rounds:
        busy = [m.peer for holders in sums for m in holders if m.phase is Phase.AVERAGING]
        num_busy = sum(any(m.phase is Phase.AVERAGING for m in holders) for holders in sums)
        alone += busy if num_busy == 1 or 2 * num_busy < len(sums) else []
    return frozenset(alone)
