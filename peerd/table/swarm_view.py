"""The swarm view: every record seen of a run, and the rules by which records merge and live.

Rules T1 (order), T2 (alive), T5 (suspicion) and T8 (proof) of docs/protocol.md live here. Times are seconds on the caller's own
monotonic clock and always arguments.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from types import MappingProxyType

from peerd.table.record import MAX_PERIODS, PeerId, PeerRecord, Phase
from peerd.table.strangers import WORDS_FOR_PROOF, Strangers
from peerd.table.view import LiveView

FULL_STAGE = 6
"""From so many peers of a stage on, two have to suspect one of them before others believe it."""
MAX_TOMBSTONES, MAX_UNPROVEN = 20_000, 2048
"""Number of peers whose highest pair this peer knows: of proven ones, and of strangers. A key costs nothing."""
LEAST_BELIEVED, KNOWN_PER_BELIEVED = 8, 8
"""Announce periods that are believed of a record; one more for so many fresh records: four times what a peer says that knows as many."""
MOST_DOUBT = 4
"""A claim that nobody proves is doubted for one life of a record, and longer each time, up to so many of them."""
CONDEMNED_LIVES, MOST_CONDEMNED_LIVES, MAX_CONDEMNED = 8, 512, 1024
"""A key that contradicts itself counts for nothing for so many lives of a record, twice as many each time; and so many keys at most."""
MAX_EXPIRED = 1024
"""Number of expired records that decisions look at, all of proven peers."""
_content_of = attrgetter(*(each.name for each in fields(PeerRecord) if each.name != "version"))
_NOBODY: Mapping[PeerId, tuple[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Sighting:
    """A record and when its pair last rose, on the reader's clock."""

    record: PeerRecord
    risen_at_s: float
    accused: Mapping[PeerId, tuple[int, int]] = field(default_factory=lambda: _NOBODY)
    """The peers that the record suspects, each with the pair up to which that counts."""

    most_periods: int = MAX_PERIODS
    """Announce periods between two announcements that are believed of a peer."""

    def life_s(self, ttl_s: float) -> float:
        return ttl_s * min(self.record.periods, self.most_periods)

    def fresh_until_s(self, ttl_s: float) -> float:
        return self.risen_at_s + self.life_s(ttl_s)

    def is_fresh(self, now_s: float, ttl_s: float) -> bool:
        """T2 (alive): it rose within three announce periods of its own."""
        return now_s < self.fresh_until_s(ttl_s)


