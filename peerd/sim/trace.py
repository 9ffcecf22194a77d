"""Churn traces: when peers join or leave, and how many. They are generated, or read from a user's CSV."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from peerd.errors import UsageError

HOUR_S = 3600.0
HOURS = 32.0
PEERS_PER_STAGE = 100
SHRINK = 0.5
"""Net loss over the trace, as a share of the peers at the start."""
TURNOVER = 2.6
"""Peers that join during the trace, per peer at the start."""
MEAN_BURST = 14.0
"""Mean size of a preemption burst, per 400 peers at the start."""
BURST_S = 120.0
GROWTH = 0.85
"""Burst times are duration x random()^GROWTH: the rate grows as time^(1 / GROWTH - 1)."""
REFILL_S = 7200.0
"""A lost peer's replacement joins within this time."""
MAX_PEERS = 1_000_000
MAX_TIME_S = 366 * 86400.0


@dataclass(frozen=True, slots=True)
class Change:
    """At `time_s`, `peers` join, or leave if negative."""

    time_s: float
    peers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """`num_peers` serve from the start; the changes are in order of time."""

    num_peers: int
    changes: tuple[Change, ...]
    duration_s: float

    @property
    def most_peers(self) -> int:
        return max(accumulate((change.peers for change in self.changes), initial=self.num_peers))


def generate(num_peers: int, seed: int, hours: float = HOURS) -> Trace:
    """A swarm of preemptible machines that shrinks to half in bursts of increasing frequency (after SWARM, figure 5).

    Each burst removes some peers within two minutes; most of them are replaced one by one.
    """
    chance = random.Random(f"trace/{seed}/{num_peers}")
    duration_s = hours * HOUR_S
    num_gone, num_come = round(num_peers * (TURNOVER + SHRINK)), round(num_peers * TURNOVER)
    mean_size = max(1.0, MEAN_BURST * num_peers / 400)
    changes: list[Change] = []
    while num_gone > 0:
        burst_at_s = duration_s * chance.random() ** GROWTH
        size = min(num_gone, 1 + int(chance.expovariate(1.0) * (mean_size - 1)))
        come_back = round(size * num_come / num_gone)
        num_gone, num_come = num_gone - size, num_come - come_back
        changes += [Change(burst_at_s + chance.uniform(0, BURST_S), -1) for _ in range(size)]
        changes += [Change(burst_at_s + chance.uniform(0, REFILL_S), 1) for _ in range(come_back)]
    within = sorted((change for change in changes if change.time_s < duration_s), key=lambda change: change.time_s)
    return Trace(num_peers=num_peers, changes=tuple(_leaving_somebody(num_peers, within)), duration_s=duration_s)


def _leaving_somebody(num_peers: int, changes: list[Change]) -> Iterator[Change]:
    """Leave out departures, one peer each, that would empty the swarm."""
    for change in changes:
        if num_peers + change.peers > 0:
            num_peers += change.peers
            yield change


@dataclass(frozen=True, slots=True)
class ChangeFile:
    """A user's changes, read and checked. The number of peers at the start is given elsewhere."""

    path: str
    changes: tuple[Change, ...]

    def trace(self, num_peers: int | None, default_peers: int) -> Trace:
        """Changes at time 0 are added to the `num_peers` at the start; `default_peers` apply if neither is given."""
        at_start = sum(change.peers for change in self.changes if change.time_s == 0)
        if num_peers is None:
            num_peers = 0 if at_start > 0 else default_peers
        start = num_peers + at_start
        later = tuple(change for change in self.changes if change.time_s > 0)
        course = list(accumulate((change.peers for change in later), initial=start))
        if min(course) < 0:
            raise UsageError(f"--trace {self.path} takes away more peers than there are", f"start from more than {num_peers} with --peers")
        if max(course) > MAX_PEERS:
            raise UsageError(f"--trace {self.path} brings more than {MAX_PEERS} peers", "simulate fewer")
        return Trace(num_peers=start, changes=later, duration_s=self.changes[-1].time_s)


def read_changes(path: Path) -> ChangeFile:
    """Read lines of `time_s,change` in order of time; the heading is optional. UsageError names the wrong line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UsageError(f"--trace {path}: {error.strerror}", "name a CSV file you can read") from None
    except UnicodeDecodeError:
        raise UsageError(f"--trace {path}: not a text file", "it takes lines of time_s,change") from None
    changes: list[Change] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.replace(" ", "") == "time_s,change"):
            continue
        change = _parse(line, f"--trace {path}, line {number}")
        if changes and change.time_s < changes[-1].time_s:
            raise UsageError(f"--trace {path}, line {number}: {change.time_s:g} s is before the line above", "sort the lines by time_s")
        changes.append(change)
    if not changes or changes[-1].time_s == 0:
        raise UsageError(f"--trace {path}: nothing happens after time 0", "the last line's time is the end: end with a line such as 3600,0")
    return ChangeFile(str(path), tuple(changes))


def _parse(line: str, where: str) -> Change:
    shown = line.strip()[:40]
    try:
        time_text, change_text = line.split(",")
        time_s, peers = float(time_text), int(change_text)
    except ValueError:
        raise UsageError(f"{where}: {shown!r} is not time_s,change", "a line is seconds, a comma, and a whole number such as -3") from None
    if not 0 <= time_s <= MAX_TIME_S:
        raise UsageError(f"{where}: the time must lie between 0 and {MAX_TIME_S:g} s, not {time_text.strip()}", "a year is the most")
    if abs(peers) > MAX_PEERS:
        raise UsageError(f"{where}: {change_text.strip()[:20]} peers at once", f"{MAX_PEERS} are the most")
    return Change(time_s, peers)
