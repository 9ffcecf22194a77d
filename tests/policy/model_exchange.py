"""An open round of the protocol model: chunks as the links allow, words about them each beat, and what the judges make of these.

It drives the very rules of the daemon: which chunk is next (policy/round/chunks.py), what a proposal assumes (proposing.py), and who judges
(policy/step/judging.py). What a judge does is in `model_judge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from peerd.policy.round.chunks import AFTER_OWN, Flow, next_flow, part_limit
from peerd.policy.round.debts import Edge
from peerd.policy.round.proposing import assumed_s, fit, usual_s
from peerd.policy.step.judging import judges_of
from peerd.policy.step.part_sizes import PartSize, too_large
from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId
from tests.policy.model_confirming import Confirming
from tests.policy.model_judge import Judge
from tests.policy.model_theta import Average

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer
    from tests.policy.model_trust import Claim

BEATS = 8
"""In an averaging time."""
BROKE_S = 0.3
"""Until a connection that broke is there again."""
SUM_BYTES = 1_000_000
CODEC_BYTES = (SUM_BYTES, SUM_BYTES // 4)
"""What an accumulator takes in each codec."""
FAST = 20.0 * SUM_BYTES
HOME = 0.25 * SUM_BYTES
"""Bytes per second of a home's line."""
ROWS = 3
"""Chunks of a flow in an averaging time, at the rates assumed: fewer than in the daemon, since each is an event of the model."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a roster says of the exchange. Tuples are in roster order."""

    slice_bytes: tuple[int, ...]
    codecs: tuple[float, ...]
    """The share of its bytes that a member sends, in its codec."""
    num_chunks: int
    within_s: float


def plan_of(told: Sequence[float], averaging_s: float) -> Plan:
    """The leader's plan by the rates that the members tell, in bytes per second. Where one is too slow all send in the smallest codec."""
    fitted = fit(told, [FAST] * len(told), CODEC_BYTES, averaging_s) if len(told) > 1 else None
    if fitted is None or -1 in fitted.codecs:
        fitted = fit(told, [FAST] * len(told), CODEC_BYTES[-1:], math.inf)
        codecs = (CODEC_BYTES[-1] / SUM_BYTES,) * len(told)
    else:
        codecs = tuple(CODEC_BYTES[codec] / SUM_BYTES for codec in fitted.codecs)
    within_s = assumed_s(fitted.expected_s, usual_s(CODEC_BYTES[-1], told, HOME), averaging_s) if len(told) > 1 else averaging_s
    slices = tuple(round(share * SUM_BYTES) for share in fitted.shares)
    return Plan(slices, codecs, max(2, math.ceil(ROWS * fitted.expected_s / averaging_s)), within_s)


