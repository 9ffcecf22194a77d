"""The live view as it was last made."""

from __future__ import annotations

from dataclasses import dataclass

from peerd.table.record import PeerRecord
from peerd.table.view import LiveView


@dataclass(frozen=True, slots=True)
class LastView:
    """The last live view, and the inputs that it was derived from. It is read often between two changes."""

    changes: int
    """`SwarmView.changes` at that moment."""
    own: PeerRecord | None
    made_at_s: float
    until_s: float
    live: LiveView
