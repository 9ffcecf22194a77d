"""The daemon's only copy of the table, and this peer's own row in it.

Contract: only the event loop changes the view; `live` may be read from any thread. Every change wakes `changed`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog

from peerd.errors import BadMessageError
from peerd.policy.swarm.meeting import Reading
from peerd.policy.swarm.spreading import News, ToldBy, periods, summarise
from peerd.policy.swarm.suspicion import Patience
from peerd.swarm.access import RunAccess
from peerd.swarm.clock import clock_s
from peerd.swarm.contradictions import Contradictions, Proof, is_proof, is_statement
from peerd.swarm.identity import Identity
from peerd.swarm.last_view import LastView
from peerd.swarm.own_row import OwnRow
from peerd.swarm.signed import SignedRecord, peek_record, read_record, sign_record
from peerd.swarm.unanswered import Unanswered
from peerd.swarm.waking import Waiters
from peerd.swarm.word import OwedWord
from peerd.table.circuit import direct
from peerd.table.record import HIDDEN, MAX_STAGES, MAX_STEP, NO_RECORD, PeerId, PeerRecord, RawRecord, RunId
from peerd.table.swarm_view import SwarmView
from peerd.table.view import TTL_PERIODS, LiveView
from peerd.wire.bans import Bans

LOG = structlog.get_logger()
MOST_DOUBTED = 1024
ABSORBED_AT_ONCE = 16
"""Checking a record takes a quarter of a millisecond."""
DIRECTORY = PeerId("")
"""Who tells what is read in the DHT, where anybody stores."""
FENCE_SHARE = 0.8
"""Share of a record's life without running after which this peer is fenced: others may have counted it as dead."""
QUIET_PERIODS = 1.5
"""Time after a fence for which this peer listens only: what was sent to it while it slept comes in, and everybody's next record."""
FORGIVEN_S = 10.0
"""Time for which a wrong suspicion makes this peer more patient."""


