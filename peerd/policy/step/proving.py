"""Whether the state that a joiner has downloaded is that of its stage: rule 21 (prove).

A lineage says which averages the parameters of a state should have gone through, and nothing in a state shows that they have. So a joiner
of a certified run compares its state with those of its mates, by sketches under a seed that it draws after the download: a giver cannot
know it. Each mate tells the sketch of the state that it has just then, whatever its step. The joiner knows its own sketch of each step that
it comes through as it catches up, so nobody waits for anybody to be at one step.

What counts is by how much each mate's state is off the joiner's. Unlike devices round differently, so mates may be a little off each other,
and the joiner may be off them by about as much.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from peerd.errors import TimedOutError
from peerd.policy.hashing import digest
from peerd.policy.step.sketching import PAUSE
from peerd.table.record import PeerId, PeerRecord

MOST_ASKED = 16
"""So many mates are asked, drawn by the joiner: who lies cannot choose to be among them."""
TOLERANCE = 1e-4
"""How far two states of one stage may be apart in any case, of each tensor as a share of its norm. With devices of one kind they are equal
to the bit. Unlike ones apply the same averages, so they differ by the rounding of updates alone."""
TIMES_APART = 4.0
"""The joiner may be so many times as far off its mates as more than half of them are off each other."""
MOST_APART = 1e-2
"""Mates that are further apart than that do not hold one state, on whatever devices."""
DISPUTE_REMEDY = "it serves once most of them hold one state, or only one is left; the organiser can `peerd ban` the one that is wrong"
MOST_SHOWN = 3
"""So many peers that disagree are named."""
PATIENCE_TIMES = 2.0
"""For so many lives of a record (or five seconds, where they are shorter) a mate that does not answer is waited for."""

BUSY_TIMES = 8.0
"""One that says that it tells others just now is waited for so many times as long, or for so many of its pauses where states are large."""

MOST_TRIES = 2
"""All stages are downloaded at most so often for an export because too few peers of one could be asked before they went on."""

Distance = Callable[[PeerId | None, PeerId | None], float]
"""How far two states are apart, each of a mate, or this joiner's own (None)."""


class StateVerdict(Enum):
    RIGHT = "more than half of those that were asked hold it"
    WRONG = "more than half of those that were asked hold another one"
    OPEN = "some have yet to answer"
    DISPUTED = "all have answered, and no state is held by more than half"


def verdict(known: Sequence[PeerId], num_asked: int, distance: Distance, *, is_over: bool = False) -> StateVerdict:
    """What the mates whose states are known say of the joiner's, of as many as were asked.

    The mate that has more than half of all within the least distance stands for them. Before all have answered these must be as near as
    devices of one kind are: later ones may be nearer still. `is_over`: nobody answers any more; OPEN then says that too few have.
    """
    is_all, most = len(known) >= num_asked, num_asked // 2 + 1
    if len(known) < most:
        return StateVerdict.DISPUTED if is_all else StateVerdict.OPEN
    radius, own = min((sorted(distance(one, other) for other in known)[most - 1], distance(one, None)) for one in known)
    if not radius <= (MOST_APART if is_all or is_over else TOLERANCE):
        return StateVerdict.DISPUTED if is_all else StateVerdict.OPEN
    return StateVerdict.RIGHT if own <= max(TOLERANCE, TIMES_APART * radius) else StateVerdict.WRONG


def why_disputed(asked: Sequence[PeerId]) -> str:
    """Why a joiner does not serve where nobody can say which state is that of the stage."""
    shown = f" ({', '.join(sorted(asked))})" if len(asked) <= MOST_SHOWN else ""
    who = f"the {len(asked)} peers of this stage{shown}"
    return f"{who} hold unlike states, and more than half hold none of them: it cannot know which is right"


def drawn(seed: bytes, mates: Sequence[PeerRecord]) -> list[PeerId]:
    """Those whose states count. Nobody can choose to be among them."""
    return sorted((mate.peer for mate in mates), key=lambda peer: digest(seed, peer))[:MOST_ASKED]


