"""Simulates gossip in a large swarm: what it costs a peer to keep the table, and how fresh the table stays.

The daemon's own rules (policy/swarm/spreading.py) choose which peer to ask, what is news and what is answered; only clock, network
and signatures are left out. From the start each peer knows the peers that it has to; none joins or leaves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from peerd.policy.hashing import digest
from peerd.policy.swarm.spreading import (
    ANNOUNCED_TO,
    KEPT_TURNS,
    PARTNERS,
    SPEAKERS,
    SUMMARISED,
    TURNS_PER_PERIOD,
    News,
    periods,
    whom_to_ask,
)
from peerd.table.record import PeerId, PeerRecord, Phase, RawRecord, StageSummary
from peerd.table.view import NEAR_STAGES, TTL_PERIODS

SPEAKERS_SUMMARY = StageSummary(peers=0, trainers=0, queue=0, throughput=0.0, held=0)
SAMPLED = 0.01
WORKING = (Phase.ACCUMULATING, Phase.AVERAGED)
"""The phases of a step that a peer announces; AVERAGING concerns the round alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipScenario:
    num_peers: int
    num_stages: int
    period_s: float = 5.0
    step_s: float = 0.0
    """Duration of a step: all peers change their phase twice in it; 0: they are idle."""


@dataclass(slots=True, kw_only=True)
class GossipCost:
    """Totals over all peers for the measured time."""

    seconds: float = 0.0
    asked: int = 0
    announced: int = 0
    told: int = 0
    """Announcements pushed, counted once per receiver."""
    records: int = 0
    """Records received, known ones included; each was sent once."""
    risen: int = 0
    """Received records that were news."""
    tags: int = 0
    known: int = 0
    """Mean number of records that a peer holds."""
    periods: int = 1
    delays_s: list[float] = field(default_factory=list)
    """For a sample of news: the time from its announcement until a peer had it."""
    too_late: int = 0
    """Records of which the next version arrived only after the known one had expired."""


@dataclass(slots=True)
class _Peer:
    record: PeerRecord
    partners: Sequence[int]
    far: Sequence[int]
    num_known: int
    news: News
    due_s: float
    asked_s: float = float("-inf")
    known: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Version and arrival time of each record that has changed since the start."""


class GossipSimulation:
    """Time advances in turns. In a turn each peer asks once, in random order."""

    def __init__(self, scenario: GossipScenario) -> None:
        self._scenario, self._chance = scenario, random.Random(0)
        self._turn_s = scenario.period_s / TURNS_PER_PERIOD
        self._large = scenario.num_peers >= SUMMARISED
        stages = [range(stage, scenario.num_peers, scenario.num_stages) for stage in range(scenario.num_stages)]
        speakers = [self._speakers_of(stage) for stage in stages]
        self._peers = [peer for peer, _ in sorted(self._make(stages, speakers), key=lambda made: made[1])]
        self._announced_s: list[dict[int, float]] = [{} for _ in self._peers]
        self._made: dict[tuple[int, int], PeerRecord] = {}
        self.cost = self._nothing_yet()

    def run(self, measured_s: float) -> GossipCost:
        """Simulate some turns to warm up, then those that are measured."""
        turns = round(measured_s / self._turn_s)
        for number in range(KEPT_TURNS + turns):
            if number == KEPT_TURNS:
                self.cost = self._nothing_yet()
            self._turn(number * self._turn_s)
        self.cost.seconds = turns * self._turn_s
        return self.cost

    def _nothing_yet(self) -> GossipCost:
        return GossipCost(
            known=sum(peer.num_known for peer in self._peers) // len(self._peers), periods=max(peer.record.periods for peer in self._peers)
        )

    def _speakers_of(self, stage: range) -> list[int]:
        return sorted(stage, key=lambda peer: digest("speaker", str(peer), size=8))[: SPEAKERS if self._large else 0]

    def _make(self, stages: Sequence[range], speakers: Sequence[list[int]]) -> Iterator[tuple[_Peer, int]]:
        for stage, members in enumerate(stages):
            near_stages = [s for s in range(len(stages)) if not self._large or abs(s - stage) <= NEAR_STAGES]
            near = [peer for s in near_stages for peer in stages[s]]
            far = [peer for s in range(len(stages)) if s not in near_stages for peer in speakers[s]]
            every = periods(len(near) + len(far))
            for index in members:
                others = [peer for peer in near if peer != index]
                mine = self._chance.sample(others, min(PARTNERS, len(others)))
                summary = SPEAKERS_SUMMARY if index in speakers[stage] else None
                record = PeerRecord(peer=PeerId(str(index)), stage=stage, phase=Phase.ACCUMULATING, periods=every, summary=summary)
                due_s = self._chance.uniform(0, every * self._scenario.period_s)
                yield _Peer(record, mine, far, len(near) + len(far), News(self._scenario.period_s), due_s), index

    def _turn(self, now_s: float) -> None:
        order = list(range(len(self._peers)))
        self._chance.shuffle(order)
        for index in order:
            peer = self._peers[index]
            if now_s >= peer.due_s:
                self._announce(index, peer, now_s)
            if now_s - peer.asked_s > peer.news.turn_s(now_s) - self._turn_s / 2:
                self._ask(index, peer, now_s)

    def _announce(self, index: int, peer: _Peer, now_s: float) -> None:
        record = replace(peer.record, version=peer.record.version + 1)
        peer.due_s = now_s + record.periods * self._scenario.period_s
        if self._scenario.step_s:
            half_s = self._scenario.step_s / len(WORKING)
            number = int(now_s // half_s)
            record = replace(record, phase=WORKING[number % len(WORKING)], step=number // len(WORKING))
            peer.due_s = min(peer.due_s, (number + 1) * half_s)
        peer.record = record
        self._announced_s[index][record.version] = now_s
        self._made[index, record.version] = record
        peer.news.note(record, _raw(index, record.version), now_s)
        self.cost.announced += 1
        for told in self._chance.sample(peer.partners, min(ANNOUNCED_TO, len(peer.partners))):
            self.cost.told += 1
            self._absorb(self._peers[told], _raw(index, record.version), now_s)

    def _ask(self, index: int, peer: _Peer, now_s: float) -> None:
        peer.asked_s = now_s
        draws = (self._chance.random(), self._chance.random())
        asked = whom_to_ask(peer.record.summary is not None, peer.partners, peer.far, draws)
        if asked is None:
            return
        tags = peer.news.tags(now_s)
        answer = self._peers[asked].news.unknown_to(tags, peer.record.stage if self._large else None, now_s)
        self.cost.asked += 1
        self.cost.tags += len(tags)
        for raw in answer:
            self._absorb(peer, raw, now_s)

    def _absorb(self, peer: _Peer, raw: RawRecord, now_s: float) -> None:
        self.cost.records += 1
        index, version = int.from_bytes(raw[0][:4], "little"), int.from_bytes(raw[0][4:], "little")
        held, risen_s = peer.known.get(index, (0, None))
        if version <= held:
            return
        record = self._made[index, version]
        if risen_s is not None and now_s - risen_s > TTL_PERIODS * self._scenario.period_s * record.periods:
            self.cost.too_late += 1
        self.cost.risen += 1
        if self._chance.random() < SAMPLED:
            self.cost.delays_s.append(now_s - self._announced_s[index][version])
        peer.known[index] = (version, now_s)
        peer.news.note(record, raw, now_s)


def _raw(index: int, version: int) -> RawRecord:
    return index.to_bytes(4, "little") + version.to_bytes(4, "little"), b""
