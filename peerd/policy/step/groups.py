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
from functools import lru_cache

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


def makes_sections(members: Sequence[PeerRecord], group_size: int) -> bool:
    """Whether the members hold the sums of which the sections of the average are made."""
    return forms_groups(members, group_size) and not groups_of(members, group_size)


def makers_of_section(sums: Sequence[Sequence[PeerRecord]], number: int) -> list[PeerRecord]:
    """One holder of each sum that makes this section with the others. A sum of fewer holders than sections has some that make several."""
    ordered = (sorted(holders, key=_place_of) for holders in sums if holders[0].done)
    return [holders[number % len(holders)] for holders in ordered]


def sections_before(sums: Sequence[Sequence[PeerRecord]], number: int) -> set[int]:
    """The sections that some maker of this one makes before it. So a member is wanted for one at a time, and no two proposals meet."""
    sizes = {len(holders) for holders in sums if holders[0].done}
    return {before for size in sizes for before in range(number % size, number, size)}


def is_section_held(members: Sequence[PeerRecord], number: int) -> bool:
    return sum(m.sections >> number & 1 for m in members) >= LEAST_HOLDERS


def by_sum(members: Sequence[PeerRecord]) -> list[list[PeerRecord]]:
    """The members by what they hold: those that hold the sum of one group together, and each other member alone."""
    found: dict[tuple[bytes, int] | PeerId, list[PeerRecord]] = {}
    for member in members:
        found.setdefault((member.group, member.done) if member.group else member.peer, []).append(member)
    return list(found.values())


@lru_cache(maxsize=REMEMBERED_RANKS)
def _place(peer: PeerId, stage: int, era: int) -> bytes:
    return digest("group", peer, stage, era, size=8)


def _place_of(member: PeerRecord) -> bytes:
    """The place of a member in its stage, by which groups are formed; it is another one every `STEPS_TOGETHER` steps."""
    return _place(member.peer, member.stage, member.step // STEPS_TOGETHER)


def _group_number(member: PeerRecord, num_members: int, group_size: int) -> int:
    """The group of a member: the range of hashes that its own falls in, of a power of two.

    So one that comes or goes changes the group of no other, but where their number passes such a power times the size.
    """
    num_groups = 1 << (-(-num_members // group_size) - 1).bit_length()
    return int.from_bytes(_place_of(member)) * num_groups // _RANKS


def groups_of(members: Sequence[PeerRecord], group_size: int) -> dict[int, list[PeerRecord]]:
    """The groups that have yet to make their sums, by number; none where the stage's sums go into one round."""
    if not forms_groups(members, group_size) or len(by_sum(members)) <= group_size:
        return {}
    found: dict[int, list[PeerRecord]] = {}
    for member in members:
        if not member.group:
            found.setdefault(_group_number(member, len(members), group_size), []).append(member)
    return found if any(len(group) > 1 for group in found.values()) else {}


def round_mates(mine: PeerRecord, members: Sequence[PeerRecord], group_size: int) -> list[list[PeerRecord]]:
    """The sums that a round with this member adds up, each with the members that hold it.

    All of the stage's; or those of this member's group, as long as some group with two members or more has not made its sum. None where
    this member has to wait for other groups.
    """
    groups = groups_of(members, group_size)
    if not groups:
        return by_sum(members)
    own = [] if mine.group else groups.get(_group_number(mine, len(members), group_size), [])
    return [[member] for member in own] if len(own) > 1 else []


def mates_to_tell(mine: PeerRecord, members: Sequence[PeerRecord], group_size: int) -> list[PeerRecord]:
    """The members whose rounds wait for what this one says: those of its group in a large stage, and everybody in a smaller one."""
    if not forms_groups(members, group_size):
        return list(members)
    own = _group_number(mine, len(members), group_size)
    return [m for m in members if _group_number(m, len(members), group_size) == own]


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