@dataclass(slots=True)
class Row:
    """What one member has, by its own word. `number` rises with each."""

    number: int
    parts: list[int]
    sums: list[int]
    carried: dict[Edge, int] = field(default_factory=dict)

    def copy(self) -> Row:
        return Row(self.number, list(self.parts), list(self.sums), dict(self.carried))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a part or of a sum. In the model it carries the whole content."""

    slice: int
    of: int
    to: int
    number: int
    content: Average
    done: int

    @property
    def is_sum(self) -> bool:
        return self.of == self.slice


class Exchange:
    """One round at one member. Members have numbers here: their places in the roster."""

    def __init__(self, peer: ModelPeer, roster: Roster, plan: Plan) -> None:
        self.peer, self.roster, self.plan = peer, roster, plan
        self.names = roster.peers
        self.me = self.names.index(peer.name)
        self.is_over = False
        """Closed, or dropped. One whose average is complete goes on: others may lack its sums."""
        self.opened_at_s = self.moved_at_s = peer.now
        self.judge_heard_s = -math.inf
        self.sizes = [plan.num_chunks if size else 0 for size in plan.slice_bytes]
        self.judges = [self.names.index(name) for name in judges_of(roster)]
        everyone = range(len(self.names))
        self.contents: dict[int, Average] = {self.me: tuple(peer.accumulator)}
        """By author: its part, from its first chunk on."""
        self.totals: dict[int, Average] = {}
        self.rows = [Row(0, [0] * len(self.names), [0] * len(self.names)) for _ in everyone]
        self.mine.parts[self.me] = self.sizes[self.me]
        self.carriers: dict[Edge, int] = {}
        self.held: dict[Edge, Average] = {}
        """Parts that this member carries."""
        self.flows = [self._new_flow(k, k, self.me) for k in everyone if k != self.me and self.sizes[k]]
        self.flows += [self._new_flow(i, self.me, self.me) for i in everyone if i != self.me and self.sizes[self.me]]
        for flow in self.flows:
            flow.limit = part_limit(self.sizes[flow.slice], 0) if not flow.is_sum else 0
        self._is_sending = False
        self._ahead: dict[tuple[int, int, int], dict[int, Chunk]] = {}
        """Chunks that overtook others."""
        self._done = peer.record.done
        self.judge = Judge(self) if self.me in self.judges else None
        self.claim: Claim | None = None
        """What came of it here."""
        self.confirming = Confirming(self)

    @property
    def mine(self) -> Row:
        return self.rows[self.me]

    @property
    def summed(self) -> int:
        """The chunks of this member's slice for which it has every part."""
        return min(self.mine.parts) if self.sizes[self.me] else 0

    @property
    def is_complete(self) -> bool:
        return self._has_all(self.mine)

    def _has_all(self, row: Row) -> bool:
        return all(has >= size for has, size in zip(row.sums, self.sizes, strict=True))

    @property
    def lacking(self) -> frozenset[PeerId]:
        """Members to which a connection is open, and that lack sums."""
        passes = self.peer.world.network.pair_passes
        rows = zip(self.names, self.rows, strict=True)
        return frozenset(name for name, row in rows if not self._has_all(row) and passes(self.peer.name, name))

    @property
    def complete(self) -> list[PeerId]:
        """The other members that have all sums, by their own word."""
        rows = zip(self.names, self.rows, strict=True)
        return [name for name, row in rows if name != self.peer.name and self._has_all(row)]

    def begin(self) -> None:
        self._sums_grow()
        self._kick()
        self.after_beat(self._beat)

    def _new_flow(self, to: int, slice_number: int, of: int) -> Flow:
        turn = 2 * ((to - self.me) % len(self.names)) + (of != slice_number) + (0 if of == self.me else AFTER_OWN)
        return Flow(to, slice_number, of, turn, to)

    def after_beat(self, act: Callable[[], None]) -> None:
        self.peer.after(self.peer.world.rules.averaging_s / BEATS, act)

    # Chunks

    def _kick(self) -> None:
        """Begin to send the next chunk, if the uplink is free."""
        flow = None if self._is_sending or self.is_over or self.peer.lies.sends_nothing else next_flow(self.flows)
        if flow is None:
            return
        self._is_sending, number = True, flow.next
        flow.next += 1
        size = self.plan.slice_bytes[flow.slice] * self.plan.codecs[flow.of] / self.plan.num_chunks
        self.peer.after(size / self.peer.up, lambda: self._sent(flow, number))

    def _sent(self, flow: Flow, number: int) -> None:
        self._is_sending = False
        if self.is_over:
            return
        content = self.totals.get(flow.slice) if flow.is_sum else self.contents.get(flow.of, self.held.get(Edge(flow.of, flow.to)))
        if flow.hop >= 0 and content is not None and flow in self.flows:
            if flow.is_sum and flow.slice == self.me:
                content = self.peer.lies.sum_for(flow.to, self.roster, content)
                self.peer.trust.signs(self.roster.average_id, content)
            done = self.roster.entries[flow.of].done if flow.of != self.me else self._done
            self._send(flow, Chunk(flow.slice, flow.of, flow.to, number, content, done))
        self._kick()

    def _send(self, flow: Flow, chunk: Chunk) -> None:
        average_id, hop = self.roster.average_id, flow.hop

        def broke() -> None:
            if flow.hop == hop:
                self._broke(flow)

        if self.peer.lies.tears:
            broke()
        else:
            self.peer.world.stream(self.peer, self.names[hop], lambda mate: mate.rounds.take_chunk(average_id, chunk), broke)

    def _broke(self, flow: Flow) -> None:
        """A connection broke, with what was on it: it goes on at the first chunk that the other end has not verified."""
        flow.hop, flow.broke = -1, flow.broke + 1
        self.peer.after(BROKE_S, lambda: self._connect(flow))

    def _connect(self, flow: Flow) -> None:
        if self.is_over or flow.hop >= 0 or flow not in self.flows:
            return
        hop = self.carriers.get(Edge(flow.of, flow.to), flow.to) if flow.of == self.me else flow.to
        other = self.peer.world.peers.get(self.names[hop])
        found = other.rounds.exchange_of(self.roster.average_id) if other is not None else None
        if found is None or not self.peer.world.network.pair_passes(self.peer.name, self.names[hop]):
            self.peer.after(BROKE_S, lambda: self._connect(flow))
            return
        row, edge = found.mine, Edge(flow.of, flow.to)
        verified = row.sums[flow.slice] if flow.is_sum else row.parts[flow.of]
        flow.next = verified if hop == flow.to else row.carried.get(edge, 0)
        flow.hop = hop
        self._kick()

    def take(self, chunk: Chunk) -> None:
        """A chunk has arrived whole."""
        entry, off = self.roster.entries[chunk.of], self.peer.world.scenario.off
        if self.is_over or (entry.done != chunk.done and "roster content" not in off):
            return
        way = (chunk.slice, chunk.of, chunk.to)
        ahead = self._ahead.setdefault(way, {})
        ahead[chunk.number] = chunk
        while (following := ahead.pop(self._verified(chunk), None)) is not None:
            self._verify(following)

    def _verified(self, chunk: Chunk) -> int:
        """The number of the next chunk of its flow."""
        if chunk.to != self.me:
            return self.mine.carried.get(Edge(chunk.of, chunk.to), 0)
        return self.mine.sums[chunk.slice] if chunk.is_sum else self.mine.parts[chunk.of]

    def _verify(self, chunk: Chunk) -> None:
        self.moved_at_s = self.peer.now
        self.mine.number += 1
        if chunk.to != self.me:
            self._take_to_carry(chunk)
        elif chunk.is_sum:
            self._take_sum(chunk)
        else:
            self.contents[chunk.of] = chunk.content
            self.mine.parts[chunk.of] += 1
            self._sums_grow()

    def _sums_grow(self) -> None:
        """What this member has summed may go to all, and as many chunks more may come."""
        if self.summed <= self.mine.sums[self.me] or self._is_too_large():
            return
        self.totals[self.me] = tuple(sorted(gradient for part in self.contents.values() for gradient in part))
        self.peer.trust.signs(self.roster.average_id, self.totals[self.me])
        self.mine.sums[self.me] = summed = self.summed
        for flow in self.flows:
            if flow.is_sum and flow.slice == self.me:
                flow.limit = summed
        if self.sizes[self.me] > part_limit(self.sizes[self.me], 0):
            me, average_id = self.me, self.roster.average_id
            for name in self.names:
                self.peer.world.stream(self.peer, name, lambda mate: mate.rounds.window_opens(average_id, me, summed))
        self._kick()
        self._ended()

    def _is_too_large(self) -> bool:
        """Rule 22 (size): leave a member out whose part of the whole slice is too large, before its sum is whole. Whether one was."""
        peer, parts = self.peer, [PartSize(1000.0 if self._inflates(name) else 1.0, 1) for name in self.names]
        large = too_large(parts, self.me, 0.0) if self.summed == self.sizes[self.me] and not peer.lies.inflates else []
        found = next(iter(large), None)
        if found is None or "size" in peer.world.scenario.off or self is not peer.rounds.current:
            return False
        peer.world.counts["too large"] += 1
        peer.trust.audits.withholding.withheld(self.names[found], self.roster.step, enough=1)
        peer.rounds.close_as_judge(self.names[found], "its part is too large", tells_whom=False)
        return True

    def _inflates(self, name: PeerId) -> bool:
        return self.peer.world.peers[name].lies.inflates

    def window_opens(self, reducer: int, summed: int) -> None:
        for flow in self.flows:
            if flow.slice == reducer and flow.of == self.me and not flow.is_sum:
                flow.limit = max(flow.limit, part_limit(self.sizes[reducer], summed))
        self._kick()

    def _take_sum(self, chunk: Chunk) -> None:
        self.totals[chunk.slice] = chunk.content
        self.mine.sums[chunk.slice] += 1
        for flow in self.flows:  # those that this member carries
            if flow.is_sum and flow.slice == chunk.slice:
                flow.limit = self.mine.sums[chunk.slice]
        self._kick()
        self._ended()

    def _ended(self) -> None:
        if not self.is_complete or self.claim is not None:
            return
        self.claim = self.peer.trust.claim_of(self)
        if self.confirming.is_due:
            self.confirming.begin(self.claim)
        else:
            self.peer.rounds.came_together(self)

    # Ways through a mate

    def carry(self, edge: Edge, mate: int) -> None:
        """From now on this mate carries what does not pass over an edge."""
        self.carriers[edge] = mate
        if self.judge is not None:
            self.judge.debts.carry(edge, mate, self.peer.now)
        mine = [flow for flow in self.flows if flow.of == self.me and flow.to == edge.target]
        for flow in mine if self.me == edge.source else ():
            if flow.is_sum:
                self.flows.remove(flow)
            else:
                flow.hop = -1
                self._connect(flow)
        if self.me == mate and self.sizes[edge.source]:
            flow = self._new_flow(edge.target, edge.source, edge.source)
            flow.limit, flow.hop = self.mine.sums[edge.source], -1
            self.flows.append(flow)
            self._connect(flow)

    def _take_to_carry(self, chunk: Chunk) -> None:
        edge = Edge(chunk.of, chunk.to)
        self.held[edge] = chunk.content
        self.mine.carried[edge] = chunk.number + 1
        onward = [flow for flow in self.flows if (flow.of, flow.to) == edge and not flow.is_sum]
        if not onward:
            onward = [self._new_flow(chunk.to, chunk.slice, chunk.of)]
            onward[0].next = chunk.number
            self.flows += onward
        onward[0].limit = chunk.number + 1
        self._kick()

    # Words, and what a judge makes of them

    def _beat(self) -> None:
        """Tell the judges what everybody has, as far as this member knows; a judge tells all, so that all hear of progress."""
        if self.is_over or all(self._has_all(row) for row in self.rows):
            return
        self.after_beat(self._beat)
        self.mine.number += 1
        rows = [row.copy() for row in self.rows]
        me, average_id = self.me, self.roster.average_id
        for number in range(len(self.names)) if self.judge is not None else self.judges:
            if number != me and not self.peer.lies.is_silent:
                self.peer.world.stream(self.peer, self.names[number], lambda mate: mate.rounds.told(average_id, me, rows))
        if self.judge is not None and not self.is_complete:
            self.judge.look()

    def told(self, author: int, rows: list[Row]) -> None:
        now_s = self.peer.now
        if author in self.judges:
            self.judge_heard_s = now_s
        for number, row in enumerate(rows):
            known = self.rows[number]
            if number == self.me or row.number <= known.number:
                continue
            if (row.parts, row.sums, row.carried) != (known.parts, known.sums, known.carried):
                self.moved_at_s = now_s
            self.rows[number] = row.copy()
            if self.judge is not None:
                self.judge.debts.heard(number, now_s)


def judge_silent_s(exchange: Exchange, now_s: float) -> float:
    """Seconds since another judge said anything; a round without one judges itself."""
    return now_s - max(exchange.judge_heard_s, exchange.opened_at_s)
