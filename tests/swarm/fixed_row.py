"""A peer's own row in the table, for tests of what publishes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from peerd.swarm.own_row import OwnRow
from peerd.table.record import PeerRecord, Vitals


@dataclass
class FixedRow(OwnRow):
    """A peer's own row as a test sets it."""

    mine: PeerRecord | None = None
    measured: Vitals = field(default_factory=Vitals)
    fences: list[str] = field(default_factory=list)

    def record(self) -> PeerRecord | None:
        return self.mine

    def vitals(self) -> Vitals:
        return self.measured

    def fenced(self, reason: str) -> None:
        self.fences.append(reason)
