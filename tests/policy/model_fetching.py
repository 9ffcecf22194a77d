"""Averages that a peer of the protocol model gets from mates, and gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerd.policy.step.roster import why_not_adopt
from peerd.table.record import PeerId, Phase
from tests.policy.model_kept import Held

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer


class Fetching:
    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer

    def fetch(self, mate: PeerId, step: int) -> None:
        peer = self._peer
        peer.fetching = True
        asked_at = (peer.record.incarnation, peer.record.ledger_no)
        record = peer.live().find(mate)
        told = (mate, record.average_id) if record is not None and record.step == step and record.average_id else None

        def answered(found: object) -> None:
            peer.fetching = False
            if told is not None:
                peer.unbelieved[told] = peer.now
            if told is not None and not isinstance(found, Held):
                peer.trust.kept_back(mate)
            if found is None:
                peer.unanswered[mate, step] = peer.now
                return
            if not isinstance(found, Held) or not self._is_useful(mate, found):
                if told is None or not isinstance(found, Held):
                    peer.refused[mate, step] = peer.now
                return
            smaller = peer.record.phase is not Phase.AVERAGED or peer.situation().is_better(found.average_id)
            if not smaller and peer.world.rules.certifies:
                peer.refused[mate, step] = peer.now  # it was only looked at, or is not the one that the mate tells
            if asked_at == (peer.record.incarnation, peer.record.ledger_no) and smaller and not peer.downloading:
                peer.world.counts["adopted"] += 1
                peer.local.learn(peer.world.peers[mate].local.log)
                peer.adopt(found.average_id, found.average, found.claim, found.norm, found.tied)

        takes_s = peer.world.rng.uniform(3.0, 15.0) if peer.world.now < peer.thin_until else 0.0
        arrived = (lambda found: peer.after(takes_s, lambda: answered(found))) if takes_s else answered
        peer.rounds.call(mate, lambda other, reply: None if other.lies.hoards else reply(other.averages.of_step(step)), arrived)

    def _is_useful(self, mate: PeerId, found: Held) -> bool:
        peer, rules = self._peer, self._peer.world.rules
        if why_not_adopt(peer.record, found.step, found.lineage) is not None:
            peer.trust.disbelieve(mate)
            return False
        is_unfinished = (found.norm is None and rules.shares_norms) or (found.tied is None and peer.tied.exists)
        return not (is_unfinished and peer.record.phase is Phase.JOINING) and peer.trust.believes(mate, found)

    def of_step(self, step: int) -> Held | str:
        peer = self._peer
        if peer.record.step == step and peer.record.phase is Phase.AVERAGED and peer.average is not None and peer.claim is not None:
            return peer.lies.given(Held(step, peer.record.average_id, peer.average, peer.claim, peer.record.lineage))
        return peer.kept.of_step(step) or "refused"
