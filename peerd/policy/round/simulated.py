"""A round over given links in virtual time, chunk by chunk, by the rules of this folder: how long it takes, or whom it ends without.

An uplink sends one chunk after the other, a downlink takes them as they come; a chunk counts once the whole of it has arrived and its
receiver has verified it. Words are small and go before bulk, so all but the opening of a window is told at once here, and all members judge
by the same debts. Nothing is drawn: the same links and faults give the same round.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from peerd.policy.round.chunks import AFTER_OWN, Flow, chunk_bytes, next_flow, part_limit, sum_limit
from peerd.policy.round.debts import Debts, Edge
from peerd.policy.round.edges import Detours, blamed
from peerd.policy.round.links import Line, LinkBreak, RoundLinks
from peerd.policy.round.proposing import turn_after_s

LOOKS = 8
"""Looks at the clocks in an averaging time."""
LIFE = 5 / 3
"""Averaging times after which a member that is not heard of does not count as live any more."""
RECONNECT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """What the proposal says. Members are numbered as in the roster."""

    slice_bytes: Sequence[int]
    """The size of each member's slice."""
    num_chunks: int
    """Of each slice."""
    within_s: float
    averaging_s: float
    turns: Sequence[int]
    """The members in the order in which they propose, and judge."""


@dataclass(slots=True)
class RoundEnd:
    """How a round ended. Times are seconds since nothing was missing."""

    began_s: float = 0.0
    ended_s: float = 0.0
    is_done: bool = False
    """Every member that lives has the average."""
    left_out: int = -1
    """The member that the next round goes on without."""
    reason: str = ""
    edges: set[Edge] = field(default_factory=set)
    """Told in this round."""
    carriers: dict[Edge, int] = field(default_factory=dict)
    """Edges over which nothing passed, and the mate that carried it."""
    sent: list[float] = field(default_factory=list)
    """Bytes sent by each member."""


def simulate(plan: RoundPlan, links: RoundLinks, most_s: float = 1e5, judge: type[Debts] = Debts) -> RoundEnd:
    """Run one round. It ends after `most_s` at the latest; `judge`: by which wording members are at fault."""
    proposer = next((rank for rank, member in enumerate(plan.turns) if member not in links.secretive), None)
    if proposer is None:
        return RoundEnd(reason="nobody proposes", ended_s=most_s, sent=[0.0 for _ in plan.slice_bytes])
    return _Play(plan, links, judge, turn_after_s(proposer, plan.averaging_s)).run(most_s)


