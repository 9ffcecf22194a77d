"""How much of an average each member of a round reduces, so that the slowest link is done as early as it can be.

A member that reduces the share w of n members' accumulators, of c bytes each, sends its parts of all other slices, (1 - w) c, and the
sum of its own slice to each of the others, (n - 1) w c: together (1 + (n - 2) w) c. It receives as many, since for each part that it sends
a sum comes back, and the other way round. So its rate is the smaller one of its uplink and its downlink, and a round takes at least
max_k (1 + (n - 2) w_k) c / rate_k. The shares that make this least are found as water fills a vessel: each member takes slices until all
that have one are done at the same moment. One that is not done by then with its parts alone reduces nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

UNEVEN, UNEVEN_FROM = 1.2, 0.1
"""Slices are cut by rates where even ones would take so many times as long, and such a share of an averaging time longer."""
NEAR_SLICE_BYTES = 1 << 19
"""Peers of one machine cut slices of at most so much, if there are members enough, and no smaller ones: each part and each sum takes
processor time whatever its size."""


def shares_by_rate(rates: Sequence[float]) -> tuple[float, ...]:
    """The share of each member, by its rate (bytes per second in its slower direction, above 0). They sum to 1.

    Two members send and receive the same whatever their shares are: each has a half.
    """
    num_members = len(rates)
    if num_members <= 2:
        return (1 / num_members,) * num_members
    level = _level(rates)
    shares = [max(0.0, (level * rate - 1) / (num_members - 2)) for rate in rates]
    whole = sum(shares)  # 1, but for rounding
    return tuple(share / whole for share in shares)


def shares_of_neighbours(num_members: int, num_bytes: float, first: int) -> tuple[float, ...]:
    """The shares of members that run on one machine: equal ones, but of no more members than there are worthwhile slices in `num_bytes`.

    No line is slow there; what counts is the processor time that all of them share. Member `first` has the first slice.
    """
    num_slices = min(num_members, max(1, ceil(num_bytes / NEAR_SLICE_BYTES)))
    return tuple(1 / num_slices if (k - first) % num_members < num_slices else 0.0 for k in range(num_members))


def _level(rates: Sequence[float]) -> float:
    """The time at which all members with a slice are done, by the time that one byte of the accumulator takes at rate 1."""
    filled, total = 0, 0.0
    for rate in sorted(rates, reverse=True):
        if filled and (len(rates) - 2 + filled) / total * rate <= 1:
            break  # it is busy with its parts alone until then, and whoever is slower, too
        filled, total = filled + 1, total + rate
    return (len(rates) - 2 + filled) / total


def rates_matter(paces: Sequence[float], averaging_s: float) -> bool:
    """Whether even slices would take noticeably longer. What is measured of short transfers differs by chance."""
    num_members = len(paces)
    even_s, least_s = exchange_s(1.0, paces, [1 / num_members] * num_members), least_exchange_s(1.0, paces)
    return even_s > UNEVEN * least_s and even_s - least_s > UNEVEN_FROM * averaging_s


def bytes_each_way(num_bytes: float, num_members: int, share: float) -> float:
    """What a member with this share sends in a round, and receives, if the accumulator has `num_bytes`."""
    return (1 + (num_members - 2) * share) * num_bytes if num_members > 1 else 0.0


def exchange_s(num_bytes: float, rates: Sequence[float], shares: Sequence[float]) -> float:
    """The least time of a round with these shares, without the delay of any link."""
    return max(bytes_each_way(num_bytes, len(rates), share) / rate for rate, share in zip(rates, shares, strict=True))


def least_exchange_s(num_bytes: float, rates: Sequence[float]) -> float:
    """The least time of a round with any shares: that of the slowest member with no slice, or of all bytes at all rates together."""
    return num_bytes * max(1 / min(rates), 2 * (len(rates) - 1) / sum(rates)) if len(rates) > 1 else 0.0