class Proof:
    """The proof of one downloaded state. Times are seconds on the caller's clock."""

    def __init__(self, givers: Collection[PeerId], seed: bytes, now_s: float, patience_s: float) -> None:
        """`givers`: the donors that offered this very state, each of which says thereby that it holds it."""
        self.givers = frozenset(givers)
        self._seed = seed
        self._began_s, self._patience_s = now_s, PATIENCE_TIMES * patience_s
        self._until_s, self._busy_until_s = now_s + self._patience_s, now_s + BUSY_TIMES * self._patience_s

    def is_over(self, now_s: float) -> bool:
        """Whether a dispute has stood for so long that the states are to be compared anew: mates may hold other ones by now."""
        return now_s >= self._until_s + self._patience_s

    def asked(self, mates: Sequence[PeerRecord]) -> list[PeerId]:
        """Those whose states count."""
        return drawn(self._seed, mates)

    def sketched(self, took_s: float) -> None:
        """A sketch took this joiner so long, and takes its mates about as long: that is how long their pauses are."""
        self._busy_until_s = max(self._busy_until_s, self._began_s + BUSY_TIMES * PAUSE * took_s)

    def judge(
        self,
        mates: Sequence[PeerRecord],
        known: Collection[PeerId],
        behind: Collection[PeerId],
        distance: Distance,
        now_s: float,
        busy: Collection[PeerId] = (),
    ) -> StateVerdict:
        """What comes of it now. `known`: mates whose states can be compared; `behind`: those that have answered from an earlier step than
        that of the download; `busy`: those that are there, and have said that they tell later.

        A mate that says nothing for long does not count any more: nobody is kept out by one that is mute. Where most are behind for as
        long, the state is not that of this stage. A dispute stands once it has lasted as long.
        """
        asked = self.asked(mates)
        told = [peer for peer in asked if peer in known or peer in self.givers]
        awaited = {peer for peer in asked if peer in busy and peer not in told} if now_s < self._busy_until_s else set()
        if now_s >= self._until_s:
            asked = [peer for peer in asked if peer in told or peer in behind or peer in awaited]
        if not asked:
            return StateVerdict.RIGHT
        found, is_over = verdict(told, len(asked), distance), now_s >= self._until_s and not awaited
        if found is StateVerdict.OPEN and is_over:
            return StateVerdict.WRONG
        return StateVerdict.OPEN if found is StateVerdict.DISPUTED and not is_over else found


@dataclass(frozen=True, slots=True)
class Opinion:
    """What the other peers of a stage say of a state that was downloaded and is not to be served: for an export."""

    verdict: StateVerdict = StateVerdict.RIGHT
    num_asked: int = 0
    """Peers of the stage whose states count, those that gave this one included."""
    givers: frozenset[PeerId] = frozenset()

    def why_unproven(self, stage: int) -> str:
        """Why the state may be false for all that the other peers of the stage say; empty if most of them hold it."""
        match self.verdict:
            case StateVerdict.WRONG:
                return f"most peers of stage {stage} hold another state than {', '.join(sorted(self.givers)) or 'its donor'} gave"
            case StateVerdict.DISPUTED:
                return f"the peers of stage {stage} hold unlike states, and more than half hold none of them"
            case StateVerdict.OPEN:
                return f"too few peers of stage {stage} told in time what they hold"
        return f"only one peer serves stage {stage}, so nobody else could confirm its state" if self.num_asked == 1 else ""


class Acceptance:
    """Which states an export takes, as it tries to get all stages at one step."""

    def __init__(self) -> None:
        self._tries = 0
        self._met_false = False
        """A stage was given a false state before."""

    def why_not(self, opinions: Sequence[Opinion], apart: str, *, is_last: bool) -> str:
        """Why these states of all stages are not taken; empty if they are. `apart`: why they are of no one step; empty if they are.

        What most of a stage contradict is never taken. Where too few could be asked in time, all is tried again: once, unless this is the
        last time. Once a stage was given a false state, what nobody has confirmed is not taken any more, and there are MOST_TRIES for each
        peer that was asked: as many liars may be in the way. Raises TimedOutError after them, as it might go on like that for ever.
        """
        false = self._reasons(opinions, StateVerdict.WRONG)
        self._met_false |= bool(false)
        if false or apart:
            return false or apart
        self._tries += 1
        unasked = self._reasons(opinions, StateVerdict.OPEN)
        if not self._met_false:
            return unasked if self._tries < MOST_TRIES and not is_last else ""
        if unasked and self._tries >= MOST_TRIES * max(each.num_asked for each in opinions):
            remedy = "export again: what nobody confirms is then written with a warning"
            raise TimedOutError(f"a peer gave a false state, and after {self._tries} tries {unasked}", remedy)
        return unasked

    def _reasons(self, opinions: Sequence[Opinion], found: StateVerdict) -> str:
        return "; ".join(each.why_unproven(stage) for stage, each in enumerate(opinions) if each.verdict is found)
