"""Members of which nothing comes in rounds are left out of the steps that follow: rule T6 (sideline) of docs/protocol.md, hole 36.

A round that waits in vain for a member costs all others an averaging time, in every step. Who is to blame cannot be told from one round: a
leader that has asked all but one makes that one look absent. So rounds of two leaders count, or two of this peer's own.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from peerd.policy.step.groups import alone_in_rounds, forms_groups
from peerd.policy.step.judging import NUM_JUDGES
from peerd.policy.step.ledger import FEWEST
from peerd.policy.step.probation import Probation
from peerd.policy.step.roster import Roster
from peerd.table.record import MAX_SIDELINED, PeerId, PeerRecord, Phase

ROUNDS_NEEDED = 2
TIMES_ITS_COST = 8
"""A member is left out for so many times as long as it has cost since it last completed a round: of the run's time it costs no ninth."""
MOST_DOUBLED = 8
"""A ban leaves its peer out for twice as long as the last one, so many times."""
PATIENCE = NUM_JUDGES + 2
"""A member may be in a round without this peer for so many averaging times: one that hears nothing of it ends it before."""
DRAINS = 2.0
"""What was counted of a member's time is forgotten after so many times as long. So one that is in a round without this peer again and
again, each time for a moment less than PATIENCE, is found as well (hole 63)."""
REMEMBERED = 64
"""Number of members that rounds have waited for in vain. The first go first."""


class _Odd(enum.Enum):
    """Why no round is possible with a mate."""

    ELSEWHERE = "in a round without this peer"
    ASTRAY = "with parameters of another history than most members have"
    AHEAD = "at a step that too few others have reached"


@dataclass(slots=True)
class _Absent:
    """What rounds have lost by one member since it last completed one."""

    leaders: set[PeerId] = field(default_factory=set)
    """Others that led such rounds."""
    seen_here: int = 0
    """Number of such rounds that this peer led, and of times that the member was in another round for too long."""
    cost_s: float = 0.0
    num_bans: int = 0
    until_s: float = float("-inf")
    out_s: float = 0.0
    """How long it was left out for its last ban. A mate that has lied has to be in for as long until its bans are forgotten."""
    has_lied: bool = False


@dataclass(slots=True)
class _Watch:
    """For how long no round was possible with a mate, less what it has made good since."""

    at_s: float
    """When it was looked at last."""
    is_odd: bool = False
    spent_s: float = 0.0
    counted_s: float = 0.0
    """What of that has been counted already."""

    def look(self, is_odd: bool, now_s: float) -> None:
        if is_odd == self.is_odd:  # between two looks that differ nobody knows
            passed_s = now_s - self.at_s
            self.spent_s = max(0.0, self.spent_s + (passed_s if is_odd else -passed_s / DRAINS))
        self.counted_s = min(self.counted_s, self.spent_s)
        self.at_s, self.is_odd = now_s, is_odd


