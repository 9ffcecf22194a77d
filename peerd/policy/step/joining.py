"""The plan of a joiner, rules J1 (join) and J2 (download): what it has to download, how fast it catches up, and when it will serve.

A joiner catches up only if an average takes less time to fetch and to apply than its stage takes for a step. One that cannot would cost its
donors a state again and again. It waits, and says what step or line it would need.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from peerd.policy.round.needs import mbit

TIMED = 4
"""The stage's pace is that of its last so many steps, and a joiner's that of the last so many averages that it applied."""
KEEPS_UP = 0.9
"""A joiner can catch up if an average takes at most this share of a step: the steps that it makes up for are the rest."""
PAUSE_SHARE = 3.0
"""One that cannot waits so many times as long as it has tried, unless the steps become long enough before: its line may have changed."""


class StagePace:
    """How long a stage's steps take, as a joiner sees it in the records. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._rises: deque[tuple[int, float]] = deque(maxlen=TIMED + 1)

    def saw(self, newest: int, now_s: float) -> None:
        """Note the newest step of the stage."""
        if self._rises and newest < self._rises[-1][0]:
            self._rises.clear()  # the run went back
        if not self._rises or newest > self._rises[-1][0]:
            self._rises.append((newest, now_s))

    def step_s(self, now_s: float) -> float | None:
        """Seconds of a step; one that is under way counts once it takes longer. None: no whole step was seen yet."""
        if len(self._rises) < 2:
            return None
        (first, began_s), (last, ended_s) = self._rises[0], self._rises[-1]
        return max((ended_s - began_s) / (last - first), now_s - ended_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinProgress:
    """Where a joiner stands. Rates are in bytes per second, times in seconds; None: not known yet."""

    bytes_left: int = 0
    """Of the download under way; 0: it has ended, or no donor has told yet how much it is."""
    bytes_total: int = 0
    rate: float | None = None
    """At which the state has come so far."""
    steps_behind: int = 0
    step_s: float | None = None
    average_bytes: int = 0
    average_s: float | None = None
    """How long an average took to fetch and to apply, lately."""


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """When a joiner will serve, and the same in words."""

    ready_s: float | None
    """Seconds until it serves; infinite: it cannot catch up; None: not known yet."""
    text: str


def plan_of(now: JoinProgress) -> JoinPlan:
    """The plan of a joiner: download the rest, then apply averages faster than the stage makes new ones."""
    if (slow := _too_slow(now)) is not None:
        return JoinPlan(math.inf, _why_never(now.average_bytes, *slow))
    download_s = _over(now.bytes_left, now.rate) if now.bytes_left else 0.0
    average_s = now.average_s if now.average_s is not None else _over(now.average_bytes, now.rate)
    ready_s = _ready_s(download_s, average_s, now.steps_behind, now.step_s)
    too_slow = (average_s, now.step_s) if ready_s == math.inf and average_s is not None and now.step_s is not None else None
    parts = []
    if now.bytes_left:
        done = now.bytes_total - now.bytes_left
        parts.append(f"downloads {_size(now.bytes_total)}, {_size(done)} of it here{_at(now.rate)}")
    if now.steps_behind or now.bytes_left:
        pace = "" if too_slow else _pace(average_s, now.step_s)
        parts.append(f"{now.steps_behind} step{'' if now.steps_behind == 1 else 's'} behind{pace}")
    if too_slow:
        parts.append(f"at this rate {_why_never(now.average_bytes, *too_slow)}")
    elif ready_s is not None:
        parts.append(f"ready in about {duration(ready_s)}")
    return JoinPlan(ready_s, "; ".join(parts))


def can_catch_up(now: JoinProgress) -> bool:
    """Whether averages come fast enough, as far as that was measured."""
    return _too_slow(now) is None


def _too_slow(now: JoinProgress) -> tuple[float, float] | None:
    """The seconds of an average and of a step, where averages come too slowly; None if they do not, as far as that was measured."""
    if now.average_s is None or now.step_s is None or now.average_s <= KEEPS_UP * now.step_s:
        return None
    return now.average_s, now.step_s


def pause_s(tried_s: float) -> float:
    """How long a joiner that cannot catch up waits until it tries again, having tried for so long in vain: seconds."""
    return PAUSE_SHARE * max(0.0, tried_s)


def duration(seconds: float) -> str:
    """A time in words, as exact as an estimate is."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _ready_s(download_s: float | None, average_s: float | None, behind: int, step_s: float | None) -> float | None:
    """Seconds until the joiner has what the stage has; None: not known. It makes up for `behind` steps and those of the download."""
    if download_s is None:
        return None
    if step_s is None:
        return download_s if not behind else None
    if average_s is None:
        return None
    if average_s > KEEPS_UP * step_s:
        return math.inf
    return download_s + (behind + download_s / step_s) * average_s / (1 - average_s / step_s)


def _why_never(average_bytes: int, average_s: float, step_s: float) -> str:
    told = f"it cannot catch up: an average of {_size(average_bytes)} takes {duration(average_s)} to get, and a step"
    told += f" {duration(step_s)}; it needs steps of at least {duration(average_s / KEEPS_UP)}"
    return f"{told}, or averages at {mbit(average_bytes / (KEEPS_UP * step_s))} Mbit/s" if step_s > 0 else told


def _over(num_bytes: int, rate: float | None) -> float | None:
    return num_bytes / rate if rate else None


def _at(rate: float | None) -> str:
    return f", at {mbit(rate)} Mbit/s" if rate else ""


def _pace(average_s: float | None, step_s: float | None) -> str:
    if average_s is None or step_s is None:
        return ""
    return f", an average takes {duration(average_s)} and a step {duration(step_s)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e8 else f"{num_bytes / 1e6:.0f} MB"
