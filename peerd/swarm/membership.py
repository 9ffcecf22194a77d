"""The one copy of the table in this daemon, and this peer's own row in it.

Contract: only the event loop changes the view; `live` may be read from any thread. Whatever changes wakes `changed`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from peerd.errors import BadMessageError
from peerd.policy.swarm.spreading import News, periods, summarise
from peerd.policy.swarm.suspicion import Patience
from peerd.swarm.clock import clock_s
from peerd.swarm.identity import Identity
from peerd.swarm.signed import SignedRecord, peek_record, read_record, sign_record
from peerd.table.circuit import direct
from peerd.table.record import HIDDEN, PeerId, PeerRecord, RawRecord, RunId, Suspicion, Vitals
from peerd.table.view import TTL_PERIODS, LiveView, SwarmView

MAX_SUSPECTS = 32
ABSORBED_AT_ONCE = 16
"""To check a record takes a quarter of a millisecond."""
FORGIVEN_S = 10.0
"""A wrong suspicion makes this peer more patient for so long."""


class OwnRow:
    """What this peer tells of itself: nothing, if it only looks at the table."""

    def record(self) -> PeerRecord | None:
        """The exact step state; None before there is one."""
        return None

    def vitals(self) -> Vitals:
        """What is measured, asked for only where there is a record."""
        return Vitals()

    def fenced(self, reason: str) -> None:
        """The view was cleared, rule T3 (fence): the claims of this peer are void."""


@dataclass(frozen=True, slots=True)
class Word:
    """Why others must hear of this peer before its next announcement."""

    tell: bool
    """This peer suspects another, or another suspects it: its next version tells or ends that."""
    superseded_by: int
    """The highest incarnation that another daemon showed under this peer's id, rule T1 (order); 0 where there was none."""


@dataclass(frozen=True, slots=True)
class _Live:
    """The last answer about who counts, and for what it was given: between two pieces of news the question is asked often."""

    view: SwarmView
    own: PeerRecord | None
    made_at_s: float
    until_s: float
    live: LiveView


