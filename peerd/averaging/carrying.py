"""What does not pass between two members of a round goes through a mate: an author's part to the mate and on, the sums that the mate has.

The leader names the mate. Each chunk of a round of three or more is signed by its author, so a mate can change none: a signature holds for
one round, slice, chunk and content. The mate checks it before it sends the chunk on, else it would be blamed for an author that signs
another one. It keeps no more of a part than the receiver's window has room for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from peerd.averaging.exchange import Exchange
from peerd.errors import BadMessageError
from peerd.policy.round.chunks import part_limit
from peerd.policy.round.debts import Edge
from peerd.wire.messages import Carried, Frame, Verified


@dataclass(slots=True)
class CarriedLoad:
    """What this member carries over one edge, as a mate."""

    first: int = -1
    """The first chunk of the part that came here; -1: none has."""
    frames: dict[int, Frame] = field(default_factory=dict)
    """By chunk: those of the part that the target has not verified."""
    here: int = 0
    """Chunks of the source's part that are here, or at the target."""
    told: Verified = field(default_factory=Verified)
    """What the target has verified of what the source owes it."""
    is_told: bool = False

    def advance(self) -> bool:
        """Count what is here without a gap. Returns whether that is more."""
        before, self.here = self.here, max(self.here, self.told.part)
        while self.here in self.frames:
            self.here += 1
        return self.here > before


class Carrying:
    """The edges of one round over which a mate carries, as this member knows them."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.mates: dict[Edge, int] = {}
        self._loads: dict[Edge, CarriedLoad] = {}
        self._ever: set[tuple[Edge, int]] = set()
        """Edges with each mate that was ever named for them: what is under way by an earlier one breaks no rule."""
        self.agreed: set[Edge] = set()
        """Edges from here whose mate has said that it carries."""
        self.told: dict[Edge, Verified] = {}
        """Of edges from here: what the target has verified, as far as it or the mate has told."""

    def take_over(self, carriers: Mapping[Edge, int]) -> list[Edge]:
        """Note the mates that the leader names. Returns the edges that have another one now."""
        num_members = self._exchange.layout.num_members
        changed = []
        for edge, mate in carriers.items():
            ends = {edge.source, edge.target, mate}
            if len(ends) == 3 and max(ends) < num_members and self.mates.get(edge) != mate:
                self.mates[edge] = mate
                self._ever.add((edge, mate))
                self.agreed.discard(edge)
                changed.append(edge)
                self._loads.pop(edge, None)
        return changed

    def load(self, edge: Edge) -> CarriedLoad:
        return self._loads.setdefault(edge, CarriedLoad())

    def from_source(self, source: int) -> Iterable[Edge]:
        """The edges that this member carries from a source."""
        return [edge for edge, mate in self.mates.items() if mate == self._exchange.me and edge.source == source]

    def to_target(self, target: int) -> Iterable[Edge]:
        """The edges that this member carries to a target."""
        return [edge for edge, mate in self.mates.items() if mate == self._exchange.me and edge.target == target]

    def through(self, mate: int) -> Iterable[Edge]:
        """The edges at this member's end that a mate carries."""
        me = self._exchange.me
        return [edge for edge, each in self.mates.items() if each == mate and me in (edge.source, edge.target)]

    def check(self, frame: Frame, sender: int) -> None:
        """Raises BadMessageError for a chunk that no mate carries for its author, from this sender, or to here."""
        edge, me = Edge(frame.author, frame.to), self._exchange.me
        if frame.to == me and (edge, sender) in self._ever:
            return
        if (edge, me) not in self._ever or sender != frame.author or frame.slice != frame.to:
            raise BadMessageError("a chunk that is not its sender's, and that its sender does not carry")
        if self.mates[edge] != me:
            return
        load = self.load(edge)
        if frame.number >= part_limit(self._exchange.layout.chunks_of(frame.to), max(load.told.summed, load.told.part)):
            raise BadMessageError("a chunk to carry that is not due yet")

    def takes(self, frame: Frame) -> bool:
        """Keep a chunk that is to be carried on. Returns whether more is here since.

        One may leave out others: the author has their sums, so it knows sooner than the mate that the target has them.
        """
        edge = Edge(frame.author, frame.to)
        load = self.load(edge)
        if self.mates[edge] != self._exchange.me:
            return False
        if load.first < 0:
            load.first = load.here = frame.number
        if frame.number >= load.here:
            load.frames[frame.number] = frame
        return load.advance()

    def told_by_target(self, edge: Edge, told: Verified) -> None:
        load = self.load(edge)
        load.told, load.is_told = told, True
        for number in [number for number in load.frames if number < told.part]:
            del load.frames[number]
        if load.first >= 0:
            load.advance()

    def first_of(self, edge: Edge, is_sum: bool) -> int:
        """The first chunk that this member sends over its hop of an edge."""
        if edge.source == self._exchange.me:
            return max(self.told.get(edge, Verified()).part, self._exchange.sums_here[edge.target])
        load = self.load(edge)
        return load.told.sum if is_sum else load.first

    def carried(self) -> dict[Edge, int]:
        """How many chunks of each source's part are here, to be carried on."""
        return {edge: self.load(edge).here for edge, mate in self.mates.items() if mate == self._exchange.me}

    def words_for(self, member: int) -> tuple[Carried, ...]:
        """What this member tells another of edges that a mate carries: as the target to the mate, and as the mate to the source."""
        here, me, found = self._exchange, self._exchange.me, []
        for edge in self.through(member):
            if edge.target == me:
                found.append(Carried(edge.source, me, 0, here.parts_here[edge.source], here.sums_here[edge.source], here.summed))
        for edge in self.from_source(member):
            load = self.load(edge)
            found.append(Carried(edge.source, edge.target, load.here, load.told.part, load.told.sum, load.told.summed))
        return tuple(found)

    def is_complete_for(self, member: int) -> bool:
        """Whether nothing more is to come from a member over edges that a mate carries."""
        here, layout = self._exchange, self._exchange.layout
        for edge in self.through(member):
            missing = here.parts_here[edge.source] < layout.chunks_of(here.me) or here.sums_here[edge.source] < layout.chunks_of(
                edge.source
            )
            if edge.target == here.me and missing:
                return False
        for edge in self.from_source(member):
            told = self.load(edge).told
            if told.part < layout.chunks_of(edge.target) or told.sum < layout.chunks_of(edge.source):
                return False
        return True
