"""When a peer of the protocol model asks the step rules for its next act."""

from __future__ import annotations

from dataclasses import fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from peerd.policy.step import acts
from peerd.policy.step.situation import OwnState, Situation
from peerd.policy.step.stepping import looks_lost
from peerd.table.record import PeerRecord, Phase
from peerd.table.swarm_view import say_the_same
from tests.policy.model_situation import own_state_of

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer

_without_record = attrgetter(*(each.name for each in fields(OwnState) if each.name != "record"))


class Deciding:
    """A peer that waits is not asked again before it knows something else, or while time alone may change its mind.

    Most looks are such: the answer would be the same.
    """

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self._waited: tuple[object, PeerRecord, object] | None = None
        """What it knew when it last decided to wait, if time alone cannot change that: the number of news, its record, and the rest."""

    def act(self) -> None:
        """Decide, and do it."""
        peer, world = self._peer, self._peer.world
        found, live = own_state_of(peer), peer.recovery.believed(peer.live())
        news = (peer.view.news, peer.recovery.clocks.claims.doubted)
        known, waited = (news, found.record, _without_record(found)), self._waited
        if waited is not None and (waited[0], waited[2]) == (known[0], known[2]) and say_the_same(waited[1], known[1]):
            return
        lost = looks_lost(Situation(found, live, peer.now, world.rules))
        peer.lost_since_s = (peer.lost_since_s if peer.lost_since_s is not None else peer.now) if lost else None
        if lost and "wait before lost" in world.scenario.off:
            peer.lost_since_s = float("-inf")
        own = peer.recovery.noted(replace(found, lost_since_s=peer.lost_since_s) if lost else found, live)
        peer.lies.make_up(live)
        act = peer.recovery.decide(Situation(own, live, peer.now, peer.lies.rules))
        self._waited = known if isinstance(act, acts.Wait) and not self._is_pressed(own) else None
        peer.act(act)

    def _is_pressed(self, own: OwnState) -> bool:
        """Whether time alone may change the decision."""
        peer, phase = self._peer, own.record.phase
        if phase in (Phase.AVERAGING, Phase.JOINING) or peer.lost_since_s is not None or peer.lies.has_lied:
            return True
        if phase is Phase.AVERAGED and own.averaged_since_s is not None:
            return True
        remembers = bool(own.refused or own.unanswered or own.unbelieved or own.reloads_in_vain)
        return remembers or peer.recovery.clocks.run or own.propose_after_s > peer.now
