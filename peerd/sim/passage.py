"""Microbatches on their way through simulated stages, by the daemon's own wiring, slots and order of passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from peerd.planner.steady import SLOTS_FACTOR, RunCost
from peerd.policy.route.admission import slots_for
from peerd.policy.route.wiring import FIRST_PAUSE_S, PartedLine, Router, next_pause_s, point_of
from peerd.sim.clock import Clock
from peerd.sim.ledgers import NOBODY, Held, Ledgers
from peerd.sim.machine import BACKWARD, FORWARD, FORWARD_SHARE, Machine
from peerd.sim.network import SharedLines
from peerd.table.record import PeerId, PeerRecord
from peerd.timeline.spans import Span, SpanKind

OWN_ROUTERS = 300
"""Up to so many peers each caller keeps its own opinion of the next stage's peers. In a larger swarm the callers of a stage share one,
which learns at the end of a step: the opinions of thousands of callers about thousands of peers would take the simulator's time."""


@dataclass(slots=True, eq=False)
class PipelinePeer:
    """A daemon without torch. `number` is its place in the network."""

    number: int
    record: PeerRecord
    machine: Machine
    microbatch_s: float
    """Computing time of a microbatch in its stage, forward and backward."""
    keeps_spans: bool
    spans: list[Span] = field(default_factory=list)
    held: int = 0
    """Microbatches between acceptance and reply."""
    is_there: bool = True
    is_reliable: bool = True

    def note(
        self, kind: SpanKind, began_s: float, ended_s: float, step: int, index: int = -1, peer: str = "", num_bytes: float = 0
    ) -> None:
        if self.keeps_spans:
            self.spans.append(Span(kind, began_s, ended_s, step, index, peer, int(num_bytes)))


@dataclass(slots=True, eq=False)
class Hop:
    """A microbatch at one stage: from the moment its caller looks for a peer until that has the gradient."""

    caller: PipelinePeer
    stage: int
    step: int
    index: int
    ended: Callable[[Hop, PipelinePeer], None]
    """What the caller does once the callee's gradient is there."""
    attempt: int = 0
    pause_s: float = FIRST_PAUSE_S
    asked_s: float = 0.0
    came_s: float = 0.0
    """When it began to wait for the pass that is due."""
    downstream_s: float = 0.0
    held_s: float = 0.0
    """What it has waited and computed here and in later stages."""
    needs_gradient: bool = False
    """Whether a stage before this one lacks the microbatch."""
    is_lost: bool = False
    """Its callee is gone."""
    is_orphan: bool = False
    """Its caller is gone, so nobody waits for the gradient."""