class SwarmView:
    """Every record seen of one run, merged in place. What a change costs does not grow with the number of rows.

    Decisions are made on the frozen `LiveView` that `live` gives, which any thread may read. Times that are passed in never go back.
    """

    def __init__(self, me: PeerId, ttl_s: float) -> None:
        self.me = me
        self.ttl_s = ttl_s
        self.group_size = 0
        """The most members of a stage that average in one round; 0: all do."""
        self.changes = 0
        """Rises with every change but the expiry of a record."""
        self.evicted: list[PeerId] = []
        """Peers whose rows had to make room. The reader empties it, and drops what it keeps about them."""
        self._sightings: dict[PeerId, Sighting] = {}
        self.sightings: Mapping[PeerId, Sighting] = MappingProxyType(self._sightings)
        """What was seen of each peer last. It stays after it has expired, so that an older record does not return."""
        self.strangers = Strangers(ttl_s)
        self._risen: OrderedDict[PeerId, None] = OrderedDict()
        self._expired: OrderedDict[PeerId, None] = OrderedDict()
        """All other proven peers in the order in which their pairs rose; and those that have expired, in that order."""
        self._fresh: set[PeerId] = set()
        """Proven peers that have not expired, and this one."""
        self._expiries: list[tuple[float, PeerId]] = []
        """A heap: no fresh peer expires before its entry."""
        self._entered_s: dict[PeerId, float] = {}
        """The entry of each peer in the heap that counts."""
        self._num_accusers: Counter[PeerId] = Counter()
        self._vouched_until_s: dict[PeerId, float] = {}
        """Accused peers that have answered this peer since, and until when nobody else's word counts against them."""
        self._doubts: dict[PeerId, tuple[int, float]] = {}
        """Peers that claim a state which nobody gives: how often in a row that was found, and until when their records do not count."""
        self._condemned: dict[PeerId, tuple[float, float]] = {}
        """Peers that contradicted themselves, the last one last: for how long each counts for nothing, and until when."""

    def merge(self, record: PeerRecord, now_s: float) -> bool:
        """T1 (order) and T2 (alive): a higher pair replaces and renews; anything else changes nothing, so a repeat never renews."""
        peer, known = record.peer, self._sightings.get(record.peer)
        if (known is not None and record.pair <= known.record.pair) or self.is_condemned(peer, now_s):
            return False
        if record.group and known is not None and peer != self.me:
            record = _credible(record, known.record)
        num_known = len(self._fresh) + (len(self.strangers) if self._words_needed(now_s) < WORDS_FOR_PROOF else 0)
        self._see(peer, Sighting(record, now_s, self._accused_by(record), LEAST_BELIEVED + num_known // KNOWN_PER_BELIEVED))
        if peer == self.me:
            self._fresh.add(peer)
        elif peer in self._risen:
            self._freshen(peer)
        else:
            self.strangers.rose(peer)
        self._make_room()
        self.changes += self.counts(peer, now_s)
        return True

    def _freshen(self, peer: PeerId) -> None:
        self._fresh.add(peer)
        self._risen[peer] = None
        self._risen.move_to_end(peer)
        self._expired.pop(peer, None)
        self._enter(peer, self._sightings[peer].fresh_until_s(self.ttl_s))

    def condemn(self, peer: PeerId, now_s: float) -> None:
        """T7 (contradiction): the peer has said two things under one pair. For a while no record of it counts, also what it said before."""
        held = {other: held for other, held in self._condemned.items() if now_s < held[1] + held[0]}
        known = self._sightings.get(peer)
        life_s = known.life_s(self.ttl_s) if known is not None else self.ttl_s
        lasts_s = min(2 * held.pop(peer)[0], MOST_CONDEMNED_LIVES * life_s) if peer in held else CONDEMNED_LIVES * life_s
        self._condemned = dict([*held.items(), (peer, (lasts_s, now_s + lasts_s))][-MAX_CONDEMNED:])
        self.shut_out(peer)

    def shut_out(self, peer: PeerId) -> None:
        """Let what a peer has said so far count for nothing, neither as live nor as expired. A higher pair counts again."""
        known = self._sightings.get(peer)
        if known is not None:
            self._see(peer, Sighting(known.record, float("-inf")))
        self._fresh.discard(peer)
        self._expired.pop(peer, None)
        self._entered_s.pop(peer, None)
        self.changes += 1

    def is_condemned(self, peer: PeerId, now_s: float) -> bool:
        return peer in self._condemned and now_s < self._condemned[peer][1]

    def condemned(self, now_s: float) -> frozenset[PeerId]:
        """The peers that count for nothing because they contradicted themselves."""
        return frozenset(peer for peer, (_, until_s) in self._condemned.items() if now_s < until_s)

    def prove(self, peer: PeerId, now_s: float) -> bool:
        """T8 (proof): a peer with this key is there, since it has answered this peer, or called it. Returns whether that is new."""
        if peer not in self.strangers:
            return False
        before = self.counts(peer, now_s)
        self.strangers.leave(peer, now_s)
        self._risen[peer] = None
        if self._sightings[peer].is_fresh(now_s, self.ttl_s):
            self._freshen(peer)
        elif not self.is_condemned(peer, now_s):
            self._fade(peer)
        self._make_room()
        self.changes += not before or len(self.strangers) > 0
        return True

    def told(self, peer: PeerId, teller: PeerId, now_s: float) -> bool:
        """T8 (proof): `teller`, which called or answered this one, has passed on the record of a peer. Returns whether that proves it."""
        if peer not in self.strangers:
            return False
        before = self.counts(peer, now_s)
        is_proven = self.strangers.told(peer, teller) and self.prove(peer, now_s)
        self.changes += not before and self.counts(peer, now_s)
        return is_proven

    def is_proven(self, peer: PeerId) -> bool:
        return peer == self.me or peer in self._risen

    def counts(self, peer: PeerId, now_s: float) -> bool:
        """True if the record of a peer is alive, and of a proven peer, or of a stranger of which enough have told."""
        self._expire(now_s)
        if peer not in self.strangers:
            return peer in self._fresh
        enough = self.strangers.words_of(peer) >= self._words_needed(now_s)
        return enough and self._sightings[peer].is_fresh(now_s, self.ttl_s)

    def _words_needed(self, now_s: float) -> int:
        return self.strangers.words_needed(len(self._fresh) - (self.me in self._fresh), now_s)

    def _counted_strangers(self, now_s: float) -> list[PeerId]:
        needed = self._words_needed(now_s)
        if needed == WORDS_FOR_PROOF:
            return []
        told = [peer for peer in self.strangers if self.strangers.words_of(peer) >= needed]
        return [peer for peer in told if self._sightings[peer].is_fresh(now_s, self.ttl_s)]

    def is_accused(self, peer: PeerId) -> bool:
        """True if some record suspects the peer."""
        return peer in self._num_accusers

    def is_vouched_for(self, peer: PeerId, now_s: float) -> bool:
        return now_s < self._vouched_until_s.get(peer, now_s)

    def vouch(self, peer: PeerId, now_s: float) -> None:
        """T5 (suspicion): an accused peer has answered this peer. For one life of a record only this peer's own suspicion counts."""
        if self.is_vouched_for(peer, now_s):
            return
        self._vouched_until_s = {other: until_s for other, until_s in self._vouched_until_s.items() if now_s < until_s}
        self._vouched_until_s[peer] = now_s + self.ttl_s
        self.changes += 1

    def doubt(self, peer: PeerId, now_s: float) -> None:
        """Note that a peer claims a state which nobody gives, itself included. For a while its records count no more than a suspect's."""
        self._doubts = {other: doubt for other, doubt in self._doubts.items() if now_s < doubt[1] + MOST_DOUBT * self.ttl_s}
        often = self._doubts.get(peer, (0, 0.0))[0] + 1
        self._doubts[peer] = often, now_s + min(often, MOST_DOUBT) * self.ttl_s
        self.changes += 1

    def _see(self, peer: PeerId, seen: Sighting | None) -> None:
        if before := self._sightings.get(peer):
            self._num_accusers.subtract(before.accused.keys())
            for accused in before.accused:
                if not self._num_accusers[accused]:
                    del self._num_accusers[accused]
        if seen is None:
            del self._sightings[peer]
        else:
            self._sightings[peer] = seen
            self._num_accusers.update(seen.accused.keys())

    def _make_room(self) -> None:
        for peers, most in ((self.strangers, MAX_UNPROVEN), (self._risen, MAX_TOMBSTONES)):
            if len(peers) > most:
                self._evict(next(iter(peers)))

    def _evict(self, peer: PeerId) -> None:
        self._see(peer, None)
        self.strangers.forget(peer)
        self._risen.pop(peer, None)
        self._expired.pop(peer, None)
        self._fresh.discard(peer)
        self._entered_s.pop(peer, None)
        self.evicted.append(peer)

    def _enter(self, peer: PeerId, until_s: float) -> None:
        if until_s >= self._entered_s.get(peer, float("inf")):
            return  # `_expire` looks at it then, and moves the entry
        self._entered_s[peer] = until_s
        heappush(self._expiries, (until_s, peer))
        if len(self._expiries) > 2 * len(self._entered_s) + MAX_UNPROVEN:
            self._expiries = [(at_s, entered) for entered, at_s in self._entered_s.items()]
            heapify(self._expiries)

    def _expire(self, now_s: float) -> None:
        """Let peers expire whose time has come. Afterwards the first entry of the heap is the next expiry."""
        while self._expiries:
            entry_s, peer = self._expiries[0]
            if self._entered_s.get(peer) != entry_s:
                heappop(self._expiries)
                continue
            until_s = self._sightings[peer].fresh_until_s(self.ttl_s)
            if until_s > entry_s:
                self._entered_s[peer] = until_s
                heapreplace(self._expiries, (until_s, peer))
                continue
            if until_s > now_s:
                return
            heappop(self._expiries)
            del self._entered_s[peer]
            self._fade(peer)

    def _fade(self, peer: PeerId) -> None:
        self._fresh.discard(peer)
        self._expired[peer] = None
        self._expired.move_to_end(peer)
        if len(self._expired) > MAX_EXPIRED:
            self._expired.popitem(last=False)

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
        if known is None or not known.is_fresh(now_s, self.ttl_s) or not say_the_same(record, known.record):
            return False
        return record.peer not in self._num_accusers

    def clear(self) -> None:
        """T3 (fence): after a fence nothing counts as live until its pair rises again; tombstones stay."""
        self._expiries, self._entered_s = [], {}
        self._num_accusers.clear()
        self._doubts.clear()
        for peer, seen in self._sightings.items():
            self._sightings[peer] = Sighting(seen.record, float("-inf"))
            if peer in self._fresh and peer != self.me:
                self._fade(peer)
        self.changes += 1

    def live(self, now_s: float) -> LiveView:
        """T5 (suspicion): the records that rose within the TTL, without those whose present pair is suspected."""
        self._expire(now_s)
        fresh = [self._sightings[peer] for peer in sorted((*self._fresh, *self._counted_strangers(now_s)))]
        suspects = self._suspects_among(fresh, now_s) | {peer for peer, (_, until_s) in self._doubts.items() if now_s < until_s}
        counted = tuple(seen.record for seen in fresh if seen.record.peer not in suspects)
        suspected = tuple(seen.record for seen in fresh if seen.record.peer in suspects)
        return LiveView(me=self.me, records=counted, suspected=suspected, expired=self._expired_records(), group_size=self.group_size)

    def _suspects_among(self, fresh: Sequence[Sighting], now_s: float) -> set[PeerId]:
        """The peers that this one suspects, and those that so many others do that their word counts (`accusers_needed`)."""
        if not self._num_accusers:
            return set()
        accusers: dict[PeerId, list[PeerId]] = {}
        counted = {seen.record.peer for seen in fresh}
        for seen in fresh:
            for peer, pair in seen.accused.items():
                if peer in counted and self._sightings[peer].record.pair <= pair:
                    accusers.setdefault(peer, []).append(seen.record.peer)
        sizes = Counter(seen.record.stage for seen in fresh)
        return {
            peer
            for peer, others in accusers.items()
            if self.me in others
            or (len(others) >= accusers_needed(sizes[self._sightings[peer].record.stage]) and not self.is_vouched_for(peer, now_s))
        }

    def _expired_records(self) -> tuple[PeerRecord, ...]:
        mine = self._sightings.get(self.me)
        step = mine.record.step if mine is not None else 0
        found = (self._sightings[peer].record for peer in self._expired)
        return tuple(record for record in found if record.step >= step - 1 and record.phase is not Phase.JOINING)

    def holds_until_s(self, now_s: float) -> float:
        """The time at which the next record expires, or stops to count; until then `live` stays the same if nothing is merged."""
        self._expire(now_s)
        ends_s = [until_s for _, until_s in self._doubts.values() if until_s > now_s]
        if strangers := self._counted_strangers(now_s):
            ends_s += [self._sightings[peer].fresh_until_s(self.ttl_s) for peer in strangers]
            ends_s.append(self.strangers.needs_more_from_s(now_s))
        return min([*ends_s, *(entry_s for entry_s, _ in self._expiries[:1])], default=float("inf"))

    def suspects(self, now_s: float) -> frozenset[PeerId]:
        """Peers with a fresh record that does not count because a live peer suspects them."""
        return frozenset(record.peer for record in self.live(now_s).suspected)


def accusers_needed(stage_size: int) -> int:
    """The number of other peers whose suspicions hide a peer of a stage with so many: a third of a small stage, two of a larger one."""
    return -(-stage_size // 3) if stage_size < FULL_STAGE else 2


def say_the_same(record: PeerRecord, known: PeerRecord) -> bool:
    """True if two records differ in the version at most. The fields that change most are compared first, which is cheaper."""
    if (record.done, record.phase, record.step, record.next_done) != (known.done, known.phase, known.step, known.next_done):
        return False
    return _content_of(record) == _content_of(known)


def _credible(record: PeerRecord, known: PeerRecord) -> PeerRecord:
    """The record of a peer that holds its group's sum: it has computed no more of that than its records of this step have shown before."""
    shown = known.own_done if known.group else known.done
    return replace(record, own_done=record.own_done & (shown if known.step == record.step else 0))
