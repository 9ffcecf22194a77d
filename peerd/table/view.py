"""The swarm view: a frozen value built from records, and the rules by which records merge and live.

Rules T1 (order), T2 (alive), T4 (members) and T5 (suspicion) of docs/protocol.md live here. Times are seconds on the caller's own monotonic
clock and always arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from types import MappingProxyType

from peerd.table.record import PeerId, PeerRecord, Phase, StageSummary

TTL_PERIODS = 3
NEAR_STAGES = 1
"""In a large swarm a peer knows all peers of the stages at most this far from its own."""
MAX_TOMBSTONES = 20_000
_EMPTY: Mapping[PeerId, Sighting] = MappingProxyType({})
_NOBODY: Mapping[PeerId, tuple[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Sighting:
    """A record and when its pair last rose, on the reader's clock."""

    record: PeerRecord
    risen_at_s: float
    accused: Mapping[PeerId, tuple[int, int]] = field(default_factory=lambda: _NOBODY)
    """The peers that the record suspects, each with the pair up to which that counts."""

    def is_fresh(self, now_s: float, ttl_s: float) -> bool:
        """T2 (alive): it rose within three announce periods of its own."""
        return now_s - self.risen_at_s < ttl_s * self.record.periods


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """The records that count at one moment; every decision is a function of them."""

    me: PeerId
    records: tuple[PeerRecord, ...]
    """Live records of the run, sorted by peer id, this peer's included. Of a large swarm those of its own and the neighbouring
    stages, and of every other one its speakers'."""
    suspected: tuple[PeerRecord, ...] = ()
    """Records that would count if no live peer suspected them. Their peers may be alive, and still hold what they say."""
    expired: tuple[PeerRecord, ...] = ()
    """Records that have expired, of peers that were at the step before this peer's or further."""
    _by_peer: dict[PeerId, PeerRecord] = field(default_factory=dict, init=False, repr=False, compare=False)
    _by_stage: dict[int, tuple[PeerRecord, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _serving: dict[int, tuple[PeerRecord, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _members: dict[tuple[int, int], tuple[PeerRecord, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """These are filled on first use: many questions are asked about one view."""

    def find(self, peer: PeerId) -> PeerRecord | None:
        if not self._by_peer:
            self._by_peer.update({record.peer: record for record in self.records})
        return self._by_peer.get(peer)

    @property
    def mine(self) -> PeerRecord | None:
        return self.find(self.me)

    def of_stage(self, stage: int) -> tuple[PeerRecord, ...]:
        """Live peers of a stage, joining ones included."""
        if not self._by_stage:
            found: dict[int, list[PeerRecord]] = {}
            for record in self.records:
                found.setdefault(record.stage, []).append(record)
            self._by_stage.update({stage: tuple(records) for stage, records in found.items()})
        return self._by_stage.get(stage, ())

    def serving(self, stage: int) -> tuple[PeerRecord, ...]:
        """Live peers of a stage that have its parameters, whatever their step. Outlived ones do not count."""
        if not self._serving:
            self._serving.update(_without_outlived(r for r in self.records if r.phase is not Phase.JOINING))
        return self._serving.get(stage, ())

    def is_outlived(self, record: PeerRecord) -> bool:
        """True if the run went back without this peer: another stage is two steps behind it or more, and a mate of its stage, too."""
        self.serving(record.stage)
        return _is_outlived(record, _spans(self._serving))

    def members(self, stage: int, step: int) -> tuple[PeerRecord, ...]:
        """T4 (members): live records with that stage and step, not joining and not voided for the step.

        A leaving peer voids nobody: the stage may have nobody left to compute anew what the voided member holds.
        """
        found = self._members.get((stage, step))
        if found is None:
            voided = {(v.peer, v.incarnation, v.step) for r in self.of_stage(stage) if not r.leaving for v in r.voids}
            found = tuple(r for r in self.serving(stage) if r.step == step and (r.peer, r.incarnation, step) not in voided)
            self._members[stage, step] = found
        return found

    @property
    def is_summarised(self) -> bool:
        """True if the swarm is so large that no peer knows all of it."""
        return any(record.summary is not None for record in self.records)

    def speakers(self, stage: int) -> tuple[PeerRecord, ...]:
        """Peers that speak for a stage of which this peer knows no others; nobody for its own stage and its neighbours."""
        told = tuple(r for r in self.serving(stage) if r.summary is not None)
        mine = self.mine if told else None
        return () if mine is not None and abs(stage - mine.stage) <= NEAR_STAGES else told

    def summary(self, stage: int) -> StageSummary | None:
        """The summary of a stage that this peer does not know itself: the median over its speakers, because one of them may be wrong."""
        told = [r.summary for r in self.speakers(stage) if r.summary is not None]
        if not told:
            return None
        return StageSummary(
            peers=median_low([each.peers for each in told]),
            trainers=median_low([each.trainers for each in told]),
            queue=median_low([each.queue for each in told]),
            throughput=median_low([each.throughput for each in told]),
            held=0,
        )

    def num_serving(self, stage: int) -> int:
        """Number of peers that serve a stage, those included that only its speakers tell of."""
        told = self.summary(stage)
        return max(len(self.serving(stage)), told.peers if told is not None else 0)

    def queue(self, stage: int) -> int:
        """Number of microbatches that these peers hold."""
        told = self.summary(stage)
        return told.queue if told is not None else sum(record.queue for record in self.serving(stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmView:
    """Every record seen of one run. Frozen; `merge` gives a new value, or itself when nothing changed."""

    me: PeerId
    ttl_s: float
    sightings: Mapping[PeerId, Sighting] = field(default_factory=lambda: _EMPTY)

    def merge(self, record: PeerRecord, now_s: float) -> SwarmView:
        """T1 (order) and T2 (alive): a higher pair replaces and renews; anything else changes nothing, so a repeat never renews."""
        known = self.sightings.get(record.peer)
        if known is not None and record.pair <= known.record.pair:
            return self
        sightings = dict(self.sightings)
        sightings[record.peer] = Sighting(record, now_s, self._accused_by(record))
        if len(sightings) > MAX_TOMBSTONES:
            oldest = min(sightings, key=lambda peer: sightings[peer].risen_at_s)
            del sightings[oldest]
        return replace(self, sightings=MappingProxyType(sightings))

    def _accused_by(self, record: PeerRecord) -> Mapping[PeerId, tuple[int, int]]:
        """The pairs up to which a record's suspicions count: none beyond what this peer knows, or the accused could never end one."""
        accused = {}
        for suspicion in record.suspects:
            known = self.sightings.get(suspicion.peer)
            if known is not None and suspicion.peer not in (record.peer, self.me):
                accused[suspicion.peer] = min((suspicion.incarnation, suspicion.version), known.record.pair)
        return accused or _NOBODY

    def only_renews(self, record: PeerRecord, now_s: float) -> bool:
        """True if the record only renews the lease of a live peer: then it changes no decision."""
        known = self.sightings.get(record.peer)
        if known is None or not known.is_fresh(now_s, self.ttl_s) or not _say_the_same(record, known.record):
            return False
        return not any(record.peer in seen.accused for seen in self.sightings.values())

    def cleared(self) -> SwarmView:
        """T3 (fence): after a fence nothing counts as live until its pair rises again; tombstones stay."""
        never = float("-inf")
        faded = {peer: Sighting(seen.record, never) for peer, seen in self.sightings.items()}
        return replace(self, sightings=MappingProxyType(faded))

    def live(self, now_s: float) -> LiveView:
        """T5 (suspicion): the records that rose within the TTL and that no live peer suspects at their present pair."""
        mine = self.sightings.get(self.me)
        step = mine.record.step if mine is not None else 0
        fresh, expired = [], []
        for seen in self.sightings.values():
            if seen.is_fresh(now_s, self.ttl_s) or seen.record.peer == self.me:
                fresh.append(seen.record)
            elif seen.record.step >= step - 1 and seen.record.phase is not Phase.JOINING:
                expired.append(seen.record)
        accused: dict[PeerId, tuple[int, int]] = {}
        for record in fresh:
            for peer, pair in self.sightings[record.peer].accused.items():
                accused[peer] = max(accused.get(peer, pair), pair)
        counted: list[PeerRecord] = []
        suspected: list[PeerRecord] = []
        for record in sorted(fresh, key=lambda r: r.peer):
            (suspected if record.peer in accused and record.pair <= accused[record.peer] else counted).append(record)
        return LiveView(me=self.me, records=tuple(counted), suspected=tuple(suspected), expired=tuple(expired))

    def holds_until_s(self, now_s: float) -> float:
        """The time at which the next record expires; until then `live` stays the same if nothing is merged."""
        fresh = [s for s in self.sightings.values() if s.is_fresh(now_s, self.ttl_s) and s.record.peer != self.me]
        return min((s.risen_at_s + self.ttl_s * s.record.periods for s in fresh), default=float("inf"))

    def suspects(self, now_s: float) -> frozenset[PeerId]:
        """Peers with a fresh record that does not count because a live peer suspects them."""
        return frozenset(record.peer for record in self.live(now_s).suspected)


def _without_outlived(serving: Iterable[PeerRecord]) -> dict[int, tuple[PeerRecord, ...]]:
    """The records by stage, but for outlived ones. In each stage at least the peer at the lowest step stays."""
    by_stage: dict[int, list[PeerRecord]] = {}
    for record in serving:
        by_stage.setdefault(record.stage, []).append(record)
    while True:
        spans = _spans(by_stage)
        left = {stage: [r for r in records if not _is_outlived(r, spans)] for stage, records in by_stage.items()}
        if left == by_stage:
            return {stage: tuple(records) for stage, records in left.items()}
        by_stage = left


def _spans(by_stage: Mapping[int, Sequence[PeerRecord]]) -> dict[int, tuple[int, int]]:
    """The lowest and the newest step of each stage."""
    return {stage: (min(r.step for r in records), max(r.step for r in records)) for stage, records in by_stage.items()}


def _is_outlived(record: PeerRecord, spans: Mapping[int, tuple[int, int]]) -> bool:
    """Whether another stage can not go on from this peer's step, but can from that of one of its mates."""
    lowest = spans[record.stage][0] if record.stage in spans else record.step
    if record.step <= lowest + 1:
        return False
    return any(lowest - 1 <= newest <= record.step - 2 for stage, (_, newest) in spans.items() if stage != record.stage)


def _say_the_same(record: PeerRecord, known: PeerRecord) -> bool:
    """True if two records differ in the version alone. The fields that change most are compared first, which is cheaper."""
    if (record.done, record.phase, record.step, record.next_done) != (known.done, known.phase, known.step, known.next_done):
        return False
    return replace(record, version=known.version) == known
