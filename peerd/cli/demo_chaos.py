"""The schedule of chaos, drawn from a seed: kind, time and victim of each fault. Pure functions; demo_strikes.py carries them out."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peerd.errors import UsageError

MIN_FAULTS = 10
"""Chaos ends when all steps are done and this many faults have happened."""
_NUMBERS = {"every": "every_s", "for": "for_s", "factor": "factor"}
SHAPE = "KIND:every=4s[,respawn=yes][,for=3s][,factor=4]"


class FaultKind(enum.StrEnum):
    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after a while."""
    SLOW = "slow"
    """Slower by a factor, for a while."""
    CUT = "cut"
    """All its links are dead for a while, because its p2pd is stopped."""
    CORRUPT = "corrupt"
    """Some of its messages are broken for a while."""
    MIXED = "mixed"
    """One of the kinds above at each turn."""


PLAIN = tuple(kind for kind in FaultKind if kind is not FaultKind.MIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """The parsed value of --chaos."""

    kind: FaultKind
    every_s: float
    respawn: bool = False
    for_s: float = 3.0
    factor: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault of the schedule. `chance` in [0, 1) selects one of the possible victims when it is due."""

    at_s: float
    kind: FaultKind
    chance: float

    def victim(self, candidates: Sequence[int]) -> int | None:
        return candidates[int(self.chance * len(candidates))] if candidates else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The state of a daemon when a strike is due."""

    peer: int
    stage: int
    step: int
    serving: bool
    """It has its stage's parameters, so it is no longer joining."""
    sound: bool
    """It answers, and no fault affects it."""


def parse_chaos(text: str) -> Chaos:
    """Parse text such as `kill:every=4s,respawn=yes`. UsageError if it is invalid."""
    kind, _, rest = text.partition(":")
    fields = dict(field.partition("=")[::2] for field in rest.split(",") if field)
    if kind not in list(FaultKind) or "every" not in fields or set(fields) - {"respawn", *_NUMBERS}:
        raise UsageError(f"--chaos {text}: not {SHAPE}", f"KIND is {', '.join(FaultKind)}; for example kill:every=4s,respawn=yes")
    if fields.get("respawn", "no") not in ("yes", "no"):
        raise UsageError(f"--chaos {text}: respawn is yes or no")
    numbers = {field: _number(text, fields, name) for name, field in _NUMBERS.items() if name in fields}
    return Chaos(kind=FaultKind(kind), respawn=fields.get("respawn") == "yes", **numbers)


def _number(text: str, fields: dict[str, str], name: str) -> float:
    try:
        value = float(fields[name].removesuffix("s"))
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 1000:
        raise UsageError(f"--chaos {text}: {name} must be a number from 0.1 to 1000")
    return value


def schedule(chaos: Chaos, seed: int) -> Iterator[Strike]:
    """The endless series of strikes, in order. Equal seeds give equal strikes."""
    chance = random.Random(seed)
    kinds = PLAIN if chaos.kind is FaultKind.MIXED else (chaos.kind,)
    number = 0
    while True:
        number += 1
        yield Strike(at_s=number * chaos.every_s, kind=chance.choice(kinds), chance=chance.random())


def may_fall(peers: Sequence[Candidate]) -> list[int]:
    """The peers that chaos may strike: all except the last sound peer of a stage with the stage's newest step.

    No other peer could restore the state of that one: hole 16 (every holder dies).
    """
    newest = {stage: max((p.step for p in peers if p.stage == stage and p.serving), default=0) for stage in {p.stage for p in peers}}
    holders = [p for p in peers if p.serving and p.sound and p.step == newest[p.stage]]
    return [p.peer for p in peers if p.sound and any(other.stage == p.stage and other.peer != p.peer for other in holders)]
