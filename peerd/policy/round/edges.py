"""What is done about an edge: a mate carries what does not pass, and where no mate can, a round goes on without one of the two ends.

Both ends tell the leader of an edge. One edge alone proves nothing: the sender may hold back, the receiver may lie, the link may be dead.
But who holds back from one can be tried with others, and then has edges to many. So the end with more edges to different members, in this
step and the last ten, is left out; of two with as many the one that told of it, so that no word alone puts out somebody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from peerd.policy.round.debts import Edge
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


def _num_partners(member: int, edges: Collection[Edge]) -> int:
    return len({end for edge in edges if member in edge for end in edge if end != member})


def mate_for(edge: Edge, edges: Collection[Edge], able: Sequence[int], tried: Collection[int] = ()) -> int | None:
    """The member that carries what does not pass over this edge; None if none can. `able`: those that may, in order of preference."""
    for mate in able:
        if mate in edge or mate in tried or Edge(edge.source, mate) in edges or Edge(mate, edge.target) in edges:
            continue
        return mate
    return None
