"""Stochastic wiring: which peer of a stage gets the next microbatch (SWARM section 3.2, appendix C, algorithm 1).

Interleaved weighted round-robin: each peer carries the total expected time of the requests given to it; the smallest is
chosen and its total grows by the moving average of its response time.

A response time is forward plus backward at that peer, network included and its queue not. With the queue in it, as many
requests wait at a slow peer as at a fast one, and a step ends when the slow peer's queue does: of two peers, one three times
slower, the fast one then gets only 2.2 times the work. Without, shares follow speed whatever the load.

A peer's first response is no measure of it: connection set-up and the first use of every kernel ride on it, seconds where the next
takes a tenth of one. Taken at its word, a newcomer would wait for as many requests of the others as fit that time. Until its second
response it counts as the mean of the others, or as its first where that was less.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from peerd.table.record import PeerId, PeerRecord

SMOOTHING = 0.1
UNKNOWN_RESPONSE_S = 1.0


class Router:
    """One caller's opinion of the peers of one stage. Holds numbers only; the caller measures."""

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        self._smoothing = smoothing
        self._total_s: dict[PeerId, float] = {}
        self._response_s: dict[PeerId, float] = {}
        self._first_s: dict[PeerId, float] = {}
        """First responses of peers that have given no second."""
        self._guesses: dict[PeerId, tuple[int, float]] = {}
        """Requests given to a peer not measured yet, and what it was charged for each; put right as more is known."""
        self._banned_at: dict[PeerId, tuple[int, int]] = {}

    def choose(
        self, candidates: Sequence[PeerRecord], prefer: Collection[PeerId] = (), elsewhere: Sequence[PeerRecord] = ()
    ) -> PeerRecord | None:
        """The next peer, or None when all are banned. `prefer` wins where one of it may be chosen.

        Peers of the stage that are no candidates just now stand in `elsewhere`: they keep their totals. Else a slow peer, which is
        a moment late at every step or alone on time, would start anew at each.
        """
        allowed = [record for record in candidates if not self._is_banned(record)]
        if not allowed:
            return None
        self._admit(allowed, elsewhere)
        pool = [record for record in allowed if record.peer in prefer] or allowed
        chosen = min(pool, key=lambda record: (self._total_s[record.peer], record.peer))
        cost_s = self.response_s(chosen.peer)
        self._total_s[chosen.peer] += cost_s
        if chosen.peer not in self._response_s:
            count, _ = self._guesses.get(chosen.peer, (0, cost_s))
            self._guesses[chosen.peer] = count + 1, cost_s
        return chosen

    def observe(self, peer: PeerId, response_s: float) -> None:
        """A request to `peer` took this long, forward plus backward and network, without its waits for others."""
        known_s = self._response_s.get(peer)
        if known_s is not None:
            self._response_s[peer] = self._smoothing * response_s + (1 - self._smoothing) * known_s
        elif peer in self._first_s:
            del self._first_s[peer]
            self._response_s[peer] = response_s
        else:
            self._first_s[peer] = response_s
        self._correct()

    def ban(self, record: PeerRecord) -> None:
        """Leave the peer out until it announces itself again, that is until its pair rises."""
        self._banned_at[record.peer] = record.pair
        self._forget(record.peer)

    def response_s(self, peer: PeerId) -> float:
        """Moving average of the peer's response time; a guess until its second response."""
        if peer in self._response_s:
            return self._response_s[peer]
        first_s = [self._first_s[peer]] if peer in self._first_s else []
        known = self._response_s.values() or self._first_s.values()
        return min(first_s + ([sum(known) / len(known)] if known else []), default=UNKNOWN_RESPONSE_S)

    def _correct(self) -> None:
        """Charge peers not measured yet, or only just, what they are thought to take by now."""
        for peer, (count, charged_s) in list(self._guesses.items()):
            cost_s = self.response_s(peer)
            self._total_s[peer] += count * (cost_s - charged_s)
            self._guesses[peer] = count, cost_s
            if peer in self._response_s:
                del self._guesses[peer]

    def _is_banned(self, record: PeerRecord) -> bool:
        banned_at = self._banned_at.get(record.peer)
        if banned_at is not None and record.pair > banned_at:
            del self._banned_at[record.peer]
            banned_at = None
        return banned_at is not None

    def _admit(self, allowed: Sequence[PeerRecord], elsewhere: Sequence[PeerRecord]) -> None:
        """A newcomer enters at the least total, so that it is tried soon and does not get everything."""
        present = {record.peer for record in allowed}
        for gone in set(self._total_s) - present - {record.peer for record in elsewhere}:
            self._forget(gone)
        totals = [self._total_s[peer] for peer in present if peer in self._total_s]
        floor = min(totals or self._total_s.values(), default=0.0)
        for peer in present:
            self._total_s.setdefault(peer, floor)

    def _forget(self, peer: PeerId) -> None:
        self._total_s.pop(peer, None)
        self._guesses.pop(peer, None)
        self._first_s.pop(peer, None)
