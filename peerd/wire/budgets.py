"""What one caller may have of this peer at once: open calls of each method, and the size of one message.

The numbers are above what an honest peer has open, also while calls over a connection that died are still there. A caller above them hears
when to come back, and is not banned: an honest one loses that pause. Callers share nothing but `MOST_OPEN`, of which a caller that
has little always gets its share, so that none can use up what another needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from peerd.errors import BusyError
from peerd.link.certificate import MAX_CERTIFICATE_BYTES
from peerd.link.links import MAX_REQUEST_BYTES
from peerd.table.record import PeerId

RETRY_S = 0.25
SMALL_BYTES = 1024
FEW_CALLS = 4
MOST_OPEN, LEAST_SHARE = 4096, 4
"""Open calls of all callers; beyond that a caller gets an equal share of them, and at least the other number."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one caller may have of one method."""

    calls: int = FEW_CALLS
    num_bytes: int = SMALL_BYTES
    """Bytes of one message."""
    per_slot: int = 0
    """So many calls more for each slot of this peer: each slot's microbatch, and as many whose gradients are on their way back."""

    def most_calls(self, slots: int) -> int:
        return self.calls + self.per_slot * slots


_OTHERS = Allowance()
_ALLOWANCES = {
    "Backpropagate": Allowance(8, MAX_REQUEST_BYTES, per_slot=2),
    "Cancel": Allowance(8, per_slot=2),
    "Converse": Allowance(8, MAX_REQUEST_BYTES),
    "Gossip": Allowance(16, MAX_REQUEST_BYTES),
    "Propose": Allowance(num_bytes=MAX_REQUEST_BYTES),
    "Reduce": Allowance(8, MAX_REQUEST_BYTES),
    "Show": Allowance(num_bytes=MAX_CERTIFICATE_BYTES + SMALL_BYTES),
    "Sink": Allowance(num_bytes=MAX_REQUEST_BYTES),
}


def allowance_of(method: str) -> Allowance:
    """What one caller may have of the method of this name."""
    return _ALLOWANCES.get(method, _OTHERS)


@dataclass(slots=True)
class OpenCalls:
    """The calls of all callers that are open now. Nothing stays of a caller that has none."""

    total: int = 0
    refused: int = 0
    """Number of calls that were refused because their callers had too many open."""
    _of: dict[PeerId, Counter[str]] = field(default_factory=dict)

    @contextmanager
    def by(self, caller: PeerId, method: str, most: int) -> Iterator[None]:
        """Count a call while the block runs. Raises BusyError if the caller has `most` of this method open, or more than its share."""
        mine = self._of.setdefault(caller, Counter())
        if mine[method] >= most:
            self._refuse(f"you have {most} calls of {method} open already")
        if self.total >= MOST_OPEN and mine.total() >= max(LEAST_SHARE, MOST_OPEN // len(self._of)):
            self._refuse("this peer has too many calls open, and you have more of them than others")
        mine[method] += 1
        self.total += 1
        try:
            yield
        finally:
            mine[method] -= 1
            self.total -= 1
            if not mine.total():
                self._of.pop(caller, None)

    def _refuse(self, reason: str) -> None:
        self.refused += 1
        raise BusyError(reason, RETRY_S)
