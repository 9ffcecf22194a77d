"""What a peer of the protocol model knows of links that are dead in one direction at least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerd.policy.swarm.reaching import is_in_round_with, is_reached, witnesses
from peerd.table.record import PeerId, PeerRecord

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer


class DeadLinks:
    """The peers that this one has called in vain, as the daemon's membership and liveness keep them."""

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self._pairs: dict[PeerId, tuple[int, int]] = {}
        self._asking: set[PeerId] = set()
        """Those of which others are asked whether they reach them."""

    @property
    def unreached(self) -> tuple[PeerId, ...]:
        return tuple(sorted(self._pairs))

    def forget(self) -> None:
        self._pairs = {}
        self._asking = set()

    def fails(self, callee: PeerId) -> None:
        """A call and a re-dial failed. A peer whose record rises all the same lives behind a dead link."""
        peer = self._peer
        sighting = peer.view.sightings.get(callee)
        if sighting is None or peer.fenced or "go around" in peer.world.scenario.off:
            return
        pair, known = sighting.record.pair, self._pairs.get(callee)
        if known is None or known[0] != pair[0]:
            self._pairs[callee] = known = pair
        if pair > known and peer.now - sighting.risen_at_s < peer.view.ttl_s / 2:
            peer.change(unreached=self.unreached)
        elif callee not in self._asking and not is_in_round_with(peer.record, sighting.record):
            self._ask_others(sighting.record)

    def _ask_others(self, accused: PeerRecord) -> None:
        """Ask others whether they reach it. Where they do not, it is suspected, unless its record has risen."""
        peer, name, words = self._peer, accused.peer, list[bool]()
        asked = witnesses(peer.live(), accused) if "witnesses" not in peer.world.scenario.off else ()
        self._asking.add(name)

        def answered(word: object) -> None:
            if name not in self._asking:
                return
            words.append(word is True)
            self._decide(accused, is_reached(len(asked), words))

        for witness in asked:
            peer.rounds.call(witness, lambda mate, reply: mate.rounds.ask(name, lambda _accused: True, reply), answered)
        if not asked:
            self._decide(accused, is_there=False)

    def _decide(self, accused: PeerRecord, is_there: bool | None) -> None:
        if is_there is None:
            return
        self._asking.discard(accused.peer)
        sighting = self._peer.view.sightings.get(accused.peer)
        if is_there or (sighting is not None and sighting.record.pair > accused.pair):
            self._peer.change(unreached=self.unreached)
        else:
            self._peer.suspect(accused.peer)

    def doubt(self, accused: PeerId) -> None:
        """Another peer suspects it: ask whether it lives. The answer vouches for it."""
        peer = self._peer
        if peer.fenced or peer.view.is_vouched_for(accused, peer.now) or "ask the accused" in peer.world.scenario.off:
            return
        peer.rounds.ask(accused, lambda _accused: True, lambda answer: peer.view.vouch(accused, peer.now) if answer else None)

    def look(self) -> None:
        """What pushes to the others tell."""
        peer = self._peer
        for record in peer.live().records:
            if peer.world.network.has_dead_link(peer.name, record.peer):
                self.fails(record.peer)
        self._pairs = {callee: pair for callee, pair in self._pairs.items() if peer.world.network.has_dead_link(peer.name, callee)}
