"""Simulated machines: how fast they compute, and how long they take to download a stage's state."""

from __future__ import annotations

import random
from dataclasses import dataclass

MEDIAN_BYTES_PER_S = 12.5e6
"""A home link of 100 Mbit/s."""


@dataclass(frozen=True, slots=True)
class Device:
    speed: float
    """Samples per second; the slowest possible device has 1."""
    download_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The distribution of machines. Speed and bandwidth are independent and log-uniform."""

    spread: float = 1.0
    """Ratio of the fastest to the slowest speed, and of the highest to the lowest bandwidth."""
    state_bytes: float = 0.0
    """Size of one stage's state; 0: there is nothing to download."""
    bytes_per_s: float = MEDIAN_BYTES_PER_S
    """Bandwidth of the median link."""
    link_delay_s: float = 0.0
    """Added to every download."""

    @classmethod
    def downloading(cls, download_s: float, spread: float = 1.0) -> Devices:
        """Machines of which the median one downloads a stage's state in this time."""
        return cls(spread=spread, state_bytes=download_s * MEDIAN_BYTES_PER_S)

    @property
    def median_download_s(self) -> float:
        return self.state_bytes / self.bytes_per_s + self.link_delay_s if self.state_bytes else 0.0

    def draw(self, chance: random.Random) -> Device:
        speed = self.spread ** chance.random()
        bytes_per_s = self.bytes_per_s * self.spread ** (chance.random() - 0.5)
        return Device(speed, self.state_bytes / bytes_per_s + self.link_delay_s if self.state_bytes else 0.0)
