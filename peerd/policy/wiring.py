"""Stochastic wiring: which peer of a stage gets the next microbatch (SWARM section 3.2, appendix C, algorithm 1).

Interleaved weighted round-robin: each peer carries the total expected time of the requests given to it; the smallest is
chosen and its total grows by the moving average of its response time.

Response times include queues, so round-robin alone keeps as many requests waiting at a slow peer as at a fast one, and a step
ends when the slow peer's queue does. Hence one exception to it: a request does not queue behind my own at a peer when another
would have it done clearly sooner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from peerd.table.record import PeerId, PeerRecord

SMOOTHING = 0.1
UNKNOWN_RESPONSE_S = 1.0
CLEARLY_SOONER = 1.5


class Router:
    """One caller's opinion of the peers of one stage. Holds numbers only; the caller measures."""

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        self._smoothing = smoothing
        self._total_s: dict[PeerId, float] = {}
        self._response_s: dict[PeerId, float] = {}
        self._guesses_s: dict[PeerId, list[float]] = {}
        """What a peer was charged before its first response; put right by that response."""
        self._service_s: dict[PeerId, float] = {}
        """Moving average of a response's time without that of my own requests ahead of it."""
        self._in_hand: dict[PeerId, int] = {}
        """My requests that a peer has not answered yet."""
        self._banned_at: dict[PeerId, tuple[int, int]] = {}

    def choose(self, candidates: Sequence[PeerRecord], prefer: Collection[PeerId] = ()) -> PeerRecord | None:
        """The next peer, or None when all are banned. `prefer` wins where one of it may be chosen."""
        allowed = [record for record in candidates if not self._is_banned(record)]
        if not allowed:
            return None
        self._admit(allowed)
        pool = [record for record in allowed if record.peer in prefer] or allowed
        due = min(pool, key=lambda record: (self._total_s[record.peer], record.peer))
        chosen = self._who_is_clearly_sooner(due, pool) or due
        cost_s = self.response_s(chosen.peer)
        self._total_s[chosen.peer] += cost_s
        if chosen.peer not in self._response_s:
            self._guesses_s.setdefault(chosen.peer, []).append(cost_s)
        return chosen

    @contextlib.contextmanager
    def holding(self, peer: PeerId) -> Iterator[int]:
        """While a request is at `peer`; gives how many of mine were there before it."""
        ahead = self._in_hand.get(peer, 0)
        self._in_hand[peer] = ahead + 1
        try:
            yield ahead
        finally:
            self._in_hand[peer] -= 1
            if not self._in_hand[peer]:
                del self._in_hand[peer]

    def observe(self, peer: PeerId, response_s: float, ahead: int = 0) -> None:
        """A request to `peer` took this long, forward plus backward, queues and network included.

        `ahead` of it had been so many of mine.
        """
        known = self._response_s.get(peer)
        weight = self._smoothing
        service_s = response_s / (ahead + 1)
        self._service_s[peer] = weight * service_s + (1 - weight) * self._service_s.get(peer, service_s)
        guesses_s = self._guesses_s.pop(peer, [])
        if peer in self._total_s:
            self._total_s[peer] += len(guesses_s) * response_s - sum(guesses_s)
        self._response_s[peer] = response_s if known is None else weight * response_s + (1 - weight) * known

    def ban(self, record: PeerRecord) -> None:
        """Leave the peer out until it announces itself again, that is until its pair rises."""
        self._banned_at[record.peer] = record.pair
        self._forget(record.peer)

    def response_s(self, peer: PeerId) -> float:
        """Moving average of the peer's response time; the mean of the others where it is not known yet."""
        if peer in self._response_s:
            return self._response_s[peer]
        known = self._response_s.values()
        return sum(known) / len(known) if known else UNKNOWN_RESPONSE_S

    def _who_is_clearly_sooner(self, due: PeerRecord, pool: Sequence[PeerRecord]) -> PeerRecord | None:
        """Who would have a request done clearly sooner than `due`, at which it would queue behind another of mine."""
        if due.peer not in self._in_hand or due.peer not in self._service_s:
            return None
        ends_s = {r.peer: (self._in_hand.get(r.peer, 0) + 1) * self._service_s[r.peer] for r in pool if r.peer in self._service_s}
        soonest = min((r for r in pool if r.peer in ends_s), key=lambda record: (ends_s[record.peer], record.peer))
        return soonest if ends_s[due.peer] > CLEARLY_SOONER * ends_s[soonest.peer] else None

    def _is_banned(self, record: PeerRecord) -> bool:
        banned_at = self._banned_at.get(record.peer)
        if banned_at is not None and record.pair > banned_at:
            del self._banned_at[record.peer]
            banned_at = None
        return banned_at is not None

    def _admit(self, allowed: Sequence[PeerRecord]) -> None:
        """A newcomer enters at the least total, so that it is tried soon and does not get everything."""
        present = {record.peer for record in allowed}
        for gone in set(self._total_s) - present:
            self._forget(gone)
        floor = min(self._total_s.values(), default=0.0)
        for record in allowed:
            self._total_s.setdefault(record.peer, floor)

    def _forget(self, peer: PeerId) -> None:
        self._total_s.pop(peer, None)
        self._guesses_s.pop(peer, None)
        self._service_s.pop(peer, None)
