"""The live view: the records that count at one moment, frozen. Every decision is a function of it. Rule T4 (members) lives here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import median_low
from typing import TypeVar

from peerd.table.record import PeerId, PeerRecord, Phase, StageSummary

T = TypeVar("T")
TTL_PERIODS = 3
WORDS_IN_GROUPS = 2
"""So many mates have to leave a peer out of a stage that averages in groups: only those of its own group see its rounds fail."""
NEAR_STAGES = 1
"""In a large swarm a peer knows all peers of the stages at most this far from its own."""


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
    group_size: int = 0
    """The most members of a stage that average in one round; 0: all do."""
    _by_peer: dict[PeerId, PeerRecord] = field(default_factory=dict, init=False, repr=False, compare=False)
    _by_stage: dict[int, tuple[PeerRecord, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _serving: dict[int, tuple[PeerRecord, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _members: dict[tuple[int, int], tuple[PeerRecord, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _sidelined: dict[int, frozenset[PeerId]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _speakers: dict[int, tuple[PeerRecord, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _spans: dict[int, tuple[int, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    stage_steps: dict[int, int | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By stage, what `policy/step/ledger.py` finds to be its step."""
    _remembered: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False, compare=False)
    """These are filled on first use: many questions are asked about one view."""

    def remembered(self, key: tuple[type[T], Hashable, Hashable], make: Callable[[], T]) -> T:
        """What `make` has returned, which is called once for each key. For what follows from the view and the key alone."""
        found = self._remembered.get(key)
        if not isinstance(found, key[0]):
            found = self._remembered[key] = make()
        return found

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
        spans = self._all_spans()
        lowest, newest = spans.get(record.stage, (record.step, record.step))
        others = sorted(last for stage, (_, last) in spans.items() if stage != record.stage)
        return record.step >= _first_outlived(lowest, max(newest, record.step), others)

    def newest_step(self, stage: int) -> int | None:
        """The newest step of the peers that serve a stage; None if nobody does."""
        span = self._all_spans().get(stage)
        return span[1] if span is not None else None

    def _all_spans(self) -> dict[int, tuple[int, int]]:
        if not self._spans:
            self.serving(0)
            self._spans.update(_spans(self._serving))
        return self._spans

    def members(self, stage: int, step: int) -> tuple[PeerRecord, ...]:
        """T4 (members): live records with that stage and step, not joining, not voided for the step and not sidelined.

        A leaving peer voids nobody: the stage may have nobody left to compute anew what the voided member holds. Nor does one that another
        member has voided: two that void each other would leave no member.
        """
        found = self._members.get((stage, step))
        if found is None:
            sidelined = self.sidelined(stage)
            able = [r for r in self.serving(stage) if r.step == step and r.peer not in sidelined]
            found = self._members[stage, step] = _without_voided(able, step)
        return found

    def sidelined(self, stage: int) -> frozenset[PeerId]:
        """T6 (sideline): peers of a stage that half of their mates leave out, so that they have no part in its steps."""
        found = self._sidelined.get(stage)
        if found is None:
            found = self._sidelined[stage] = _left_out(self.serving(stage), self.group_size)
        return found

    @property
    def is_summarised(self) -> bool:
        """True if the swarm is so large that no peer knows all of it."""
        return any(record.summary is not None for record in self.records)

    def speakers(self, stage: int) -> tuple[PeerRecord, ...]:
        """Peers that speak for a stage of which this peer knows no others; nobody for its own stage and its neighbours."""
        found = self._speakers.get(stage)
        if found is None:
            told = tuple([r for r in self.serving(stage) if r.summary is not None])
            mine = self.mine if told else None
            found = self._speakers[stage] = () if mine is not None and abs(stage - mine.stage) <= NEAR_STAGES else told
        return found

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


