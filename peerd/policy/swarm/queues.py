"""What the queues say: the mean of a peer's own, and when differences between stages last long enough to act on.

A queue is noisy: a reading at one moment says little. So a record tells the mean over the last rebalancing period, and a stage counts as
short of peers once three readings in a row, a third of a period apart, name the same two stages. A peer that is on its way there has to
serve, and one that leaves the other stage has to be gone, before the readings begin anew.
"""

from __future__ import annotations

import math

from peerd.policy.swarm.rebalance import Move, Plan
from peerd.table.record import Phase
from peerd.table.view import LiveView

READINGS = 3
"""QueueReadings in a row that must agree, all within one period."""


class MeanQueue:
    """The moving average of a number that is read now and then, over about `over_s` seconds. It holds numbers only."""

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._read_s: float | None = None
        self._waiting = self.mean = 0.0

    def read(self, waiting: float, now_s: float) -> None:
        """So many wait now. What was read before counts as having lasted until now."""
        if self._read_s is not None and self._over_s > 0:
            self.mean += (self._waiting - self.mean) * (1 - math.exp(-max(0.0, now_s - self._read_s) / self._over_s))
        self._read_s, self._waiting = now_s, waiting


class QueueReadings:
    """Turns the plans of single readings into one that lasts."""

    def __init__(self) -> None:
        self._stages: tuple[int, int] | None = None
        self._count = 0

    def read(self, found: Plan, live: LiveView) -> Plan:
        """The plan if as many readings in a row named these two stages, and no other peer is on its way; else the reason to wait."""
        if not found.moves:
            self._stages, self._count = None, 0
            return found
        move = found.moves[0]
        if why := _why_wait(live, move):
            self._stages, self._count = None, 0
            return Plan((), f"{found.reason}, once {why}")
        stages = move.from_stage, move.to_stage
        self._count = self._count + 1 if stages == self._stages else 1
        self._stages = stages
        if self._count < READINGS:
            return Plan((), f"{found.reason}, if {READINGS - self._count} more readings say so")
        self._stages, self._count = None, 0
        return found


def _why_wait(live: LiveView, move: Move) -> str:
    """What has to end first: queues tell of the stages as they were before."""
    if any(record.phase is Phase.JOINING and not record.leaving for record in live.of_stage(move.to_stage)):
        return f"the peer that is on its way to stage {move.to_stage} serves"
    if any(record.leaving for record in live.of_stage(move.from_stage)):
        return f"the peer that leaves stage {move.from_stage} is gone"
    return ""