class Membership:
    """Merges records from the network and publishes this peer's own."""

    def __init__(
        self,
        identity: Identity,
        run: RunId,
        ttl_s: float,
        row: OwnRow | None = None,
        num_stages: int = MAX_STAGES,
        last_step: int = MAX_STEP,
        access: RunAccess | None = None,
    ) -> None:
        """The run has `num_stages`, and ends at `last_step`. Without `access` everybody may take part."""
        self.identity, self.run = identity, run
        self.access = access or RunAccess(identity.peer, run)
        self._num_stages, self._last_step = num_stages, last_step
        self.view = SwarmView(me=identity.peer, ttl_s=ttl_s)
        self._lock = threading.Lock()
        """Held while the view is changed: a record that expires changes it, whichever thread asks what is live."""
        self.raws: dict[PeerId, SignedRecord] = {}
        self.contradictions = Contradictions(run)
        self.row = row or OwnRow()
        self.news = News(ttl_s / TTL_PERIODS)
        """Records that changed lately, for peers that ask for news."""
        self.patience = Patience(FORGIVEN_S)
        """Determines how long other peers have to answer: longer after a wrong suspicion."""
        self._reading = Reading(ttl_s / TTL_PERIODS)
        self.book: dict[PeerId, tuple[str, ...]] = {}
        """Addresses of peers met before, whose records have not been seen yet."""
        self.messages_refused = self._version = 0
        self._published: PeerRecord | None = None
        """This peer's step state as last announced. While it is unchanged, the own row in the view is up to date."""
        self._announced: dict[str, Any] = {}
        """Fields of the own row that keep the values last announced while the step state changes."""
        self._live: LastView | None = None
        self._unanswered = Unanswered(self.view)
        self.doubted: asyncio.Queue[PeerId] = asyncio.Queue(MOST_DOUBTED)
        """Peers that another one has accused lately: this peer asks them itself."""
        self._waiters = Waiters()
        self._ran_s: float | None = None
        """When the announcing loop last ran; None while it does not run."""
        self._quiet_until_s = float("-inf")
        self.word, self.bans = OwedWord(), Bans()

    @property
    def me(self) -> PeerId:
        return self.identity.peer

    def live(self) -> LiveView:
        """Return the live view, with the own row as it is now and not as last announced."""
        changes, published, view, own, now_s = self.view.changes, self._published, self.view, self.row.record(), clock_s()
        if (known := self._live) is not None and known.changes == changes and known.own is own and known.made_at_s <= now_s < known.until_s:
            return known.live
        with self._lock:
            live, until_s = view.live(now_s), view.holds_until_s(now_s)
        if own is not None and own is not published:
            live = replace(live, records=tuple(replace(own, **self._announced) if r.peer == own.peer else r for r in live.records))
        self._live = LastView(changes, own, now_s, until_s, live)
        return live

    @property
    def contradictory(self) -> frozenset[PeerId]:
        """Peers that count for nothing because they signed two different records under one (incarnation, version)."""
        return self.view.condemned(clock_s())

    @property
    def periods(self) -> int:
        """Number of periods within which this peer announces itself at least once."""
        mine = self.find(self.me)
        return mine.periods if mine is not None else 1

    def find(self, peer: PeerId) -> PeerRecord | None:
        """Return the last record seen of a peer, live or not."""
        seen = self.view.sightings.get(peer)
        return seen.record if seen else None

    def is_known(self, peer: PeerId) -> bool:
        """Whether a peer has a record that has not expired."""
        seen = self.view.sightings.get(peer)
        return peer == self.me or (seen is not None and seen.is_fresh(clock_s(), self.view.ttl_s))

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        return record.addresses if (record := self.find(peer)) else self.book.get(peer, ())

    def bootstrap(self, most: int) -> tuple[str, ...]:
        """Return addresses of a few other live peers that can be dialled, one each."""
        others = [direct(r.addresses) for r in self.live().records if r.peer != self.me and r.reach not in HIDDEN]
        return tuple(addresses[0] for addresses in others if addresses)[:most]

    def publish(self) -> SignedRecord | None:
        """Sign and merge a new version of the own row and return it; the caller spreads it."""
        own = self.row.record()
        if own is None:
            return None
        self._unanswered.forget_expired(clock_s())
        self._version += 1
        live = self.live()
        self._announced = {
            **self.row.vitals().measured(),
            "version": self._version,
            "suspects": self._unanswered.suspicions,
            "unreached": self._unanswered.unreached,
            "invitation": self.access.invitation,
            "periods": periods(len(live.records)),
            "summary": summarise(own, live),
        }
        record = replace(own, **self._announced)
        signed = sign_record(record, self.identity, self.run)
        self.raws[self.me] = signed
        with self._lock:
            self.view.merge(record, clock_s())
        self.contradictions.note(signed, clock_s() + self.view.ttl_s * record.periods)
        self._published = own
        self.news.note(record, signed.raw, clock_s(), ToldBy.OWN)
        self.wake()
        return signed

    def current(self) -> SignedRecord | None:
        """The own row as last published; a new version only if the step state has changed since, because each costs everybody a look."""
        own = self.row.record()
        return self.raws[self.me] if own is not None and own is self._published else self.publish()

    def absorb(self, raws: Sequence[RawRecord], sender: PeerId | None = None) -> list[RawRecord]:
        """Merge records that a peer sent in a call of its own, or as its answer, and skip and count broken ones.

        Return those to pass on: for each proven peer the verified one held here. A broken record of a third party costs only itself,
        because the sender may have passed on what another peer made. Raises BadMessageError, after all others are merged, if the sender's
        own is broken.
        """
        told, news, blamed, before = list[PeerId](), False, None, NO_RECORD
        for raw in raws:
            peer = None
            try:
                if is_statement(raw):
                    news |= self.convict(before, raw)
                else:
                    peer, pair = peek_record(raw[0])
                    news |= self._merge(peer, pair, raw, before, sender)
                    told.append(peer)
                before = raw
            except BadMessageError as error:
                self.messages_refused += 1
                blamed = error if peer is not None and peer == sender else blamed
        if sender is not None:
            self._prove(sender, told)
        if news:
            self.wake()
        if blamed is not None:
            raise blamed
        return [self.raws[peer].raw for peer in told if peer in self.raws and self.view.is_proven(peer)]

    async def absorb_quietly(self, raws: Sequence[RawRecord], sender: PeerId | None = None) -> None:
        """Merge many records. There may be thousands, so other tasks get their turn in between."""
        for first in range(0, len(raws), ABSORBED_AT_ONCE):
            self.absorb(raws[first : first + ABSORBED_AT_ONCE], sender)
            await asyncio.sleep(0)

    def forget(self, peer: PeerId) -> None:
        """Forget a peer that is gone for good. The view keeps its last record, so that an older one does not bring it back."""
        self.raws.pop(peer, None)
        self.contradictions.forget(peer)
        self.news.forget(peer)

    def suspect(self, record: PeerRecord) -> bool:
        """Note that a peer did not answer a re-dial at its present pair. Returns whether that is news."""
        is_news = self._unanswered.suspect(record)
        self.word.owe(tell=True)
        return is_news

    def not_reached(self, peer: PeerId, *, may_be_slow: bool) -> bool:
        """Note that a re-dial failed. Returns whether the peer lives all the same, as its record says: the link to it is dead (hole 22)."""
        lives, is_news = self._unanswered.not_reached(peer, clock_s(), may_be_slow=may_be_slow)
        if is_news:
            self.word.owe(tell=True)
        return lives

    def drop_shut_out(self) -> list[PeerId]:
        """T9 (access): let those count for nothing who may not take part any more. Returns them."""
        shut_out = [peer for peer in self.raws if peer != self.me and not self.access.admits(peer)]
        for peer in shut_out:
            with self._lock:
                self.view.shut_out(peer)
            self.forget(peer)
            self._unanswered.forget(peer)
        if shut_out:
            self.wake()
        return shut_out

    def doubt(self, peer: PeerId) -> None:
        """Note that a peer claims a state that nobody gives."""
        LOG.warning("a peer claims a state that nobody gives; it does not count for a while", claims=peer)
        with self._lock:
            self.view.doubt(peer, clock_s())
        self.wake()

    def reached(self, peer: PeerId) -> None:
        """Note that a peer has answered a call."""
        self.called_by(peer)
        if self.view.is_accused(peer):
            with self._lock:
                self.view.vouch(peer, clock_s())
            self.wake()
        if self._unanswered.reached(peer):
            self.word.owe(tell=True)

    def called_by(self, peer: PeerId) -> None:
        """Note that a peer has called: a daemon has its key."""
        self._prove(peer)

    def strangers(self) -> list[PeerRecord]:
        """Peers that have not expired, and of which nothing proves yet that they are there: T8 (proof)."""
        now_s, seen = clock_s(), self.view.sightings
        return [seen[peer].record for peer in self.view.strangers if seen[peer].is_fresh(now_s, self.view.ttl_s)]

    def ran(self) -> None:
        """Note that the announcing loop runs. T3 (fence) applies if it did not for too long."""
        self._fence_if_late()
        self._ran_s = clock_s()

    def runs_no_more(self) -> None:
        """Note that the announcing loop has ended."""
        self._ran_s = None

    @property
    def is_quiet(self) -> bool:
        """T3 (fence): True for a while after this peer slept. It announces nothing meanwhile, and takes no silence for an absence.

        To be asked before a decision: what wakes first may not be the announcing loop (hole 27).
        """
        self._fence_if_late()
        return clock_s() < self._quiet_until_s

    def _fence_if_late(self) -> None:
        late_s = clock_s() - self._ran_s if self._ran_s is not None else 0.0
        if late_s > FENCE_SHARE * self.view.ttl_s * self.periods:
            self._ran_s = clock_s()
            self.fence(f"this peer did not run for {late_s:.1f} s")

    def fence(self, reason: str) -> None:
        """Apply T3 (fence): clear the view, be quiet, and let the row's owner drop its claims."""
        self._quiet_until_s = clock_s() + QUIET_PERIODS * self.view.ttl_s / TTL_PERIODS * self.periods
        self.clear_liveness()
        self.row.fenced(reason)

    def clear_liveness(self) -> None:
        """Let no peer count until it is seen again."""
        with self._lock:
            self.view.clear()
        self._unanswered.clear()

    async def changed(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the next change of the view; the expiry of a record is one. Returns False on timeout."""
        return await self._waiters.wait(timeout_s, self._next_death_s() - clock_s())

    def _next_death_s(self) -> float:
        known, now_s = self._live, clock_s()
        if known is not None and known.changes == self.view.changes and now_s < known.until_s:
            return known.until_s
        with self._lock:
            return self.view.holds_until_s(now_s)

    def wake(self) -> None:
        """Wake every task that waits for a change."""
        self._waiters.wake()

    def _prove(self, peer: PeerId, told: Sequence[PeerId] = ()) -> None:
        """T8 (proof): a peer has called or answered this one, and has told of others. Who is proven by that is news."""
        now_s, before = clock_s(), self.view.changes
        with self._lock:
            proven = [peer] if self.view.prove(peer, now_s) else []
            proven += [other for other in told if self.view.told(other, peer, now_s)]
        for signed in (self.raws[each] for each in proven if each in self.raws):
            self.news.note(signed.record, signed.raw, now_s)
        if self.view.changes != before:
            self.wake()

    def _merge(self, peer: PeerId, pair: tuple[int, int], raw: RawRecord, before: RawRecord, sender: PeerId | None) -> bool:
        """Merge a record that names this peer and pair. Returns True if it changes anything besides renewing the lease of a live peer.

        `before` came before it in the same message: two that contradict each other travel together.
        """
        known, now_s = self.view.sightings.get(peer), clock_s()
        other = self.contradictions.other(peer, pair, raw, now_s) or self.contradictions.beside(peer, pair, raw, before)
        is_old = known is not None and pair <= known.record.pair
        if self.view.is_condemned(peer, now_s) or (is_old and other is None) or self.access.is_banned(peer):
            return False  # checked before the signature, which costs more
        is_vague = not self.view.is_proven(peer) and peer != sender
        if is_vague and not self._reading.may_read(sender or DIRECTORY, now_s):
            return False
        signed = read_record(*raw, self.run)
        if signed.record.stage >= self._num_stages or signed.record.step > self._last_step:
            where = f"stage {signed.record.stage} and step {signed.record.step}"
            raise BadMessageError(f"{peer} names {where} of a run of {self._num_stages} stages that ends at step {self._last_step}")
        self.access.show(peer, signed.record.invitation)
        if not self.access.admits(peer):
            return False
        contradicts = other is not None and is_proof(other, raw, self.run)
        if is_old and not contradicts:
            return False
        if peer == self.me:
            self.word.owe(superseded_by=signed.record.incarnation)
            return False
        if other is not None and contradicts:
            self._condemn(peer, (other, raw), now_s)
            return True
        if self._unanswered.has_risen(signed.record):
            self.patience = self.patience.after_mistake(now_s)
        renews = self.view.only_renews(signed.record, now_s)
        with self._lock:
            self.view.merge(signed.record, now_s)
            counts = self.view.counts(peer, now_s)
        self.raws[peer] = signed
        if self.view.is_proven(peer):
            self.news.note(signed.record, signed.raw, now_s, ToldBy.PUSHED if sender == peer else ToldBy.PASSED_ON)
        self.contradictions.note(signed, self.view.sightings[peer].fresh_until_s(self.view.ttl_s))
        for accused in self.view.sightings[peer].accused if counts else ():
            if not self.doubted.full() and not self._unanswered.suspects(accused) and not self.view.is_vouched_for(accused, now_s):
                self.doubted.put_nowait(accused)
        while self.view.evicted:
            self.forget(self.view.evicted.pop())
        if counts and any(s.peer == self.me and (s.incarnation, s.version) >= self._last_pair() for s in signed.record.suspects):
            # A higher version ends the suspicion. The ledger stays: if its work was done again meanwhile, rule 6 (reset) decides.
            self.word.owe(tell=True)
        return counts and not renews

    def convict(self, one: RawRecord, other: RawRecord) -> bool:
        """Condemn the reducer that has signed both statements of one round. Returns whether that is new: rule 18 (certify)."""
        liar = self.contradictions.reducer_of_both(one, other)
        if liar is not None and liar != self.me:
            self._condemn(liar, (one, other), clock_s())
            self.wake()
        return liar not in (None, self.me)

    def _condemn(self, peer: PeerId, proof: Proof, now_s: float) -> None:
        """T7 (contradiction): let a peer count for nothing, and let others know why if it counted."""
        LOG.warning("a peer signed two texts that contradict each other; it counts for nothing for a while", signed_by=peer)
        counted = self.live().find(peer) is not None
        self.cast_out(peer, now_s)
        self.contradictions.found(peer, proof, is_to_tell=counted)

    def cast_out(self, peer: PeerId, now_s: float) -> None:
        """Let a peer count for nothing for a while: T7 (contradiction), rule 20 (audit)."""
        with self._lock:
            self.view.condemn(peer, now_s)
        self.forget(peer)
        self._unanswered.forget(peer)

    def _last_pair(self) -> tuple[int, int]:
        return self.raws[self.me].record.pair if self.me in self.raws else (0, 0)
