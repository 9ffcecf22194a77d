"""What a peer of the protocol model hears of others, and passes on."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq
from typing import TYPE_CHECKING

from peerd.policy.swarm.contradictions import Heard
from peerd.table.record import PeerId, PeerRecord

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer


class Hearing:
    """The records that come to a peer, as the daemon's membership merges them."""

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self._heard: Heard[PeerRecord] = Heard(eq, lambda _record: 1)

    def receive(self, records: Sequence[PeerRecord]) -> None:
        peer = self._peer
        before = peer.view.changes
        for record in records:
            if record.peer == peer.name and record.pair > peer.record.pair:
                peer.world.disk[peer.name] = max(peer.world.disk.get(peer.name, -1), record.incarnation)
                peer.fence(f"saw my own id at {record.pair}")
            elif record.peer != peer.name:
                self._merge(record)
        if peer.view.changes != before:
            peer.poke()

    def _merge(self, record: PeerRecord) -> None:
        peer, off = self._peer, self._peer.world.scenario.off
        known = peer.view.sightings.get(record.peer)
        if "repeats renew" in off and known is not None and known.record.pair == record.pair:
            peer.view._evict(record.peer)
        other = self._heard.other(record.peer, record.pair, record, peer.now)
        if other is not None and "condemn" not in off and not peer.view.is_condemned(record.peer, peer.now):
            self._condemn(other, record)
        elif peer.view.merge(record, peer.now):
            self._heard.note(record.peer, record.pair, record, peer.now + peer.view.ttl_s)
            for accused in peer.view.sightings[record.peer].accused:
                peer.links.doubt(accused)

    def _condemn(self, one: PeerRecord, other: PeerRecord) -> None:
        """T7 (contradiction): the peer has signed both."""
        peer = self._peer
        peer.world.counts["condemned"] += 1
        peer.view.condemn(one.peer, peer.now)
        for record in peer.live().records:
            peer.world.send(peer, record.peer, lambda mate: mate.hearing.receive((one, other)))

    def recent_records(self, listener: PeerId, limit: int = 0) -> tuple[PeerRecord, ...]:
        """The peer's own and those that rose last: what rides on a message to the listener."""
        peer = self._peer
        if "repeats renew" in peer.world.scenario.off:
            limit = 99
        limit = limit or peer.world.scenario.riders
        others = sorted((s for p, s in peer.view.sightings.items() if p != peer.name), key=lambda s: (-s.risen_at_s, s.record.peer))
        return (peer.lies.told(listener), *(s.record for s in others[: limit - 1]))
