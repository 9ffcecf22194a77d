"""A newcomer of a large swarm, by T8 (proof): how soon it knows all others, and all know it, by what peers ask one another anyway."""

from __future__ import annotations

from random import Random

from peerd.policy.swarm.meeting import Meetings
from peerd.policy.swarm.spreading import TURNS_PER_PERIOD, News, partners
from peerd.table.record import MAX_PERIODS, PeerId, PeerRecord, Phase, RawRecord
from peerd.table.swarm_view import SwarmView

PERIOD_S, TTL_S = 5.0, 15.0
TURN_S = PERIOD_S / TURNS_PER_PERIOD
NUM_STAGES = 2


class Peer:
    """What one peer knows. Its record is its own text."""

    def __init__(self, number: int, swarm: Swarm) -> None:
        self.record = PeerRecord(peer=PeerId(f"p{number}"), stage=number % NUM_STAGES, phase=Phase.ACCUMULATING, periods=MAX_PERIODS)
        self.view, self.news = SwarmView(me=self.record.peer, ttl_s=TTL_S), News(PERIOD_S)
        self.meetings, self._swarm = Meetings(period_s=PERIOD_S, life_s=TTL_S), swarm
        self.view.merge(self.record, 0.0)

    def hear(self, names: list[PeerId], teller: Peer, now_s: float) -> None:
        """Take the records of these from another peer, which this one has called, or that has called it."""
        known = self._swarm.peers
        for name in (*names, teller.record.peer):
            self.view.merge(known[name].record, now_s)
        proven = [teller.record.peer] if self.view.prove(teller.record.peer, now_s) else []
        for name in (*proven, *(name for name in names if self.view.told(name, teller.record.peer, now_s))):
            self.news.note(known[name].record, raw_of(name), now_s)

    def ask(self, other: Peer, now_s: float) -> None:
        other.hear([], self, now_s)
        self.hear([PeerId(raw[0].decode()) for raw in other.news.unknown_to(self.news.tags(now_s), None, now_s)], other, now_s)


class Swarm:
    """Peers that have known one another for long."""

    def __init__(self, num_peers: int) -> None:
        self.random = Random(num_peers)
        self.num_meetings = 0
        self.peers: dict[PeerId, Peer] = {}
        for number in range(num_peers):
            self.add(number)
        for peer in self.peers.values():
            for name, other in self.peers.items():
                peer.view.merge(other.record, 0.0)
                peer.view.prove(name, 0.0)

    def add(self, number: int) -> Peer:
        peer = Peer(number, self)
        self.peers[peer.record.peer] = peer
        return peer

    def turn(self, now_s: float) -> None:
        """Each peer asks one of its partners for news, and calls the strangers that are due."""
        for name, peer in self.peers.items():
            near = partners(name, [record.peer for record in peer.view.live(now_s).records if record.peer != name])
            peer.ask(self.peers[self.random.choice(near)], now_s)
            for stranger in peer.meetings.whom(list(peer.view.strangers), now_s, self.random.random()):
                self.num_meetings += 1
                self.peers[stranger].hear([], peer, now_s)
                peer.hear([], self.peers[stranger], now_s)


def raw_of(name: PeerId) -> RawRecord:
    return name.encode(), b""


def test_a_newcomer_of_a_large_swarm_knows_all_after_two_tables_and_all_know_it_within_three_periods_without_many_calls() -> None:
    swarm, now_s, others = Swarm(150), 10.0, [PeerId(f"p{number}") for number in range(150)]
    newcomer, contact, second = swarm.add(150), swarm.peers[others[7]], swarm.peers[others[8]]
    contact.hear([], newcomer, now_s)
    newcomer.hear(others, contact, now_s)
    assert len(newcomer.view.live(now_s + 1.1 * TTL_S).records) == 151, "its first table counts"
    newcomer.hear(others, second, now_s)
    assert all(newcomer.view.is_proven(name) for name in others)
    for name in partners(newcomer.record.peer, others):
        swarm.peers[name].hear([], newcomer, now_s)
    for turn in range(3 * TURNS_PER_PERIOD):
        swarm.turn(now_s + turn * TURN_S)
    assert all(swarm.peers[name].view.is_proven(newcomer.record.peer) for name in others)
    assert swarm.num_meetings < 150 / 4