class Passages:
    """Carries microbatches. `added` is called with each one that a stage has computed, and the peer's number.

    With `ledgers`, peers come and go: what a stage holds is not computed there again, and what was sent to a peer that is gone is sent to
    another one once that is noticed.
    """

    def __init__(
        self,
        clock: Clock,
        lines: SharedLines,
        cost: RunCost,
        slots: int,
        added: Callable[[Held, int], None],
        ledgers: Ledgers | None = None,
    ) -> None:
        self._clock, self._lines, self._cost = clock, lines, cost
        self._slots, self._added, self._ledgers = slots, added, ledgers
        self._under_way: defaultdict[int, dict[Hop, None]] = defaultdict(dict)
        """By callee and by caller, in the order of time, where peers come and go."""
        self._last = len(cost.stages) - 1
        self._stages: list[tuple[PeerRecord, ...]] = [() for _ in cost.stages]
        self._peers: dict[PeerId, PipelinePeer] = {}
        self._routers: dict[tuple[PeerId, int], Router] = {}
        self._parted_lines: dict[Router, tuple[int, PartedLine]] = {}
        """By router, and for which step."""
        self._learned: list[tuple[Router, PeerId, float, float]] = []
        self.num_refused = 0

    def serve(self, stages: Sequence[Sequence[PipelinePeer]]) -> None:
        """The peers of each stage."""
        self._parted_lines.clear()
        self._stages = [tuple(peer.record for peer in peers) for peers in stages]
        self._peers = {peer.record.peer: peer for peers in stages for peer in peers}

    def serve_stage(self, stage: int, peers: Sequence[PipelinePeer]) -> None:
        """The peers of one stage, where one has come or gone."""
        self._parted_lines = {router: known for router, known in self._parted_lines.items() if known[1].peers[0].stage != stage}
        self._stages[stage] = tuple(peer.record for peer in peers)
        self._peers |= {peer.record.peer: peer for peer in peers}

    def launch(self, trainer: PipelinePeer, step: int, index: int, ended: Callable[[Hop, PipelinePeer], None]) -> None:
        self._send(Hop(trainer, 0, step, index, ended))

    def gone(self, peer: PipelinePeer, noticed_s: float) -> None:
        """Nothing comes of what this peer had, and its callers send that to others `noticed_s` later."""
        peer.is_there, peer.held = False, 0
        for hop in self._under_way.pop(peer.number, ()):
            if hop.caller is peer:
                hop.is_orphan = True
            elif not hop.is_lost:
                hop.is_lost = True
                if not hop.is_orphan:
                    self._clock.after(noticed_s, self._send_again, hop)

    def _send_again(self, hop: Hop) -> None:
        if not hop.is_orphan and hop.caller.is_there:
            again = Hop(hop.caller, hop.stage, hop.step, hop.index, hop.ended, hop.attempt + 1, needs_gradient=hop.needs_gradient)
            self._send(again)

    def step_ended(self) -> None:
        """Let the routers that several callers share learn what the step has shown."""
        for learned in self._learned:
            self._observe(*learned)
        self._learned.clear()

    @property
    def _are_shared(self) -> bool:
        return len(self._peers) > OWN_ROUTERS

    def _router(self, hop: Hop) -> Router:
        whose = PeerId("") if self._are_shared else hop.caller.record.peer
        return self._routers.setdefault((whose, hop.stage), Router())

    def _parted(self, router: Router, hop: Hop) -> PartedLine:
        """The line of a stage, which stays while its step lasts and nothing is measured."""
        known = self._parted_lines.get(router)
        if known is None or known[0] != hop.step:
            known = self._parted_lines[router] = hop.step, router.parted(self._stages[hop.stage], hop.step)
        return known[1]

    def _observe(self, router: Router, peer: PeerId, elapsed_s: float, later_s: float) -> None:
        router.observe(peer, elapsed_s, later_s)
        self._parted_lines.pop(router, None)

    def _send(self, hop: Hop) -> None:
        if hop.is_orphan:
            return
        router, ledgers = self._router(hop), self._ledgers
        if ledgers is not None and not ledgers.is_missing_from(hop.stage, hop.step, hop.index):
            self._ask_holder(hop, ledgers.holder(hop.stage, hop.step, hop.index))
            return
        record = self._parted(router, hop).at(point_of(hop.index, self._cost.microbatches_per_step, hop.attempt))
        callee = self._peers[record.peer]
        if callee.held >= slots_for(0, SLOTS_FACTOR * self._slots) or not callee.is_there:
            self.num_refused += callee.is_there
            self._clock.after(hop.pause_s, self._send, hop)
            hop.pause_s, hop.attempt = next_pause_s(hop.pause_s, router.response_s(record.peer)), hop.attempt + 1
            return
        callee.held += 1
        if ledgers is not None:
            self._under_way[callee.number][hop] = self._under_way[hop.caller.number][hop] = None
        hop.asked_s = self._clock.now_s
        num_bytes = self._cost.stages[hop.stage - 1].forth_bytes if hop.stage else 0.0
        began_s, arrives_s = self._lines.send(hop.caller.number, callee.number, num_bytes, hop.asked_s)
        hop.caller.note(SpanKind.SEND, began_s, arrives_s, hop.step, hop.index, record.peer, num_bytes)
        callee.note(SpanKind.RECEIVE, began_s, arrives_s, hop.step, hop.index, hop.caller.record.peer, num_bytes)
        self._clock.at(arrives_s, self._arrived, hop, callee)

    def _ask_holder(self, hop: Hop, number: int) -> None:
        """No stage from here on lacks it: the one that holds it gives the gradient again, where an earlier stage needs that."""
        holder = next((peer for record in self._stages[hop.stage] if (peer := self._peers[record.peer]).number == number), hop.caller)
        num_bytes = self._cost.stages[hop.stage - 1].back_bytes if hop.stage and hop.needs_gradient else 0.0
        asked_s = self._lines.send(hop.caller.number, holder.number, 0.0, self._clock.now_s)[1]
        self._clock.at(self._lines.send(holder.number, hop.caller.number, num_bytes, asked_s)[1], self._given, hop, holder)

    def _given(self, hop: Hop, holder: PipelinePeer) -> None:
        if not hop.is_orphan:
            hop.ended(hop, holder)

    def _lacks(self, hop: Hop) -> bool:
        """Whether this stage has to compute both passes: it lacks the microbatch, or has to pass a gradient on."""
        ledgers = self._ledgers
        return ledgers is None or hop.needs_gradient or ledgers.holder(hop.stage, hop.step, hop.index) == NOBODY

    def _arrived(self, hop: Hop, callee: PipelinePeer) -> None:
        if hop.is_lost:
            return
        hop.came_s = self._clock.now_s
        usual_s = callee.microbatch_s * (1.0 if hop.stage == self._last else FORWARD_SHARE)
        callee.machine.compute(hop.step, FORWARD, usual_s, partial(self._forward_done, hop, callee))

    def _forward_done(self, hop: Hop, callee: PipelinePeer, began_s: float, ended_s: float) -> None:
        if hop.is_lost:
            return
        self._passed(SpanKind.FORWARD, hop, callee, began_s, ended_s)
        if hop.stage == self._last:
            middle_s = began_s + (ended_s - began_s) * FORWARD_SHARE
            if callee.keeps_spans:
                callee.spans[-1] = callee.spans[-1]._replace(ended_s=middle_s)
            callee.note(SpanKind.BACKWARD, middle_s, ended_s, hop.step, hop.index)
            self._reply(hop, callee)
            return
        hop.came_s = ended_s
        below = Hop(callee, hop.stage + 1, hop.step, hop.index, partial(self._gradient_came, hop, callee), needs_gradient=self._lacks(hop))
        self._send(below)

    def _gradient_came(self, hop: Hop, callee: PipelinePeer, below: Hop, giver: PipelinePeer) -> None:
        """The later stage's peer has given the gradient of a hop below this one."""
        if hop.is_lost:
            return
        now_s = self._clock.now_s
        hop.downstream_s, hop.held_s = now_s - hop.came_s, hop.held_s + below.held_s
        callee.note(SpanKind.BELOW, hop.came_s, now_s, hop.step, hop.index, giver.record.peer)
        hop.came_s = now_s
        if not below.needs_gradient:
            self._reply(hop, callee, is_computed=False)
            return
        usual_s = callee.microbatch_s * (1 - FORWARD_SHARE)
        callee.machine.compute(hop.step, BACKWARD, usual_s, partial(self._backward_done, hop, callee))

    def _backward_done(self, hop: Hop, callee: PipelinePeer, began_s: float, ended_s: float) -> None:
        if hop.is_lost:
            return
        self._passed(SpanKind.BACKWARD, hop, callee, began_s, ended_s)
        self._reply(hop, callee)

    def _passed(self, kind: SpanKind, hop: Hop, callee: PipelinePeer, began_s: float, ended_s: float) -> None:
        hop.held_s += ended_s - hop.came_s
        callee.note(SpanKind.QUEUED, hop.came_s, began_s, hop.step, hop.index)
        callee.note(kind, began_s, ended_s, hop.step, hop.index)

    def _reply(self, hop: Hop, callee: PipelinePeer, *, is_computed: bool = True) -> None:
        if is_computed:
            self._added((hop.stage, hop.step, hop.index), callee.number)
        num_bytes = self._cost.stages[hop.stage - 1].back_bytes if hop.stage and is_computed else 0.0
        began_s, arrives_s = self._lines.send(callee.number, hop.caller.number, num_bytes, self._clock.now_s)
        if num_bytes:
            callee.note(SpanKind.SEND_GRADIENT, began_s, arrives_s, hop.step, hop.index, hop.caller.record.peer, num_bytes)
            hop.caller.note(SpanKind.RECEIVE_GRADIENT, began_s, arrives_s, hop.step, hop.index, callee.record.peer, num_bytes)
        self._clock.at(arrives_s, self._replied, hop, callee)

    def _replied(self, hop: Hop, callee: PipelinePeer) -> None:
        if hop.is_lost:
            return  # it was on its way when its callee went
        callee.held -= 1
        if self._ledgers is not None:
            self._under_way[callee.number].pop(hop, None)
            self._under_way[hop.caller.number].pop(hop, None)
        if hop.is_orphan:
            return
        elapsed_s = self._clock.now_s - hop.asked_s
        router = self._router(hop)
        if self._are_shared:
            self._learned.append((router, callee.record.peer, elapsed_s, hop.downstream_s))
        else:
            self._observe(router, callee.record.peer, elapsed_s, hop.downstream_s)
        hop.ended(hop, callee)


def machine_of(clock: Clock, noise: float, seed: int, number: int) -> Machine:
    return Machine(clock, noise, Random(f"machine/{seed}/{number}"))
