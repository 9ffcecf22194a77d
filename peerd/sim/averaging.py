"""A stage's average in virtual time: its chunks pass over the members' lines by the daemon's own rules (`peerd/policy/round`).

Slices are cut as a daemon proposes them: by rates where that is noticeably shorter, else all alike. Nobody is judged, as no member is at
fault here; who comes and goes is `sim/run.py`'s. A large stage is not played chunk by chunk: it takes what its bytes need at the least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peerd.planner.slow_start import round_waits_s
from peerd.policy.round.chunks import num_chunks
from peerd.policy.round.debts import AtFault, Debts, Edge
from peerd.policy.round.links import HomeLink, RoundLinks
from peerd.policy.round.simulated import RoundPlan, simulate
from peerd.policy.round.slices import bytes_each_way, exchange_s, rates_matter, shares_by_rate
from peerd.sim.network import SimulatedLinks

MOST_PLAYED = 16
"""Members of a round that is played chunk by chunk."""
MOST_CHUNKS = 20_000
"""Of a round that is played, parts and sums of all members together. One of more is played with larger chunks."""
LEAST_CHUNKS = 16
"""Of a slice, all the same: with fewer the first and the last one count too much."""
PLAYED_ROUND_TRIPS = 1.0
"""Of those that a round takes (planner/slow_start.py), the ways of parts and sums are in what is played."""
MOST_PAIRED = 200
"""Members of a stage whose pairs are looked at; of a larger one those of so many."""
MOST_UNLIKE = 1e3
"""A line counts as at most so many times as fast as the slowest of its round."""


@dataclass(frozen=True, slots=True)
class PlayedRound:
    """A round of a stage."""

    took_s: float
    sent_bytes: Mapping[int, float]
    """By member."""


class Unjudged(Debts):
    """Debts by which nobody is at fault."""

    def behind(self, now_s: float) -> list[Edge]:
        return []

    def at_fault(self, now_s: float, later: float = 0.0) -> list[AtFault]:
        return []


def exchanged(num_bytes: float, members: Sequence[int], links: SimulatedLinks, averaging_s: float, *, slow_start: bool) -> PlayedRound:
    """A round in which each member has an accumulator of so many bytes. `members`: by their numbers in the network."""
    if len(members) < 2:
        return PlayedRound(0.0, {})
    lines = lines_of(members, links)
    paces = [min(line.up, line.down) for line in lines]
    round_trip_s = _widest_s(members, links)
    waits_s = round_waits_s(num_bytes if slow_start else 0.0, len(members), min(paces), round_trip_s)
    limited = [min(pace, MOST_UNLIKE * min(paces)) for pace in paces]
    is_uneven = not math.isinf(min(paces)) and rates_matter([pace / max(num_bytes, 1.0) for pace in limited], averaging_s)
    shares = shares_by_rate(limited) if is_uneven else (1 / len(members),) * len(members)
    sent = {member: bytes_each_way(num_bytes, len(members), share) for member, share in zip(members, shares, strict=True)}
    least_s = exchange_s(num_bytes, paces, shares)
    if num_bytes < len(members) or least_s == 0 or len(members) > MOST_PLAYED:
        return PlayedRound(least_s + waits_s, sent)
    plan = _planned([int(share * num_bytes) for share in shares], least_s, averaging_s)
    delays = [[links.delay_s(one, other) if one != other else 0.0 for other in members] for one in members]
    played = simulate(plan, RoundLinks(lines=lines, delay_s=delays), judge=Unjudged)
    return PlayedRound(played.ended_s + waits_s - PLAYED_ROUND_TRIPS * round_trip_s, sent)


def lines_of(members: Sequence[int], links: SimulatedLinks) -> list[HomeLink]:
    """Each member's line to its mates: its own, or what its slowest pair allows, as each mate gets about an equal part."""
    found = []
    for one in members:
        peer, others = links.peers[one], [other for other in members if other != one] if len(members) <= MOST_PAIRED else []
        ups = [len(others) * links.pair_rate(one, other) for other in others]
        downs = [len(others) * links.pair_rate(other, one) for other in others]
        found.append(HomeLink(min([peer.up, *ups]), min([peer.down, *downs])))
    return found


def _widest_s(members: Sequence[int], links: SimulatedLinks) -> float:
    some = members[:: math.ceil(len(members) / MOST_PAIRED)]
    return max(links.delay_s(one, other) + links.delay_s(other, one) for one in some for other in some if one != other)


def _planned(slice_bytes: Sequence[int], expected_s: float, averaging_s: float) -> RoundPlan:
    pairs = 2 * len(slice_bytes) * (len(slice_bytes) - 1)
    count = min(num_chunks(slice_bytes, expected_s, averaging_s), max(LEAST_CHUNKS, MOST_CHUNKS // pairs))
    within_s = max(averaging_s, expected_s)
    return RoundPlan(slice_bytes=slice_bytes, num_chunks=count, within_s=within_s, averaging_s=within_s, turns=range(len(slice_bytes)))
