"""What one member of a round sends on one line, and how far each of it is verified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from peerd.averaging.carrying import Carrying
from peerd.averaging.exchange import Exchange
from peerd.policy.round.chunks import AFTER_OWN, Flow, next_flow, part_limit, sum_limit
from peerd.policy.round.debts import Edge
from peerd.wire.messages import Verified


@dataclass(slots=True)
class Sending:
    """Chunks of one part or sum on their way over a line."""

    flow: Flow
    total: int
    """Chunks that are to be sent in all."""
    verified: int = 0
    carried: Edge | None = None
    """The edge over which they do not pass directly."""

    def told(self, verified: int) -> int:
        """Take how many chunks are verified. Returns the number if that is more than before, else 0."""
        verified = min(verified, self.total)
        if verified <= self.verified:
            return 0
        self.verified = verified
        self.flow.next = max(self.flow.next, verified)
        return verified


class Sendings:
    """What this member sends to one other: its own part and sum, and what a mate carries."""

    def __init__(self, number: int, exchange: Exchange, carrying: Carrying) -> None:
        self._number = number
        self._exchange = exchange
        self._carrying = carrying
        me, chunks_of = exchange.me, exchange.layout.chunks_of
        self._part = Sending(Flow(number, number, me, 1, number), chunks_of(number))
        self._sum = Sending(Flow(number, me, me, 0, number), chunks_of(me))
        self._summed = 0
        """Of the other's slice."""
        self._carried: dict[tuple[Edge, bool], Sending] = {}
        """By edge, and whether it is the source's sum."""

    def told(self, verified: Verified) -> tuple[int, int]:
        """Take what the other has verified of this member's part and sum. Returns the counts that have grown, else 0."""
        self._summed = max(self._summed, min(verified.summed, self._part.total))
        return self._part.told(verified.part), self._sum.told(min(verified.sum, self._exchange.summed))

    def told_by_mate(self, edge: Edge, here: int) -> None:
        """The mate has so many chunks of this member's part, which it carries."""
        sending = self._carried.get((edge, False))
        if sending is not None:
            sending.told(here)

    @property
    def own(self) -> Verified:
        """What the other has verified of this member's own chunks, as far as it has told."""
        return Verified(self._part.verified, self._sum.verified, self._summed)

    @property
    def are_done(self) -> bool:
        return all(sending.verified >= sending.total for sending in self._all())

    @property
    def num_verified(self) -> int:
        return sum(sending.verified for sending in self._all())

    def resume(self) -> None:
        """Begin anew at what is not verified. Chunks of a part whose sum is here are at the reducer, and the sum stands in their place."""
        for sending in self._all():
            flow = sending.flow
            is_own_part = flow.of == self._exchange.me and not flow.is_sum
            flow.next = max(sending.verified, self._exchange.sums_here[flow.slice]) if is_own_part else sending.verified

    def next(self) -> Sending | None:
        """What is to be sent now; None if nothing can be."""
        sendings = {id(sending.flow): sending for sending in self._all()}
        for sending in sendings.values():
            sending.flow.limit = self._limit(sending)
        flow = next_flow(sending.flow for sending in sendings.values())
        return sendings[id(flow)] if flow is not None else None

    def _limit(self, sending: Sending) -> int:
        exchange, edge = self._exchange, sending.carried
        if edge is None:
            return sum_limit(exchange.summed, sending.verified) if sending is self._sum else part_limit(sending.total, self._summed)
        if edge.source == exchange.me:
            return part_limit(sending.total, self._carrying.told[edge].summed) if edge in self._carrying.agreed else 0
        load = self._carrying.load(edge)
        if not load.is_told:
            return 0
        if sending.flow.is_sum:
            return sum_limit(exchange.sums_here[edge.source], sending.verified)
        return load.here if sending.flow.next in load.frames else 0

    def _all(self) -> Iterator[Sending]:
        yield self._sum
        yield self._part
        if self._carrying.mates:
            self._look_what_is_carried()
            yield from self._carried.values()

    def _look_what_is_carried(self) -> None:
        """Note what mates carry since, from here or to the other end of this line."""
        carrying, me, number, chunks_of = self._carrying, self._exchange.me, self._number, self._exchange.layout.chunks_of
        wanted: dict[tuple[Edge, bool], int] = {}
        for edge in carrying.through(number):
            if edge.source == me:
                wanted[edge, False] = chunks_of(edge.target)
        for edge in carrying.to_target(number):
            if carrying.load(edge).first >= 0:
                wanted[edge, False] = chunks_of(number)
            wanted[edge, True] = chunks_of(edge.source)
        for key in self._carried.keys() - wanted.keys():
            del self._carried[key]
        for (edge, is_sum), total in wanted.items():
            if (edge, is_sum) not in self._carried:
                owner = edge.source if is_sum else edge.target
                flow = Flow(number, owner, edge.source, AFTER_OWN + (not is_sum), number)
                flow.next = carrying.first_of(edge, is_sum)
                self._carried[edge, is_sum] = Sending(flow, total, flow.next, edge)
        for (edge, is_sum), sending in self._carried.items():
            if edge.target == number:
                told = carrying.load(edge).told
                sending.told(told.sum if is_sum else told.part)
