"""The schedule of chaos, drawn from a seed: kind, time and victim of each fault. Pure functions; demo_strikes.py carries them out."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peerd.errors import UsageError

MIN_FAULTS = 10
"""Chaos ends when all steps are done and this many faults have happened; of mixed chaos, one of each kind if that is more."""
STEPS_MISSED = 3
"""Number of steps that a pause-stale strike's sleeper misses: more than the one step whose average it could still fetch."""
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
    PROPOSAL_CANCEL = "proposal-cancel"
    """Calls that propose it a round end while it joins, for a while."""
    DISK_FULL = "disk-full"
    """No write to its disk succeeds for a while."""
    SKEWED_CLOCK = "skewed-clock"
    """Its wall clock is a day off for a while."""
    P2PD = "p2pd"
    """Its p2pd is killed, and each new one as well, for a while."""
    STAGE_WIPED = "stage-wiped"
    """SIGKILL for all peers of a stage; one comes back with what is on its disk."""
    PAUSE_STALE = "pause-stale"
    """It sleeps while its mates train on and pause; it wakes with an older step before they resume."""
    MIXED = "mixed"
    """Each of the kinds above, in an order that the seed draws, again and again."""


PLAIN = tuple(kind for kind in FaultKind if kind is not FaultKind.MIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """The parsed value of --chaos."""

    kind: FaultKind
    every_s: float
    respawn: bool = False
    for_s: float = 3.0
    factor: float = 4.0

    def kinds(self, can_wipe: bool) -> tuple[FaultKind, ...]:
        """The kinds to strike with. `can_wipe` says whether a stage that is wiped can come back."""
        kinds = PLAIN if self.kind is FaultKind.MIXED else (self.kind,)
        return tuple(kind for kind in kinds if can_wipe or kind is not FaultKind.STAGE_WIPED)


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
    on_disk: frozenset[int] = frozenset()
    """Steps of its checkpoints."""


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


def schedule(kinds: Sequence[FaultKind], every_s: float, seed: int) -> Iterator[Strike]:
    """The endless series of strikes: all kinds in an order drawn from the seed, again and again. Equal seeds give equal strikes."""
    chance = random.Random(seed)
    number = 0
    while True:
        for kind in chance.sample(kinds, len(kinds)):
            number += 1
            yield Strike(at_s=number * every_s, kind=kind, chance=chance.random())


def victims(kind: FaultKind, peers: Sequence[Candidate], gone_back_to: int = 0) -> list[int]:
    """The living peers that a strike of this kind may hit now. `gone_back_to` is the step that the run last went back to."""
    match kind:
        case FaultKind.STAGE_WIPED:
            return may_come_back(peers, gone_back_to)
        case FaultKind.PAUSE_STALE:
            return may_sleep(peers)
        case _:
            return may_fall(peers)


def may_fall(peers: Sequence[Candidate]) -> list[int]:
    """The peers that chaos may strike: all except the last sound peer of a stage with the stage's newest step.

    No other peer could restore the state of that one: hole 16 (every holder dies).
    """
    newest = {stage: max((p.step for p in peers if p.stage == stage and p.serving), default=0) for stage in {p.stage for p in peers}}
    holders = [p for p in peers if p.serving and p.sound and p.step == newest[p.stage]]
    return [p.peer for p in peers if p.sound and any(other.stage == p.stage and other.peer != p.peer for other in holders)]


def may_come_back(peers: Sequence[Candidate], gone_back_to: int) -> list[int]:
    """The peers with which a wiped stage can come back: those whose disks have the newest step that a disk of every stage has.

    None unless that step is new since the run last went back, or it would never get further.
    """
    on_disks = [frozenset[int]().union(*(p.on_disk for p in peers if p.stage == stage)) for stage in {p.stage for p in peers}]
    common = frozenset.intersection(*on_disks) if on_disks else frozenset()
    step = max(common, default=0)
    return [p.peer for p in peers if p.sound and step > gone_back_to and step in p.on_disk]


def may_sleep(peers: Sequence[Candidate]) -> list[int]:
    """The peers of stages with at least two peers, all of which serve and are sound."""
    stages = {stage: [p for p in peers if p.stage == stage] for stage in {p.stage for p in peers}}
    whole = [stage for stage, found in stages.items() if len(found) > 1 and all(p.serving and p.sound for p in found)]
    return [p.peer for p in peers if p.stage in whole]