class Sidelining:
    """What one peer has seen of its mates in rounds. Times are seconds on the caller's monotonic clock."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._absent: dict[PeerId, _Absent] = {}
        self._banned: frozenset[PeerId] = frozenset()
        self._watched: dict[_Odd, dict[PeerId, _Watch]] = {}
        """By what no round is possible with them for."""
        self._disbelieved_since_s: dict[PeerId, float] = {}
        self._step = -1
        self._probation = Probation()
        self._on_probation: frozenset[PeerId] = frozenset()
        """Those of this peer's present mates that are."""
        self._led: list[PeerId] = []
        self._waited_for: list[PeerId] = []
        self.peers: tuple[PeerId, ...] = ()
        """Those that this peer leaves out of the present step, for its record."""

    def closed(self, roster: Roster, judge: PeerId, named: PeerId, lasted_s: float, now_s: float) -> None:
        """Note that `judge` closed a round after `lasted_s` and named a member. Of this peer itself it says nothing new."""
        self.gave_up(roster)
        if named != self._me:
            self._waited_for.append(named)
            self._count(named, judge, lasted_s, now_s)

    def gave_up(self, roster: Roster) -> None:
        """Note a round that led to nothing. Nobody is blamed, but another member leads the next one."""
        if roster.step != self._step:
            self._step, self._led, self._waited_for = roster.step, [], []
        self._led.append(roster.leader)

    def _count(self, peer: PeerId, leader: PeerId, cost_s: float, now_s: float) -> None:
        known = self._absent.setdefault(peer, _Absent())
        known.cost_s += cost_s
        if leader == self._me:
            known.seen_here += 1
        else:
            known.leaders.add(leader)
        if len(known.leaders) + known.seen_here >= ROUNDS_NEEDED:
            self._leave_out(peer, now_s + TIMES_ITS_COST * known.cost_s)
        self._forget_the_first()

    def _leave_out(self, peer: PeerId, until_s: float) -> None:
        self._absent[peer].until_s = max(self._absent[peer].until_s, until_s)
        self.peers = tuple(sorted({*self.peers, peer}))[:MAX_SIDELINED]

    def _forget_the_first(self) -> None:
        while len(self._absent) > REMEMBERED:
            del self._absent[next(iter(self._absent))]

    def banned(self, left_s: Mapping[PeerId, float], now_s: float) -> None:
        """Note the members whose calls this peer refuses, each with the seconds that are left of its ban: no round with one can succeed.

        Each is left out while it is banned, and twice as long at each further ban.
        """
        for peer in left_s.keys() - self._banned:
            known = self._absent.setdefault(peer, _Absent())
            known.out_s = left_s[peer] * 2 ** min(known.num_bans, MOST_DOUBLED)
            self._leave_out(peer, now_s + known.out_s)
            known.num_bans += 1
        self._banned = frozenset(left_s)
        self._forget_the_first()

    def lied(self, peer: PeerId) -> None:
        """Note that a mate has lied about an average: it stays out until it has gone along with the stage for some steps (probation.py)."""
        self._absent.setdefault(peer, _Absent()).has_lied = True
        self._probation.begin(peer)
        self._forget_the_first()

    def look_at_liars(self, mine: PeerRecord, mates: Sequence[PeerRecord], early: Collection[PeerId], now_s: float) -> None:
        """Note how mates that have lied go along. `early`: mates that tell an average of this step which nobody else tells."""
        stays, ends = self._probation.look(mine, mates, early)
        self._on_probation = frozenset(stays)
        for peer in stays:
            self._absent.setdefault(peer, _Absent(has_lied=True))
            self._leave_out(peer, now_s)
        for peer in ends:
            if known := self._absent.get(peer):
                known.until_s = max(known.until_s, now_s)

    def disbelieved(self, peer: PeerId, averaging_s: float, now_s: float) -> bool:
        """Note that a mate holds an average of this step that this peer does not take, though nothing proves it wrong: rule 18 (certify).

        Nobody else can make one meanwhile. Returns whether that has lasted for longer than it takes to be held by others, too.
        """
        since_s, patience_s = self._disbelieved_since_s.setdefault(peer, now_s), PATIENCE * averaging_s
        if now_s - since_s < patience_s:
            return False
        self._disbelieved_since_s[peer] = now_s
        self._count(peer, self._me, patience_s, now_s)
        if peer in self.peers:
            self.lied(peer)
        return True

    def kept_back(self, peer: PeerId, now_s: float) -> bool:
        """Note that a mate, asked for an average that it holds alone, has shown none that could come to count: hole 56.

        The second time without an average with it in between, it is left out. Returns whether it is.
        """
        since_s = self._disbelieved_since_s.get(peer, now_s)
        self._disbelieved_since_s[peer] = now_s
        self._count(peer, self._me, now_s - since_s, now_s)
        if peer in self.peers:
            self.lied(peer)
        return peer in self.peers

    def look(self, mine: PeerRecord, members: Sequence[PeerRecord], averaging_s: float, now_s: float, group_size: int = 0) -> None:
        """Note members that no round is possible with, once that lasts longer than a round may stand still.

        Some are in a round without this peer, and nobody proposes meanwhile. Where half of the others are, this peer is late, and gets
        their average; where half of those are that a member makes the sum of a group with, it is in its group's round.

        Others tell parameters of another history than most members have (hole 48). An honest peer with such ones begins to download
        the stage's at once, and is no member meanwhile.
        """
        waits, others = mine.phase is Phase.ACCUMULATING, [m for m in members if m.peer != mine.peer]
        away = [m for m in others if m.phase is Phase.AVERAGING] if waits else []
        if forms_groups(members, group_size):
            odd = alone_in_rounds(members, group_size)
        else:
            odd = frozenset(m.peer for m in away if len(away) == 1 or 2 * len(away) < len(others))
        self._note(_Odd.ELSEWHERE, [m.peer for m in away if m.peer in odd], averaging_s, now_s)
        astray = [m.peer for m in members if m.lineage is not mine.lineage and m.lineage != mine.lineage]
        is_most = len(members) >= FEWEST and 2 * len(astray) < len(members)
        self._note(_Odd.ASTRAY, astray if is_most else [], averaging_s, now_s)

    def look_ahead(self, peers: Sequence[PeerId], averaging_s: float, now_s: float) -> None:
        """Note mates that say that they are ahead, and that too few agree with (certifying.py): work would be done for their step alone."""
        self._note(_Odd.AHEAD, peers, averaging_s, now_s)

    def _note(self, odd: _Odd, peers: Sequence[PeerId], averaging_s: float, now_s: float) -> None:
        """Note all mates of whom this is true now, and count those of whom it has been for longer than a round may stand still."""
        watched, patience_s = self._watched.setdefault(odd, {}), PATIENCE * averaging_s
        for peer in peers:
            watched.setdefault(peer, _Watch(now_s))
        for peer, watch in [*watched.items()]:
            watch.look(peer in peers, now_s)
            if watch.spent_s >= watch.counted_s + patience_s:
                watch.counted_s += patience_s
                self._count(peer, self._me, patience_s, now_s)
                if watch.counted_s >= ROUNDS_NEEDED * patience_s:  # also where rounds between have come together
                    self._leave_out(peer, now_s + TIMES_ITS_COST * watch.counted_s)
            if not (watch.is_odd or watch.spent_s):
                del watched[peer]

    def came_together(self, roster: Roster) -> None:
        """Note an average: what was held against its members is over, but for the bans of those that have lied."""
        for peer in roster.peers:
            known = self._absent.pop(peer, None)
            if known is not None and known.has_lied:
                self._absent[peer] = _Absent(num_bans=known.num_bans, until_s=known.until_s, out_s=known.out_s, has_lied=True)

    def begin_step(self, now_s: float) -> None:
        """Between two steps members come back whose time is over. Until then their ledgers are done anew by others."""
        self._disbelieved_since_s = {}
        self._step = -1
        stay = {peer for peer, known in self._absent.items() if now_s < known.until_s}
        self.peers = tuple(sorted(stay | self._on_probation))[:MAX_SIDELINED]
        over = [p for p, known in self._absent.items() if known.has_lied and now_s >= known.until_s + known.out_s]
        for peer in set(over).difference(self.peers):
            del self._absent[peer]

    def forget(self) -> None:
        """Rule T3 (fence): rounds that failed while this peer slept say nothing of others. A lie stays one."""
        self._absent = {peer: known for peer, known in self._absent.items() if known.has_lied}
        self._watched = {}
        self._disbelieved_since_s = {}
        self._step, self.peers = -1, ()
        self._banned = frozenset()

    def last_in_turn(self, step: int) -> tuple[PeerId, ...]:
        """The last members to propose in this step: those that have led a round in vain, and then those that rounds have waited for."""
        return (*self._led, *self._waited_for) if step == self._step else ()
