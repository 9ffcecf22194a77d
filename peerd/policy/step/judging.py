"""The judges of a round, what a word of theirs counts for, and the time after which a member ends a round that nobody ends: rule 4 (close).

A judge watches what each member has moved (policy/round/debts.py), and closes the round where somebody is at fault. It names that member
and leaves it out of the step. All others were only told: they blame nobody.
"""

from __future__ import annotations

from peerd.policy.hashing import peer_rank
from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId, Void

NUM_JUDGES = 3
"""So many members judge a round. Each waits an averaging time longer than the one before it, which may be mute or at fault itself."""

LOST = 3.0
"""Averaging times after which a member of a round counts as gone, if nothing at all is heard of it."""


def judges_of(roster: Roster) -> tuple[PeerId, ...]:
    """The judges in the order in which they judge: the leader first. The roster alone says who they are, so all agree."""
    others = sorted((p for p in roster.peers if p != roster.leader), key=lambda p: peer_rank(p, roster.stage, roster.step))
    return (roster.leader, *others)[:NUM_JUDGES]


def why_unheeded(roster: Roster, author: PeerId, named: PeerId | None, lasted_s: float, averaging_s: float) -> str:
    """Why a member goes on with a round that `author` has closed; empty if it obeys. `lasted_s`: the age of the round at this member.

    Any member may end its part and name nobody: without it the round cannot finish. Only a judge names a member, and the judge of rank k
    has no reason to before k averaging times. So a judge that lies can put one member out of a round that it leads, and out of others only
    if they are long.
    """
    if author not in roster.peers:
        return f"{author} is no member of this round"
    if named is None:
        return ""
    judges = judges_of(roster)
    if author not in judges:
        return f"{author} is no judge of this round"
    if named == author or named not in roster.peers:
        return f"{author} names a member that it cannot leave out"
    return "" if lasted_s >= judges.index(author) * averaging_s else f"it is not yet the turn of {author} to judge"


def void_of(roster: Roster, named: PeerId) -> Void | None:
    """What the judge that closes a round puts into its record: the member that it names is left out of the step at once."""
    entry = roster.entry_of(named)
    return None if entry is None else Void(entry.peer, entry.incarnation, roster.step)


def lost_after_s(averaging_s: float) -> float:
    """How long the record of a member of an open round may not rise until the member counts as gone, and the round is closed.

    That is longer than a record lives: a round is worth the wait for a link that breaks for some seconds.
    """
    return LOST * averaging_s


def given_up_after_s(num_members: int, averaging_s: float) -> float:
    """How long a member hears of no progress and of no judge before it closes a round by itself, and blames nobody.

    By then each judge that hears of the members has had its turn.
    """
    return (1 + min(NUM_JUDGES, num_members)) * averaging_s
