"""How members of a round in the protocol model tell each other what has come of it, before they go by it: rule 18 (certify) in groups."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from peerd.policy.step.certificates import is_confirmed, needs_confirming
from peerd.policy.step.confirming import mute_members
from peerd.table.record import AverageId, PeerId

if TYPE_CHECKING:
    from tests.policy.model_exchange import Exchange
    from tests.policy.model_trust import Claim


class Confirming:
    """The words of one round's members, at one of them."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._peer = exchange.peer
        self._told: dict[PeerId, AverageId] = {}
        self._asked: set[PeerId] = set()
        """Members that say something else, and are asked to show it."""
        self._shown: dict[PeerId, bool] = {}
        """Whether what they showed proves what they say."""
        self._complete_since_s: dict[PeerId, float] = {}
        """Members that have all sums, as far as they have told."""

    @property
    def is_due(self) -> bool:
        rules, off = self._peer.world.rules, self._peer.world.scenario.off
        return rules.certifies and "confirm" not in off and needs_confirming(self._exchange.roster, rules.num_microbatches)

    @property
    def _is_open(self) -> bool:
        return self._exchange is self._peer.rounds.current

    def begin(self, claim: Claim) -> None:
        """All sums are here."""
        self._peer.trust.confirms(claim)
        self._told[self._peer.name] = claim.id
        self._tell_all()
        self._settle()

    def _tell_all(self) -> None:
        """Tell all, again until most have said the same."""
        if self._exchange.is_over or not self._is_open:
            return
        for name in self._exchange.names:
            if name != self._peer.name:
                self._tell(name)
        self._look_for_mute()
        self._exchange.after_beat(self._tell_all)

    def _look_for_mute(self) -> None:
        """A judge ends the round without a member that has all sums, and does not say what came of them."""
        exchange, peer = self._exchange, self._peer
        for name in exchange.complete:
            self._complete_since_s.setdefault(name, peer.now)
        if exchange.judge is not None and "mute" not in peer.world.scenario.off and self._is_open:
            patience_s = (1 + exchange.judges.index(exchange.me)) * peer.world.rules.averaging_s
            mute = mute_members(self._told, self._complete_since_s, peer.now, patience_s)
            if mute:
                peer.rounds.close_as_judge(mute[0], "it does not say what came of the round")

    def _tell(self, name: PeerId) -> None:
        assert self._exchange.claim is not None
        me, average_id, found = self._peer.name, self._exchange.roster.average_id, self._peer.lies.confirmed(self._exchange.claim.id)
        if self._peer.lies.is_reticent:
            return
        self._peer.world.stream(self._peer, name, lambda mate: mate.rounds.confirmed(average_id, me, found))

    def hear(self, author: PeerId, found: AverageId) -> None:
        """A member says what came of the round there; its first word counts."""
        known = self._told.setdefault(author, found)
        if self._exchange.claim is None or known != found:
            return
        if self._is_open:
            self._settle()
        else:
            self._tell(author)  # it has not heard of it

    def _settle(self) -> None:
        exchange = self._exchange
        assert exchange.claim is not None
        for name, found in self._told.items():
            if found != exchange.claim.id and name not in self._asked:
                self._asked.add(name)
                self._peer.trust.compare(name, exchange, found)
        outcome = is_confirmed(exchange.claim.id, self._told, exchange.roster)
        if outcome:
            sure = tuple(name for name, found in self._told.items() if found == exchange.claim.id)
            exchange.claim = replace(exchange.claim, confirmed_by=sure)
            self._peer.rounds.came_together(exchange)
        elif outcome is False and self._asked <= self._shown.keys():
            unfounded = next((name for name, is_proven in self._shown.items() if not is_proven), None)
            if unfounded is None:
                self._peer.rounds.close("most members hold something else of it")
            else:
                self._peer.rounds.close_as_judge(unfounded, "it does not show what it says that it holds")

    def shown(self, name: PeerId, is_proven: bool) -> None:
        """A member has shown the slices that it holds of the round, or nothing that proves what it says."""
        self._shown[name] = is_proven
        if self._is_open:
            self._settle()
