"""The links of `scripts/bench home --part averaging`, and the least time that a round takes over them.

The bound counts bytes alone, no delay and no header: slices by uplink (`peerd/policy/round/slices.py`), chosen by the rates at the
beginning, over the rates that the links had meanwhile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from peerd.policy.round.slices import bytes_each_way, shares_by_rate
from scripts.benchmarks._switch import Links, Rates, Way

ROUND_TRIP_MS, DOWN_MBIT, SLOWED_MBIT = 60.0, 100.0, 5.0
BROKEN_S, LOSS, JITTER_MS = 10.0, 0.03, 100.0
MOST_RATIO = 1.15
STRUCK, OTHER = 1, 2
"""The peer whose link gets worse, and the one that it does not reach where one way is dead. The others did not join either of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    up_mbit: tuple[float, ...]
    """Of each peer."""
    worse: Literal["", "drop", "break", "rough", "one-way"] = ""
    """What happens to one peer's link: it becomes slow in the middle of each round, breaks for a while there, loses packets always, or
    nothing passes from it to one of the others, so that TCP works in neither direction between the two."""
    liar: str = ""
    """A module in `_liars/`: the last peer does what it says once all serve. The bound and all figures are those of the other peers."""
    most_ratio: float = math.inf
    """The largest ratio to the bound that counts as a pass."""
    most_replayed: int = 0
    """Microbatches that may be launched again: calls that were under way over a link when it died."""
    most_failed: int = 0
    """Rounds that may fail, as their members count them: one whose proposal was under way over a link when it died."""

    @property
    def num_peers(self) -> int:
        return len(self.up_mbit)

    @property
    def num_honest(self) -> int:
        return self.num_peers - bool(self.liar)

    def links(self, addresses: Sequence[str], struck: bool) -> Links:
        """The links, before and while the link of one peer is worse."""
        slow = struck and self.worse == "drop"
        rates = {address: Rates(up=up, down=DOWN_MBIT) for address, up in zip(addresses, self.up_mbit, strict=True)}
        if slow:
            rates[addresses[STRUCK]] = Rates(up=SLOWED_MBIT, down=SLOWED_MBIT)
        way = Way(origin="", target="", delay_ms=ROUND_TRIP_MS / 2)
        if self.worse == "rough":
            way = replace(way, loss=LOSS, jitter_ms=JITTER_MS)
        elif struck and self.worse == "break":
            way = replace(way, loss=1)
        mine = addresses[STRUCK]
        pairs = [pair for other in addresses if other != mine for pair in ((mine, other), (other, mine))]
        ways = [replace(way, origin=origin, target=target) for origin, target in pairs]
        if self.worse == "one-way":
            ways = [replace(each, loss=float((each.origin, each.target) == (mine, addresses[OTHER]))) for each in ways]
        return Links(mbit_per_s=0, round_trip_ms=ROUND_TRIP_MS, rates=rates, ways=ways)

    def bound_s(self, num_bytes: int, struck_s: float | None = None) -> float:
        """The least time of an exchange in which one link became worse after so long (None: none did), with the slices of the beginning.

        What does not pass between two peers goes through the others, which share it: a part and a sum of a slice each way.
        """
        rates = [min(up, DOWN_MBIT) * 1e6 / 8 for up in self.up_mbit[: self.num_honest]]
        if self.worse == "rough":
            rates[STRUCK] *= 1 - LOSS
        over_time = [[(0.0, rate)] for rate in rates]
        if struck_s is not None and self.worse == "drop":
            over_time[STRUCK].append((struck_s, SLOWED_MBIT * 1e6 / 8))
        elif struck_s is not None and self.worse == "break":
            over_time[STRUCK] += [(struck_s, 0.0), (struck_s + BROKEN_S, rates[STRUCK])]
        shares = shares_by_rate(rates)
        loads = [bytes_each_way(num_bytes, self.num_honest, share) for share in shares]
        if self.worse == "one-way":
            carried = 2 * num_bytes * (shares[STRUCK] + shares[OTHER]) / (self.num_peers - 2)
            loads = [load + carried * (peer not in (STRUCK, OTHER)) for peer, load in enumerate(loads)]
        return max(passed_s(load, changes) for load, changes in zip(loads, over_time, strict=True))


def passed_s(num_bytes: float, rates: Sequence[tuple[float, float]]) -> float:
    """When so many bytes have passed over a link. `rates`: (since when, bytes per second), from time 0 on; the last is above 0."""
    for (since_s, rate), (until_s, _) in itertools.pairwise(rates):
        if rate > 0 and rate * (until_s - since_s) >= num_bytes:
            return since_s + num_bytes / rate
        num_bytes -= rate * (until_s - since_s)
    since_s, rate = rates[-1]
    return since_s + num_bytes / rate


SCENARIOS = (
    Scenario(name="up-20", up_mbit=(20,) * 2, most_ratio=MOST_RATIO),
    Scenario(name="up-20", up_mbit=(20,) * 4, most_ratio=MOST_RATIO),
    Scenario(name="up-5", up_mbit=(5,) * 2, most_ratio=MOST_RATIO),
    Scenario(name="up-5", up_mbit=(5,) * 4, most_ratio=MOST_RATIO),
    Scenario(name="up-5-20-20-100", up_mbit=(5, 20, 20, 100), most_ratio=1.2),
    *(Scenario(name="drop", up_mbit=(100,) * peers, worse="drop") for peers in (2, 4)),
    *(Scenario(name="break", up_mbit=(20,) * peers, worse="break") for peers in (2, 4)),
    *(Scenario(name="rough", up_mbit=(20,) * peers, worse="rough") for peers in (2, 4)),
    Scenario(name="one-way", up_mbit=(20,) * 4, worse="one-way", most_replayed=2, most_failed=4),
    *(Scenario(name=liar, up_mbit=(20,) * 4, liar=liar) for liar in ("silent", "trickles", "tears", "mute")),
)


def chosen(names: Sequence[str], peers: Sequence[int]) -> list[Scenario]:
    return [each for each in SCENARIOS if each.name in names and each.num_peers in peers]
