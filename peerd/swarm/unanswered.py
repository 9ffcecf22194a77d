"""The peers that do not answer this one: those that it suspects, T5 (suspicion), and those that no call has reached since a re-dial."""

from __future__ import annotations

from peerd.table.record import PeerId, PeerRecord, Suspicion
from peerd.table.swarm_view import SwarmView

MAX_SUSPECTS, MAX_UNREACHED = 32, 16
Pair = tuple[int, int]


class Unanswered:
    """Times are seconds on the caller's clock."""

    def __init__(self, view: SwarmView) -> None:
        self._view = view
        self._suspects: dict[PeerId, Pair] = {}
        self._unreached: dict[PeerId, Pair] = {}
        """Peers that have not answered since a re-dial failed, each with its pair of that moment."""
        self._failing_since_s: dict[PeerId, float] = {}

    @property
    def suspicions(self) -> tuple[Suspicion, ...]:
        return tuple(Suspicion(peer, *pair) for peer, pair in list(self._suspects.items())[:MAX_SUSPECTS])

    @property
    def unreached(self) -> tuple[PeerId, ...]:
        return tuple(sorted(self._unreached))[:MAX_UNREACHED]

    def suspects(self, peer: PeerId) -> bool:
        return peer in self._suspects

    def suspect(self, record: PeerRecord) -> bool:
        """Note that a peer did not answer a re-dial at its present pair. Returns whether that is news."""
        is_news = self._suspects.get(record.peer) != record.pair
        self._suspects[record.peer] = record.pair
        return is_news

    def has_risen(self, record: PeerRecord) -> bool:
        """Note a peer's higher pair, which ends the suspicion of it. Returns whether it was suspected wrongly."""
        suspected = self._suspects.pop(record.peer, None)
        return suspected is not None and suspected[0] == record.incarnation

    def not_reached(self, peer: PeerId, now_s: float, *, may_be_slow: bool) -> tuple[bool, bool]:
        """Note that a re-dial failed. Returns whether the peer lives all the same, as its record says, and whether that it failed is news.

        One that may be slow must have answered nothing for half the life of a record.
        """
        seen, known = self._view.sightings[peer], self._unreached.get(peer)
        half_life_s = self._view.ttl_s * seen.record.periods / 2
        if may_be_slow and now_s - self._failing_since_s.setdefault(peer, now_s) < half_life_s:
            return False, False
        is_news = known is None or known[0] != seen.record.incarnation
        if known is None or is_news:
            self._unreached[peer] = known = seen.record.pair
        return seen.record.pair > known and now_s - seen.risen_at_s < half_life_s, is_news

    def reached(self, peer: PeerId) -> bool:
        """Note that a peer has answered. Returns whether that is news."""
        self._failing_since_s.pop(peer, None)
        return self._unreached.pop(peer, None) is not None

    def forget(self, peer: PeerId) -> None:
        """Suspect a peer no longer: it counts for nothing anyhow."""
        self._suspects.pop(peer, None)

    def forget_expired(self, now_s: float) -> None:
        """Drop what is said of peers whose records have expired. A higher pair ends a suspicion earlier."""
        for held in (self._suspects, self._unreached):
            for peer in list(held):
                seen = self._view.sightings.get(peer)
                if seen is None or now_s - seen.risen_at_s > 2 * self._view.ttl_s:
                    del held[peer]

    def clear(self) -> None:
        self._suspects.clear()
        self._unreached.clear()
        self._failing_since_s.clear()
