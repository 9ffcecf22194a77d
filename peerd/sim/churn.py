"""Peers that come and go while steps are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

STATE_SHARE = 3.0
"""A stage's state by its gradients: parameters and two moments of Adam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """Unreliable peers: each goes during a step by chance, without a word, and comes back a step's time later as a joiner."""

    share: float
    """Of the peers, that are unreliable."""
    rate: float
    """The chance that an unreliable peer goes during a step."""
    noticed_s: float = 5.0
    """Until the others know that it is gone: an announce period, in which calls to it fail and re-dials go unanswered."""

    def __post_init__(self) -> None:
        if not (0 <= self.share <= 1 and 0 <= self.rate <= 1 and self.noticed_s >= 0):
            raise ValueError(
                "the share of unreliable peers and the chance that one goes lie in [0, 1], the time until it is noticed is not negative"
            )

    def unreliable(self, num_peers: int, seed: int) -> frozenset[int]:
        """The peers, by number, that are unreliable."""
        return frozenset(Random(f"churn/{seed}").sample(range(num_peers), round(self.share * num_peers)))

    def departures(self, peers: Sequence[int], step_s: float, random: Random) -> list[tuple[float, int]]:
        """Draw who goes during a step that takes about `step_s`, and how long after its begin."""
        return [(random.random() * step_s, peer) for peer in peers if random.random() < self.rate]


@dataclass(slots=True)
class ChurnCounts:
    """What churn has cost."""

    departures: int = 0
    relaunched: int = 0
    """Microbatches that a stage lost with a peer and was given again."""
    rounds_failed: int = 0
    inexact: int = 0
    """Averages that the daemons' own check would have refused."""
    least_reliable: int = 0
    """Reliable peers of the stage that had fewest, at any time."""