class _Play:
    def __init__(self, plan: RoundPlan, links: RoundLinks, judge: type[Debts], began_s: float) -> None:
        self.plan, self.links = plan, links
        self.members = range(len(plan.slice_bytes))
        self.now_s = 0.0
        self.end = RoundEnd(began_s=began_s, sent=[0.0 for _ in self.members])
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = 0
        changes = sorted(links.changes, key=lambda each: each.at_s)
        self.ups, self.downs = [], []
        for member, line in enumerate(links.lines):
            mine = [each for each in changes if each.member == member]
            self.ups.append(Line(line.up, [(each.at_s, each.up) for each in mine]))
            self.downs.append(Line(line.down, [(each.at_s, each.down) for each in mine]))
        self.down_free_s = [0.0 for _ in self.members]
        self.sending: list[Flow | None] = [None for _ in self.members]
        self.transfer = [0 for _ in self.members]
        """The number of each member's present transfer; another one than when it began: it broke."""
        self.epochs = [[0 for _ in self.members] for _ in self.members]
        self.is_dead = [False for _ in self.members]
        self.onward: dict[Edge, Flow] = {}
        """Parts on their second hop, at the mate that carries them."""
        self.detours = Detours(sorted(self.members, key=lambda member: -links.lines[member].up), plan.averaging_s)
        self.debts = judge(plan.slice_bytes, plan.num_chunks, plan.within_s, plan.averaging_s, began_s)
        self.parts = {(i, k): self.new_flow(i, k, k, i) for i in self.members for k in self.members if i != k}
        self.sums = {(k, i): self.new_flow(k, i, k, k) for i in self.members for k in self.members if i != k}
        self.flows = [[flow for table in (self.sums, self.parts) for (i, _), flow in table.items() if i == m] for m in self.members]

    def new_flow(self, sender: int, to: int, slice_number: int, of: int) -> Flow:
        turn = 2 * ((to - sender) % len(self.members)) + (of != slice_number) + (0 if sender == of else AFTER_OWN)
        return Flow(to, slice_number, of, turn, to)

    # Time

    def at(self, at_s: float, act: Callable[..., None], *arguments: Any) -> None:
        self.number += 1
        heapq.heappush(self.queue, (at_s, self.number, act, arguments))

    def run(self, most_s: float) -> RoundEnd:
        for member, at_s in self.links.killed_s.items():
            self.at(at_s, self.kill, member)
        for each in self.links.breaks:
            self.at(each.from_s, self.break_link, each)
            self.at(each.until_s + RECONNECT_S, self.kick_all)
        self.at(self.end.began_s, self.begin)
        while self.queue and not self.is_over:
            at_s, _, act, arguments = heapq.heappop(self.queue)
            if at_s > most_s:
                break
            self.now_s = at_s
            act(*arguments)
        self.end.carriers = dict(self.debts.carriers)
        self.end.ended_s = self.now_s if self.is_over else most_s
        return self.end

    @property
    def is_over(self) -> bool:
        return self.end.is_done or bool(self.end.reason)

    def begin(self) -> None:
        for member in self.members:
            self.debts.heard(member, self.now_s)
        for (_, k), flow in self.parts.items():
            flow.limit = part_limit(self.debts.sizes[k], 0)
        self.end.is_done = self.debts.is_done
        self.kick_all()
        self.look()

    # Sending

    def kick_all(self) -> None:
        for member in self.members:
            self.kick(member)

    def kick(self, member: int) -> None:
        """Begin to send the next chunk, if the uplink is free."""
        if self.sending[member] is not None or self.is_dead[member] or member in self.links.mute:
            return
        flows = self.flows[member]
        if self.links.breaks or self.links.dead:
            flows = [flow for flow in flows if flow.hop >= 0 and self.links.passes(member, flow.hop, self.now_s)]
        flow = next_flow(flows)
        if flow is None:
            return
        number, hop, now_s = flow.next, flow.hop, self.now_s
        size = self.num_bytes(flow, number)
        flow.next += 1
        self.sending[member] = flow
        self.transfer[member] += 1
        delay_s = self.links.delay_s[member][hop]
        sent_s = self.ups[member].end_s(now_s, size)
        taken_s = self.downs[hop].end_s(max(now_s + delay_s, self.down_free_s[hop]), size)
        if sent_s < now_s + self.plan.averaging_s:  # else it is broken: others do not wait for it
            self.down_free_s[hop] = taken_s
        self.at(sent_s, self.sent, member, self.transfer[member], size)
        self.at(max(taken_s, sent_s + delay_s), self.arrives, member, hop, flow, number, self.epochs[member][hop])

    def num_bytes(self, flow: Flow, number: int) -> int:
        return chunk_bytes(self.plan.slice_bytes[flow.slice], self.plan.num_chunks, number)

    def sent(self, member: int, transfer: int, size: int) -> None:
        if self.transfer[member] == transfer and not self.is_dead[member]:
            self.end.sent[member] += size
            self.sending[member] = None
            self.kick(member)

    def arrives(self, sender: int, hop: int, flow: Flow, number: int, epoch: int) -> None:
        if self.epochs[sender][hop] != epoch or self.is_dead[hop] or self.is_dead[sender]:
            return
        if sender in self.links.tears or hop in self.links.deaf:
            flow.hop = -1
            self.at(self.now_s + RECONNECT_S, self.connect, flow, sender)
        elif hop != flow.to:
            self.carry(hop, flow, number)
        elif flow.is_sum:
            self.takes_sum(flow.slice, hop, number)
        else:
            self.takes_part(flow.of, hop, number)

    def takes_part(self, author: int, reducer: int, number: int) -> None:
        debts = self.debts
        if number != debts.parts[author][reducer]:
            return
        before = debts.summed[reducer]
        debts.told_part(author, reducer, number + 1, self.now_s)
        self.parts[author, reducer].broke = 0
        if debts.summed[reducer] > before:
            delay_s = max(self.links.delay_s[reducer][member] for member in self.members)
            self.at(self.now_s + delay_s, self.opens, reducer, debts.summed[reducer])
            self.widen_sums(reducer)

    def takes_sum(self, reducer: int, member: int, number: int) -> None:
        if number != self.debts.sums[reducer][member]:
            return
        self.debts.told_sum(reducer, member, number + 1, self.now_s)
        self.sums[reducer, member].broke = 0
        if self.debts.carriers:
            self.widen_sums(reducer)
        else:
            self.sums[reducer, member].limit = sum_limit(self.debts.summed[reducer], number + 1)
            self.kick(reducer)
        if number + 1 == self.debts.sizes[reducer]:
            self.end.is_done = self.is_everywhere

    def opens(self, reducer: int, num_summed: int) -> None:
        """The others hear that the reducer has summed so many chunks."""
        for member in self.members:
            if member != reducer:
                self.parts[member, reducer].limit = part_limit(self.debts.sizes[reducer], num_summed)
                self.kick(member)

    def widen_sums(self, reducer: int) -> None:
        summed, arrived = self.debts.summed[reducer], self.debts.sums[reducer]
        for member in self.members:
            if member != reducer:
                carrier = self.debts.carriers.get(Edge(reducer, member), reducer)
                self.sums[reducer, member].limit = sum_limit(min(summed, arrived[carrier]), arrived[member])
                if carrier != reducer:
                    self.kick(carrier)
        self.kick(reducer)

    @property
    def is_everywhere(self) -> bool:
        """Whether every member that lives has all sums."""
        sums, sizes = self.debts.sums, self.debts.sizes
        return all(sums[k][i] >= sizes[k] for k in self.members for i in self.members if not self.is_dead[i])

    # Ways through a mate

    def carry(self, mate: int, flow: Flow, number: int) -> None:
        """A chunk of somebody's part has come to the mate that is to carry it further."""
        edge = Edge(flow.of, flow.to)
        if self.debts.carriers.get(edge) != mate or self.debts.carried[edge] != number:
            return
        flow.broke = 0
        self.debts.told_carried(edge, number + 1, self.now_s)
        onward = self.onward.get(edge)
        if onward is None:
            onward = self.onward[edge] = self.new_flow(mate, flow.to, flow.slice, flow.of)
            self.flows[mate].append(onward)
            onward.next = number
        onward.limit = number + 1
        self.kick(mate)

    def detour(self, edge: Edge, mate: int) -> None:
        """From now on the mate carries what does not pass over this edge."""
        before = self.debts.carriers.get(edge, edge.source)
        self.debts.carry(edge, mate, self.now_s)
        self.flows[before].remove(self.sums[edge])
        self.sums[edge] = self.new_flow(mate, edge.target, edge.source, edge.source)
        self.flows[mate].append(self.sums[edge])
        self.parts[edge].hop = mate
        self.resume(edge)
        self.widen_sums(edge.source)
        self.kick(edge.source)

    def resume(self, edge: Edge) -> None:
        """Go on with the first chunk that has not been verified."""
        source, target = edge
        self.sums[edge].next = self.debts.sums[source][target]
        self.parts[edge].next = self.debts.parts[source][target]
        self.debts.lost(edge, self.now_s)
        onward = self.onward.pop(edge, None)
        if onward is not None:
            for flows in self.flows:
                flows[:] = [each for each in flows if each is not onward]

    # What goes wrong

    def connect(self, flow: Flow, sender: int) -> None:
        """A flow that broke goes on at its chunk."""
        edge = Edge(flow.of, flow.to)
        carrier = self.debts.carriers.get(edge)
        flow.hop = flow.to if carrier is None or carrier == sender else carrier
        flow.broke += 1
        self.resume(edge)
        self.kick(sender)
        if carrier is not None:
            self.kick(carrier)

    def kill(self, member: int) -> None:
        self.is_dead[member] = True
        self.end.is_done = self.is_everywhere

    def break_link(self, each: LinkBreak) -> None:
        """What is under way breaks off; it goes on at the chunk where it broke."""
        for one in self.members:
            for other in self.members:
                if one == other or not each.cuts(one, other):
                    continue
                self.epochs[one][other] += 1
                flow = self.sending[one]
                if flow is not None and flow.hop == other:
                    self.sending[one] = None
                    self.transfer[one] += 1
                for edge in (Edge(one, other), *(edge for edge, mate in self.debts.carriers.items() if mate in (one, other))):
                    self.resume(edge)
                self.down_free_s[other] = self.now_s if each.other < 0 and other == each.member else self.down_free_s[other]
        self.kick_all()

    # Judging

    def look(self) -> None:
        averaging_s, debts = self.plan.averaging_s, self.debts
        for member in self.members:
            if not self.is_dead[member] and not self.is_cut(member):
                debts.heard(member, self.now_s)
        debts.look(self.now_s)
        gone = [member for member in self.members if debts.silent_s(member, self.now_s) > LIFE * averaging_s]
        if gone:
            self.close(gone[0], "it is not live any more")
            return
        edges = debts.behind(self.now_s)
        self.end.edges.update(edges)
        self.go_around(edges)
        self.judge(edges)
        if not self.is_over:
            self.at(self.now_s + averaging_s / LOOKS, self.look)

    def is_cut(self, member: int) -> bool:
        others = [other for other in self.members if other != member]
        return bool(self.links.breaks) and not any(self.links.passes(member, other, self.now_s) for other in others)

    def go_around(self, edges: Sequence[Edge]) -> None:
        """Let mates carry what does not pass."""
        for edge, mate in self.detours.due(self.debts, edges, self.end.edges, self.now_s):
            self.detour(edge, mate)

    def judge(self, edges: Sequence[Edge]) -> None:
        able = [m not in self.links.secretive and not self.is_dead[m] and not self.is_cut(m) for m in self.plan.turns]
        rank = next((rank for rank, is_able in enumerate(able) if is_able), 0)
        for fault in self.debts.at_fault(self.now_s, rank):
            tellers = [m for m in self.members if m not in self.links.secretive]
            self.close(*blamed(fault, self.debts, edges, self.end.edges, tellers))
            return

    def close(self, member: int, reason: str) -> None:
        self.end.left_out, self.end.reason = member, reason
