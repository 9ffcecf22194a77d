"""How the members of a large stage gather an average from its sections, and who of them takes what is missing: rules 17 and 16.

Each section has a holder in each group when its round is done. So a member asks mates of its own group, and only where none of them has a
section one of another group. What it has fetched it gives to others, as its record says.
"""

from __future__ import annotations

from peerd.policy.hashing import digest
from peerd.policy.step.groups import by_sum
from peerd.policy.step.ledger import full, indices, missing
from peerd.policy.step.roster import turns
from peerd.policy.step.situation import Situation
from peerd.table.record import PeerId, PeerRecord, Phase

SECTIONS_AT_ONCE = 2
"""Sections that a member fetches at one time, and gives: while one line is slow, another one is busy. Whoever asks for more tries others. A
donor that gave to all at once would serve each of them late, and none of them could give to others meanwhile."""


def _donors(now: Situation) -> list[PeerRecord]:
    mine = now.mine
    return now.willing([m for m in now.mates if m.sections and m.step == mine.step and m.lineage == mine.lineage])


def comes_by_sections(now: Situation) -> bool:
    """Whether this peer gets the whole average of its step by the sections that mates hold."""
    held = now.mine.sections
    if now.rules.num_sections == 1:
        return False
    for donor in _donors(now):
        held |= donor.sections
    return held & full(now.rules.num_sections) == full(now.rules.num_sections)


def section_to_fetch(now: Situation) -> tuple[PeerId, int] | None:
    """The mate to ask, and the section, of which this peer fetches none yet; None: it has all that are to be had, or is fetching enough.

    Members begin at unlike sections, and those of one group share the holders of other groups, so no donor has many to serve at once.
    """
    mine, num_sections, busy = now.mine, now.rules.num_sections, {peer for peer, _ in now.own.fetching}
    if num_sections == 1 or len(now.own.fetching) >= SECTIONS_AT_ONCE:
        return None
    absent = full(num_sections) & ~mine.sections
    for _, section in now.own.fetching:
        absent &= ~(1 << section)
    donors = [donor for donor in _donors(now) if donor.sections & absent] if absent else []
    first = digest(mine.peer, mine.step, size=2)
    for section in sorted(indices(absent), key=lambda section: (section - int.from_bytes(first)) % num_sections):
        able = [donor for donor in donors if donor.sections >> section & 1]
        if able:
            return min(able, key=lambda m: _order(now, m, section, m.peer in busy)).peer, section
    return None


def is_to_open(now: Situation) -> bool:
    """Rule 16 (open): whether this peer gives its copy of a group's sum up: all hold such sums, and nobody can add what is missing."""
    mine, rules = now.mine, now.rules
    if mine.phase is not Phase.ACCUMULATING or not mine.group or not missing(now.live, mine.stage, mine.step, rules.num_microbatches):
        return False
    members = [mine if m.peer == mine.peer else m for m in now.live.members(mine.stage, mine.step)]
    if any(not (m.group or m.leaving) for m in members):
        return False
    free = [m for m in members if m.phase is Phase.ACCUMULATING and not m.leaving]
    copies = {m.peer: len(holders) for holders in by_sum(members) for m in holders}
    order = {peer: rank for rank, peer in enumerate(turns(members))}
    first = min(free, key=lambda m: (-copies[m.peer], order.get(m.peer, len(order))), default=None)
    return first is not None and first.peer == mine.peer


def _order(now: Situation, donor: PeerRecord, section: int, is_busy: bool) -> tuple[bool, bool, bool, bytes]:
    mine = now.mine
    is_far = donor.group != mine.group or not mine.group
    return (donor.peer, mine.step) in now.own.unanswered, is_far, is_busy, digest("section", mine.peer, donor.peer, section, size=8)