class Membership:
    """Merges what arrives, publishes what this peer is."""

    def __init__(self, identity: Identity, run: RunId, ttl_s: float, row: OwnRow | None = None) -> None:
        self.identity = identity
        self.run = run
        self.view = SwarmView(me=identity.peer, ttl_s=ttl_s)
        self.raws: dict[PeerId, SignedRecord] = {}
        self.row = row or OwnRow()
        self.news = News(ttl_s / TTL_PERIODS)
        """Records that rose lately, for peers that ask for what is new."""
        self.patience = Patience(FORGIVEN_S)
        """How long another peer gets to answer; longer after a suspicion that was wrong."""
        self.book: dict[PeerId, tuple[str, ...]] = {}
        """Addresses of peers met before, whose records have not been seen yet."""
        self.messages_refused = 0
        self._version = 0
        self._published: PeerRecord | None = None
        """My step state as it was last announced: while it is still that, my row in the view needs no mending."""
        self._announced: dict[str, Any] = {}
        """The fields of my row that stay as they were last announced, whatever my step state is meanwhile."""
        self._live: _Live | None = None
        self._suspects: dict[PeerId, tuple[int, int]] = {}
        self._waiters: set[asyncio.Future[bool]] = set()
        self._tell, self._superseded_by, self._owes_word = False, 0, asyncio.Event()

    @property
    def me(self) -> PeerId:
        return self.identity.peer

    def live(self) -> LiveView:
        """What counts now, my own row as it is and not as it was last announced."""
        published, view, own, now_s = self._published, self.view, self.row.record(), clock_s()
        known = self._live
        if known is not None and known.view is view and known.own is own and known.made_at_s <= now_s < known.until_s:
            return known.live
        live = view.live(now_s)
        if own is not None and own is not published:
            live = replace(live, records=tuple(replace(own, **self._announced) if r.peer == own.peer else r for r in live.records))
        self._live = _Live(view, own, now_s, view.holds_until_s(now_s), live)
        return live

    def find(self, peer: PeerId) -> PeerRecord | None:
        """The last record seen of a peer, live or not."""
        seen = self.view.sightings.get(peer)
        return seen.record if seen else None

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        record = self.find(peer)
        return record.addresses if record else self.book.get(peer, ())

    def bootstrap(self, most: int) -> tuple[str, ...]:
        """Addresses of a few other live peers that can be dialled, one of each."""
        others = [direct(r.addresses) for r in self.live().records if r.peer != self.me and r.reach not in HIDDEN]
        return tuple(addresses[0] for addresses in others if addresses)[:most]

    def publish(self) -> SignedRecord | None:
        """A new version of my row, signed and merged; the caller spreads it."""
        own = self.row.record()
        if own is None:
            return None
        self._forget_suspects()
        self._version += 1
        suspects = tuple(Suspicion(peer, *pair) for peer, pair in list(self._suspects.items())[:MAX_SUSPECTS])
        live = self.live()
        self._announced = {
            **self.row.vitals().measured(),
            "version": self._version,
            "suspects": suspects,
            "periods": periods(len(live.records)),
            "summary": summarise(own, live),
        }
        record = replace(own, **self._announced)
        signed = sign_record(record, self.identity, self.run)
        self.raws[self.me] = signed
        self.view = self.view.merge(record, clock_s())
        self._published = own
        self.news.note(record, signed.raw, clock_s())
        self.wake()
        return signed

    def absorb(self, raws: Sequence[RawRecord]) -> None:
        """Merge records from the network. BadMessageError for the first broken one; what is sound before it counts."""
        news = False
        for body, signature in raws:
            news |= self._absorb_one(body, signature)
        if news:
            self.wake()

    async def absorb_quietly(self, raws: Sequence[RawRecord]) -> None:
        """The same for records of many senders, where a broken one is nobody's call. They may be thousands: others get their turn."""
        for number, raw in enumerate(raws, start=1):
            with contextlib.suppress(BadMessageError):
                self.absorb([raw])
            if number % ABSORBED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def forget(self, peer: PeerId) -> None:
        """It is gone for good. The view keeps its tombstone, so that an old record does not bring it back."""
        self.raws.pop(peer, None)
        self.news.forget(peer)

    def suspect(self, record: PeerRecord) -> None:
        """This peer did not answer a re-dial at its present pair."""
        self._suspects[record.peer] = record.pair
        self._owe_word(tell=True)

    async def word_owed(self) -> Word:
        """Returns once others must hear of this peer."""
        await self._owes_word.wait()
        word = Word(self._tell, self._superseded_by)
        self._tell, self._superseded_by = False, 0
        self._owes_word.clear()
        return word

    def clear_liveness(self) -> None:
        """T3 (fence): nobody counts until seen anew."""
        self.view = self.view.cleared()
        self._suspects.clear()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next change of the view, a record's death among them, at most this long. False when the time ran out."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters.add(waiter)
        lives_s = self._next_death_s() - clock_s()
        timer = loop.call_later(max(0.0, min(timeout_s, lives_s)), _answer, waiter, lives_s <= timeout_s)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    def _next_death_s(self) -> float:
        known, now_s = self._live, clock_s()
        if known is not None and known.view is self.view and now_s < known.until_s:
            return known.until_s
        return self.view.holds_until_s(now_s)

    def wake(self) -> None:
        """Let everyone who waits for a change look again."""
        for waiter in self._waiters:
            _answer(waiter, True)

    def _absorb_one(self, body: bytes, signature: bytes) -> bool:
        """Whether it says more than that its peer, who counted anyhow, is still there."""
        try:
            peer, pair = peek_record(body)
            known = self.view.sightings.get(peer)
            if known is not None and pair <= known.record.pair:
                return False  # checking a signature costs more than knowing it is old
            signed = read_record(body, signature, self.run)
        except BadMessageError:
            self.messages_refused += 1
            raise
        if peer == self.me:
            self._owe_word(superseded_by=signed.record.incarnation)
            return False
        now_s = clock_s()
        suspected = self._suspects.pop(peer, None)
        if suspected is not None and suspected[0] == signed.record.incarnation:
            self.patience = self.patience.after_mistake(now_s)
        says_more = not self.view.only_renews(signed.record, now_s)
        self.view = self.view.merge(signed.record, now_s)
        self.raws[peer] = signed
        self.news.note(signed.record, signed.raw, now_s)
        if any(s.peer == self.me and (s.incarnation, s.version) == self._last_pair() for s in signed.record.suspects):
            # A higher version ends it. The ledger stays: if this work was done again meanwhile, rule 6 (reset) settles it.
            self._owe_word(tell=True)
        return says_more

    def _owe_word(self, *, tell: bool = False, superseded_by: int = 0) -> None:
        self._tell |= tell
        self._superseded_by = max(self._superseded_by, superseded_by)
        self._owes_word.set()

    def _last_pair(self) -> tuple[int, int]:
        mine = self.raws.get(self.me)
        return mine.record.pair if mine is not None else (0, 0)

    def _forget_suspects(self) -> None:
        """A suspicion ends with the record, where the peer's pair does not rise before (`_absorb_one`)."""
        now_s = clock_s()
        for peer in list(self._suspects):
            seen = self.view.sightings.get(peer)
            if seen is None or now_s - seen.risen_at_s > 2 * self.view.ttl_s:
                del self._suspects[peer]


def _answer(waiter: asyncio.Future[bool], has_changed: bool) -> None:
    if not waiter.done():
        waiter.set_result(has_changed)
