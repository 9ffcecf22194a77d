"""How a joiner of the protocol model finds out whether the state that it got is that of its stage: rule 21 (prove)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from peerd.policy.step.certifying import mates_to_follow
from peerd.policy.step.proving import Proof, StateVerdict, why_disputed
from peerd.policy.step.situation import OwnState, Situation
from peerd.table.record import Lineage, PeerId, Phase
from tests.policy.model_theta import ThetaId

if TYPE_CHECKING:
    from peerd.table.view import LiveView
    from tests.policy.model_peer import ModelPeer

ASKS_AGAIN_S, DISTRUSTS_S, LIFE_S = 0.5, 24.0, 3.0


class Proving:
    """Compares parameters as symbols: what lies between them is all or nothing."""

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self._proof: Proof | None = None
        self._givers: frozenset[PeerId] = frozenset()
        self.disputed = ""
        self._previous = False
        self._own: dict[int, ThetaId] = {}
        self._told: dict[PeerId, tuple[int, ThetaId]] = {}
        self._asked_at: dict[PeerId, float] = {}
        self._distrusted: dict[PeerId, float] = {}

    def begin(self, giver: PeerId, previous: bool = False) -> None:
        """A state is here, or the parameters of the step before."""
        self._previous = previous
        peer = self._peer
        is_off = "prove" in peer.world.scenario.off or not peer.world.rules.certifies
        self.end()
        self._givers = frozenset([giver])
        if not is_off:
            self._compare(self._givers)

    def _compare(self, givers: frozenset[PeerId]) -> None:
        peer = self._peer
        self._proof = Proof(givers, f"{peer.name} {peer.now}".encode(), peer.now, LIFE_S)
        self._own, self._told, self._asked_at = {}, {}, {}

    def end(self) -> None:
        """What this peer holds is proven, or comes from its own disk."""
        self._proof, self.disputed = None, ""

    @property
    def is_open(self) -> bool:
        """Whether the state may still turn out to be made up: this peer does not serve with it, and it is not checked."""
        return self._proof is not None

    def check_history(self) -> None:
        if not self.is_open:
            self._peer.world.check_history(self._peer)

    @property
    def distrusted(self) -> frozenset[PeerId]:
        return frozenset(peer for peer, until in self._distrusted.items() if self._peer.now < until)

    def noted(self, own: OwnState, live: LiveView) -> OwnState:
        """With what is known of the state."""
        peer, mine = self._peer, own.record
        if self._proof is None or mine.phase is not Phase.JOINING:
            return own
        held = peer.previous if self._previous else peer.theta
        if held is None:
            self.end()
            return own
        self._own.setdefault(mine.step, held)
        mates = mates_to_follow(Situation(own, live, peer.now, peer.world.rules))
        first = min(self._own)
        for name in self._proof.asked(mates):
            told = self._told.get(name)
            if name not in self._proof.givers and (told is None or told[0] < first):
                self._ask(name)
        known = [name for name, (step, _theta) in self._told.items() if step in self._own]
        behind = [name for name, (step, _theta) in self._told.items() if step < first]
        match self._proof.judge(mates, known, behind, self._distance, peer.now):
            case StateVerdict.RIGHT:
                self.end()
                return own
            case StateVerdict.DISPUTED:
                self.disputed = why_disputed(self._proof.asked(mates))
                if self._proof.is_over(peer.now):
                    self._compare(frozenset())
                return replace(own, unproven=self.disputed)
            case StateVerdict.OPEN:
                return replace(own, unproven="its state is not proven yet")
        return replace(own, disproved="it is not that of the stage")

    def _distance(self, one: PeerId | None, other: PeerId | None) -> float:
        mine, theirs = self._residual(one), self._residual(other)
        if mine is None or theirs is None:
            return float(mine is not theirs)
        return float(mine[0] == theirs[0] and mine[1] != theirs[1])

    def _residual(self, name: PeerId | None) -> tuple[int, ThetaId] | None:
        """None if this peer has the same."""
        told = self._told.get(name) if name is not None else None
        return None if told is None or self._own.get(told[0]) == told[1] else told

    def _ask(self, name: PeerId) -> None:
        peer, proof = self._peer, self._proof
        if peer.now - self._asked_at.get(name, float("-inf")) < ASKS_AGAIN_S:
            return
        self._asked_at[name] = peer.now

        def answered(found: object) -> None:
            if isinstance(found, tuple) and proof is self._proof:
                self._told[name] = found

        previous = self._previous
        peer.rounds.ask(name, lambda mate: mate.recovery.proving.tell(previous), answered)

    def tell(self, previous: bool) -> tuple[int, ThetaId] | None:
        mine, held = self._peer.record, self._peer.previous if previous else self._peer.theta
        return None if mine.phase is Phase.JOINING or held is None else (mine.step, held)

    def give_up(self) -> None:
        """Hold the first weights, and ask others first."""
        peer = self._peer
        peer.world.counts["states given up"] += 1
        self._distrusted |= dict.fromkeys(self._givers, peer.now + DISTRUSTS_S)
        self.end()
        peer.recovery.begin_anew()
        peer.change(step=0, lineage=Lineage(), norms=(), tied=Lineage(), tied_sums=(), voids=())
