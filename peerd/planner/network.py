"""The devices that a plan is made for, and the links between them. Pure: files are read by whoever asks for a plan.

Rates are bytes per second, delays one-way seconds, speeds floating-point operations per second.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TYPICAL_FLOPS = 1e12
"""Speed of a device that nothing is known of: only ratios between devices matter where links bind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpec:
    """A device, before it is asked or as its record describes it."""

    name: str
    flops: float = TYPICAL_FLOPS
    memory_bytes: float = math.inf
    up: float = math.inf
    down: float = math.inf
    is_reliable: bool = True
    """Expected to stay: it may anchor a stage."""
    stage: int | None = None
    """The stage that it serves now."""
    microbatches_per_s: float | None = None
    """What it was measured to compute in that stage."""

    def __post_init__(self) -> None:
        numbers = {"flops": self.flops, "memory": self.memory_bytes, "up": self.up, "down": self.down}
        wrong = [name for name, value in numbers.items() if not value > 0]
        if wrong:
            raise ValueError(f"device {self.name}: {wrong[0]} must be above 0")


@dataclass(frozen=True, slots=True)
class Topology:
    """Devices with the delay and the rate of each pair."""

    peers: tuple[PeerSpec, ...]
    delay_s: tuple[tuple[float, ...], ...]
    """One way, from the row's device to the column's."""
    rate: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        size = len(self.peers)
        if not size:
            raise ValueError("the network has no devices")
        for what, matrix, is_right in (("delay", self.delay_s, _is_delay), ("rate", self.rate, _is_rate)):
            if len(matrix) != size or any(len(row) != size for row in matrix):
                raise ValueError(f"the network has {size} devices, so its {what}s must be {size} rows of {size} numbers")
            for a, row in enumerate(matrix):
                if not all(is_right(value) or a == b for b, value in enumerate(row)):
                    raise ValueError(f"the network's {what}s from {self.peers[a].name} must be numbers, {_FORMS[what]}")
        if len({peer.name for peer in self.peers}) < size:
            raise ValueError("two devices of the network have the same name")

    def link_rate(self, a: int, b: int) -> float:
        """Bytes per second from `a` to `b`, with both access lines in it."""
        return min(self.rate[a][b], self.peers[a].up, self.peers[b].down)

    def hop_s(self, a: int, b: int, num_bytes: float) -> float:
        """Seconds until bytes that `a` sends have arrived at `b`."""
        return self.delay_s[a][b] + num_bytes / self.link_rate(a, b)

    def mean_hop_s(self, a: int, b: int, num_bytes: float) -> float:
        """The same with the means of both ways, for exchanges that send as much in one as in the other."""
        return (self.delay_s[a][b] + self.delay_s[b][a]) / 2 + num_bytes / self.mean_rate(a, b)

    def mean_rate(self, a: int, b: int) -> float:
        """Bytes per second, the mean of both ways."""
        return (self.link_rate(a, b) + self.link_rate(b, a)) / 2

    def part(self, chosen: Sequence[int]) -> Topology:
        """These devices only, in this order."""
        return Topology(
            tuple(self.peers[each] for each in chosen),
            tuple(tuple(self.delay_s[a][b] for b in chosen) for a in chosen),
            tuple(tuple(self.rate[a][b] for b in chosen) for a in chosen),
        )

    def canonical_order(self) -> list[int]:
        """The devices by what can be seen of them, whatever order they are listed in: shuffled devices get the same plan.

        Devices are told apart by what they are and by their links to devices that are told apart already, in rounds, as
        Weisfeiler and Leman tell vertices of graphs apart. Those that stay alike keep the order of the list.
        """
        count = range(len(self.peers))
        kinds = _ranked([(each.flops, each.memory_bytes, each.up, each.down, each.is_reliable) for each in self.peers])
        while True:
            seen = [
                (
                    kinds[a],
                    sorted((self.delay_s[a][b], self.rate[a][b], self.delay_s[b][a], self.rate[b][a], kinds[b]) for b in count if b != a),
                )
                for a in count
            ]
            refined = _ranked(seen)
            if len(set(refined)) == len(set(kinds)):
                return sorted(count, key=lambda each: refined[each])
            kinds = refined


_FORMS = {"delay": "0 or more", "rate": "above 0"}


def _is_delay(value: float) -> bool:
    return 0 <= value < math.inf


def _is_rate(value: float) -> bool:
    return value > 0


def _ranked(values: Sequence[Any]) -> list[int]:
    """The rank of each value among the different ones."""
    different: list[Any] = []
    for value in sorted(values):
        if not different or different[-1] != value:
            different.append(value)
    return [bisect.bisect_left(different, value) for value in values]
