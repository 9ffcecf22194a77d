"""Simulates gossip in a large swarm: what it costs a peer to keep the table, and how fresh the table stays.

The daemon's own rules (policy/swarm/spreading.py) choose which peer to ask, what is news and what is answered; only clock, network
and signatures are left out. From the start each peer knows the peers that it has to; none joins or leaves. A peer that works adds gradients
and tells what it does in a step as a daemon does.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from peerd.policy.hashing import digest
from peerd.policy.swarm.spreading import (
    ANNOUNCED_TO,
    KEPT_TURNS,
    MATES_AMONG_PARTNERS,
    MOST_IN_A_TURN,
    MOST_NEWS,
    PARTNERS,
    SPEAKERS,
    SUMMARISED,
    TURNS_PER_PERIOD,
    News,
    ToldBy,
    periods,
    whom_to_ask,
)
from peerd.table.record import AverageId, PeerId, PeerRecord, Phase, RawRecord, StageSummary
from peerd.table.view import NEAR_STAGES, TTL_PERIODS

SPEAKERS_SUMMARY = StageSummary(peers=0, trainers=0, queue=0, throughput=0.0, held=0)
SAMPLED = 0.01
PUSHED_TO = 16
"""Peers that a change of phase, a sum or a section is pushed to (swarm/gossip.py). A ledger goes to the leader of its group."""
GRADIENTS_UNTIL, SUM_AT, SECTION_AT, AVERAGED_AT = 0.7, 0.85, 0.9, 0.95
"""When a peer has these, as shares of a step; what comes after the gradients waits longer where the step does."""
JITTER = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipScenario:
    num_peers: int
    num_stages: int
    period_s: float = 5.0
    step_s: float = 0.0
    """Duration of a step; 0: all are idle."""
    microbatches: int = 14
    """Gradients that a peer adds in a step, at times drawn by chance."""
    waits_s: float = 0.0
    """Seconds after the last gradient in which nobody has a sum or an average: the step is so much longer."""
    in_groups: bool = False
    """Each peer has the sum of its group, and makes a section, before it has the average."""
    num_whole: int = 0
    """Stages in the middle of which all peers are simulated, of the others the speakers alone; 0: all of each. What comes to the peers
    of the stage in the middle of five is what comes to them in the whole swarm, and they alone are measured."""

    @property
    def whole_step_s(self) -> float:
        return self.step_s + self.waits_s


@dataclass(slots=True, kw_only=True)
class GossipCost:
    """Totals over all measured peers for the measured time."""

    peers: int = 0

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
    whole_s: list[float] = field(default_factory=list)
    """For each peer of the first stage: the time from its last mate's last gradient until it knew all ledgers of a step."""
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
    is_measured: bool
    asked_s: float = float("-inf")
    known: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Version and arrival time of each record that has changed since the start."""
    changes: deque[tuple[float, dict[str, Any]]] = field(default_factory=deque)
    """What its record will say of this step, and when."""
    whole: set[int] = field(default_factory=set)
    """Mates whose last ledger of this step it knows."""


class GossipSimulation:
    """Time advances in turns. In a turn each peer asks once, in random order."""

    def __init__(self, scenario: GossipScenario) -> None:
        self._scenario, self._chance = scenario, random.Random(0)
        self._turn_s = scenario.period_s / TURNS_PER_PERIOD
        self._large = scenario.num_peers >= SUMMARISED
        stages = [range(stage, scenario.num_peers, scenario.num_stages) for stage in range(scenario.num_stages)]
        speakers = [self._speakers_of(stage) for stage in stages]
        self._middle = len(stages) // 2 if scenario.num_whole else 0
        there = [self._simulated_of(stage, stages, speakers) for stage in range(len(stages))]
        self._num_mates = len(there[self._middle]) - 1
        self._peers = dict(sorted(self._make(stages, there, speakers)))
        self._announced_s: dict[int, dict[int, float]] = {index: {} for index in self._peers}
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
        measured = [peer for peer in self._peers.values() if peer.is_measured]
        return GossipCost(
            peers=len(measured),
            known=sum(peer.num_known for peer in measured) // len(measured),
            periods=max(peer.record.periods for peer in measured),
        )

    def _simulated_of(self, stage: int, stages: Sequence[range], speakers: Sequence[list[int]]) -> Sequence[int]:
        num_whole = self._scenario.num_whole
        is_whole = not num_whole or abs(stage - self._middle) <= num_whole // 2
        return stages[stage] if is_whole else speakers[stage]

    def _speakers_of(self, stage: range) -> list[int]:
        return sorted(stage, key=lambda peer: digest("speaker", str(peer), size=8))[: SPEAKERS if self._large else 0]

    def _make(self, stages: Sequence[range], there: Sequence[Sequence[int]], speakers: Sequence[list[int]]) -> Iterator[tuple[int, _Peer]]:
        """`there`: the peers of each stage that are simulated."""
        for stage, members in enumerate(there):
            near_stages = [s for s in range(len(stages)) if not self._large or abs(s - stage) <= NEAR_STAGES]
            near = [peer for s in near_stages for peer in there[s]]
            far = [peer for s in range(len(stages)) if s not in near_stages for peer in speakers[s]]
            num_known = sum(len(stages[s]) for s in near_stages) + len(far)
            every = periods(num_known)
            for index in members:
                mine = self._partners_of(index, members, near)
                summary = SPEAKERS_SUMMARY if index in speakers[stage] else None
                record = PeerRecord(peer=PeerId(str(index)), stage=stage, phase=Phase.ACCUMULATING, periods=every, summary=summary)
                due_s = self._chance.uniform(0, every * self._scenario.period_s)
                is_measured = not self._scenario.num_whole or stage == self._middle
                yield index, _Peer(record, mine, far, num_known, News(self._scenario.period_s), due_s, is_measured)

    def _partners_of(self, index: int, members: Sequence[int], near: Sequence[int]) -> list[int]:
        own = frozenset(members)
        mates, others = [peer for peer in members if peer != index], [peer for peer in near if peer not in own]
        if not self._large:
            return self._chance.sample(mates + others, min(PARTNERS, len(mates) + len(others)))
        of_others = min(len(others), max(PARTNERS - MATES_AMONG_PARTNERS, PARTNERS - len(mates)))
        return self._chance.sample(mates, min(len(mates), PARTNERS - of_others)) + self._chance.sample(others, of_others)

    def _plan(self, index: int, step: int) -> Iterator[tuple[float, dict[str, Any]]]:
        """What a peer's record says in a step, and when."""
        share, begins_s = self._scenario.step_s, step * self._scenario.whole_step_s
        for number, at in enumerate(sorted(self._chance.uniform(0, GRADIENTS_UNTIL) for _ in range(self._scenario.microbatches))):
            yield begins_s + share * at, {"done": (2 << number) - 1}
        late = self._scenario.waits_s + share * self._chance.uniform(0, JITTER)
        if self._scenario.in_groups:
            yield begins_s + share * SUM_AT + late, {"group": AverageId(bytes(16))}
            yield begins_s + share * SECTION_AT + late, {"sections": 1}
        yield begins_s + share * AVERAGED_AT + late, {"phase": Phase.AVERAGED}
        yield begins_s + share + late, {"phase": Phase.ACCUMULATING, "step": step + 1, "done": 0, "group": AverageId(b""), "sections": 0}

    def _turn(self, now_s: float) -> None:
        order = list(self._peers)
        self._chance.shuffle(order)
        for index in order:
            peer = self._peers[index]
            if self._scenario.step_s:
                self._work(index, peer, now_s)
            if now_s >= peer.due_s:
                peer.due_s = now_s + peer.record.periods * self._scenario.period_s
                self._announce(index, peer, now_s, ANNOUNCED_TO)
            if now_s - peer.asked_s > peer.news.turn_s(now_s) - self._turn_s / 2:
                peer.asked_s = now_s
                for _ in range(MOST_IN_A_TURN):
                    if self._ask(peer, now_s) < MOST_NEWS:
                        break

    def _work(self, index: int, peer: _Peer, now_s: float) -> None:
        if not peer.changes:
            peer.changes.extend(self._plan(index, peer.record.step))
        while peer.changes and peer.changes[0][0] <= now_s:
            _, fields = peer.changes.popleft()
            is_ledger = fields.keys() == {"done"}
            peer.record = replace(peer.record, **fields)
            if "step" in fields:
                peer.whole.clear()
            self._announce(index, peer, now_s, 1 if is_ledger else PUSHED_TO)

    def _announce(self, index: int, peer: _Peer, now_s: float, told_to: int) -> None:
        record = peer.record = replace(peer.record, version=peer.record.version + 1)
        self._announced_s[index][record.version] = now_s
        self._made[index, record.version] = record
        peer.news.note(record, _raw(index, record.version), now_s, ToldBy.OWN)
        self.cost.announced += peer.is_measured
        for told in self._chance.sample(peer.partners, min(told_to, len(peer.partners))):
            self.cost.told += peer.is_measured
            self._absorb(self._peers[told], _raw(index, record.version), now_s, ToldBy.PUSHED)

    def _ask(self, peer: _Peer, now_s: float) -> int:
        """Returns the number of records that came."""
        draws = (self._chance.random(), self._chance.random())
        asked = whom_to_ask(peer.record.summary is not None, peer.partners, peer.far, draws)
        if asked is None:
            return 0
        tags = peer.news.tags(now_s)
        answer = self._peers[asked].news.unknown_to(tags, peer.record.stage if self._large else None, now_s)
        if peer.is_measured:
            self.cost.asked += 1
            self.cost.tags += len(tags)
        for raw in answer:
            self._absorb(peer, raw, now_s, ToldBy.PASSED_ON)
        return len(answer)

    def _absorb(self, peer: _Peer, raw: RawRecord, now_s: float, told_by: ToldBy) -> None:
        self.cost.records += peer.is_measured
        index, version = int.from_bytes(raw[0][:4], "little"), int.from_bytes(raw[0][4:], "little")
        held, risen_s = peer.known.get(index, (0, None))
        if version <= held:
            return
        record = self._made[index, version]
        if risen_s is not None and now_s - risen_s > TTL_PERIODS * self._scenario.period_s * record.periods:
            self.cost.too_late += peer.is_measured
        self.cost.risen += peer.is_measured
        if self._chance.random() < SAMPLED and peer.is_measured:
            self.cost.delays_s.append(now_s - self._announced_s[index][version])
        peer.known[index] = (version, now_s)
        peer.news.note(record, raw, now_s, told_by)
        if self._scenario.step_s and record.stage == self._middle == peer.record.stage:
            self._look_whether_whole(index, peer, record, now_s)

    def _look_whether_whole(self, index: int, peer: _Peer, record: PeerRecord, now_s: float) -> None:
        """Note when a peer of the first stage, or of the middle one, knows the last ledger of each mate."""
        if record.step == peer.record.step and record.done.bit_count() == self._scenario.microbatches and index not in peer.whole:
            peer.whole.add(index)
            if len(peer.whole) == self._num_mates:
                self.cost.whole_s.append(now_s - self._scenario.whole_step_s * record.step - self._scenario.step_s * GRADIENTS_UNTIL)


def _raw(index: int, version: int) -> RawRecord:
    return index.to_bytes(4, "little") + version.to_bytes(4, "little"), b""
