"""The swarm view: a frozen value built from records, and the rules by which records merge and live.

Rules T1, T2 and T4 of the step protocol, and suspicion, live here. Times are seconds on the caller's own monotonic
clock and always arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from peerd.table.record import PeerId, PeerRecord, Phase

TTL_PERIODS = 3
MAX_TOMBSTONES = 20_000
_EMPTY: Mapping[PeerId, Sighting] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Sighting:
    """A record and when its pair last rose, on the reader's clock."""

    record: PeerRecord
    risen_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """The records that count at one moment; what every decision is a function of."""

    me: PeerId
    records: tuple[PeerRecord, ...]
    """Live records of the run, sorted by peer id, mine included."""

    def find(self, peer: PeerId) -> PeerRecord | None:
        return next((record for record in self.records if record.peer == peer), None)

    @property
    def mine(self) -> PeerRecord | None:
        return self.find(self.me)

    def serving(self, stage: int) -> tuple[PeerRecord, ...]:
        """Live peers of a stage that have its parameters, whatever their step."""
        return tuple(r for r in self.records if r.stage == stage and r.phase is not Phase.JOINING)

    def members(self, stage: int, step: int) -> tuple[PeerRecord, ...]:
        """T4: live records with that stage and step, not joining and not voided for the step."""
        voided = {(v.peer, v.incarnation, v.step) for r in self.records if r.stage == stage for v in r.voids}
        return tuple(r for r in self.serving(stage) if r.step == step and (r.peer, r.incarnation, step) not in voided)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmView:
    """Every record seen of one run. Frozen; `merge` gives a new value, or itself when nothing changed."""

    me: PeerId
    ttl_s: float
    sightings: Mapping[PeerId, Sighting] = field(default_factory=lambda: _EMPTY)

    def merge(self, record: PeerRecord, now_s: float) -> SwarmView:
        """T1 and T2: a higher pair replaces and renews; anything else changes nothing, so a repeat never renews."""
        known = self.sightings.get(record.peer)
        if known is not None and record.pair <= known.record.pair:
            return self
        sightings = dict(self.sightings)
        sightings[record.peer] = Sighting(record, now_s)
        if len(sightings) > MAX_TOMBSTONES:
            oldest = min(sightings, key=lambda peer: sightings[peer].risen_at_s)
            del sightings[oldest]
        return replace(self, sightings=MappingProxyType(sightings))

    def cleared(self) -> SwarmView:
        """T3: after a fence nothing counts as live until its pair rises again; tombstones stay."""
        never = float("-inf")
        faded = {peer: Sighting(seen.record, never) for peer, seen in self.sightings.items()}
        return replace(self, sightings=MappingProxyType(faded))

    def live(self, now_s: float) -> LiveView:
        """The records that rose within the TTL and that no live peer suspects at their present pair."""
        fresh = [s.record for s in self.sightings.values() if now_s - s.risen_at_s < self.ttl_s or s.record.peer == self.me]
        accused: dict[PeerId, tuple[int, int]] = {}
        for record in fresh:
            for suspicion in record.suspects:
                if suspicion.peer not in (record.peer, self.me):
                    pair = (suspicion.incarnation, suspicion.version)
                    accused[suspicion.peer] = max(accused.get(suspicion.peer, pair), pair)
        counted = [r for r in fresh if r.peer not in accused or r.pair > accused[r.peer]]
        return LiveView(me=self.me, records=tuple(sorted(counted, key=lambda r: r.peer)))

    def suspects(self, now_s: float) -> frozenset[PeerId]:
        """Peers whose record is fresh but does not count because somebody suspects them."""
        counted = {r.peer for r in self.live(now_s).records}
        fresh = {s.record.peer for s in self.sightings.values() if now_s - s.risen_at_s < self.ttl_s}
        return frozenset(fresh - counted)

    def accuses_me(self, incarnation: int, now_s: float) -> bool:
        """Whether a live peer suspects me in my present incarnation."""
        return any(
            suspicion.peer == self.me and suspicion.incarnation == incarnation
            for record in self.live(now_s).records
            if record.peer != self.me
            for suspicion in record.suspects
        )
