"""What this peer publishes of itself, and what it does when it was taken for dead."""

from __future__ import annotations

from peerd.table.record import PeerRecord, Vitals


class OwnRow:
    """The record that this peer publishes of itself; none if it only reads the table."""

    def record(self) -> PeerRecord | None:
        """Return the exact step state; None before there is one."""
        return None

    def vitals(self) -> Vitals:
        """Return the measured values; called only if there is a record."""
        return Vitals()

    def fenced(self, reason: str) -> None:
        """The view was cleared, rule T3 (fence): the claims of this peer are void."""
