"""What is done about an edge: a mate carries what does not pass, and where no mate can, a round goes on without one of the two ends.

Both ends tell the leader of an edge. One edge alone proves nothing: the sender may hold back, the receiver may lie, the link may be dead.
But who holds back from one can be tried with others, and then has edges to many. So the end with more edges to different members, in this
step and the last ten, is left out; of two with as many the one that told of it, so that no word alone puts out somebody else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from peerd.policy.round.debts import BEHIND, AtFault, Debts, Edge
from peerd.table.record import PeerId

STEPS_REMEMBERED = 10


@dataclass(slots=True)
class PastEdges:
    """The edges of the last ten steps, by peer, as a leader keeps them."""

    _steps: deque[frozenset[tuple[PeerId, PeerId]]] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))

    def end_step(self, edges: Iterable[tuple[PeerId, PeerId]]) -> None:
        self._steps.append(frozenset(edges))

    def among(self, peers: Sequence[PeerId]) -> frozenset[Edge]:
        """Those between members of a roster, by their numbers in it."""
        place = {peer: number for number, peer in enumerate(peers)}
        pairs = (pair for step in self._steps for pair in step)
        return frozenset(Edge(place[source], place[target]) for source, target in pairs if source in place and target in place)


def whom_to_leave_out(owed: Collection[Edge], edges: Collection[Edge], told_by: Collection[int]) -> int:
    """The end of the edges `owed`, of one member at fault, that is left out.

    `edges`: those of this step and of the last ten; `told_by`: the members that told of an edge of theirs.
    """
    ends = {end for edge in owed for end in edge}
    most = max(_num_partners(end, edges) for end in ends)
    worst = sorted(end for end in ends if _num_partners(end, edges) == most)
    tellers = [end for end in worst if end in told_by]
    sources = [edge.source for edge in owed if edge.source in worst]
    return tellers[0] if len(tellers) == 1 else next(iter(sources), worst[0])


def named_by(judge: int, worst: int, faulty: int, num_members: int) -> int | None:
    """The member that a judge names where `faulty` is at fault and `worst` is the end to leave out; None: it leaves that to the next judge.

    A judge does not leave out itself. Of two members nobody else could judge, so it names the other one.
    """
    if faulty == judge:
        return None
    if worst != judge:
        return worst
    return faulty if num_members == 2 else None


def blamed(fault: AtFault, debts: Debts, edges: Collection[Edge], known: Collection[Edge], told_by: Collection[int]) -> AtFault:
    """The member that a fault puts out: the one that owes, or the one at which what is owed does not arrive.

    `edges`: those over which too little passes now; `known`: all of this step and of the last ten.
    """
    owed = debts.owed_by(fault.member)
    owed = [edge for edge in owed if edge in edges] or owed
    worst = whom_to_leave_out(owed, {*known, *owed}, told_by)
    return fault if worst == fault.member else AtFault(worst, "what others owe it does not arrive")


class Detours:
    """The mates that carry what does not pass in one round. `able`: the members that may, in order of preference."""

    def __init__(self, able: Sequence[int], averaging_s: float) -> None:
        self._able = able
        self._averaging_s = averaging_s
        self._tried: dict[Edge, tuple[tuple[int, ...], float]] = {}
        """By edge: the mates that were to carry what does not pass over it, and since when the last one."""

    def due(
        self, debts: Debts, edges: Sequence[Edge], known: Collection[Edge], now_s: float, dead: Collection[Edge] = ()
    ) -> Iterator[tuple[Edge, int]]:
        """Yield edges over which nothing passes, and those that lead over such a hop, each with the mate that carries from now on.

        `dead`: edges over which nothing can pass, as both ends say: nobody waits to see that.
        """
        still = [edge for edge in edges if debts.is_still(edge, now_s)] + [edge for edge in dead if debts.owes(*edge)]
        known = {*known, *dead}
        for edge in dict.fromkeys([*still, *(each for hop in still for each in debts.over(hop))]):
            tried, since_s = self._tried.get(edge, ((), -math.inf))
            if now_s < since_s + BEHIND * self._averaging_s:
                continue
            mate = mate_for(edge, known, self._able, tried)
            if mate is not None and (edge in debts.carriers or debts.owes(*edge)):
                self._tried[edge] = (*tried, mate), now_s
                yield edge, mate


def _num_partners(member: int, edges: Collection[Edge]) -> int:
    return len({end for edge in edges if member in edge for end in edge if end != member})


def mate_for(edge: Edge, edges: Collection[Edge], able: Sequence[int], tried: Collection[int] = ()) -> int | None:
    """The member that carries what does not pass over this edge; None if none can. `able`: those that may, in order of preference."""
    for mate in able:
        if mate in edge or mate in tried or Edge(edge.source, mate) in edges or Edge(mate, edge.target) in edges:
            continue
        return mate
    return None
