"""Compares the state that a joiner has downloaded with those of its mates: rule 21 (prove) of docs/protocol.md."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import structlog

from peerd.background import Tasks
from peerd.errors import BadMessageError
from peerd.policy.step.certifying import mates_to_follow
from peerd.policy.step.joining import JoinPlan
from peerd.policy.step.proving import DISPUTE_REMEDY, Proof, StateVerdict, why_disputed
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.stage.download import Downloader
from peerd.stage.executor import Executor, Priority
from peerd.stage.sketches import Sketch, StateResidual, distances, new_seed
from peerd.stage.state import StageState
from peerd.swarm.clock import clock_s
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId, Phase
from peerd.table.swarm_view import CONDEMNED_LIVES

LOG = structlog.get_logger()
LEAST_PATIENCE_S = 5.0
MOST_KEPT = 64
"""Own sketches that a joiner keeps, of the steps through which it catches up."""


class Proving:
    """In a run that does not certify it takes every state."""

    def __init__(self, state: StageState, executor: Executor, membership: Membership, downloader: Downloader, rules: StepRules) -> None:
        self._state = state
        self._executor = executor
        self._membership = membership
        self._downloader = downloader
        self._rules = rules
        self._tasks = Tasks()
        self._proof: Proof | None = None
        self._givers: frozenset[PeerId] = frozenset()
        self.disputed = ""
        """Why this joiner cannot know whether its state is that of its stage; empty: it can, or it has none to compare."""
        self._seed, self._previous = b"", False
        self._own: dict[int, Sketch] = {}
        """Of this joiner's state, by step."""
        self._told: dict[PeerId, tuple[int, bytes]] = {}
        """The steps and sums of mates."""
        self._residuals: dict[PeerId, StateResidual] = {}
        """How far mates' states are off this joiner's, as far as that is known. Donors that offered its own hold it."""
        self._next_ask_s: dict[PeerId, float] = {}
        self._busy: set[PeerId] = set()
        """Mates that have said last that they tell others just now."""
        self.given_up = 0
        """States that were not those of the stage."""
        self._refused = ""
        """Why the last one was not; empty once another one is proven."""

    def begin(self, previous: bool = False) -> None:
        """A state was downloaded and loaded, or with `previous` the parameters of the step before."""
        self.end()
        self._previous = previous
        if self._rules.certifies and not (previous and self._state.holdings.previous is None):
            self._givers = self._downloader.givers
            self._compare_with_mates(self._givers)

    def _compare_with_mates(self, givers: Collection[PeerId]) -> None:
        """Begin a comparison. That `givers` hold this state is believed."""
        self._forget()
        self._seed = new_seed()
        self._proof = Proof(givers, self._seed, clock_s(), max(LEAST_PATIENCE_S, self._membership.view.ttl_s))

    def end(self) -> None:
        """There is nothing to prove: it is proven, or this peer's state comes from its own disk."""
        self._forget()
        self._proof, self.disputed = None, ""

    def _forget(self) -> None:
        self._tasks.cancel()
        self._own, self._told, self._residuals, self._next_ask_s = {}, {}, {}, {}
        self._busy = set()

    async def keep_up(self) -> None:
        """Make this joiner's sketch of the step at which it is."""
        record = self._state.record
        if self._proof is None or record.phase is not Phase.JOINING or record.step in self._own:
            return
        if self._own and record.step < min(self._own):  # it has given this state up for what is on its disk
            self.end()
            return
        proof = self._proof

        def timed() -> tuple[Sketch, float]:
            began_s = clock_s()
            return self._state.holdings.sketch(record, self._seed, self._previous), clock_s() - began_s

        self._own[record.step], took_s = await self._executor.run(Priority.LEDGER, timed)
        proof.sketched(took_s)
        for step in sorted(self._own)[1:-MOST_KEPT]:
            del self._own[step]

    def noted(self, own: OwnState, now: Situation) -> OwnState:
        """With what is known of the state. What is yet to be known is asked for."""
        proof = self._proof
        if proof is None:
            return own
        if own.record.phase is not Phase.JOINING:
            self.end()
            return own
        if not self._own:
            return replace(own, unproven=self.disputed or "its state is yet to be compared with those of its mates")
        mates = mates_to_follow(now)
        for mate in set(proof.asked(mates)) - proof.givers:
            self._compare(mate, proof)
        first = min(self._own)
        behind = {mate for mate, (step, _sums) in self._told.items() if step < first}
        match proof.judge(mates, self._residuals, behind, distances(self._residuals), now.now_s, self._busy):
            case StateVerdict.RIGHT:
                self._refused = ""
                self.end()
                return own
            case StateVerdict.OPEN:
                return replace(own, unproven=self.disputed or "its state is being compared with those of its mates")
            case StateVerdict.WRONG:
                return replace(own, disproved="most of the stage hold another state than the one that was downloaded")
            case StateVerdict.DISPUTED:
                self._note_dispute(proof, why_disputed(proof.asked(mates)), now.now_s)
        return replace(own, unproven=self.disputed)

    def _note_dispute(self, proof: Proof, reason: str, now_s: float) -> None:
        """Another download would show no more, so this joiner keeps its state, catches up with it, and compares it again after a while."""
        if not self.disputed:
            LOG.warning("this peer does not serve", reason=reason, remedy=DISPUTE_REMEDY)
        self.disputed = reason
        if proof.is_over(now_s):
            self._compare_with_mates(())

    def planned(self, plan: JoinPlan) -> JoinPlan:
        """When this joiner will serve: nobody knows while its state is disputed. If it has refused one, the plan says why."""
        if self.disputed:
            return JoinPlan(None, self.disputed)
        return replace(plan, text=f"{plan.text or 'begins again'}; it has refused a state: {self._refused}") if self._refused else plan

    def give_up(self, reason: str) -> None:
        """This peer gives the state up. Ask those that gave it no more for a while, if there are others."""
        LOG.warning("the downloaded state is refused; it is downloaded anew", reason=reason, givers=sorted(self._givers))
        self._downloader.distrust(self._givers, CONDEMNED_LIVES * self._membership.view.ttl_s)
        self.given_up, self._refused = self.given_up + 1, reason
        self.end()

    def _compare(self, mate: PeerId, proof: Proof) -> None:
        """Compare a mate's state with this joiner's of the same step, or ask for it."""
        told = self._told.get(mate)
        if mate in self._residuals:
            return
        if told is not None and told[0] in self._own:
            try:
                self._residuals[mate] = self._own[told[0]].residual(told[1])
                return
            except BadMessageError as error:
                LOG.warning("a mate's sketch of its state is refused", mate=mate, error=error.message)
                del self._told[mate]
        elif told is not None and told[0] > max(self._own):
            return  # this joiner gets there
        if clock_s() >= self._next_ask_s.get(mate, 0.0):
            self._next_ask_s[mate] = math.inf  # until it has answered
            self._tasks.start(self._ask(mate, proof))

    async def _ask(self, mate: PeerId, proof: Proof) -> None:
        answer = await self._downloader.sketch(mate, self._state.record.stage, self._seed, self._previous)
        if proof is self._proof:
            if answer.told is not None:
                self._told[mate] = answer.told
            (self._busy.add if answer.is_busy else self._busy.discard)(mate)
            self._next_ask_s[mate] = clock_s() + answer.again_s
            self._membership.wake()
