"""Which peers somebody who asks the model leaves out for a while. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from peerd.table.record import PeerId

REFUSED_PAUSE_S, FAILED_PAUSE_S = 0.1, 2.0
"""For so long a peer is left out that has refused without saying until when, and one that could not be reached or answered nonsense."""
CHANGE_S = 0.5
"""Where no peer can be asked, the table is looked at again after so long."""
LEAST_PAUSE_S = 0.01


@dataclass(slots=True)
class LeftOut:
    """Times are seconds on the caller's clock."""

    _until_s: dict[PeerId, float] = field(default_factory=dict)

    def note(self, peer: PeerId, now_s: float, *, refused: bool, retry_after_s: float = 0.0) -> None:
        """A call to `peer` has failed. `refused`: it answered that it cannot now. `retry_after_s`: when it said to ask again; 0: never."""
        self._until_s[peer] = now_s + (retry_after_s or (REFUSED_PAUSE_S if refused else FAILED_PAUSE_S))

    def includes(self, peer: PeerId, now_s: float) -> bool:
        return self._until_s.get(peer, now_s) > now_s

    def pause_s(self, now_s: float) -> float:
        """How long to wait where no peer can be asked: until the first one may be asked again, and at most until the next look."""
        soonest_s = min((until_s for until_s in self._until_s.values() if until_s > now_s), default=now_s + CHANGE_S)
        return min(CHANGE_S, max(LEAST_PAUSE_S, soonest_s - now_s))
