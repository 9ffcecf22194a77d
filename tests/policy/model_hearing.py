"""What a peer of the protocol model hears of others, and passes on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import eq
from typing import TYPE_CHECKING

from peerd.policy.swarm.contradictions import Heard
from peerd.policy.swarm.meeting import Meetings
from peerd.table.record import PeerId, PeerRecord
from peerd.table.swarm_view import SwarmView, say_the_same
from peerd.table.view import LiveView

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer


class KeptView(SwarmView):
    """Gives one live view until a record changes or the next one expires, as the daemon's membership does."""

    _kept: tuple[int, float, float, LiveView] | None = None
    """After how many changes it was made, when, until when it holds, and the view."""
    news = 0
    """Rises with each view that says something else than the one before, which is more than that peers are still there."""

    def live(self, now_s: float) -> LiveView:
        before = self._kept
        if before is not None and before[0] == self.changes and before[1] <= now_s < before[2]:
            return before[3]
        live = super().live(now_s)
        self._kept = self.changes, now_s, self.holds_until_s(now_s), live
        self.news += before is None or not _say_the_same(before[3], live)
        return live


def _say_the_same(one: LiveView, other: LiveView) -> bool:
    for known, found in ((one.records, other.records), (one.suspected, other.suspected), (one.expired, other.expired)):
        if len(known) != len(found) or not all(a is b or say_the_same(a, b) for a, b in zip(known, found, strict=True)):
            return False
    return True


class Hearing:
    """The records that come to a peer, as the daemon's membership merges them."""

    def __init__(self, peer: ModelPeer, period_s: float) -> None:
        self._peer = peer
        self._heard: Heard[PeerRecord] = Heard(eq, lambda _record: 1)
        self._meetings = Meetings(period_s=period_s, life_s=peer.view.ttl_s)
        self.banned = set(peer.world.banned)
        """Whom the organiser's list bans, as far as it has come here."""
        self._said: dict[PeerId, PeerRecord] = {}
        """The records as they were heard, which is how they are passed on: of one with a group's sum the table may believe less."""
        self._calls = 0
        self._random = random.Random(peer.name)

    def receive(self, records: Sequence[PeerRecord], source: PeerId | None = None) -> None:
        """Merge records that a peer has passed on; None: they come from the directory."""
        peer = self._peer
        before = peer.view.changes
        for record in records:
            if record.peer == peer.name and record.pair > peer.record.pair:
                peer.world.disk[peer.name] = max(peer.world.disk.get(peer.name, -1), record.incarnation)
                peer.fence(f"saw my own id at {record.pair}")
            elif record.peer != peer.name and (record.peer not in self.banned or "drop banned" in peer.world.scenario.off):
                self._merge(record)
        if source is not None:
            peer.view.prove(source, peer.now)
            for record in records:
                peer.view.told(record.peer, source, peer.now)
        if peer.view.changes != before:
            peer.poke()

    def shut_out(self, name: PeerId) -> None:
        """T9 (access): a peer is banned. Nothing that it has said or says counts, and its calls are refused."""
        self.banned.add(name)
        if "drop banned" not in self._peer.world.scenario.off:
            self._peer.view.shut_out(name)
        self._peer.poke()

    def meet(self) -> None:
        """T8 (proof): call strangers. One that answers is proven."""
        peer = self._peer
        strangers = [name for name in peer.view.strangers if peer.view.sightings[name].is_fresh(peer.now, peer.view.ttl_s)]
        for name in self._meetings.whom(strangers, peer.now, self._random.random()) if not self._calls else ():
            self._calls += 1
            peer.rounds.ask(name, lambda _peer: True, lambda answer, name=name: self._met(name, bool(answer)))  # type: ignore[misc]

    def _met(self, name: PeerId, answered: bool) -> None:
        self._calls -= 1
        if not answered:
            self._meetings.failed(name, self._peer.now)

    def _merge(self, record: PeerRecord) -> None:
        peer, off = self._peer, self._peer.world.scenario.off
        known = peer.view.sightings.get(record.peer)
        if known is not None and self._said.get(record.peer) is record and "repeats renew" not in off:
            return  # the very same one: most that are passed on are
        is_proven = peer.view.is_proven(record.peer)
        if "repeats renew" in off and known is not None and known.record.pair == record.pair:
            peer.view._evict(record.peer)
        other = self._heard.other(record.peer, record.pair, record, peer.now)
        if other is not None and "condemn" not in off and not peer.view.is_condemned(record.peer, peer.now):
            self._condemn(other, record)
        elif peer.view.merge(record, peer.now):
            self._said[record.peer] = record
            self._heard.note(record.peer, record.pair, record, peer.now + peer.view.ttl_s)
            if is_proven or "proof" in off:
                peer.view.prove(record.peer, peer.now)
            for accused in peer.view.sightings[record.peer].accused:
                peer.links.doubt(accused)

    def _condemn(self, one: PeerRecord, other: PeerRecord) -> None:
        """T7 (contradiction): the peer has signed both."""
        peer = self._peer
        peer.world.counts["condemned"] += 1
        peer.view.condemn(one.peer, peer.now)
        for record in peer.live().records:
            peer.world.send(peer, record.peer, lambda mate: mate.hearing.receive((one, other)))

    def heard(self, name: PeerId) -> PeerRecord:
        """What the peer `name` has said last, word for word."""
        return self._said[name]

    def recent_records(self, listener: PeerId, limit: int = 0) -> tuple[PeerRecord, ...]:
        """The peer's own and those that rose last: what rides on a message to the listener."""
        peer = self._peer
        if "repeats renew" in peer.world.scenario.off:
            limit = 99
        limit = limit or peer.world.scenario.riders
        proven = (s for p, s in peer.view.sightings.items() if p != peer.name and peer.view.is_proven(p))
        others = sorted(proven, key=lambda s: (-s.risen_at_s, s.record.peer))
        return (peer.lies.told(listener), *peer.lies.ghosts(), *(self.heard(s.record.peer) for s in others[: limit - 1]))
