"""What a simulation measures: throughput, relative to the best that any partition of the present peers could reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_S = 3600.0


def best_bottleneck(speeds: Sequence[float], num_stages: int) -> float:
    """An upper bound of the weakest stage's throughput over all partitions. `speeds` ascend.

    For equal peers the bound is floor(n / S) peers. For unequal peers it is the mean over the stages; a peer faster than the mean
    has a stage to itself, and the mean is over the rest.
    """
    if len(speeds) < num_stages:
        return 0.0
    if speeds[0] == speeds[-1]:
        return len(speeds) // num_stages * speeds[0]
    return _mean_share(sum(speeds), speeds, num_stages)


def _mean_share(total: float, speeds: Sequence[float], num_stages: int) -> float:
    remaining = num_stages
    for speed in reversed(speeds):
        if remaining == 1 or speed * remaining <= total:
            break
        total, remaining = total - speed, remaining - 1
    return total / remaining


@dataclass(slots=True)
class Window:
    """Work done and work possible in a time window, in samples."""

    start_s: float
    end_s: float
    done: float = 0.0
    possible: float = 0.0

    def add(self, start_s: float, end_s: float, throughput: float, optimum: float) -> None:
        overlap_s = min(end_s, self.end_s) - max(start_s, self.start_s)
        if overlap_s > 0:
            self.done += overlap_s * throughput
            self.possible += overlap_s * optimum

    @property
    def percent(self) -> float:
        return 100 * self.done / self.possible if self.possible > 0 else 100.0


class Meter:
    """Integrates throughput over the whole simulation, its first and last hour, and `num_points` equal parts for a plot."""

    def __init__(self, duration_s: float, num_points: int = 384) -> None:
        self.overall = Window(0.0, duration_s)
        self.first = Window(0.0, min(WINDOW_S, duration_s))
        self.last = Window(max(0.0, duration_s - WINDOW_S), duration_s)
        self._part_s = duration_s / num_points
        self.parts = [Window(i * self._part_s, (i + 1) * self._part_s) for i in range(num_points)]

    def add(self, start_s: float, end_s: float, throughput: float, optimum: float) -> None:
        """Add an interval in which both figures were constant."""
        for window in (self.overall, self.first, self.last):
            window.add(start_s, end_s, throughput, optimum)
        lowest = min(int(start_s / self._part_s), len(self.parts) - 1)
        highest = min(int(end_s / self._part_s), len(self.parts) - 1)
        for part in self.parts[lowest : highest + 1]:
            part.add(start_s, end_s, throughput, optimum)