def words_needed(num: int, group_size: int = 0) -> int:
    """T6 (sideline): how many of the `num` peers of a stage have to leave one out: as many as no minority of them is (hole 58).

    Of two the other one is enough. `group_size`: the most members of a stage that average in one round; 0: all do.
    """
    return WORDS_IN_GROUPS if 0 < group_size < num else num // 2 + num % 2


def _left_out(mates: Sequence[PeerRecord], group_size: int) -> frozenset[PeerId]:
    """The peer of which most say so comes first, and has no word itself; of equals one that is behind. At most half of a stage go."""
    if not any(record.sidelined for record in mates):
        return frozenset()
    by_name, accusers, out = {record.peer: record for record in mates}, dict[PeerId, list[PeerId]](), set[PeerId]()
    for record in mates:
        for peer in set(record.sidelined) if not record.leaving else ():
            if peer in by_name and peer != record.peer:
                accusers.setdefault(peer, []).append(record.peer)

    def weight(peer: PeerId) -> tuple[int, int, bytes]:
        return len(accusers[peer]), -by_name[peer].step, _drawn(by_name[peer])

    needed = words_needed(len(mates), group_size)
    for peer in sorted(accusers, key=weight, reverse=True):
        words = sum(author not in out for author in accusers[peer])
        if words >= needed and len(out) < len(mates) // 2:
            out.add(peer)
    return frozenset(out)


def _without_voided(members: Sequence[PeerRecord], step: int) -> tuple[PeerRecord, ...]:
    """The members of a step without those that another one has voided. The word of one that is voided itself counts for nothing.

    Who comes first is the same for all, and another at each step. The last one whose word counts stays, so not all can be out. One author
    voids half of the members at most: it may lie (hole 60).
    """
    if not any(record.voids for record in members):
        return tuple(members)
    out: set[tuple[PeerId, int]] = set()
    there = {(r.peer, r.incarnation) for r in members}
    for author in sorted((r for r in members if r.voids and not r.leaving), key=_drawn):
        if (author.peer, author.incarnation) not in out:
            told = dict.fromkeys((v.peer, v.incarnation) for v in author.voids if v.step == step and v.peer != author.peer)
            out.update([each for each in told if each in there][: len(members) // 2])
    return tuple(r for r in members if (r.peer, r.incarnation) not in out)


def _drawn(record: PeerRecord) -> bytes:
    """Another order of peers at each step."""
    return blake2b(f"{record.step} {record.peer}".encode(), digest_size=8).digest()


def _without_outlived(serving: Iterable[PeerRecord]) -> dict[int, tuple[PeerRecord, ...]]:
    """The records by stage, but for outlived ones. In each stage at least the peer at the lowest step stays."""
    by_stage: dict[int, list[PeerRecord]] = {}
    for record in serving:
        by_stage.setdefault(record.stage, []).append(record)
    while True:
        spans = _spans(by_stage)
        newest = sorted(last for _, last in spans.values())
        outlived = {stage: step for stage, span in spans.items() if (step := _first_outlived(*span, newest)) <= span[1]}
        if not outlived:
            return {stage: tuple(records) for stage, records in by_stage.items()}
        for stage, step in outlived.items():
            by_stage[stage] = [record for record in by_stage[stage] if record.step < step]


def _spans(by_stage: Mapping[int, Sequence[PeerRecord]]) -> dict[int, tuple[int, int]]:
    """The lowest and the newest step of each stage."""
    steps_of = ((stage, [record.step for record in records]) for stage, records in by_stage.items())
    return {stage: (min(steps), max(steps)) for stage, steps in steps_of}


def _first_outlived(lowest: int, newest: int, others: Sequence[int]) -> int:
    """The step from which on peers of a stage are outlived; beyond `newest` if none is. `others` are the stages' newest steps, sorted.

    Another stage can not go on from there, but can from the lowest step of this one. That the stage's own newest step is among `others`
    changes nothing.
    """
    at = bisect_left(others, lowest - 1)
    return max(others[at], lowest) + 2 if at < len(others) else newest + 1
