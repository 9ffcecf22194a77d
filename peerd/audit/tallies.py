"""What has come of this peer's audits, for those who look on."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from enum import StrEnum

from peerd.policy.step.auditing import AuditWord, Item
from peerd.table.record import PeerId

MOST_REMEMBERED = 256
"""Audits that are remembered one by one, the last ones."""
MOST_PEERS = 2_048
"""Peers whose audits are counted."""


class AuditOutcome(StrEnum):
    """What came of one audit."""

    RIGHT = "right"
    DIFFERS = "differs"
    """Further off than it may be, and not so far that this peer accuses."""
    ACCUSED = "accused"
    MISSED = "missed"
    """It could not be computed again."""
    WITHHELD = "withheld"
    """The peer does not show what its part is made of."""
    CONVICTED = "convicted"
    CLEARED = "cleared"
    DISPUTED = "disputed"


@dataclass(frozen=True, slots=True)
class AuditNote:
    """One audit."""

    item: Item
    outcome: AuditOutcome
    deviation: float | None = None
    """|a - b| / |b|; None if it was not computed."""
    reason: str = ""


@dataclass(slots=True)
class AuditTallies:
    """Counts since the seat was taken, and the last audits."""

    num_items: int = 0
    """Microbatches of mates of which this peer had receipts, and parts of which it had a signed chunk."""
    num_drawn: int = 0
    counts: Counter[AuditOutcome] = field(default_factory=Counter)
    """Audits by what came of them first; the rulings of cases count besides."""
    of_peers: dict[PeerId, tuple[int, int]] = field(default_factory=dict)
    """Of each audited peer how many items were right, and how many differed; the peers that were audited last."""
    last: deque[AuditNote] = field(default_factory=lambda: deque(maxlen=MOST_REMEMBERED))

    def drew(self, num_items: int, num_drawn: int) -> None:
        """Note a step's items, and how many of them the coins drew."""
        self.num_items += num_items
        self.num_drawn += num_drawn

    def missed(self, item: Item, reason: str) -> None:
        self._note(AuditNote(item, AuditOutcome.MISSED, reason=reason))

    def withheld(self, peer: PeerId, stage: int, step: int) -> None:
        """Note that a mate does not show what its part of a step is made of."""
        self._note(AuditNote(Item(peer, stage, step, None, b""), AuditOutcome.WITHHELD, reason="it shows no receipts of its part"))

    def audited(self, item: Item, word: AuditWord) -> None:
        outcome = AuditOutcome.ACCUSED if word.accuses else AuditOutcome.DIFFERS if word.differs else AuditOutcome.RIGHT
        self._note(AuditNote(item, outcome, word.deviation))
        right, differed = self.of_peers.pop(item.audited, (0, 0))
        self.of_peers[item.audited] = (right + (not word.differs), differed + word.differs)
        if len(self.of_peers) > MOST_PEERS:
            del self.of_peers[next(iter(self.of_peers))]

    def ruled(self, item: Item, outcome: AuditOutcome) -> None:
        """Note how a case ended. An audit of this peer's own is remembered with that."""
        self.counts[outcome] += 1
        self.last = deque((replace(note, outcome=outcome) if note.item == item else note for note in self.last), MOST_REMEMBERED)

    def _note(self, note: AuditNote) -> None:
        self.counts[note.outcome] += 1
        self.last.append(note)
