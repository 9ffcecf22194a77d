"""The debts of a round: what each member owes, and who is at fault.

No round has a fixed time. Only a member that could move something and does not is blamed.
What a member has moved is what its receivers have told: the highest *verified* chunk of each of its flows. A chunk sent again is none, and
half a chunk is none. A member owes only what it could send now: for a part the reducer's window is open, for a sum all parts of that chunk
are there. So who waits for others owes nothing, and while a round is not done somebody owes. A member is at fault

- once it has owed for one averaging time, to anybody, and no chunk of its has arrived anywhere; or
- once it has owed for three, and in the last three has moved less than half of what the proposal assumed of it, and moves less than half as
  fast as another member. Where all are as slow, the proposal was wrong: rates that are believed may be old.

What does not pass from one to the other may go through a mate (`carry`). Then the sender owes it to the mate, and the mate to the receiver.

The clocks of a pair stand while one of the two is not heard of at all. Whether a silent peer lives is another question, that of T2 (alive).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from peerd.policy.round.chunks import WINDOW, part_limit

STILL = 1.0
"""Averaging times of owing without progress after which a member is at fault."""
SLOW = 3.0
"""Averaging times over which the rate of a member that owes is judged."""
LEAST_OF_ASSUMED = 0.5
"""The share of the assumed rate below which a member is at fault."""
CARRIED = 0.5
"""The share of that rate that is assumed of what goes through a mate: the mate needs its line for its own, too."""
BEHIND = 0.5
"""Averaging times of owing without progress after which an edge is told."""
HEARD = 0.25
"""Averaging times without a word after which a member is not heard of."""
RETURNS = 2
"""How often in a round a member that was not heard of begins anew to owe without progress: its link was dead, and its connections take a
while to notice that it is not any more."""
LOOKS = 64
"""How many looks are kept: with eight in an averaging time, those of the last eight."""
NEVER = float("-inf")


class Edge(NamedTuple):
    """A pair of members, of which the first has something for the second that does not arrive."""

    source: int
    target: int


class AtFault(NamedTuple):
    member: int
    reason: str


@dataclass(slots=True)
class Owing:
    """A clock that runs while something is owed. Times are seconds."""

    since_s: float = NEVER
    """When it began to run; `NEVER`: it stands."""
    owed_s: float = 0.0
    """What it showed when it began to run."""
    moved_at_s: float = 0.0
    """What it showed when a chunk last arrived."""
    moved: float = 0.0
    """Bytes that have arrived."""
    assumed: float = 0.0
    """Bytes per second that the proposal assumes while it runs."""
    due: float = 0.0
    """Bytes that were assumed until it began to run."""

    @property
    def runs(self) -> bool:
        return self.since_s != NEVER

    def shows_s(self, now_s: float) -> float:
        return self.owed_s + now_s - self.since_s if self.runs else self.owed_s

    def still_s(self, now_s: float) -> float:
        """For how long something has been owed since a chunk last arrived."""
        return self.shows_s(now_s) - self.moved_at_s

    def due_by(self, now_s: float) -> float:
        return self.due + self.assumed * (now_s - self.since_s) if self.runs else self.due

    def move(self, num_bytes: float, now_s: float) -> None:
        self.moved += num_bytes
        self.moved_at_s = self.shows_s(now_s)

    def run(self, now_s: float, assumed: float = 0.0) -> None:
        self.since_s, self.assumed = now_s, assumed

    def stand(self, now_s: float) -> None:
        self.due, self.owed_s, self.since_s = self.due_by(now_s), self.shows_s(now_s), NEVER


class _Look(NamedTuple):
    """What all clocks showed at one moment."""

    at_s: float
    owed_s: list[float]
    """By member: for how long it has owed."""
    due: list[list[float]]
    """By edge: the bytes assumed, and those that have arrived."""
    moved: list[list[float]]


class Debts:
    """What all members owe, as far as the receivers have told it. Every member of a round may keep one; the leader judges by its own.

    `slice_bytes`: what each member reduces; `num_chunks`: of each slice; `within_s`: how long the round takes at most at the rates that the
    proposal assumes.
    """

    def __init__(self, slice_bytes: Sequence[int], num_chunks: int, within_s: float, averaging_s: float, now_s: float = 0.0) -> None:
        self.members = range(len(slice_bytes))
        self.sizes = sizes = [num_chunks if each else 0 for each in slice_bytes]
        self._slice_bytes, self._chunk_bytes = list(slice_bytes), [each / num_chunks for each in slice_bytes]
        self.parts = [[size if i == k else 0 for k, size in enumerate(sizes)] for i in self.members]
        """`parts[i][k]`: the chunks of i's part that reducer k has."""
        self.sums = [[sizes[k] if i == k else 0 for i in self.members] for k in self.members]
        """`sums[k][i]`: the chunks of k's sum that member i has."""
        self.num_verified = 0
        """Chunks that have been told, of all flows."""
        self.summed = [size if len(sizes) == 1 else 0 for size in sizes]
        """The chunks of its slice for which reducer k has every part."""
        self.carriers: dict[Edge, int] = {}
        """The mate that carries what does not pass over an edge."""
        self.carried: dict[Edge, int] = {}
        """The chunks of the source's part that this mate has, or the target."""
        self._hops: dict[Edge, list[Edge]] = {}
        """By hop: the edges that lead over it through a mate."""
        self._within_s, self._averaging_s = within_s, averaging_s
        self._edges = [[Owing() for _ in self.members] for _ in self.members]
        self._totals = [Owing() for _ in self.members]
        self._num_owed = [0 for _ in self.members]
        self._heard_s = [now_s for _ in self.members]
        self._is_heard = [True for _ in self.members]
        self._returns = [0 for _ in self.members]
        self._looks: deque[_Look] = deque(maxlen=LOOKS)
        for i in self.members:
            self._update_all(i, now_s)

    # What is told

    def told_part(self, author: int, reducer: int, chunks: int, now_s: float) -> None:
        """`reducer` has verified so many chunks of the part of `author`."""
        before = self.parts[author][reducer]
        chunks = min(chunks, self.sizes[reducer])
        if chunks <= before:
            return
        self.parts[author][reducer] = chunks
        self.num_verified += chunks - before
        edge = Edge(author, reducer)
        sender = self._moves(edge, chunks, self.carried.get(edge, 0), (chunks - before) * self._chunk_bytes[reducer], now_s)
        if before == self.summed[reducer]:
            slowest = min(row[reducer] for row in self.parts)
            if slowest > before:
                self.summed[reducer] = slowest
                for i in self.members:
                    self._update(i, reducer, now_s)
                    self._update(reducer, i, now_s)
                self._update_hops(now_s)
                return
        self._update(sender, reducer, now_s)
        self._update_hops(now_s)

    def told_sum(self, reducer: int, member: int, chunks: int, now_s: float) -> None:
        """`member` has verified so many chunks of the sum of `reducer`."""
        before = self.sums[reducer][member]
        chunks = min(chunks, self.summed[reducer])
        if chunks > before:
            self.sums[reducer][member] = chunks
            self.num_verified += chunks - before
            edge = Edge(reducer, member)
            at_mate = self.sums[reducer][self.carriers[edge]] if edge in self.carriers else 0
            sender = self._moves(edge, chunks, at_mate, (chunks - before) * self._chunk_bytes[reducer], now_s)
            self._update(sender, member, now_s)
            self._update_hops(now_s)

    def told_carried(self, edge: Edge, chunks: int, now_s: float) -> None:
        """The mate that carries it has verified so many chunks of the source's part for the target."""
        before, mate = self.carried[edge], self.carriers[edge]
        chunks = min(chunks, self.sizes[edge.target])
        if chunks > before:
            self.carried[edge] = chunks
            self._moves(Edge(edge.source, mate), chunks, 0, (chunks - before) * self._chunk_bytes[edge.target], now_s)
            self._update_hops(now_s)

    def carry(self, edge: Edge, mate: int, now_s: float) -> None:
        """From now on this mate carries what does not pass over the edge: parts that come to it, and the sums that it has."""
        self.carriers[edge], self.carried[edge] = mate, self.parts[edge.source][edge.target]
        before, self._hops = list(self._hops), {}
        for each, carrier in self.carriers.items():
            for hop in (Edge(each.source, carrier), Edge(carrier, each.target)):
                self._hops.setdefault(hop, []).append(each)
        for hop in (edge, *before, *self._hops):
            self._stand(*hop, now_s)
            self._update(*hop, now_s)

    def lost(self, edge: Edge, now_s: float) -> None:
        """What was under way through the mate broke off. It goes on at the first chunk that the target has not verified."""
        if edge in self.carriers:
            self.carried[edge] = self.parts[edge.source][edge.target]
            self._update_hops(now_s)

    def heard(self, member: int, now_s: float) -> None:
        """Something came of the member: a word in the round, or a record that rises."""
        self._heard_s[member] = now_s
        if not self._is_heard[member]:
            self._is_heard[member] = True
            self._returns[member] += 1
            if self._returns[member] <= RETURNS:
                for clock in (self._totals[member], *self._edges[member], *(row[member] for row in self._edges)):
                    clock.moved_at_s = clock.shows_s(now_s)
            self._update_all(member, now_s)

    def silent_s(self, member: int, now_s: float) -> float:
        return now_s - self._heard_s[member]

    def look(self, now_s: float) -> None:
        """Take notice of the time. To be called several times in each averaging time."""
        for member in self.members:
            if self._is_heard[member] and self.silent_s(member, now_s) > HEARD * self._averaging_s:
                self._is_heard[member] = False
                self._update_all(member, now_s)
        due = [[edge.due_by(now_s) for edge in row] for row in self._edges]
        moved = [[edge.moved for edge in row] for row in self._edges]
        self._looks.append(_Look(now_s, [total.shows_s(now_s) for total in self._totals], due, moved))

    # What follows

    def owes(self, source: int, target: int) -> bool:
        """Whether `source` could send something to `target` now that has not arrived."""
        if source == target:
            return False
        if self.carriers:
            edge = Edge(source, target)
            if any(self._owes_over(edge, each) for each in self._hops.get(edge, ())):
                return True
            if edge in self.carriers:
                return False
        summed, has = self.summed, self.parts[source][target]
        if has < self.sizes[target] and has < summed[target] + WINDOW:
            return True
        return self.sums[source][target] < summed[source]

    def _owes_over(self, hop: Edge, edge: Edge) -> bool:
        """Whether something of the edge, which a mate carries, could pass over this hop now."""
        (source, target), at_mate = edge, self.carried[edge]
        if hop.source == source:
            return at_mate < part_limit(self.sizes[target], self.summed[target])
        return at_mate > self.parts[source][target] or self.sums[source][hop.source] > self.sums[source][target]

    @property
    def is_done(self) -> bool:
        return all(has >= size for row, size in zip(self.sums, self.sizes, strict=True) for has in row)

    def at_fault(self, now_s: float, later: float = 0.0) -> list[AtFault]:
        """The members at fault; `later`: averaging times that this judge waits for longer, as others judge before it."""
        found = []
        for member in self.members:
            total = self._totals[member]
            if not total.runs:
                continue
            if total.still_s(now_s) >= (STILL + later) * self._averaging_s:
                found.append(AtFault(member, "it owes chunks, and none of its arrived anywhere"))
            elif self._is_slow(member, (SLOW + later) * self._averaging_s, now_s) and self._is_slowest(member, now_s):
                found.append(AtFault(member, "what it owes comes at less than half of the rate assumed"))
        return found

    def behind(self, now_s: float) -> list[Edge]:
        """The edges: what is owed, and does not arrive, or comes at less than half of the rate assumed."""
        since = next((look for look in self._looks if look.at_s >= now_s - SLOW * self._averaging_s), None)
        found = []
        for i, row in enumerate(self._edges):
            for k, edge in enumerate(row):
                if edge.runs and (edge.still_s(now_s) >= BEHIND * self._averaging_s or self._is_behind_since(since, i, k, now_s)):
                    found.append(Edge(i, k))
        return found

    def owed_by(self, member: int) -> list[Edge]:
        return [Edge(member, target) for target, edge in enumerate(self._edges[member]) if edge.runs]

    def owed_s(self, member: int, now_s: float) -> float:
        """For how many seconds this member has owed something, to anybody."""
        return self._totals[member].shows_s(now_s)

    def is_still(self, edge: Edge, now_s: float) -> bool:
        """Whether nothing arrives over this edge, so that a mate should carry it."""
        clock = self._edges[edge.source][edge.target]
        return clock.runs and clock.still_s(now_s) >= BEHIND * self._averaging_s

    def over(self, hop: Edge) -> list[Edge]:
        """The edges that lead over this hop through a mate."""
        return self._hops.get(hop, [])

    def assumed(self, source: int, target: int) -> float:
        """Bytes per second that are assumed of an edge while something is owed over it.

        An author owes to the mate what it is to carry, so that no slow line hides behind mates. Of the mate nothing is assumed for it:
        nobody is too slow for helping.
        """
        carried = sum(self._slice_bytes[each.target] for each in self.over(Edge(source, target)) if each.source == source)
        return (self._slice_bytes[target] + self._slice_bytes[source] + CARRIED * carried) / self._within_s

    def _is_slow(self, member: int, over_s: float, now_s: float) -> bool:
        shows_s = self._totals[member].shows_s(now_s)
        if shows_s < over_s:
            return False
        look = next((look for look in reversed(self._looks) if look.owed_s[member] <= shows_s - over_s), None)
        moved = due = 0.0
        for k, edge in enumerate(self._edges[member]):
            moved += edge.moved - (look.moved[member][k] if look else 0.0)
            due += edge.due_by(now_s) - (look.due[member][k] if look else 0.0)
        return moved < LEAST_OF_ASSUMED * due

    def _is_slowest(self, member: int, now_s: float) -> bool:
        """Whether some other member moves more than twice as fast while it owes. Where all are slow, the assumption was wrong."""
        paces = [total.moved / max(total.shows_s(now_s), 1e-9) for total in self._totals]
        return paces[member] < LEAST_OF_ASSUMED * max(pace for other, pace in enumerate(paces) if other != member)

    def _is_behind_since(self, look: _Look | None, source: int, target: int, now_s: float) -> bool:
        if look is None:
            return False
        edge = self._edges[source][target]
        due = edge.due_by(now_s) - look.due[source][target]
        moved = edge.moved - look.moved[source][target]
        return due >= edge.assumed * STILL * self._averaging_s and moved < LEAST_OF_ASSUMED * due

    # Clocks

    def _moves(self, edge: Edge, chunks: int, at_mate: int, num_bytes: float, now_s: float) -> int:
        """So many chunks have arrived over an edge. Returns who sent the last ones: a mate, if one carries them and has as many.

        What was under way when the mate was named arrives without it, and is the source's own.
        """
        sender = self.carriers.get(edge, edge.source) if chunks <= at_mate else edge.source
        self._edges[sender][edge.target].move(num_bytes, now_s)
        self._totals[sender].move(num_bytes, now_s)
        return sender

    def _update_hops(self, now_s: float) -> None:
        for hop in self._hops:
            self._update(*hop, now_s)

    def _update_all(self, member: int, now_s: float) -> None:
        for other in self.members:
            self._update(member, other, now_s)
            self._update(other, member, now_s)

    def _update(self, source: int, target: int, now_s: float) -> None:
        edge = self._edges[source][target]
        runs = self._is_heard[source] and self._is_heard[target] and self.owes(source, target)
        if not runs:
            self._stand(source, target, now_s)
        elif not edge.runs:
            edge.run(now_s, self.assumed(source, target))
            self._num_owed[source] += 1
            if self._num_owed[source] == 1:
                self._totals[source].run(now_s)

    def _stand(self, source: int, target: int, now_s: float) -> None:
        edge = self._edges[source][target]
        if edge.runs:
            edge.stand(now_s)
            self._num_owed[source] -= 1
            if self._num_owed[source] == 0:
                self._totals[source].stand(now_s)
