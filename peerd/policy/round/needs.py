"""Which line a run needs: what a peer has to upload and download to take part in its stage's averages, and to pass microbatches on.

A member that reduces no slice sends its gradients once in a round, and receives the sum once (`policy/round/slices.py`): that is the least.
Where one cannot do so within the time that a round may take, the whole stage waits for it; a round ends without a member that moves
half as fast as others and much less than was assumed. Boundaries need no such rate: a peer whose line is slower gets fewer microbatches.
Rates are bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peerd.policy.round.proposing import most_s
from peerd.policy.round.slices import bytes_each_way
from peerd.table.view import TTL_PERIODS

AVERAGING_SHARE_OF_TTL = 0.6
ROUND_SHARE = 1.0
"""A round may take as long as the step computes, at the rates that its proposal assumes."""


def averaging_s(announce_period_s: float) -> float:
    """The averaging time of a run."""
    return AVERAGING_SHARE_OF_TTL * TTL_PERIODS * announce_period_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTraffic:
    """What a peer of a stage sends and receives, in the smallest codecs that the run allows. Bytes."""

    gradient_bytes: int
    """The stage's accumulator."""
    boundary_up: int
    """A microbatch's activations to the next stage, and its gradient to the one before."""
    boundary_down: int
    """The activations from the stage before, and the gradient from the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeed:
    """The rates that a peer of a stage needs."""

    rounds: float
    """Up and down, to be in the averages; 0 where nobody else is in the stage."""
    boundary_up: float
    """To compute as fast as the others of its stage."""
    boundary_down: float


def rounds_s(num_bytes: Sequence[int], rates: Sequence[Sequence[float]], least_rate: float) -> float:
    """How long the longest round of a run takes, in seconds.

    `num_bytes`: of each stage's accumulator; `rates`: by stage, bytes per second of each member in its slower direction; `least_rate`: of a
    member with which rounds are not ended, whatever it says.
    """
    each = [(size, len(mine), max(min(mine, default=math.inf), least_rate)) for size, mine in zip(num_bytes, rates, strict=True)]
    return max((bytes_each_way(size, number, 1 / number) / slowest for size, number, slowest in each if number > 1), default=0.0)


def within_s(announce_period_s: float, num_samples: int, stage_rates: Sequence[float]) -> float:
    """How long a round may take in a run whose step has so many samples and whose stages compute at these rates (samples per second)."""
    slowest = min(stage_rates, default=0.0)
    return most_s(averaging_s(announce_period_s), ROUND_SHARE, num_samples / slowest if slowest > 0 else 0.0)


def stage_need(traffic: StageTraffic, num_members: int, round_s: float, microbatches_per_s: float) -> StageNeed:
    """`num_members` of the stage, this peer included; `round_s`: what a round may take; `microbatches_per_s`: what one peer computes."""
    return StageNeed(
        rounds=bytes_each_way(traffic.gradient_bytes, num_members, 0.0) / round_s,
        boundary_up=traffic.boundary_up * microbatches_per_s,
        boundary_down=traffic.boundary_down * microbatches_per_s,
    )


def falls_short(up: float, down: float, needed: float) -> tuple[str, float] | None:
    """The direction of a line that does not carry the averages of a stage, with its rate; None if both do. A rate of 0 is unknown."""
    return next(((way, has) for way, has in (("up", up), ("down", down)) if 0 < has < needed), None)


def too_slow(up: float, down: float, need: StageNeed) -> str:
    """Why a peer's line does not carry the averages of its stage; empty if it does, as far as is known."""
    short = falls_short(up, down, need.rounds)
    if short is None:
        return ""
    return f"its {short[0]}load is too slow for this run (needs {mbit(need.rounds)} Mbit/s, has {mbit(short[1])})"


def shortfall(up: float, down: float, needed: float) -> str:
    """The same, said of this machine before it joins. The subject is the run, or a part of it."""
    short = falls_short(up, down, needed)
    return "" if short is None else f"needs {mbit(needed)} Mbit/s {short[0]}, this machine has {mbit(short[1])}"


def mbit(rate: float) -> str:
    """Bytes per second as Mbit/s, in three digits at most."""
    return f"{8e-6 * rate:.3g}" if rate < 125e6 else f"{8e-6 * rate:.0f}"
